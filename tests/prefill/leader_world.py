"""A prefill leader's requests with fake ranks: messages are recorded, and answers come in whatever order a test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from node_runtime.rank_messages import StepDone, StepFailed
from prefill_node.prefix_loads import PrefixLoads
from prefill_node.rank_messages import LoadPrefix, PrefixLoaded, RunPrefillStep, StartRequest
from prefill_node.requests import OnLoaded, OnTaskOver, PrefillRequests
from prefill_node.scheduler import PrefillScheduler, page_needs
from tests.decode.leader_world import told_of
from tests.runtime.instances import instance
from transfer.chunk import ChunkPlan
from transfer.config import PrefillLimitsConfig
from transfer.connector.decode_instances import Join, Reservation
from transfer.connector.messages import CancelOutgoing, TransferNotSent, TransferSent
from transfer.connector.outgoing import Transfer
from transfer.errors import LocalProtocolError, PeerUnreachable, TransferError
from transfer.layer_groups import PageCounts, layer_groups
from transfer.layout import DType, KVLayout
from transfer.pb import kvferry_pb2 as pb
from transfer.send.events import SentStats
from transfer.sizes import Cut

POOL_PAGES, PAGE_SIZE, CHUNK, NUM_RANKS = 8, 4, 8, 2
GROUPS = layer_groups(KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=DType.FLOAT16))
NEEDS = page_needs(GROUPS, PAGE_SIZE, chunk_tokens=CHUNK)


def kind_of(item: object) -> str:
    """Return the name of an event, or the type of an error, in the progress of a transfer."""
    return str(item.WhichOneof("event")) if isinstance(item, pb.PrefillEvent) else type(item).__name__


def new_join(incarnation: int = 5) -> Join:
    loop = asyncio.get_running_loop()
    return Join(
        number=incarnation,
        instance=instance(incarnation),
        address="decode:1",
        attached=loop.create_future(),
        lost=loop.create_future(),
        waiting_for=set(),
        cut=Cut(plan=ChunkPlan(chunk_tokens=CHUNK, layers_per_group=incarnation), largest_piece_bytes=1),
    )


class Rank:
    """State of a rank: requests whose part is not sent, requests that hold pages, and computed steps."""

    def __init__(self) -> None:
        self.unsent: set[str] = set()
        self.holding: set[str] = set()
        self.aborted: set[str] = set()
        self.computed: set[str] = set()
        self.loading: dict[str, LoadPrefix] = {}


class World:
    """The leader's side is real, the ranks and the decode leader are this.

    Args:
        breaks: The error of every message to the ranks; empty where they can be sent.
    """

    def __init__(
        self,
        *,
        max_queued: int = 100,
        queue_timeout_s: float = 60.0,
        step_timeout_s: float = 60.0,
        max_running: int = 4,
        breaks: str = "",
        make_loads: Callable[[Callable[[object], None], OnLoaded, OnTaskOver], PrefixLoads] | None = None,
    ) -> None:
        self._breaks = breaks
        self.scheduler = PrefillScheduler(
            pool_pages=PageCounts((POOL_PAGES,)),
            needs=NEEDS,
            chunk_tokens=CHUNK,
            max_step_tokens=2 * CHUNK,
            max_running=max_running,
        )
        self.sent: list[object] = []
        self.steps: dict[int, RunPrefillStep] = {}
        self.outcomes: list[str] = []
        self.broken: list[str] = []
        self.ranks = [Rank() for _ in range(NUM_RANKS)]
        self.asked: list[str] = []
        self.answers: dict[str, bool | int | TransferError | asyncio.Future[bool]] = {}  # a number: reserved, from that token on
        self.accepted: list[Transfer] = []
        self.join = new_join()
        self.leader = PrefillRequests(
            self.scheduler,
            num_ranks=NUM_RANKS,
            limits=PrefillLimitsConfig(
                max_queued_requests=max_queued, queue_timeout_s=queue_timeout_s, step_timeout_s=step_timeout_s
            ),
            broadcast=self._broadcast,
            reserve=self._reserve,
            on_broken=self.broken.append,
            on_outcome=self.outcomes.append,
            loads=partial(make_loads, self._broadcast) if make_loads is not None else None,
        )
        self.leader.start()

    def submit(self, name: str, num_tokens: int, *, join: Join | None = None, **fields: Any) -> Transfer:
        """Submit a prompt; `fields` are those of its transfer."""
        join = join or self.join
        request = Transfer(transfer_id=name, token_ids=tuple(range(num_tokens)), join=join, plan=join.plan, **fields)
        self.leader.submit(request)
        self.accepted.append(request)
        return request

    def _broadcast(self, message: object) -> None:
        if self._breaks:
            raise LocalProtocolError(self._breaks)
        self.sent.append(message)
        for rank in self.ranks:
            match message:
                case StartRequest():
                    assert message.transfer_id not in rank.unsent | rank.holding, "an id that a rank still knows"
                    assert message.plan.layers_per_group == message.decode_incarnation, "cut as for another decode instance"
                    rank.unsent.add(message.transfer_id)
                    rank.holding.add(message.transfer_id)
                    rank.aborted.discard(message.transfer_id)
                    rank.computed.discard(message.transfer_id)
                case CancelOutgoing():
                    rank.aborted.add(message.transfer_id)
                case LoadPrefix():
                    assert message.request_id in rank.holding - rank.aborted
                    rank.loading[message.request_id] = message
                case RunPrefillStep():
                    for part in message.parts:
                        assert part.request_id not in rank.loading, "no step of what is being loaded"
                        assert part.request_id not in rank.aborted, "no step of what was given up"
        if isinstance(message, RunPrefillStep):
            self.steps[message.step] = message

    async def _reserve(self, join: Join, request_id: str, plan: ChunkPlan) -> Reservation:
        self.asked.append(request_id)
        answer = self.answers.get(request_id, True)
        if isinstance(answer, asyncio.Future):
            answer = await answer
        if isinstance(answer, TransferError):
            raise answer
        if isinstance(answer, bool):
            return Reservation(is_reserved=answer)
        return Reservation(is_reserved=True, start_token=answer)

    # Answers of the ranks

    def finish_step(self) -> None:
        """The oldest step is computed on every rank."""
        step = self.steps.pop(min(self.steps))
        tokens = {}
        for part in step.parts:
            if part.is_last:
                tokens[part.request_id] = 7
                for rank in self.ranks:
                    rank.computed.add(part.request_id)
        for rank in range(NUM_RANKS):
            found = tokens if rank == 0 else {}
            self.leader.on_step_done(rank, StepDone(step=step.step, tokens=found, compute_s=0.0))

    def fail_step(self, *, is_out_of_memory: bool = False) -> None:
        step = self.steps.pop(min(self.steps))
        failed = StepFailed(
            step=step.step,
            request_ids=tuple(part.request_id for part in step.parts),
            reason="the engine failed",
            is_fatal=False,
            is_out_of_memory=is_out_of_memory,
        )
        self.leader.on_step_failed(failed)

    def finish_load(self, rank: int, name: str, num_tokens: int) -> None:
        del self.ranks[rank].loading[name]
        self.leader.on_prefix_loaded(rank, PrefixLoaded(request_id=name, num_tokens=num_tokens))

    def send_part(self, rank: int, name: str) -> None:
        self.ranks[rank].unsent.discard(name)
        self.leader.on_sent(rank, TransferSent(transfer_id=name, stats=SentStats(num_bytes=10, writes=1, transfer_s=0.5 + rank)))

    def fail_part(self, rank: int, name: str) -> None:
        self.ranks[rank].unsent.discard(name)
        self.leader.on_not_sent(rank, TransferNotSent(transfer_id=name, reason="a session is lost", is_passing=True))

    def release(self, rank: int, name: str) -> None:
        self.ranks[rank].holding.discard(name)
        self.leader.on_pages_released(rank, name)

    def settle(self) -> None:
        """Deliver all outstanding answers of the ranks. They do not send what is not computed."""
        for number, rank in enumerate(self.ranks):
            for name in sorted(rank.loading):
                self.finish_load(number, name, 0)
        while self.steps:
            self.finish_step()
        for number, rank in enumerate(self.ranks):
            for name in sorted(rank.unsent & (rank.computed | rank.aborted)):
                if name in rank.aborted:
                    self.fail_part(number, name)
                else:
                    self.send_part(number, name)
            for name in sorted(rank.holding - rank.unsent):
                self.release(number, name)

    # Judgement

    def assert_nothing_is_left(self) -> None:
        assert not self.broken
        assert self.leader.num_transfers == self.leader.num_queued == self.leader.num_running == 0
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        self.scheduler.check_idle()
        assert not self.leader.request_ids and not self.steps
        assert len(self.outcomes) == len(self.accepted)
        for request in self.accepted:
            self.assert_told_once(request)

    def assert_told_once(self, request: Transfer) -> None:
        told = told_of(request)
        *before, last = told
        assert isinstance(last, TransferError) or kind_of(last) == "sent", told
        kinds = [kind_of(item) for item in before]
        assert kinds in ([], ["started"], ["started", "first_token"]), told
        assert kind_of(last) != "sent" or kinds == ["started", "first_token"]

    async def close(self) -> None:
        await self.leader.close(PeerUnreachable("the test is over"))
