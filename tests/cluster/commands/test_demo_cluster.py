"""`kvferry demo-cluster` as a user runs it, with one node in each tier."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from kvferry.local_cluster.prometheus import find_prometheus

pytestmark = pytest.mark.timeout(180)


def test_a_cluster_is_started_loaded_watched_and_summed_up(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    words = ["demo-cluster", "--prefill", "1", "--decode", "1", "--rate", "6", "--seconds", "3", "--json", str(summary)]
    ended = subprocess.run(
        [sys.executable, "-m", "kvferry", *words], capture_output=True, text=True, timeout=170, stdin=subprocess.DEVNULL
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    pages = re.findall(r"page (http://[\d.:]+/)", ended.stdout)
    assert len(pages) == 2 and "every request was answered" in ended.stdout
    found = json.loads(summary.read_text())
    (load,) = found["load"]["rates"]
    assert found["is_success"] and found["leftovers"] == [] and load["served"] == load["requests"] > 0
    assert found["links"].keys() == {"prefill -> decode"} and found["links"]["prefill -> decode"]["bandwidth_bytes_per_s"] > 0
    assert 0 < found["ring_peaks"]["decode"] <= 1 and found["metrics_page"]["bytes"] > 1000
    assert (found["alerts"] is None) == (find_prometheus() is None)
    for page in pages:
        with pytest.raises(OSError):
            urllib.request.urlopen(page, timeout=2)
