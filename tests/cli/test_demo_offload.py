"""`kvferry demo --offload`: what is stored by one run is found by the next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.demo_offload import Figures, OffloadReport
from kvferry.demo_print import _offload_table
from tests.cli.test_demo import demo

PAGE = """# HELP kvferry_host_pages x
# TYPE kvferry_host_pages gauge
kvferry_host_pages{group="full",role="decode",state="free"} 3.0
kvferry_host_pages{group="full",role="decode",state="held"} 4.0
kvferry_host_pages{group="window_8",role="decode",state="held"} 50.0
# HELP kvferry_store_bytes_total x
# TYPE kvferry_store_bytes_total counter
kvferry_store_bytes_total{op="put",rank="0",role="decode"} 5.0
kvferry_store_bytes_total{op="put",rank="1",role="decode"} 6.0
"""


def test_figures_are_sums_over_ranks_and_states() -> None:
    figures = Figures(PAGE)
    assert figures.sum("host_pages", group="full") == 7
    assert figures.sum("store_bytes_total", op="put") == 11
    assert figures.sum("store_bytes_total", op="get") == figures.sum("nothing") == 0


def test_pages_that_could_not_be_stored_are_shown() -> None:
    def shown(unstored: int) -> str:
        numbers = dict.fromkeys((one for one in OffloadReport.__dataclass_fields__), 1) | {"unstored_pages": unstored}
        console = Console(width=120, record=True)
        console.print(_offload_table(OffloadReport(**numbers)))
        return console.export_text()

    assert "could not be stored" in shown(3) and "could not be stored" not in shown(0)


@pytest.mark.timeout(200)
def test_a_second_run_finds_what_the_first_has_stored(tmp_path: Path, demo_dir: Path) -> None:
    reports = []
    for number in range(2):
        file = tmp_path / f"report-{number}.json"
        shape = ("--prefill-tp", "1", "--decode-tp", "2", "--max-new-tokens", "8")
        run = demo("--model", str(demo_dir), *shape, "--offload", "kv", "--json", str(file), cwd=tmp_path)
        assert run.returncode == 0, run.stdout + run.stderr
        assert "hit tokens" in run.stdout
        reports.append(json.loads(file.read_text()))
    first, second = (report["offload"] for report in reports)
    assert all(report["tokens_match"] and not report["leaks"] for report in reports)
    assert first["longest_request_tokens"] > first["device_tokens"], "it runs although the device has no room for it"
    assert first["hit_tokens_storage"] == 0
    assert first["stored_bytes"] > 0 and not first["unstored_pages"]
    assert second["hit_tokens_storage"] + second["hit_tokens_host"] > 0.8 * reports[1]["prompt_tokens"]
    assert second["hit_tokens_storage"] > 0 and second["skipped_tokens"] > 0
    assert reports[1]["bytes_moved"] < 0.3 * reports[0]["bytes_moved"]
