"""The link benchmark's arithmetic and JSON, and that its two halves play together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.link import over_inproc, over_ucx, steps
from bench.timing import Report, Row, readable_bytes, readable_seconds, sample


def test_row_statistics() -> None:
    row = Row(case="c", what="w", samples_s=tuple(i / 1000 for i in range(1, 201)), num_bytes=10**9)
    assert row.median_s == pytest.approx(0.1005)
    assert row.p99_s == pytest.approx(0.198)
    assert row.gb_per_s == pytest.approx(1 / 0.1005)
    assert Row(case="c", what="w", samples_s=(3.0, 1.0, 2.0)).p99_s == 3.0
    assert Row(case="c", what="w", samples_s=(1.0,)).gb_per_s is None
    with pytest.raises(ValueError, match="at least one"):
        Row(case="c", what="w", samples_s=())


def test_ratios_and_json(tmp_path: Path) -> None:
    report = Report(title="t")
    fast = report.add("a", "copy", [1.0, 1.0], num_bytes=100)
    report.add("b", "move", [4.0], num_bytes=100, against=fast)
    report.add("b", "call", [0.5], against=report.add("a", "call", [1.0]))
    report.finish(tmp_path / "new" / "report.json")
    content = json.loads((tmp_path / "new" / "report.json").read_text())
    rows = {(row["case"], row["what"]): row for row in content["rows"]}
    assert rows["b", "move"]["ratio"] == 0.25
    assert rows["b", "move"]["ratio_to"] == "copy (a)"
    assert rows["b", "call"]["ratio"] == 2.0
    expected = {"case", "what", "median_s", "p99_s", "spread", "bytes", "gb_per_s", "ratio", "ratio_to", "samples_s"}
    assert all(set(row) == expected for row in content["rows"])
    assert {"commit", "cpu", "num_cores", "versions", "date", "command"} <= set(content["environment"])
    assert content["environment"]["commit"] != "unknown"


def test_readable() -> None:
    assert [readable_bytes(n) for n in (1, 4096, 1536, 64 << 20)] == ["1 B", "4 KiB", "1.5 KiB", "64 MiB"]
    assert [readable_seconds(s) for s in (2e-9, 3.5e-6, 0.0421, 2.0)] == ["2 ns", "3.5 us", "42.1 ms", "2 s"]


def test_sample_counts_after_the_warm_up() -> None:
    calls: list[int] = []
    assert len(sample(lambda: calls.append(1), repetitions=3, warmup=2)) == 3
    assert len(calls) == 5


@pytest.mark.parametrize("lane", ["inproc", "shm"])
def test_every_step_is_measured(lane: str) -> None:
    plan = [step for step in steps(is_quick=True) if step.num_bytes <= 512 << 10]
    samples_s = over_inproc(plan) if lane == "inproc" else over_ucx(lane, plan, 0.0)
    assert [len(samples) for samples in samples_s] == [step.repetitions for step in plan]
    assert all(sample_s > 0 for samples in samples_s for sample_s in samples)
