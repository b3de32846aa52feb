"""Every benchmark runs with tiny sizes, and the tables can read its record."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.table import outcomes_of
from bench.timing import ROOT

MACHINE = {"cpu", "num_cores", "gpus", "driver", "nvlink", "kernel"}
ENVIRONMENT = MACHINE | {"commit", "is_modified", "python", "versions", "date", "command"}
ROW = {"case", "what", "median_s", "p99_s", "spread", "bytes", "gb_per_s", "ratio", "ratio_to", "samples_s"}
POOL_TINY = ("--mb", "1", "--in-flight", "2", "--chunk-tokens", "4", "--layers-per-group", "0", "--ring-mb", "4")


def run(module: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)


def bench(module: str, file: Path, *arguments: str, timeout_s: float = 200) -> dict[str, Any]:
    """Run a benchmark as its user does and return its record."""
    done = run(module, "--json", str(file), "--quick", *arguments, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record: dict[str, Any] = json.loads(file.read_text())
    assert record["environment"].keys() == ENVIRONMENT
    assert record["environment"]["command"].startswith(f"python -m {module}")
    assert record["rows"]
    for row in record["rows"]:
        if "samples_s" in row:
            assert row.keys() == ROW
            assert row["samples_s"] and all(math.isfinite(sample) and sample >= 0 for sample in row["samples_s"])
    return record


@pytest.mark.parametrize(
    ("lane", "limits"),
    [
        ("ucx", {"pool to pool": [None, 0.35], "writes": [1.0, 1.0]}),
        ("shm", {"pool to pool": [0.45, 0.6], "writes": [1.0, 1.0], "CPU of both ends": [18.0, 18.0]}),
    ],
)
def test_pool_to_pool(lane: str, limits: dict[str, list[float | None]], tmp_path: Path) -> None:
    record = bench("bench.pool_to_pool", tmp_path / "record.json", *POOL_TINY, "--lanes", lane, "--in-flight", "1", "2")
    cases = {row["case"] for row in record["rows"]}
    assert len(cases) == 2, "a block of rows for each number of requests in flight"
    for case in cases:
        facts = record["facts"][f"{case}, {lane}"]
        assert (facts["writes_per_chunk_and_route"], facts["resends"]) == (1, 0)
        assert facts["chunks_per_request"] > 1 and facts["overlap"] > 0
    moves = [row for row in record["rows"] if row["what"] == f"kvferry {lane}, pool to pool"]
    assert [row["bytes"] for row in moves] == [1 << 20] * 2
    assert all(row["ratio"] > 0 and row["ratio_to"].startswith("memcpy") for row in moves)
    lines = outcomes_of("pool_to_pool", record)
    found: dict[str, list[float | None]] = {}
    for line in lines:
        found.setdefault(line.what.split(",")[0], []).append(line.limit)
        assert line.measured is not None and line.measured > 0
    assert found == limits


def test_the_link_is_held_against_its_plain_use(tmp_path: Path) -> None:
    record = bench("bench.link", tmp_path / "record.json", "--max-mb", "1", "--lanes", "copy", "ucx plain", "ucx/shm")
    rows = {(row["case"], row["what"]): row for row in record["rows"]}
    assert rows["4 KiB", "UCXX tag send, plain"]["ratio_to"] == "memcpy, one thread (4 KiB)"
    assert rows["4 KiB", "kvferry ucx/shm"]["ratio_to"] == "UCXX tag send, plain (4 KiB)"
    assert record["facts"]["carried by"] == {"kvferry ucx/shm": "ucx/shm"}


def test_control_plane(tmp_path: Path) -> None:
    record = bench("bench.control", tmp_path / "record.json")
    assert 1 / record["chunks_per_second"] == pytest.approx(record["rows"][1]["median_s"])
    assert record["round_trip_p50_s"] > 0
    cases = {row["case"] for row in record["rows"] if row["what"] == "grant, ready, ack"}
    assert cases >= {"two processes, 1 peer", "two processes, 4 peers", "two processes, 10 held grants"}
    lines = outcomes_of("control", record)
    assert [line.limit for line in lines] == [3000, 1.0, 4.0, 4.0, 4.0, 0, 1.3, 1.3, 1.3, 200_000, 4.0]
    assert lines[5].what == "sessions lost, of 1,536" and lines[5].measured == 0
    assert lines[8].what == "ring pair, in order, 10 to 10,000 live grants"


def test_a_lone_request_is_traced_through_both_nodes(tmp_path: Path) -> None:
    record = bench("bench.lone_request", tmp_path / "record.json", "--trace")
    (line,) = outcomes_of("lone_request", record)
    assert line.measured is not None and line.measured > 0 and (line.limit, line.bound) == (6.5, "below")
    rows = record["facts"]["trace"]["rows"]
    assert {row["role"] for row in rows} == {"decode leader", "decode rank", "prefill leader", "prefill rank"}
    assert [row["first_ms"] for row in rows] == sorted(row["first_ms"] for row in rows)


def test_token_streams_of_a_decode_leader(tmp_path: Path) -> None:
    record = bench("bench.decode_leader", tmp_path / "record.json", "--streams", "4", "--tokens", "16")
    (line,) = outcomes_of("decode_leader", record)
    assert line.measured is not None and line.measured > 0 and line.limit == 25_000
    assert record["facts"]["4 streams"]["tokens per second"] > 0


def test_idle_cluster_has_a_row_for_each_leader_and_rank(tmp_path: Path) -> None:
    record = bench("bench.idle", tmp_path / "record.json", "--prefill-tp", "1", "--decode-tp", "1", "--seconds", "2")
    assert [row["case"] for row in record["rows"]] == ["prefill leader", "decode leader", "prefill rank 0", "decode rank 0"]
    assert all(row["median_s"] > 0 for row in record["rows"])
    assert [line.limit for line in outcomes_of("idle", record)] == [3.0, None]


def test_nixl_progress_compares_both_settings_of_the_thread(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    options = ("--quick", "--device", "cpu", "--lanes", "shm", "--json", str(file))
    done = run("bench.nixl_progress", *options, timeout_s=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    pairs = json.loads(file.read_text())["pairs"]
    assert [pair["case"] for pair in pairs] == ["lane shm, thread at target, pair 1", "lane shm, thread at both ends, pair 1"]
    assert all(pair["writes"] and pair["carried_by"] == "nixl/shm" and not pair["failure"] for pair in pairs)


def test_the_whole_table_judges_every_benchmark_that_ran(tmp_path: Path) -> None:
    record = bench("bench", tmp_path / "record.json", "--only", "pages")
    assert [(row["what"], row["limit"]) for row in record["rows"]] == [
        ("pages, pools of 1,000 to 1,000,000", 500_000),
        ("pages, flat", 0.7),
    ]
    assert all(row["measured"] > 0 and row["ok"] in (True, False) for row in record["rows"])
    assert {row["what"] for row in record["reports"]["pages"]["rows"]} == {"pair", "request with a window"}
    assert record["is_quick"] is True


def test_the_table_of_offload(tmp_path: Path) -> None:
    record = bench("bench.offload", tmp_path / "record.json", "--only", "offload_copies")
    assert record["title"] == "kvferry: targets of KV offload"
    assert all(row["measured"] > 0 for row in record["rows"])
    copies = record["reports"]["offload_copies"]
    assert copies["must_reach"] == 0.9 and copies["worst_ratio"] > 0
    compared = {row["what"] for row in copies["rows"] if row["ratio"] is not None}
    assert compared == {f"{side}, {order}" for side in ("save", "load") for order in ("in order", "in no order")}


def test_decode_over_device_and_host_memory(tmp_path: Path) -> None:
    record = bench("bench.tiered_decode", tmp_path / "record.json", "--device", "cpu")
    assert record["must_reach_beside_saves"] == 0.97 and record["ratio_beside_saves"] > 0
    assert record["ratio_of_longest"] > 0 and record["must_reach_of_link"] == 1 / 1.3


def test_decode_with_kv_in_the_store(tmp_path: Path) -> None:
    record = bench("bench.stored_decode", tmp_path / "record.json", "--device", "cpu", "--stored-mb", "16")
    assert [row["what"] for row in record["rows"]] == ["host memory", "reads alone", "store"]
    assert all(facts["time over the sum"] > 0 for facts in record["facts"].values())


def test_prefill_of_a_long_prompt(tmp_path: Path) -> None:
    record = bench("bench.sparse_prefill", tmp_path / "record.json", "--parts", "prefill", "kernel")
    assert {"of_allowed_time", "least_speed_times_density"} <= record.keys()


@pytest.mark.timeout(300)  # the nodes start, and start again after a fault
def test_the_soak_finds_nothing_wrong(tmp_path: Path) -> None:
    record = bench("bench.soak", tmp_path / "record.json", timeout_s=240)
    assert (record["violations"], record["leaks"]) == (0, 0)
    assert record["requests"] == sum(record["facts"]["requests"].values()) > 10
    assert record["faults"] == sum(record["facts"]["faults"].values()) >= 1
    assert record["tokens_verified"] > 50
