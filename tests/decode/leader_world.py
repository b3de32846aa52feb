"""A decode leader with fake ranks and fake prefill nodes: messages recorded, answers in an order of the test's choice."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

from decode_node.admission import Admission, page_needs
from decode_node.offload.tiers import Tiers
from decode_node.rank_messages import ExpectRequest, FinishRequest, RunDecodeStep
from decode_node.requests import DecodeRequests, GenerationObserver, GenerationRequest
from decode_node.text import TextCodec
from node_runtime.rank_messages import StepDone, StepFailed
from tests.runtime.instances import hello, instance
from transfer.breaker import Breaker, BreakerState
from transfer.chunk import ChunkPlan
from transfer.config import BreakerConfig, ConnectorConfig, DecodeLimitsConfig, SpeculativeConfig, TlsConfig
from transfer.connector.attempt import AttemptStage, IncomingObserver
from transfer.connector.messages import CancelIncoming, TransferBroken, TransferExpected
from transfer.connector.prefill_nodes import PrefillNodes
from transfer.connector.prefill_peer import PrefillPeer
from transfer.engine_types import SamplingParams
from transfer.errors import TransferError
from transfer.instance import Instance, Link
from transfer.layer_groups import PageCounts, layer_groups
from transfer.layout import DType, KVLayout
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.security import PlainText
from transfer.sizes import Cut

POOL_PAGES, PAGE_SIZE, NUM_RANKS = 8, 4, 2
GROUPS = layer_groups(KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=DType.FLOAT16))
NEEDS = page_needs(GROUPS, PAGE_SIZE)
PREFILL_LIFE, OTHER_LIFE, DECODE_LIFE = 11, 12, 22
PLAN = ChunkPlan(chunk_tokens=4, layers_per_group=3)
FIRST_TOKEN = 7
CONFIG = ConnectorConfig(
    tls=TlsConfig(insecure=1), breaker=BreakerConfig(failures=3, window_s=10.0, pause_s=1.0, max_pause_s=8.0)
)
BREAKER = CONFIG.breaker.settings()


class Call:
    """A `Prefill` call: what the prefill node says, when the test has it say so."""

    def __init__(self, token_ids: tuple[int, ...], token: int) -> None:
        self.token_ids = token_ids
        self.token = token
        self.events: asyncio.Queue[pb.PrefillEvent | Exception | None] = asyncio.Queue()
        self.has_said: set[str] = set()
        self.is_over = False

    def first_token(self) -> None:
        self.has_said.add("token")
        self.events.put_nowait(pb.PrefillEvent(first_token=pb.FirstToken(token_id=self.token)))

    def sent(self) -> None:
        """The last event, after which the call ends."""
        self.has_said.add("sent")
        self.events.put_nowait(pb.PrefillEvent(sent=pb.PrefillSent(stats=pb.TransferStats(bytes=99))))
        self.events.put_nowait(None)

    def fail(self, error: Exception) -> None:
        self.has_said.add("sent")
        self.events.put_nowait(error)

    async def run(self) -> AsyncIterator[pb.PrefillEvent]:
        try:
            while (event := await self.events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.is_over = True


def first_token_of(life: int) -> int:
    """Each life of a prefill node says another one, so that a test sees whose it was."""
    return FIRST_TOKEN + 100 * (life - PREFILL_LIFE)


class Peer:
    """A `PrefillPeer`."""

    def __init__(self, address: str, life: int, breaker: Breaker) -> None:
        self.address = address
        self.state = "joined"
        self.instance: Instance | None = instance(life)
        self.breaker = breaker
        self.breaker_reason = ""
        self.can_start_late = True
        self.takes_room = False  # it asks for room with `Reserve`
        self.takes_early_room = False
        self.cut = Cut(plan=PLAN, largest_piece_bytes=0)
        self.early_plans: dict[str, ChunkPlan | None] = {}
        self.start_tokens: dict[str, int] = {}
        self.rooms: dict[str, asyncio.Future[pb.PrefillRoom] | None] = {}
        self.outstanding_tokens = 0
        self.others_tokens: int | None = None
        # Of equal ones the oldest is taken: it has the fastest link.
        self.links = [Link(prefill_rank=0, decode_rank=0, lane="x", latency_s=0.0, bandwidth_bytes_per_s=1e9 / life)]
        self.unnamed_s: float | None = None
        self.joined, self.unfit = asyncio.Event(), asyncio.Event()
        self.reason, self.plan = "", PLAN
        self.num_users = 0
        self.other: Peer | None = None
        self.calls: dict[str, Call] = {}

    def prefill(self, request_id: str, token_ids: tuple[int, ...], **values: Any) -> AsyncIterator[pb.PrefillEvent]:
        assert self.instance is not None
        self.rooms[request_id], self.early_plans[request_id] = values["room"], values["early_room_plan"]
        self.start_tokens[request_id] = values["start_token"]
        call = self.calls[request_id] = Call(token_ids, first_token_of(self.instance.incarnation))
        return call.run()


class Peers(PrefillNodes):
    """Picks, and has breakers, as the real ones do; joins nobody."""

    def __init__(self, *peers: Peer) -> None:
        super().__init__(
            [],
            config=CONFIG,
            hellos=[hello(0, incarnation=DECODE_LIFE)],
            security=PlainText(),
            decode_address="",
            metrics=NodeMetrics(role="decode"),
            broadcast=lambda message: None,
            on_lost=lambda *loss: None,
        )
        self.peers = cast(list[PrefillPeer], list(peers))

    @property
    def num_openings(self) -> float:
        return self._metrics.counter("breaker_openings").value

    def unavailable_reason(self) -> str:
        return "no prefill node is joined"


class Text:
    """A `TextCodec`."""

    def stream(self) -> Text:
        return self

    def add(self, token_id: int) -> str:
        return f"<{token_id}>"


class Rank:
    """What a rank has to answer."""

    def __init__(self) -> None:
        self.unanswered: set[str] = set()
        self.receiving: set[str] = set()
        self.holding: set[str] = set()
        self.leaving: set[str] = set()


class World:
    def __init__(
        self,
        *,
        max_queued: int = 100,
        queue_timeout_s: float = 60.0,
        join_timeout_s: float = 0.0,
        step_timeout_s: float = 60.0,
        max_running: int = 4,
        prefill_retries: int = 0,
        speculative: SpeculativeConfig | None = None,
        can_overlap: bool = False,
    ) -> None:
        self.max_steps = 2 if can_overlap else 1
        self.admission = Admission(
            pool_pages=PageCounts((POOL_PAGES,)),
            needs=NEEDS,
            max_running=max_running,
            on_freed=lambda: self.transfers.room_changed(),
        )
        self.tiers = Tiers(self.admission)
        self.now_s = 0.0  # of the breakers
        self.num_lives = 0  # beyond the first ones
        breakers = [Breaker(BREAKER, lambda: self.now_s) for _ in range(2)]
        self.peer, self.other = Peer("prefill:1", PREFILL_LIFE, breakers[0]), Peer("prefill:2", OTHER_LIFE, breakers[1])
        self.ranks = [Rank() for _ in range(NUM_RANKS)]
        self.sent: list[object] = []
        self.steps: deque[RunDecodeStep] = deque()  # in flight, the oldest first
        self.outcomes: list[str] = []
        self.hung: list[str] = []
        self.waiting: set[str] = set()  # tries that found no room
        self.queue_seconds: list[float] = []
        self.first_tokens: list[float] = []
        self.drafts: list[tuple[int, int]] = []  # proposed and accepted
        self.num_retries, self.max_retries = 0, prefill_retries
        self.may_wait = join_timeout_s > 0
        self.accepted: list[GenerationRequest] = []
        self.names: dict[str, int] = {}  # how many tries of a name there were
        self.reserving: dict[str, asyncio.Task[int | None]] = {}
        self.peers = Peers(self.peer, self.other)
        self.leader = DecodeRequests(
            tiers=self.tiers,
            peers=self.peers,
            text=cast(TextCodec, Text()),
            own=instance(DECODE_LIFE, tp_size=NUM_RANKS),
            limits=DecodeLimitsConfig(
                max_queued_requests=max_queued,
                queue_timeout_s=queue_timeout_s,
                join_timeout_s=join_timeout_s,
                step_timeout_s=step_timeout_s,
                prefill_retries=prefill_retries,
            ),
            speculative=SpeculativeConfig() if speculative is None else speculative,
            broadcast=self._broadcast,
            on_broken=self.hung.append,
            observer=IncomingObserver(
                on_outcome=self.outcomes.append,
                on_queue_seconds=self.queue_seconds.append,
                on_retry=self._count_retry,
                on_no_room=self.waiting.add,
                on_wait_over=self.waiting.discard,
            ),
            generation=GenerationObserver(
                on_first_token=self.first_tokens.append,
                on_token=lambda seconds: None,
                on_drafts=lambda *counts: self.drafts.append(counts),
            ),
            name_attempt=self._name,
            can_overlap=can_overlap,
        )
        self.transfers = self.leader.transfers

    @property
    def step(self) -> RunDecodeStep | None:
        """The oldest step in flight."""
        return self.steps[0] if self.steps else None

    @property
    def num_without_node(self) -> int:
        """Prompts that wait for any prefill node to join."""
        return sum(view.stage == "queued" and not view.peer for view in self.transfers.views())

    def _count_retry(self) -> None:
        self.num_retries += 1
        waiting = [request for request in self.accepted if request.current.stage is AttemptStage.WAITING]
        assert waiting and not any(request.generated for request in waiting), "its caller has a token of the try before"

    def _name(self, request_id: str) -> str:
        """The first try is called as the request is, which makes tests easy to read; the second "a.2"."""
        self.names[request_id] = self.names.get(request_id, 0) + 1
        number = self.names[request_id]
        return request_id if number == 1 else f"{request_id}.{number}"

    def submit(
        self,
        name: str,
        num_tokens: int = 3,
        *,
        prompt: Sequence[int] | None = None,
        new: int = 3,
        end_ids: frozenset[int] = frozenset(),
        may_wait: bool = True,
    ) -> GenerationRequest:
        token_ids = tuple(range(num_tokens) if prompt is None else prompt)
        request = self.leader.submit(name, token_ids, new, SamplingParams(), end_ids, may_wait=may_wait)
        self.accepted.append(request)
        return request

    def _broadcast(self, message: object) -> None:
        self.sent.append(message)
        if isinstance(message, RunDecodeStep):
            self._check_step(message)
            self.steps.append(message)
        for rank in self.ranks:
            match message:
                case ExpectRequest():
                    assert message.transfer_id not in rank.holding, "an id that a rank still knows"
                    assert message.plan == PLAN
                    for names in (rank.unanswered, rank.receiving, rank.holding):
                        names.add(message.transfer_id)
                case CancelIncoming(transfer_id=name) | FinishRequest(request_id=name):
                    assert name in rank.holding and name not in rank.leaving
                    rank.leaving.add(name)
                    rank.receiving.discard(name)
                case RunDecodeStep():
                    for part in message.parts:
                        assert part.request_id in rank.holding - rank.leaving - rank.receiving, "KV that is not whole"

    def _check_step(self, step: RunDecodeStep) -> None:
        assert len(self.steps) < self.max_steps
        before = {part.request_id: part.position for one in self.steps for part in one.parts}
        for part in step.parts:
            if part.token_id is None:
                assert part.position == before[part.request_id] + 1, "the previous step chooses its token"
            else:
                assert part.request_id not in before, "its newest token is not read"

    # The prefill leader

    def reserve(
        self, name: str, *, prefill: int | None = None, decode: int = DECODE_LIFE, plan: ChunkPlan = PLAN
    ) -> asyncio.Task[int | None]:
        """As the prefill leader that has the call does, unless it is said which life asks."""
        if prefill is None:
            peer = self.other if name in self.other.calls else self.peer
            prefill = PREFILL_LIFE if peer.instance is None else peer.instance.incarnation
        task = self.reserving[name] = asyncio.ensure_future(self.transfers.reserve(name, prefill, decode, plan))
        return task

    def call(self, name: str) -> Call:
        return next(peer.calls[name] for peer in (self.peer, self.other) if name in peer.calls)

    def lose(self, peer: Peer) -> None:
        if peer.instance is not None:
            peer.breaker.lose()
        peer.state, peer.instance = "lost", None
        self.transfers.on_peer_lost(cast(PrefillPeer, peer), "it is silent")
        self.transfers.place_waiting()

    def join(self, peer: Peer, life: int) -> None:
        """A life of a node is joined, or no longer drains."""
        peer.state, peer.instance = "joined", instance(life)
        self.transfers.place_waiting()

    def drain(self, peer: Peer) -> None:
        peer.state = "draining"
        self.transfers.place_waiting()

    def let_nobody_come(self) -> None:
        for peer in (self.peer, self.other):
            peer.unfit.set()
        self.transfers.place_waiting()

    # The ranks

    def expected(self, rank: int, name: str, reason: str = "") -> None:
        self.ranks[rank].unanswered.discard(name)
        self.transfers.on_expected(rank, TransferExpected(transfer_id=name, reason=reason))

    def complete(self, rank: int, name: str) -> None:
        self.ranks[rank].receiving.discard(name)
        self.transfers.on_whole(rank, name)

    def broken(self, rank: int, name: str, *, is_data_loss: bool) -> None:
        self.ranks[rank].receiving.discard(name)
        self.transfers.on_broken(rank, TransferBroken(transfer_id=name, reason="broke", is_data_loss=is_data_loss))

    def release(self, rank: int, name: str) -> None:
        self.ranks[rank].holding.discard(name)
        self.ranks[rank].leaving.discard(name)
        self.transfers.on_drained(rank, name)

    def finish_step(self, token: int = 1, *, compute_s: float = 0.0, faults: Sequence[str] = ()) -> None:
        """End the step, with the same token for every request but those that it could not continue."""
        step = self.steps.popleft()
        tokens = {part.request_id: token for part in step.parts if part.request_id not in faults}
        done = StepDone(step=step.step, tokens=tokens, compute_s=compute_s, faults=dict.fromkeys(faults, "not finite"))
        self.leader.on_step_done(done)

    def fail_step(self, *, is_out_of_memory: bool = False) -> None:
        step = self.steps.popleft()
        failed = StepFailed(
            step=step.step,
            request_ids=tuple(part.request_id for part in step.parts),
            reason="the engine failed",
            is_fatal=False,
            is_out_of_memory=is_out_of_memory,
        )
        self.leader.on_step_failed(failed)

    def releasable(self, rank: int) -> list[str]:
        busy = {part.request_id for step in self.steps for part in step.parts}
        return sorted(self.ranks[rank].leaving - busy - self.ranks[rank].unanswered)

    async def settle(self) -> None:
        """Everything that anyone still has to say."""
        for peer in (self.peer, self.other):
            for name, call in list(peer.calls.items()):
                if not call.is_over:
                    if name not in self.reserving or (self.reserving[name].done() and not has_room(self.reserving[name])):
                        self.reserve(name)
                        await turns()
                    if not self.reserving[name].done() or has_room(self.reserving[name]):
                        if "token" not in call.has_said:
                            call.first_token()
                        if "sent" not in call.has_said:
                            call.sent()
        await turns()
        for number, rank in enumerate(self.ranks):
            for name in sorted(rank.unanswered):
                self.expected(number, name)
            for name in sorted(rank.receiving):
                self.complete(number, name)
            for name in self.releasable(number):
                self.release(number, name)
        if self.step is not None:
            self.finish_step()
        await turns()

    # Whole stages of a try

    async def submitted(self, name: str = "a", *, num_tokens: int = 3, new: int = 3) -> GenerationRequest:
        """A request that a prefill node was asked for."""
        request = self.submit(name, num_tokens, new=new)
        await turns()
        return request

    async def receiving(self, name: str = "a", *, num_tokens: int = 3, new: int = 3) -> GenerationRequest:
        """A request that has room on every rank, and of which no rank has the KV."""
        request = await self.submitted(name, num_tokens=num_tokens, new=new)
        await self.give_room(name)
        return request

    async def received(self, name: str = "a", *, num_tokens: int = 3, new: int = 3) -> GenerationRequest:
        """A request whose KV is whole on every rank, and whose first token nobody has told."""
        request = await self.receiving(name, num_tokens=num_tokens, new=new)
        self.complete_all(name)
        return request

    async def give_room(self, name: str) -> None:
        reserving = self.reserve(name)
        await turns()
        for rank in range(NUM_RANKS):
            self.expected(rank, name)
        assert await reserving == 0  # the first token

    def complete_all(self, name: str) -> None:
        for rank in range(NUM_RANKS):
            self.complete(rank, name)

    async def first_token(self, name: str) -> None:
        self.call(name).first_token()
        await turns()

    async def finish(self, name: str) -> None:
        """The rest of a try that has room."""
        self.call(name).first_token()
        self.call(name).sent()
        self.complete_all(name)
        await turns()
        while self.step is not None:
            self.finish_step()
        await turns()

    async def served(self, name: str) -> None:
        """The whole of a try, to its pages' end."""
        await self.give_room(name)
        await self.finish(name)
        await self.release_all()

    async def release_all(self) -> None:
        for rank in range(NUM_RANKS):
            for name in self.releasable(rank):
                self.release(rank, name)
        await turns()

    def cancelled(self) -> list[str]:
        return [message.transfer_id for message in self.sent if isinstance(message, CancelIncoming)]

    # Judgement

    def assert_nothing_is_left(self) -> None:
        assert not self.transfers.request_ids
        assert (self.transfers.num_queued, self.transfers.num_running) == (0, 0)
        assert (self.admission.free_pages, self.admission.num_running) == (PageCounts((POOL_PAGES,)), 0)
        assert not self.admission.num_waiting
        assert not self.waiting, "a wait for room that nobody hears the end of"
        assert self.peer.outstanding_tokens == self.other.outstanding_tokens == 0
        assert all(call.is_over for peer in (self.peer, self.other) for call in peer.calls.values())
        self.now_s += BREAKER.max_pause_s
        for peer in (self.peer, self.other):
            is_free = peer.breaker.state is BreakerState.CLOSED or peer.breaker.wants_trial
            assert is_free, "a peer that is tried for ever gets nothing else to do"
        assert len(self.outcomes) == len(self.accepted)
        for request in self.accepted:
            told = told_of(request)
            *before, last = told
            lives = [one.incarnation for one in request.attempts if one.peer is not None]
            assert all(one.unsent is None for one in request.attempts), "a timer that goes on"
            assert not request.generated or request.generated[0] == first_token_of(lives[-1]), "another try's"
            assert len(lives) <= 1 + self.max_retries and len(set(lives)) == len(lives)
            assert not isinstance(last, pb.GenerateDone) or last.retries == len(lives) - 1
            assert isinstance(last, pb.GenerateDone | TransferError), told
            assert all(isinstance(item, pb.GeneratedTokens) for item in before), told

    async def close(self) -> None:
        await self.leader.close(TransferError("the test is over"))
        for task in self.reserving.values():
            task.cancel()
        await asyncio.gather(*self.reserving.values(), return_exceptions=True)


def has_room(task: asyncio.Task[int | None]) -> bool:
    """Whether the prefill node was told to start."""
    return not task.cancelled() and task.exception() is None and task.result() is not None


TOLD: WeakKeyDictionary[object, list[object]] = WeakKeyDictionary()
"""What callers were told, by the queue that they read."""


def told_of(request: Any) -> list[object]:
    """Return all events that were sent to the request's caller."""
    told = TOLD.setdefault(request.progress, [])
    told += [request.progress.get_nowait() for _ in range(request.progress.qsize())]
    return told


def outcome(request: GenerationRequest) -> pb.GenerateDone | TransferError:
    """The last progress that its caller received."""
    last = told_of(request)[-1]
    assert isinstance(last, pb.GenerateDone | TransferError), last
    return last


def take(request: Any) -> list[object]:
    """Return the events that were sent to the request's caller since the last call."""
    num_known = len(TOLD.get(request.progress, ()))
    return told_of(request)[num_known:]


async def turns(count: int = 12) -> None:
    """Let the loop do what is ready."""
    for _ in range(count):
        await asyncio.sleep(0)
