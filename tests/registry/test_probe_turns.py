"""Turns to measure links: few at once, in order, and given back."""

from __future__ import annotations

import pytest

from tests.runtime.instances import until
from transfer.registry import probe_turns
from transfer.registry.probe_turns import MAX_PROBES, ProbeTurns


async def test_turns_are_granted_in_order_as_others_end() -> None:
    granted: list[int] = []
    turns = ProbeTurns(granted.append)
    for session in range(MAX_PROBES + 3):
        turns.ask(session)
    assert granted == list(range(MAX_PROBES))
    turns.end(MAX_PROBES)  # it was lost while it waited
    turns.end(1)
    turns.end(1)
    turns.end(999)
    assert granted == [*range(MAX_PROBES), MAX_PROBES + 1]
    turns.end(0)
    assert granted[-1] == MAX_PROBES + 2
    for session in granted:
        turns.end(session)


async def test_a_writer_that_reports_nothing_does_not_keep_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_turns, "TURN_S", 0.01)
    granted: list[int] = []
    turns = ProbeTurns(granted.append)
    for session in range(2 * MAX_PROBES):
        turns.ask(session)
    await until(lambda: len(granted) == 2 * MAX_PROBES)
    for session in granted:
        turns.end(session)
