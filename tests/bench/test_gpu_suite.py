"""The suite for GPUs: it stops at its budget, and its table judges what it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_suite
from bench.gpu_table import outcomes_of
from bench.link import FUSED, FUSED_WITH_DIGEST, PEER_MEMCPY
from bench.peers import sglang
from bench.pool_to_pool import NIXL_BULK, SGLANG


def test_no_part_is_begun_when_the_budget_is_spent(tmp_path: Path) -> None:
    assert gpu_suite.main(["--out", str(tmp_path), "--rehearse", "--budget-s", "1", "--only", "link"]) == 1
    record = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert record["failures"] == {"link": "not begun: the budget of 1 s is spent"}
    assert [row["ok"] for row in record["rows"]] == [False]


def test_every_part_is_a_benchmark_whose_report_is_read() -> None:
    for part in gpu_suite.PARTS:
        assert outcomes_of(part.name, {"rows": [], "facts": {}}) == []
    assert sum(part.run.timeout_s for part in gpu_suite.PARTS) < 800
    wheel = Path("a.whl")
    for name, run in gpu_suite.commands(wheel=wheel, is_rehearsal=False).items():
        assert ("--sglang-wheel" in run.arguments) == (name in ("kernels", "pool to pool"))


def row(case: str, what: str, *, seconds: float, num_bytes: int, ratio: float | None = None) -> dict[str, Any]:
    gb_per_s = num_bytes / seconds / 1e9
    against = "" if ratio is None else f"{PEER_MEMCPY} ({case})"
    times = {"median_s": seconds, "gb_per_s": gb_per_s}
    return {"case": case, "what": what, "bytes": num_bytes, "ratio": ratio, "ratio_to": against, **times}


def test_what_the_kernels_are_judged_by() -> None:
    def kernel_row(case: str, what: str, ratio: float | None, median_s: float = 1e-4) -> dict[str, Any]:
        return {"case": case, "what": what, "ratio": ratio, "ratio_to": f"device copy ({case})", "median_s": median_s}

    rows = [
        kernel_row("A, gather", "gather", 0.98),
        kernel_row("B, gather", "gather", 0.96),
        kernel_row("B, wire float8_e4m3, gather", "gather", 0.6),
        kernel_row("A, scatter", "scatter + digest", 0.95),
        kernel_row("A, gather", "gather + digest, host", None, 20e-6),
        kernel_row("B, gather", "gather + digest, host", None, 30e-6),
        kernel_row("B, gather", "gather + digest, first, host", None, 50e-6),
        kernel_row("A, gather", "SGLang gather", 0.5),
    ]
    lines = outcomes_of("kernels", {"rows": rows, "facts": {}})
    assert [(line.what, line.measured, line.limit, line.is_reached) for line in lines] == [
        ("gather, worst of 2", 0.96, 0.97, False),
        ("gather, converted, worst of 1", 0.6, None, True),
        ("scatter + digest, worst of 1", 0.95, 0.94, True),
        ("host time of gather + digest, worst of 2", pytest.approx(30), pytest.approx(25), False),
        ("host time of gather + digest, first, worst of 1", pytest.approx(50), None, True),
        ("SGLang gather, worst of 1", 0.5, None, True),
    ]
    assert lines[0].note == "B, gather"


def test_what_the_link_is_judged_by() -> None:
    large, small = "68 MB of Llama 3 70B, P4 -> D2", "17 MB of Llama 3 70B, P4 -> D2"
    rows = [
        row(large, FUSED, seconds=200e-6, num_bytes=68 * 10**6, ratio=0.93),
        row(large, FUSED_WITH_DIGEST, seconds=210e-6, num_bytes=68 * 10**6, ratio=0.91),
        row(small, FUSED, seconds=90e-6, num_bytes=17 * 10**6, ratio=0.5),
    ]
    lines = outcomes_of("link", {"rows": rows, "facts": {}})
    assert [(line.measured, line.limit, line.is_reached) for line in lines] == [
        (0.93, 0.92, True),
        (0.91, None, True),
        (0.5, None, True),
    ]
    assert all(line.limit is None for line in outcomes_of("link, one gpu", {"rows": rows, "facts": {}}))


def test_what_pool_to_pool_is_judged_by() -> None:
    case, num_bytes = "320 MiB, 1 in flight", 320 << 20
    lanes = ("cuda_ipc/fused", "nixl")
    several = "320 MiB, 16 in flight"
    facts = {f"{of}, {lane}": {"chunks_per_request": 5} for of in (case, several) for lane in lanes}
    rows = [
        row(case, PEER_MEMCPY, seconds=860e-6, num_bytes=num_bytes),
        row(case, SGLANG, seconds=2.3e-3, num_bytes=num_bytes),
        row(case, NIXL_BULK, seconds=1.57e-3, num_bytes=num_bytes),
        row(case, "NIXL, 40,960 descriptors of 8,192 B", seconds=0.2, num_bytes=num_bytes),
        row(case, "kvferry cuda_ipc/fused, pool to pool", seconds=2e-3, num_bytes=num_bytes, ratio=0.43),
        row(several, "kvferry cuda_ipc/fused, pool to pool", seconds=1e-3, num_bytes=num_bytes, ratio=0.86),
        row(several, "kvferry nixl, pool to pool", seconds=1.6e-3, num_bytes=num_bytes, ratio=0.54),
    ]
    judged = {line.what: line for line in outcomes_of("pool to pool", {"rows": rows, "facts": facts}) if line.limit is not None}
    found = [(what.strip(), round(line.measured or 0, 2), line.limit, line.is_reached) for what, line in judged.items()]
    assert found == [
        (f"pool to pool, cuda_ipc/fused, {several}", 0.86, 0.88, False),
        (f"against {SGLANG}", 2.3, 2.0, True),
        ("against NIXL descriptors", 200.0, 100.0, True),
        (f"against {NIXL_BULK}", 0.98, 0.95, True),
    ]


def test_a_wheel_without_the_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(sglang.NoSglang, match=r"cannot be had from .*none\.whl"):
        sglang.load(tmp_path / "none.whl")
