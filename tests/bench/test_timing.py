"""The arithmetic, the JSON and the verdicts of reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.table import Outcome
from bench.timing import Report, Row


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


@pytest.mark.parametrize(
    ("measured", "limit", "bound", "is_reached"),
    [
        (0.2, 0.2, "at least", True),
        (0.19, 0.2, "at least", False),
        (2.9, 3.0, "below", True),
        (1.1, 1.0, "exactly", False),
        (None, 1.0, "at least", False),
    ],
)
def test_verdicts(measured: float | None, limit: float | None, bound: str, is_reached: bool) -> None:
    outcome = Outcome(what="", measured=measured, limit=limit, unit="", bound=bound, cpu="EPYC")  # type: ignore[arg-type]
    assert outcome.is_reached is is_reached
    assert outcome.is_missed("EPYC") is outcome.is_missed("EPYC 9654 96-Core Processor") is not is_reached
    assert outcome.is_missed("Xeon") is (measured is None), "a target for another CPU"
    assert replace(outcome, cpu="").is_missed("Xeon") is not is_reached
