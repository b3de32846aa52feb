"""Every benchmark runs with tiny sizes, and what it writes can be read: numbers nobody can run again are worth nothing."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bench.table import Outcome, outcomes_of
from bench.timing import ROOT

MACHINE = {"cpu", "num_cores", "gpus", "driver", "nvlink", "kernel"}
ENVIRONMENT = MACHINE | {"commit", "is_modified", "python", "versions", "date", "command"}
ROW = {"case", "what", "median_s", "p99_s", "spread", "bytes", "gb_per_s", "ratio", "ratio_to", "samples_s"}
POOL_TINY = ("--mb", "1", "--in-flight", "2", "--chunk-tokens", "4", "--layers-per-group", "0", "--ring-mb", "4")


def bench(module: str, file: Path, *arguments: str, expected: int = 0, timeout_s: float = 100) -> dict[str, Any]:
    """Run one as its user does; its record."""
    command = [sys.executable, "-m", module, "--json", str(file), "--quick", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == expected, done.stdout[-2000:] + done.stderr[-2000:]
    record: dict[str, Any] = json.loads(file.read_text())
    assert record["environment"].keys() == ENVIRONMENT
    assert record["environment"]["command"].startswith(f"python -m {module}")
    assert record["rows"]
    return record


def check_rows(record: dict[str, Any]) -> None:
    for row in record["rows"]:
        assert row.keys() == ROW
        assert row["samples_s"] and all(math.isfinite(sample) and sample >= 0 for sample in row["samples_s"])


def check_pool_to_pool(record: dict[str, Any], *, num_cases: int, lane: str = "ucx") -> None:
    check_rows(record)
    cases = {row["case"] for row in record["rows"]}
    assert len(cases) == num_cases, "a block of rows for each number of requests in flight"
    for case in cases:
        facts = record["facts"][f"{case}, {lane}"]
        assert facts["writes_per_chunk_and_route"] == 1
        assert facts["resends"] == 0
        assert facts["chunks_per_request"] > 1
        assert facts["overlap"] > 0
    moves = [row for row in record["rows"] if row["what"] == f"kvferry {lane}, pool to pool"]
    assert [row["bytes"] for row in moves] == [1 << 20] * num_cases
    assert all(row["ratio"] > 0 and row["ratio_to"].startswith("memcpy") for row in moves)


def test_pool_to_pool_and_what_the_table_reads_of_it(tmp_path: Path) -> None:
    record = bench("bench.pool_to_pool", tmp_path / "record.json", *POOL_TINY, "--in-flight", "1", "2")
    check_pool_to_pool(record, num_cases=2)
    lines = outcomes_of("pool_to_pool", record)
    assert [line.what.split(",")[0] for line in lines] == ["pool to pool", "writes"] * 2
    assert [line.limit for line in lines] == [None, 1.0, 0.35, 1.0]


@pytest.mark.parametrize(
    "cut",
    [
        ("--prefill-tp", "4", "--decode-tp", "2", "--decode-order", "HND"),
        pytest.param(("--prefill-page-size", "64", "--decode-page-size", "1", "--layers-per-group", "8"), marks=pytest.mark.slow),
        pytest.param(("--asks-late",), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_pool_to_pool_of_other_cuts(tmp_path: Path, cut: tuple[str, ...]) -> None:
    check_pool_to_pool(bench("bench.pool_to_pool", tmp_path / "record.json", *POOL_TINY, *cut), num_cases=1)


def test_pool_to_pool_refuses_a_cut_with_several_targets(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.pool_to_pool", "--prefill-tp", "2", "--decode-tp", "4", *POOL_TINY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "writes to decode ranks [0, 1]" in done.stderr.splitlines()[-1]


def test_pool_to_pool_beside_what_others_do(tmp_path: Path) -> None:
    cut = ("--mb", "2", "--in-flight", "1", "--chunk-tokens", "4", "--piece-mb", "0.25", "--peers", "--lanes", "nixl")
    record = bench("bench.pool_to_pool", tmp_path / "record.json", *cut)
    if find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None and find_spec("nixl") is None:
        assert {"nixl", "NIXL bulk WRITE"} <= record["facts"]["not measured"].keys()
        return
    assert "not measured" not in record["facts"]
    measured = [row["what"] for row in record["rows"]]
    assert {"NIXL bulk WRITE", "NIXL, 64 descriptors of 32,768 B", "kvferry nixl, pool to pool"} <= set(measured)
    facts = record["facts"]["2 MiB, 1 in flight, pieces of 256 KiB, nixl"]
    assert facts["layers_per_chunk"] == 16, "4 tokens of 16 layers are 256 KiB"
    assert facts["chunks_per_request"] == 8


@pytest.mark.slow
def test_control_plane_and_what_the_table_reads_of_it(tmp_path: Path) -> None:
    record = bench("bench.control", tmp_path / "record.json")
    check_rows(record)
    assert 1 / record["chunks_per_second"] == pytest.approx(record["rows"][1]["median_s"])
    assert 0 < record["round_trip_p50_s"] < 1
    assert {row["case"] for row in record["rows"] if row["what"] == "grant, ready, ack"} >= {
        "two processes, 1 peer",
        "two processes, 4 peers",
        "two processes, 10 held grants",
    }
    lines = outcomes_of("control", record)
    assert [line.limit for line in lines] == [3000, 1.0, 1.3, 1.3, 1.3, 200_000, 4.0]
    assert [line.what for line in lines][2:5] == [
        "CPU of a chunk, 10 to 100 held grants",
        "CPU of a chunk, 10 to 100 waiting grants",
        "ring pair, in order, 10 to 10,000 live grants",
    ]


@pytest.mark.slow
def test_idle_cluster_has_a_row_for_each_leader_and_rank(tmp_path: Path) -> None:
    sizes = ("--prefill-tp", "1", "--decode-tp", "1", "--seconds", "2")
    record = bench("bench.idle", tmp_path / "record.json", *sizes)
    check_rows(record)
    assert [row["case"] for row in record["rows"]] == ["prefill leader", "decode leader", "prefill rank 0", "decode rank 0"]
    assert all(0 < row["median_s"] < 1 for row in record["rows"]), "no process can be idle and use a core"
    assert [line.limit for line in outcomes_of("idle", record)] == [3.0, None]


@pytest.mark.slow
def test_nixl_progress_writes_and_compares_with_both_settings_of_the_thread(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    command = [sys.executable, "-m", "bench.nixl_progress", "--quick", "--device", "cpu", "--lanes", "shm", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    pairs = json.loads(file.read_text())["pairs"]
    assert [pair["case"] for pair in pairs] == ["lane shm, thread at target, pair 1", "lane shm, thread at both ends, pair 1"]
    assert all(pair["writes"] and pair["carried_by"] == "nixl/shm" and not pair["failure"] for pair in pairs)


def test_pages_and_what_the_table_reads_of_them(tmp_path: Path) -> None:
    record = bench("bench.pages", tmp_path / "record.json")
    check_rows(record)
    assert {row["what"] for row in record["rows"]} == {"pair", "request with a window"}
    lines = outcomes_of("pages", record)
    assert [(line.what, line.limit) for line in lines] == [("pages, pools of 1,000 to 1,000,000", 500_000), ("pages, flat", 0.7)]


def test_the_whole_table_has_a_verdict_for_every_promise_that_was_run(tmp_path: Path) -> None:
    record = bench("bench", tmp_path / "record.json", "--only", "pages")
    assert [row["what"] for row in record["rows"]] == ["pages, pools of 1,000 to 1,000,000", "pages, flat"]
    assert all(row["limit"] is not None and row["measured"] > 0 and row["ok"] in (True, False) for row in record["rows"])
    assert record["reports"]["pages"]["rows"]
    assert record["is_quick"] is True


def test_a_benchmark_that_fails_is_a_promise_that_is_missed() -> None:
    outcome = Outcome.failed("control", "ended with 1: boom")
    assert not outcome.is_reached
    assert outcome.to_json()["note"] == "ended with 1: boom"


@pytest.mark.parametrize(
    ("outcome", "is_reached"),
    [
        (Outcome(what="", measured=0.2, limit=0.2, unit=""), True),
        (Outcome(what="", measured=0.19, limit=0.2, unit=""), False),
        (Outcome(what="", measured=3.0, limit=3.0, unit="", bound="below"), False),
        (Outcome(what="", measured=2.9, limit=3.0, unit="", bound="below"), True),
        (Outcome(what="", measured=1.0, limit=1.0, unit="", bound="exactly"), True),
        (Outcome(what="", measured=1.1, limit=1.0, unit="", bound="exactly"), False),
        (Outcome(what="", measured=5.0, limit=None, unit=""), True),
        (Outcome(what="", measured=None, limit=1.0, unit=""), False),
    ],
)
def test_verdicts(outcome: Outcome, is_reached: bool) -> None:
    assert outcome.is_reached is is_reached


def test_what_the_hosts_do_is_told_without_a_link(tmp_path: Path) -> None:
    sizes = ("--mb", "1", "--piece-mb", "2", "--ring-mb", "8", "--in-flight", "1", "4")
    record = bench("bench.host", tmp_path / "record.json", *sizes, "--gb-per-s", "1")
    check_rows(record)
    (link, *_) = [row for row in record["rows"] if row["what"] == "the link alone"]
    moves = [row for row in record["rows"] if row["what"] == "kvferry pretended, pool to pool"]
    assert link["median_s"] == pytest.approx(link["bytes"] / 1e9)
    assert all(row["median_s"] > link["median_s"] and 0 < row["ratio"] < 1 for row in moves) and len(moves) == 2
    hops = {row["what"] for row in record["rows"] if " to " in row["what"].partition(", ")[2] and "in" in row["case"]}
    assert {f"kvferry pretended, {hop}" for hop in ("computed to gathered", "written to scattered")} <= hops


def test_copies_can_be_said_to_take_no_time(tmp_path: Path) -> None:
    sizes = ("--mb", "1", "--piece-mb", "0.25", "--ring-mb", "8", "--in-flight", "2")
    record = bench("bench.host", tmp_path / "record.json", *sizes, "--gb-per-s", "0")
    (moved,) = [row for row in record["rows"] if row["what"] == "kvferry pretended, pool to pool"]
    assert moved["ratio"] is None
    (facts,) = [facts for name, facts in record["facts"].items() if name.endswith(", pretended")]
    assert facts["chunks_per_request"] > 4


def test_pages_to_and_from_host_memory(tmp_path: Path) -> None:
    record = bench("bench.offload_copies", tmp_path / "record.json", "--device", "cpu", "--mb", "2")
    check_rows(record)
    assert record["must_reach"] == 0.9 and record["worst_ratio"] > 0
    held_against = {row["what"] for row in record["rows"] if row["ratio"] is not None}
    assert held_against == {f"{side}, {order}" for side in ("save", "load") for order in ("in order", "in no order")}


@pytest.mark.slow
def test_the_table_of_offload(tmp_path: Path) -> None:
    record = bench("bench.offload", tmp_path / "record.json", "--only", "offload_copies")
    assert record["title"] == "kvferry: what KV offload must reach"
    assert record["rows"] and all(row["measured"] > 0 for row in record["rows"])
    assert record["reports"].keys() == {"offload_copies"}


@pytest.mark.slow
def test_decode_over_device_and_host_memory(tmp_path: Path) -> None:
    record = bench("bench.tiered_decode", tmp_path / "record.json", "--device", "cpu")
    check_rows(record)
    assert record["must_reach_beside_saves"] == 0.97 and record["ratio_beside_saves"] > 0
    assert 0 < record["ratio_of_longest"] < 10 and record["must_reach_of_link"] == 1 / 1.3
