"""Prompts that an engine with its own scheduler fetches: the time of binding, the source of the KV, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest

from tests.decode.leader_world import DECODE_LIFE, NUM_RANKS, OTHER_LIFE, PLAN, PREFILL_LIFE, Peer, Peers, turns
from tests.runtime.hand_clock import HandClock
from tests.runtime.instances import instance
from tests.runtime.virtual_time import VirtualTimeLoop, run_in_virtual_time
from tests.tracing.test_given_up import ToldSpan
from transfer.breaker import Breaker, BreakerSettings
from transfer.config import ConnectorLimitsConfig
from transfer.connector import bound_prompts as bound_module
from transfer.connector import incoming as incoming_module
from transfer.connector.attempt import IncomingObserver
from transfer.connector.bound_prompts import BIND_WAIT_S, BoundPrompts, PromptState, PromptView
from transfer.connector.incoming import EARLY_ROOM_S, PLACE_AFTER_S, RETRY_PAUSE_S
from transfer.connector.messages import CancelIncoming, ExpectBound, SettlePrompt, TransferBroken, TransferExpected
from transfer.connector.named_node import REJOIN_S
from transfer.connector.prefill_peer import PrefillPeer
from transfer.errors import Preempted, TransportClosed
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import chunk_plan_to_proto
from transfer.tracing import Tracer

PROMPT = tuple(range(20))
TABLES = ((3, 1, 4, 5, 6),)
GIVEN_UP = "given up"


class Connector:
    """`BoundPrompts` with two prefill nodes. The test gives the answers of ranks and prefill nodes."""

    def __init__(self) -> None:
        breaker = BreakerSettings(failures=100, window_s=10.0, pause_s=1.0, max_pause_s=8.0)
        self.peer = Peer("prefill:1", PREFILL_LIFE, Breaker(breaker, lambda: 0.0))
        self.other = Peer("prefill:2", OTHER_LIFE, Breaker(breaker, lambda: 0.0))
        for peer in (self.peer, self.other):
            peer.joined.set()
        self.sent: list[object] = []
        self.outcomes: list[str] = []
        self.num_retries = 0
        self.span = ToldSpan()
        self.prompts = BoundPrompts(
            peers=Peers(self.peer, self.other),
            limits=ConnectorLimitsConfig(prefill_retries=1, meet_timeout_s=60.0),
            own=instance(DECODE_LIFE, tp_size=NUM_RANKS),
            may_join=False,
            broadcast=self.sent.append,
            observer=IncomingObserver(
                on_outcome=self.outcomes.append, on_queue_seconds=lambda seconds: None, on_retry=self._count_retry
            ),
            tracer=cast(Tracer, SimpleNamespace(begin=lambda name, **told: self.span)),
        )
        self.transfers = self.prompts.transfers

    def _count_retry(self) -> None:
        self.num_retries += 1

    async def wants(self, name: str = "b", *, source: str = "prefill:1", transfer_id: str = "t", start_token: int = 0) -> str:
        """Return the id of the next attempt."""
        self.prompts.want(name, transfer_id, source, PROMPT, start_token)
        await turns()
        return self.transfers.request_ids[-1]

    def asks(self, request_id: str, *, life: int = PREFILL_LIFE) -> asyncio.Task[pb.ReserveResponse]:
        """Ask for room as the prefill node."""
        question = pb.ReserveRequest(
            request_id=request_id, prefill_incarnation=life, decode_incarnation=DECODE_LIFE, chunk_plan=chunk_plan_to_proto(PLAN)
        )
        return asyncio.ensure_future(self.transfers.answer(question))

    async def has_room(self, request_id: str, *, life: int = PREFILL_LIFE) -> pb.ReserveResponse:
        """Ask for room as the prefill node. There is room, and every rank expects the prompt."""
        asking = self.asks(request_id, life=life)
        await turns()
        self.expected(request_id)
        return await asking

    def arrives(self, request_id: str) -> None:
        for rank in range(NUM_RANKS):
            self.transfers.on_whole(rank, request_id)

    def expected(self, request_id: str) -> None:
        for rank in range(NUM_RANKS):
            self.transfers.on_expected(rank, TransferExpected(transfer_id=request_id))

    async def drained(self, request_id: str) -> None:
        for rank in range(NUM_RANKS):
            self.transfers.on_drained(rank, request_id)
        await turns()

    async def loses(self) -> None:
        """Lose the first prefill node."""
        self.transfers.on_peer_lost(cast(PrefillPeer, self.peer), "it is silent")
        await turns()

    def state(self, name: str = "b") -> PromptState:
        view = self.prompts.view(name)
        assert view is not None
        return view.state

    def settled(self) -> list[str]:
        return [message.failure for message in self.sent if isinstance(message, SettlePrompt)]


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    return HandClock(monkeypatch, incoming_module, bound_module)


@pytest.fixture
async def connector(clock: HandClock) -> AsyncIterator[Connector]:
    one = Connector()
    yield one
    await one.prompts.close()


async def test_a_prompt_with_pages_gets_room_before_prefill_asks(connector: Connector) -> None:
    """An engine such as SGLang takes the pages first."""
    connector.peer.takes_room = connector.peer.takes_early_room = True
    connector.prompts.want("b", "t", "prefill:1", PROMPT, 4, tables=TABLES)
    await turns()
    (attempt,), (expect,) = connector.transfers.request_ids, connector.sent
    assert isinstance(expect, ExpectBound) and (expect.tables, expect.start_token) == (TABLES, 4)
    room = connector.peer.rooms[attempt]
    assert connector.peer.early_plans == {attempt: PLAN} and room is not None and not room.done()
    connector.expected(attempt)
    await turns()
    assert room.result() == pb.PrefillRoom() and connector.state() is PromptState.BOUND
    connector.arrives(attempt)
    assert connector.settled() == [""] and connector.outcomes == ["done"]


def test_a_prompt_with_pages_keeps_its_room_while_others_lack_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would not give its pages to them."""

    async def main(loop: VirtualTimeLoop) -> None:
        connector = Connector()
        connector.peer.takes_room = connector.peer.takes_early_room = True
        connector.prompts.want("b", "t", "prefill:1", PROMPT, 0, tables=TABLES)
        await turns()
        connector.expected(connector.transfers.request_ids[0])
        without = await connector.wants("other", transfer_id="u")
        for _ in range(4):
            assert not (await connector.asks(without)).reserved
            await asyncio.sleep(EARLY_ROOM_S / 8)
        assert not any(isinstance(message, CancelIncoming) for message in connector.sent)
        await connector.prompts.close()

    run_in_virtual_time(main, monkeypatch, incoming_module, bound_module)


async def test_a_prompt_without_pages_gets_no_early_room(connector: Connector) -> None:
    connector.peer.takes_room = connector.peer.takes_early_room = True
    attempt = await connector.wants()
    assert connector.peer.early_plans == {attempt: None} and not connector.sent


async def test_pages_are_bound_when_prefill_is_about_to_send(clock: HandClock, connector: Connector) -> None:
    attempt = await connector.wants()
    assert connector.state() is PromptState.WAITING
    asking = connector.asks(attempt)
    await turns()
    assert connector.state() is PromptState.READY and not connector.sent
    await clock.advance(BIND_WAIT_S)
    assert await asking == pb.ReserveResponse(reserved=False), "not yet"
    connector.prompts.bind("b", TABLES)
    assert await connector.has_room(attempt) == pb.ReserveResponse(reserved=True)
    (expect,) = connector.sent
    assert isinstance(expect, ExpectBound) and (expect.tables, expect.start_token) == (TABLES, 0)
    assert connector.span.told == [("kvferry.try", None), ("kvferry.queue", "")] and connector.span.error is None
    connector.arrives(attempt)
    assert connector.settled() == [""] and connector.outcomes == ["done"]
    assert connector.prompts.view("b") is None and not connector.transfers.request_ids
    assert connector.span.error == "" and connector.span.values == {"retries": 0}


def test_a_prompt_that_is_bound_as_the_wait_for_it_ends_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No later event would tell the prefill node: `bind` asks for attempts that wait already, and a timer for the oldest only."""

    async def main(loop: VirtualTimeLoop) -> None:
        connector = Connector()
        attempt = await connector.wants()
        loop.call_later(BIND_WAIT_S, connector.prompts.bind, "b", TABLES)
        asking = connector.asks(attempt)
        await asyncio.sleep(BIND_WAIT_S)
        await turns()
        for rank in range(NUM_RANKS):
            connector.transfers.on_expected(rank, TransferExpected(transfer_id=attempt))
        assert await asking == pb.ReserveResponse(reserved=True)
        await connector.prompts.close()

    run_in_virtual_time(main, monkeypatch, incoming_module, bound_module)


@pytest.mark.parametrize(("can_start_late", "answer"), [(True, pb.ReserveResponse(reserved=True, start_token=8)), (False, None)])
async def test_tokens_that_came_here_meanwhile_are_not_sent(
    clock: HandClock, connector: Connector, can_start_late: bool, answer: pb.ReserveResponse | None
) -> None:
    """Ask a prefill node that cannot start late again, from the later token on."""
    connector.peer.can_start_late = can_start_late
    first = await connector.wants(start_token=4)
    asking = connector.asks(first)
    await turns()
    assert connector.prompts.view("b") == PromptView(state=PromptState.READY, can_start_late=can_start_late)
    with pytest.raises(ValueError, match=r"bound from token 0 on; it must be in \[4, 20\)"):
        connector.prompts.bind("b", TABLES, 0)
    connector.prompts.bind("b", TABLES, 8)
    await turns()
    if answer is None:
        with pytest.raises(TransportClosed, match="needed from token 8 on now"):
            await asking
        await clock.advance(RETRY_PAUSE_S)
        (second,) = connector.transfers.request_ids[1:]
        assert await connector.has_room(second) == pb.ReserveResponse(reserved=True)
    else:
        for rank in range(NUM_RANKS):
            connector.transfers.on_expected(rank, TransferExpected(transfer_id=first))
        assert await asking == answer
    expect = connector.sent[-1]
    assert isinstance(expect, ExpectBound) and expect.start_token == 8


async def test_a_prompt_is_fetched_again_from_the_node_that_it_names_once_no_rank_writes(
    clock: HandClock, connector: Connector
) -> None:
    first = await connector.wants()
    connector.prompts.bind("b", TABLES)
    await connector.has_room(first)
    await connector.loses()
    await clock.advance(1.0)
    assert isinstance(connector.sent[-1], CancelIncoming) and connector.transfers.request_ids == (first,), (
        "its pages are the same"
    )
    connector.transfers.on_whole(1, first)
    await connector.drained(first)
    await clock.advance(RETRY_PAUSE_S)
    (second,) = connector.transfers.request_ids[1:]
    assert second in connector.peer.calls and not connector.other.calls
    await connector.has_room(second)
    connector.arrives(second)
    assert connector.settled() == [""] and connector.num_retries == 1


async def test_an_attempt_that_lacked_only_the_note_is_forgotten_when_the_next_one_begins(
    clock: HandClock, connector: Connector
) -> None:
    """No rank reports on it any more. It stayed in the table, so a drain waited for it until the process ended."""
    connector.prompts.want("b", "t", "prefill:1", PROMPT, 0, needs_note=True)
    await turns()
    (first,) = connector.transfers.request_ids
    connector.prompts.bind("b", TABLES)
    await connector.has_room(first)
    connector.arrives(first)
    assert connector.state() is PromptState.BOUND, "it lacks the note"
    await connector.loses()
    await clock.advance(RETRY_PAUSE_S)
    (second,) = connector.transfers.request_ids[1:]
    assert second in connector.peer.calls
    connector.prompts.cancel("b", GIVEN_UP)
    await turns()
    assert connector.transfers.num_prompts == 0


@pytest.mark.parametrize("engine_has_it", [True, False])
async def test_a_node_that_started_again_has_lost_the_prompts_of_its_engine(
    clock: HandClock, connector: Connector, engine_has_it: bool
) -> None:
    await connector.wants(transfer_id="t" if engine_has_it else "")
    connector.peer.instance = instance(OTHER_LIFE + 1)
    await connector.loses()
    await clock.advance(RETRY_PAUSE_S)
    if engine_has_it:
        view = connector.prompts.view("b")
        assert view is not None and view.failure == "prefill node prefill:1 restarted and lost the KV of its engine"
    else:
        assert len(connector.peer.calls) == 2, "it computes the prompt again"


async def test_a_prompt_that_is_under_way_waits_a_moment_for_its_node_to_come_back(
    clock: HandClock, connector: Connector
) -> None:
    await connector.wants()
    connector.peer.joined.clear()
    connector.peer.state, connector.peer.reason = "lost", "it is silent"
    await connector.loses()
    await clock.advance(RETRY_PAUSE_S)
    assert connector.state() is PromptState.WAITING
    await clock.advance(REJOIN_S)
    view = connector.prompts.view("b")
    assert view == PromptView(state=PromptState.FAILED, failure="prefill node prefill:1 is lost: it is silent")
    assert connector.outcomes == ["failed"]
    connector.prompts.bind("b", TABLES)  # an engine that fails the prompt instead of computing it
    assert connector.settled() == ["prefill node prefill:1 is lost: it is silent"]


async def test_a_prompt_that_names_no_node_waits_for_one(clock: HandClock, connector: Connector) -> None:
    for peer in (connector.peer, connector.other):
        peer.state = "joining"
    await connector.wants(source="", transfer_id="")
    assert not connector.peer.calls and connector.transfers.views()[0].peer == ""
    connector.other.state = "joined"
    connector.transfers.peers_changed()
    await clock.advance(PLACE_AFTER_S)
    assert len(connector.other.calls) == 1 and not connector.num_retries


@pytest.mark.parametrize("source", ["prefill:1", ""])
async def test_a_preempted_prompt_is_fetched_again_without_a_limit(clock: HandClock, connector: Connector, source: str) -> None:
    attempt = await connector.wants(source=source)
    for _ in range(5):
        asking = connector.asks(attempt)
        await turns()
        assert connector.state() is PromptState.READY
        connector.peer.calls[attempt].fail(Preempted("its pages are taken back"))
        await turns()
        assert connector.state() is PromptState.WAITING, "it needs no pages until it is computed again"
        await clock.advance(PLACE_AFTER_S)
        (attempt,) = connector.transfers.request_ids
        await clock.advance(BIND_WAIT_S)
        with pytest.raises(TransportClosed):
            await asking
    assert not connector.num_retries and not connector.outcomes and not connector.other.calls


@pytest.mark.parametrize("is_bound", [True, False])
async def test_a_cancelled_prompt_is_settled_only_if_it_has_pages(connector: Connector, is_bound: bool) -> None:
    attempt = await connector.wants()
    if is_bound:
        connector.prompts.bind("b", TABLES)
        await connector.has_room(attempt)
    connector.prompts.cancel("b", GIVEN_UP)
    if is_bound:
        assert not connector.settled(), "a rank may write"
        await connector.drained(attempt)
    assert connector.settled() == ([GIVEN_UP] if is_bound else [])
    assert connector.prompts.view("b") is None and connector.outcomes == ["aborted"] and not connector.transfers.request_ids


async def test_the_last_failure_is_reported_once_no_rank_writes(clock: HandClock, connector: Connector) -> None:
    attempt = await connector.wants()
    connector.prompts.bind("b", TABLES)
    await connector.has_room(attempt)
    for rank in range(NUM_RANKS):
        connector.transfers.on_broken(rank, TransferBroken(transfer_id=attempt, reason="broke", is_data_loss=True))
    await clock.advance(1.0)
    assert not connector.settled()
    await connector.drained(attempt)
    assert connector.settled() == ["decode rank 0: broke"] and connector.outcomes == ["failed"]
