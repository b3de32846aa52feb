"""How often a prefill leader asks for room: a "not yet" is followed by a pause, whatever else wakes the leader meanwhile."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from prefill_node import requests as requests_module
from prefill_node import source_requests as source_module
from prefill_node.joins import Join, Reservation
from prefill_node.source_requests import SourceRequests
from tests.prefill.leader_world import World, new_join
from tests.runtime.virtual_time import VirtualTimeLoop, run_in_virtual_time
from transfer.config.hosted import HostedLimitsConfig
from transfer.engine_types import GREEDY
from transfer.errors import PeerUnreachable, StagingError

PAUSE_S, ROUNDED_UP_S, ANSWER_S = 0.05, 0.01, 0.002
MOST_S = PAUSE_S + ROUNDED_UP_S + ANSWER_S + 1e-9
FULL, IDLE = 6, 7  # decode instances


class TimedWorld(World):
    """Notes when each request is asked about; the decode instance `FULL` answers "not yet", the others reserve."""

    def __init__(self, loop: VirtualTimeLoop, *, queue_timeout_s: float = 60.0) -> None:
        self._loop = loop
        self.asked_s: dict[str, list[float]] = {}
        self.has_room = False
        super().__init__(queue_timeout_s=queue_timeout_s)

    async def _reserve(self, join: Join, request_id: str) -> Reservation:
        self.asked_s.setdefault(request_id, []).append(self._loop.now_s)
        await asyncio.sleep(ANSWER_S)
        return Reservation(is_reserved=join.incarnation != FULL or self.has_room)


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

    run_in_virtual_time(main, monkeypatch, requests_module)


def test_a_leader_whose_requests_wait_is_woken_by_their_turns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        world = TimedWorld(loop)
        world.submit("a", 3, join=new_join(FULL))
        await asyncio.sleep(10.0)
        num_asked, num_turns = len(world.asked_s["a"]), loop.num_turns
        assert 10.0 / MOST_S <= num_asked <= 10.0 / (PAUSE_S + ANSWER_S)
        assert num_turns < 10 * num_asked
        world.has_room = True
        await asyncio.sleep(MOST_S + ANSWER_S)
        assert world.steps, "started at its next turn"
        world.settle()
        world.assert_nothing_is_left()
        await world.close()

    run_in_virtual_time(main, monkeypatch, requests_module)


def test_a_request_without_room_is_refused_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        world = TimedWorld(loop, queue_timeout_s=1.01)
        request = world.submit("a", 3, join=new_join(FULL))
        assert isinstance(await request.progress.get(), StagingError)
        assert loop.now_s == pytest.approx(1.01)
        await world.close()

    run_in_virtual_time(main, monkeypatch, requests_module)


def test_a_hosted_prefill_side_pauses_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        asked_s: list[float] = []

        async def reserve(join: Join, transfer_id: str) -> bool:
            asked_s.append(loop.now_s)
            await asyncio.sleep(ANSWER_S)
            return False

        requests = SourceRequests(
            num_ranks=1,
            limits=HostedLimitsConfig(),
            broadcast=lambda message: None,
            reserve=reserve,
            on_outcome=lambda outcome: None,
        )
        requests.offer("prompt", "a", (1, 2, 3))
        requests.begin("prompt")
        requests.submit("a.1", "a", (1, 2, 3), 0, GREEDY, new_join(FULL))
        await asyncio.sleep(1.0)
        assert [later - earlier for earlier, later in pairwise(asked_s)] == pytest.approx([ANSWER_S + PAUSE_S] * 19)
        await requests.close(PeerUnreachable("the test is over"))

    run_in_virtual_time(main, monkeypatch, source_module)
