"""A decode node refuses an engine that offload cannot use at the start: one line, with the setting, and an exit code.

tests/offload/test_sizes.py, test_rules.py and tests/storage/test_directory.py check the refusals that need no process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.open_nodes import open_nodes

pytestmark = pytest.mark.timeout(240)

BAD_CONFIG = 2
BLIND = "tests.cluster.offload.blind_engine:load_engine"


def test_an_engine_that_cannot_read_host_pages_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "decode_node", "serve", "--insecure", "--model", str(model)]
    settings = ("pool.num_tokens=1024", "pool.page_size=8", f"engine={BLIND}", "offload.host_ratio=2", "offload.device_window=64")
    for setting in settings:
        command += ["--set", setting]
    with open_nodes(tmp_path) as nodes:
        ended = subprocess.run(command, env=nodes.environment(), capture_output=True, text=True, timeout=120, check=False)
        assert not nodes.processes(), "it was to leave nothing"
    assert ended.returncode == BAD_CONFIG, ended.stderr
    assert "Traceback" not in ended.stderr
    says = ("offload.device_window is 64", f"{BLIND} cannot read KV in host memory")
    lines = [line for line in ended.stderr.splitlines() if all(part in line for part in says)]
    assert len(lines) == 1, f"one line is to name {says}: {ended.stderr}"
