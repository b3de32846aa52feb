"""How often a prefill leader asks for room: a "not yet" is followed by a pause, whatever else wakes the leader meanwhile."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from prefill_node import requests as requests_module
from tests.prefill.leader_world import World, new_join
from tests.runtime.virtual_time import VirtualTimeLoop, run_in_virtual_time
from transfer.connector import outgoing as outgoing_module
from transfer.connector.decode_instances import Join, Reservation

PAUSE_S, ROUNDED_UP_S, ANSWER_S = 0.05, 0.01, 0.002
MOST_S = PAUSE_S + ROUNDED_UP_S + ANSWER_S + 1e-9
FULL, IDLE = 6, 7  # decode instances


class TimedWorld(World):
    """Notes when each request is asked about; the decode instance `FULL` answers "not yet", the others reserve."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self.asked_s: dict[str, list[float]] = {}
        super().__init__()

    async def _reserve(self, join: Join, request_id: str) -> Reservation:
        self.asked_s.setdefault(request_id, []).append(self._loop.now_s)
        await asyncio.sleep(ANSWER_S)
        return Reservation(is_reserved=join.incarnation != FULL)


def test_a_request_is_asked_about_twenty_times_a_second_at_most_whatever_wakes_the_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        world, full, idle = TimedWorld(loop), new_join(FULL), new_join(IDLE)
        for name in ("old", "young"):
            world.submit(name, 3, join=full)
        for number in range(200):
            world.submit(f"busy-{number}", 3, join=idle)
            await asyncio.sleep(0.005)
            world.settle()
        assert world.outcomes == ["sent"] * 200
        for name in ("old", "young"):
            pauses_s = [later - earlier for earlier, later in pairwise(world.asked_s[name])]
            assert len(pauses_s) > 15 and all(ANSWER_S + PAUSE_S <= pause_s <= MOST_S for pause_s in pauses_s)
        await world.close()

    run_in_virtual_time(main, monkeypatch, requests_module, outgoing_module)
