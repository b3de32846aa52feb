"""Turns to measure links: few at once, in order, and given back."""

from __future__ import annotations

import asyncio

from tests.runtime.virtual_time import in_virtual_time
from transfer.registry.probe_turns import MAX_PROBES, MAX_WAIT_S, TURN_S, ProbeTurns


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


@in_virtual_time
async def test_a_writer_that_reports_nothing_does_not_keep_its_turn() -> None:
    granted: list[int] = []
    turns = ProbeTurns(granted.append)
    for session in range(MAX_PROBES):
        turns.ask(session)
    await asyncio.sleep(TURN_S - 1.0)
    turns.ask(MAX_PROBES)
    assert granted == list(range(MAX_PROBES))
    await asyncio.sleep(1.1)
    assert granted == list(range(MAX_PROBES + 1))
    turns.end(MAX_PROBES)


@in_virtual_time
async def test_a_writer_gets_its_turn_in_time_however_many_others_measure_broken_links() -> None:
    loop = asyncio.get_running_loop()
    granted: dict[int, float] = {}
    turns = ProbeTurns(lambda session: granted.update({session: loop.time()}))
    for session in range(40):
        turns.ask(session)
    await asyncio.sleep(MAX_WAIT_S / 2)
    turns.ask(99)
    turns.ask(100)
    turns.end(100)
    await asyncio.sleep(2 * MAX_WAIT_S)
    assert granted[99] == 1.5 * MAX_WAIT_S
    assert sorted(granted) == [*range(40), 99], "one that was lost while it waited gets none"
    for session in granted:
        turns.end(session)
