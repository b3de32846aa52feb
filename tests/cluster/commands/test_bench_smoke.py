"""Every benchmark runs with tiny sizes, and the tables can read its record."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_suite
from bench.table import Run, outcomes_of
from bench.timing import ROOT

MACHINE = {"cpu", "num_cores", "gpus", "driver", "nvlink", "kernel"}
ENVIRONMENT = MACHINE | {"commit", "is_modified", "python", "versions", "date", "command"}
ROW = {"case", "what", "median_s", "p99_s", "spread", "bytes", "gb_per_s", "ratio", "ratio_to", "samples_s"}
POOL_TINY = ("--mb", "1", "--in-flight", "2", "--chunk-tokens", "4", "--layers-per-group", "0", "--ring-mb", "4")
HAS_NIXL = any(find_spec(name) for name in ("nixl_cu13", "nixl_cu12", "nixl"))


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
    ("arguments", "num_cases"),
    [
        (("--in-flight", "1", "2"), 2),
        (("--prefill-tp", "4", "--decode-tp", "2", "--decode-order", "HND"), 1),
        (("--prefill-page-size", "64", "--decode-page-size", "1", "--layers-per-group", "8"), 1),
        (("--asks-late",), 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_pool_to_pool(tmp_path: Path, arguments: tuple[str, ...], num_cases: int) -> None:
    record = bench("bench.pool_to_pool", tmp_path / "record.json", *POOL_TINY, *arguments)
    cases = {row["case"] for row in record["rows"]}
    assert len(cases) == num_cases, "a block of rows for each number of requests in flight"
    for case in cases:
        facts = record["facts"][f"{case}, ucx"]
        assert (facts["writes_per_chunk_and_route"], facts["resends"]) == (1, 0)
        assert facts["chunks_per_request"] > 1 and facts["overlap"] > 0
    moves = [row for row in record["rows"] if row["what"] == "kvferry ucx, pool to pool"]
    assert [row["bytes"] for row in moves] == [1 << 20] * num_cases
    assert all(row["ratio"] > 0 and row["ratio_to"].startswith("memcpy") for row in moves)
    if not arguments[0].startswith("--in-flight"):
        return
    lines = outcomes_of("pool_to_pool", record)
    assert [line.what.split(",")[0] for line in lines] == ["pool to pool", "writes"] * 2
    assert [line.limit for line in lines] == [None, 1.0, 0.35, 1.0]


def test_pool_to_pool_refuses_shards_with_several_targets() -> None:
    done = run("bench.pool_to_pool", "--prefill-tp", "2", "--decode-tp", "4", *POOL_TINY, timeout_s=60)
    assert done.returncode == 2
    assert "writes to decode ranks [0, 1]" in done.stderr.splitlines()[-1]


def test_pool_to_pool_beside_other_libraries(tmp_path: Path) -> None:
    sizes = ("--mb", "2", "--in-flight", "1", "--chunk-tokens", "4", "--piece-mb", "0.25", "--peers", "--lanes", "nixl")
    record = bench("bench.pool_to_pool", tmp_path / "record.json", *sizes)
    if not HAS_NIXL:
        assert {"nixl", "NIXL bulk WRITE"} <= record["facts"]["not measured"].keys()
        return
    assert "not measured" not in record["facts"]
    measured = {row["what"] for row in record["rows"]}
    assert {"NIXL bulk WRITE", "NIXL, 64 descriptors of 32,768 B", "kvferry nixl, pool to pool"} <= measured
    facts = record["facts"]["2 MiB, 1 in flight, pieces of 256 KiB, nixl"]
    assert (facts["layers_per_chunk"], facts["chunks_per_request"]) == (16, 8), "4 tokens of 16 layers are 256 KiB"


def test_control_plane(tmp_path: Path) -> None:
    record = bench("bench.control", tmp_path / "record.json")
    assert 1 / record["chunks_per_second"] == pytest.approx(record["rows"][1]["median_s"])
    assert record["round_trip_p50_s"] > 0
    cases = {row["case"] for row in record["rows"] if row["what"] == "grant, ready, ack"}
    assert cases >= {"two processes, 1 peer", "two processes, 4 peers", "two processes, 10 held grants"}
    lines = outcomes_of("control", record)
    assert [line.limit for line in lines] == [3000, 1.0, 1.3, 1.3, 1.3, 200_000, 4.0]
    assert lines[4].what == "ring pair, in order, 10 to 10,000 live grants"


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


def test_hosts_beside_a_pretended_link(tmp_path: Path) -> None:
    sizes = ("--mb", "1", "--piece-mb", "2", "--ring-mb", "8", "--in-flight", "1")
    record = bench("bench.host", tmp_path / "record.json", *sizes, "--gb-per-s", "1")
    rows = {row["what"]: row for row in record["rows"]}
    link, moved = rows["the link alone"], rows["kvferry pretended, pool to pool"]
    assert link["median_s"] == pytest.approx(link["bytes"] / 1e9)
    assert moved["median_s"] > link["median_s"] and 0 < moved["ratio"] < 1
    assert {f"kvferry pretended, {hop}" for hop in ("computed to gathered", "written to scattered")} <= rows.keys()


def test_copies_can_take_no_time(tmp_path: Path) -> None:
    sizes = ("--mb", "1", "--piece-mb", "0.25", "--ring-mb", "8", "--in-flight", "2")
    record = bench("bench.host", tmp_path / "record.json", *sizes, "--gb-per-s", "0")
    (moved,) = [row for row in record["rows"] if row["what"] == "kvferry pretended, pool to pool"]
    assert moved["ratio"] is None
    (facts,) = [facts for name, facts in record["facts"].items() if name.endswith(", pretended")]
    assert facts["chunks_per_request"] > 4


def test_the_table_of_offload(tmp_path: Path) -> None:
    record = bench("bench.offload", tmp_path / "record.json", "--only", "offload_copies")
    assert record["title"] == "kvferry: what KV offload must reach"
    assert all(row["measured"] > 0 for row in record["rows"])
    copies = record["reports"]["offload_copies"]
    assert copies["must_reach"] == 0.9 and copies["worst_ratio"] > 0
    compared = {row["what"] for row in copies["rows"] if row["ratio"] is not None}
    assert compared == {f"{side}, {order}" for side in ("save", "load") for order in ("in order", "in no order")}


def test_decode_over_device_and_host_memory(tmp_path: Path) -> None:
    record = bench("bench.tiered_decode", tmp_path / "record.json", "--device", "cpu")
    assert record["must_reach_beside_saves"] == 0.97 and record["ratio_beside_saves"] > 0
    assert record["ratio_of_longest"] > 0 and record["must_reach_of_link"] == 1 / 1.3


@pytest.mark.timeout(300)  # the nodes start, and start again after a fault
def test_the_soak_finds_nothing_wrong(tmp_path: Path) -> None:
    record = bench("bench.soak", tmp_path / "record.json", timeout_s=240)
    assert (record["violations"], record["leaks"]) == (0, 0)
    assert record["requests"] == sum(record["facts"]["requests"].values()) > 10
    assert record["faults"] == sum(record["facts"]["faults"].values()) >= 1
    assert record["tokens_verified"] > 50


def test_a_part_of_the_gpu_suite_that_fails_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = next(part for part in gpu_suite.PARTS if part.name == "pool to pool, one gpu")
    bad = gpu_suite.Part(name="link", run=Run(module="link", timeout_s=60), rehearsed=("--device", "cuda"))
    monkeypatch.setattr(gpu_suite, "PARTS", (bad, good))
    assert gpu_suite.main(["--out", str(tmp_path), "--rehearse", "--quick", "--only", bad.name, good.name]) == 1
    record = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert record["failures"].keys() == {"link"} and "torch sees no CUDA device" in record["failures"]["link"]
    assert record["reports"]["pool to pool, one gpu"]["rows"]
    assert "kvferry ucx, pool to pool" in (tmp_path / "gpu_suite.log").read_text()
