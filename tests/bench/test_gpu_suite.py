"""The suite for GPUs: it stops at its budget, and its table judges what it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_suite
from bench.gpu_table import outcomes_of
from bench.pool_to_pool import SGLANG


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


def test_which_measurements_judge_requests() -> None:
    sizes = {"320 MiB": 335_544_320, "64 MiB": 67_092_480, "16 MiB": 16_793_600}
    lanes = ("cuda_ipc/fused", "ucx", "nixl")
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for size, num_bytes in sizes.items():
        for case in (f"{size}, 1 in flight", f"{size}, 16 in flight"):
            for lane in lanes:
                facts[f"{case}, {lane}"] = {"chunks_per_request": 1}
                rows.append({"case": case, "what": f"kvferry {lane}, pool to pool", "bytes": num_bytes, "ratio": 0.5})
    rows.append({"case": "320 MiB, 1 in flight", "what": SGLANG, "bytes": sizes["320 MiB"], "ratio": None})
    for row in rows:
        row |= {"gb_per_s": 100.0, "median_s": 2e-3, "ratio_to": "peer memcpy over CUDA IPC (x)"}
    lines = outcomes_of("pool to pool", {"rows": rows, "facts": facts})
    assert {line.what: line.limit for line in lines if line.limit is not None} == {
        "pool to pool, cuda_ipc/fused, 320 MiB, 1 in flight": 0.72,
        "pool to pool, cuda_ipc/fused, 64 MiB, 1 in flight": 0.40,
        "pool to pool, cuda_ipc/fused, 16 MiB, 1 in flight": 0.20,
        "pool to pool, cuda_ipc/fused, 320 MiB, 16 in flight": 0.9,
        "pool to pool, ucx, 320 MiB, 16 in flight": 0.75,
        f"  against {SGLANG}": 2.0,
    }
    assert [line.limit for line in lines if SGLANG in line.what] == [1.0, 2.0, None, None]
    assert outcomes_of("pool to pool, other sizes", {"rows": rows, "facts": facts}) == lines
    assert not any(line.limit for line in outcomes_of("pool to pool, one gpu", {"rows": rows, "facts": facts}))


def test_which_measurements_judge_the_kernels() -> None:
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
