"""The prompts of an engine that schedules by itself, in its leader, with fake ranks and a fake decode side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.connector.instances import PROMPT
from tests.decode.leader_world import take, turns
from tests.prefill.leader_world import kind_of, new_join
from tests.tracing.told_span import ToldSpan
from transfer.chunk import ChunkPlan
from transfer.config import ConnectorLimitsConfig
from transfer.connector.decode_instances import Join, Reservation
from transfer.connector.messages import ClosePrompt, FreePrompt, PromptIdle, StartOffered, TransferNotSent, TransferSent
from transfer.connector.offered_prompts import OfferedPrompts
from transfer.connector.outgoing import Transfer
from transfer.errors import PeerUnreachable, Preempted, TransferAborted
from transfer.pb import kvferry_pb2 as pb
from transfer.send.events import SentStats

NUM_RANKS = 2
STATS = (
    SentStats(num_bytes=10, writes=1, writes_without_staging=8, transfer_s=0.5, exposed_s=0.25, resends=1),
    SentStats(num_bytes=20, writes=2, writes_without_staging=16, transfer_s=1.5, exposed_s=0.125),
)
SUM = pb.TransferStats(bytes=30, writes=3, writes_without_staging=24, transfer_s=1.5, exposed_s=0.25, resends=1)
"""Of both ranks: bytes and writes add up, times are those of the slowest."""


class World:
    """A real leader's side, with fake ranks and a fake decode leader."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.asked: list[str] = []
        self.answer = Reservation(is_reserved=True)
        self.outcomes: list[str] = []
        self.join = new_join()
        self.prompts = OfferedPrompts(
            num_ranks=NUM_RANKS,
            limits=ConnectorLimitsConfig(),
            broadcast=self.sent.append,
            reserve=self._reserve,
            on_outcome=self.outcomes.append,
        )

    async def _reserve(self, join: Join, transfer_id: str, plan: ChunkPlan) -> Reservation:
        self.asked.append(transfer_id)
        return self.answer

    def offer(self, name: str = "a", transfer_id: str = "t") -> None:
        """Offer the prompt and begin to compute it, as the engine."""
        self.prompts.offer(name, transfer_id, PROMPT)
        self.prompts.begin(name)

    def submit(self, transfer_id: str = "t/1", **fields: Any) -> Transfer:
        """Ask for the prompt "t", as a decode side."""
        transfer = Transfer(
            transfer_id=transfer_id, token_ids=PROMPT, join=self.join, plan=self.join.plan, engine_request="t", **fields
        )
        self.prompts.submit(transfer)
        return transfer

    def starts(self) -> list[StartOffered]:
        return [message for message in self.sent if isinstance(message, StartOffered)]

    def send_parts(self, transfer_id: str = "t/1") -> None:
        for rank in range(NUM_RANKS):
            self.prompts.on_sent(rank, TransferSent(transfer_id=transfer_id, stats=STATS[rank]))

    def fail_parts(self, transfer_id: str = "t/1") -> None:
        for rank in range(NUM_RANKS):
            self.prompts.on_not_sent(rank, TransferNotSent(transfer_id=transfer_id, reason="cancelled"))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    one = World()
    yield one
    await one.prompts.close(PeerUnreachable("the test is over"))


@pytest.mark.parametrize("finishes_first", [True, False])
async def test_a_transfer_is_over_once_it_is_sent_and_its_prompt_finished(world: World, finishes_first: bool) -> None:
    world.offer()
    span = ToldSpan()
    span.traceparent = "00-told"
    transfer = world.submit(span=span)
    await turns()
    (start,) = world.starts()
    assert (start.name, start.transfer_id, start.num_tokens, start.traceparent) == ("a", "t/1", 100, span.traceparent)
    for finishes in (finishes_first, not finishes_first):
        assert not transfer.is_over
        if finishes:
            world.prompts.finish("a", first_token=7, note=b"n")
            await turns()
        else:
            world.send_parts()
    events = take(transfer)
    assert [kind_of(event) for event in events] == ["started", "first_token", "note", "sent"]
    assert events[-1] == pb.PrefillEvent(sent=pb.PrefillSent(stats=SUM))
    assert span.told == [("kvferry.queue", ""), ("kvferry.compute", "")] and span.values["prompt_tokens"] == 100
    assert isinstance(world.sent[-1], ClosePrompt) and world.outcomes == ["sent"]
    assert world.prompts.num_transfers == 0 and world.prompts.num_prompts == 1, "its pages may still be read"


@pytest.mark.parametrize("start_token", [16, 48])
async def test_the_decode_side_may_choose_a_later_start_when_it_has_room(world: World, start_token: int) -> None:
    world.answer = Reservation(is_reserved=True, start_token=start_token)
    world.offer()
    world.submit(start_token=16)
    await turns()
    (start,) = world.starts()
    assert start.start_token == start_token


async def test_no_room_is_asked_for_while_the_prompt_is_preempted(world: World) -> None:
    world.offer()
    first = world.submit()
    await turns()
    world.prompts.pause("a")
    assert isinstance(take(first)[-1], Preempted)
    world.fail_parts()
    second = world.submit("t/2")
    await turns()
    assert world.asked == ["t/1"]
    world.prompts.begin("a")
    await turns()
    assert world.asked == ["t/1", "t/2"] and second.is_started


async def test_the_id_of_an_attempt_is_free_once_no_rank_knows_it(world: World) -> None:
    world.offer()
    transfer = world.submit()
    await turns()
    assert world.prompts.abort("t/1", TransferAborted("by an operator"))
    assert transfer.is_over
    with pytest.raises(TransferAborted, match="request_id t/1 is in flight already"):
        world.submit()
    world.fail_parts()
    world.submit()
    await turns()
    assert len(world.starts()) == 2


async def test_prompts_and_transfers_are_listed(world: World) -> None:
    def stages() -> list[tuple[str, str, int]]:
        return [(view.transfer_id, view.stage, view.ready_tokens) for view in world.prompts.views()]

    world.answer = Reservation(is_reserved=False)
    world.offer()
    assert stages() == [("t", "queued", 0)] and (world.prompts.num_queued, world.prompts.num_running) == (1, 0)
    transfer = world.submit()
    await turns()
    assert stages() == [("t/1", "queued", 0)]
    world.answer = Reservation(is_reserved=True)
    async with asyncio.timeout(60):
        while not transfer.is_started:
            await asyncio.sleep(0.01)
    assert stages() == [("t/1", "computing", 0)] and (world.prompts.num_queued, world.prompts.num_running) == (0, 1)
    world.prompts.finish("a")
    await turns()
    assert stages() == [("t/1", "sending", 100)]
    world.prompts.fail(transfer, TransferAborted("gone"))
    assert stages() == [("t/1", "ending", 100), ("t", "queued", 100)], "another attempt may come for the prompt"


async def test_a_repeated_report_does_not_release_pages_of_the_next_prompt(world: World) -> None:
    """Regression: a second idle report of a rank released the pages of the next prompt of that name."""
    prompts, sent = world.prompts, world.sent
    prompts.offer("a", "t1", PROMPT)
    prompts.withdraw("a", "given up")
    for rank in range(NUM_RANKS):
        prompts.on_idle(rank, PromptIdle(name="a"))
    assert sent[-1] == FreePrompt(name="a")
    prompts.offer("a", "t2", PROMPT)
    prompts.on_idle(1, PromptIdle(name="a"))
    assert prompts.num_prompts == 1
    prompts.withdraw("a", "given up")
    prompts.on_idle(1, PromptIdle(name="a"))
    prompts.on_idle(1, PromptIdle(name="a"))
    assert prompts.num_prompts == 1 and isinstance(sent[-1], ClosePrompt)
