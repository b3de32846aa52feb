"""A suite of benchmarks: a part that fails is in the table and in the exit code, also if it has written a partial report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import suite
from bench.table import Content, Outcome, Run

LATE = "did not end within 5 s"


def one_value(name: str, content: Content) -> Sequence[Outcome]:
    return [Outcome(what=name, measured=content["value"], limit=None, unit="us")]


@pytest.mark.parametrize(
    ("content", "reason", "measured", "code"),
    [
        ({"value": 1.0}, "", [1.0], 0),
        ({"value": None}, "", [None], 1),
        (None, LATE, [None], 1),
        ({"value": 1.0}, LATE, [None, 1.0], 1),
    ],
)
def test_a_failed_part_is_a_line_of_the_table(
    monkeypatch: pytest.MonkeyPatch, content: Content | None, reason: str, measured: list[float | None], code: int
) -> None:
    def run_one(run: Run, folder: Path, *, is_quick: bool, timeout_s: float) -> tuple[Content | None, str]:
        folder.mkdir()
        (folder / "log").write_text("some output\n")
        return content, reason

    shown: list[Outcome] = []
    monkeypatch.setattr(suite, "run_one", run_one)
    monkeypatch.setattr(suite, "print_table", lambda outcomes, environment, console: shown.extend(outcomes))
    monkeypatch.setattr(sys, "argv", ["bench", "--quick"])
    assert suite.run_command([Run(module="link", timeout_s=5.0)], one_value, title="a suite") == code
    assert [line.measured for line in shown] == measured
    assert [line.note for line in shown if line.note] == [reason] * bool(reason)
