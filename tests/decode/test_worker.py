"""A decode rank binds pages as KV arrives, and gives pages back while it generates and when a request ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from decode_node.admission import page_needs
from decode_node.rank_messages import DecodeStepPart, ExpectRequest, FinishRequest, RunDecodeStep
from tests.decode.workers import Receiver, new_worker, use
from tests.runtime.instances import instance
from tests.runtime.paged_memory import GROUPS, LAYOUT, PAGE_SIZE, SHARD, WINDOW_TOKENS, HeldThread, PagedMemory
from transfer.chunk import ChunkPlan, split_into_chunks
from transfer.connector.messages import CancelIncoming, PagesReleased, TransferExpected
from transfer.engine_types import DecodeItem, SamplingParams
from transfer.layout import DType, routes
from transfer.piece import SessionRoute, TransferTerms
from transfer.pool.page_allocator import GroupAllocator
from transfer.receive.attach import Unattached

PREFILL_LIFE = 11
PLAN = ChunkPlan(chunk_tokens=8)
NEEDS = page_needs(GROUPS, PAGE_SIZE)
PROMPT, NEW = 50, 40
OWN = instance(22, layout=LAYOUT)
WRITERS = TransferTerms(
    layout=LAYOUT,
    wire_dtype=DType.FLOAT32,
    routes=tuple(
        SessionRoute(route=route, session=50 + route.prefill_rank)
        for route in routes(LAYOUT, instance(PREFILL_LIFE, tp_size=2, layout=LAYOUT).shard, SHARD)
    ),
    digest="xxh3-64",
    scales={(0, False): 0.5},
)


class Engine:
    """Reads and writes what a step of a real one does."""

    pool = SimpleNamespace(device="cpu")
    shard = SHARD

    def __init__(self, memory: PagedMemory) -> None:
        self._memory = memory

    def decode(self, items: Sequence[DecodeItem]) -> dict[str, int]:
        for item in items:
            self._memory.write(item.request_id, item.page_tables, [item.position])
            self._memory.read(item.request_id, item.page_tables, item.position + 1, window_tokens=WINDOW_TOKENS)
        return {item.request_id: 7 for item in items}


class Rank:
    """A worker between a leader and a receiver, both the test's."""

    needs = NEEDS

    def __init__(
        self,
        num_requests: int = 1,
        *,
        writers: TransferTerms | Unattached = WRITERS,
        knows_all: bool = False,
        reader: HeldThread | None = None,
    ) -> None:
        self.memory, self.thread, self.said = PagedMemory(), HeldThread(), list[Any]()
        self.room = tuple(num_requests * count for count in self.needs.peak(PROMPT + NEW).by_group)
        self.allocator = GroupAllocator(self.needs, self.room)
        self.receiver = Receiver(knows_all=knows_all)
        self.worker = new_worker(thread=self.thread, send=self.said.append)
        use(
            self.worker,
            engine=self.new_engine(),
            allocator=self.allocator,
            receiver=self.receiver,
            writers=writers,
            reader=reader,
        )

    def new_engine(self) -> object:
        return Engine(self.memory)

    def expect(self, request_id: str) -> None:
        message = ExpectRequest(
            transfer_id=request_id,
            prefill_incarnation=PREFILL_LIFE,
            num_tokens=PROMPT,
            start_token=0,
            pages=self.needs.peak(PROMPT + NEW).by_group,
            plan=PLAN,
            sampling=SamplingParams(),
        )
        self.worker.on_message(message)

    def arrive(self, request_id: str, seed: int, num_chunks: int = 99) -> None:
        """Chunks in any order; of the window's layers, only what travels."""
        chunks = list(split_into_chunks(PLAN, num_tokens=PROMPT, num_layers=LAYOUT.num_layers))
        random.Random(seed).shuffle(chunks)
        for chunk in chunks[:num_chunks]:
            full, window, state = self.worker.tables_up_to(request_id, chunk.tokens.end)
            tokens = range(chunk.tokens.begin, chunk.tokens.end)
            # In front of the window lies nothing: the window's share of these tokens is written into pages that do not exist.
            nowhere = [10_000 + entry if page < 0 else page for entry, page in enumerate(window)]
            self.memory.write(request_id, (full, [*nowhere, *range(20_000, 20_099)], state), tokens)
        if num_chunks >= len(chunks):
            tables = self.worker.tables_up_to(request_id, PROMPT)
            self.memory.write(request_id, tables, [PROMPT - 1])  # the state that counts is that after the last token
            self.memory.read(request_id, tables, PROMPT, window_tokens=WINDOW_TOKENS)
            self.worker.incoming.on_complete(request_id)

    def step(self, number: int, *positions: tuple[str, int]) -> None:
        parts = tuple(DecodeStepPart(request_id=name, token_id=1, position=position) for name, position in positions)
        self.worker.on_message(RunDecodeStep(step=number, parts=parts))

    def bound(self) -> list[int]:
        self.allocator.check_invariants()
        return [pages.num_bound for _, pages in self.allocator.by_group]

    def released(self) -> list[str]:
        return [message.transfer_id for message in self.said if isinstance(message, PagesReleased)]

    def assert_nothing_is_left(self) -> None:
        assert self.bound() == [0, 0, 0]
        assert [pages.num_free for _, pages in self.allocator.by_group] == list(self.room)
        assert self.worker.check_idle()


def test_windows_keep_their_few_pages_from_arrival_to_the_last_token() -> None:
    rank = Rank(3)
    full, window, _ = NEEDS.peak(PROMPT + NEW).by_group
    assert (full, window) == (23, 3), "for 90 tokens"
    for seed, request_id in enumerate("abc"):
        rank.expect(request_id)
        assert rank.bound() == [13 * seed, 2 * seed, seed], "pages come with data"
        rank.arrive(request_id, seed)
    for number in range(NEW):
        # They do not go in step: "b" joins later, "c" is ahead.
        positions = [("a", PROMPT + number), ("c", PROMPT + number)]
        positions += [("b", PROMPT + number - 5)] if number >= 5 else []
        rank.step(number, *positions)
        assert rank.bound()[1] <= 3 * window
        rank.thread.run_next()
    for request_id in "abc":
        rank.worker.on_message(FinishRequest(request_id=request_id))
    assert rank.released() == ["a", "b", "c"]
    rank.assert_nothing_is_left()


@pytest.mark.parametrize("num_steps", [0, 1, 17])
def test_a_request_that_leaves_in_the_middle_of_a_step_gives_everything_back_after_it(num_steps: int) -> None:
    rank = Rank(1)
    rank.expect("a")
    rank.arrive("a", 1)
    for number in range(num_steps):
        rank.step(number, ("a", PROMPT + number))
        rank.thread.run_next()
    rank.step(num_steps, ("a", PROMPT + num_steps))
    rank.worker.on_message(FinishRequest(request_id="a"))
    assert not rank.released() and rank.bound()[0]
    rank.thread.run_next()
    assert rank.released() == ["a"]
    rank.assert_nothing_is_left()
    rank.expect("b")
    rank.arrive("b", 2)


@pytest.mark.parametrize("num_chunks", [0, 1, 4])
def test_a_transfer_that_is_given_up_half_way_gives_everything_back_once_it_is_drained(num_chunks: int) -> None:
    rank = Rank(1)
    rank.expect("a")
    rank.arrive("a", 3, num_chunks)
    rank.worker.on_message(CancelIncoming(transfer_id="a", reason="the client left"))
    assert set(rank.receiver.draining) == {"a"} and not rank.released(), "a write can still land in its pages"
    rank.worker.incoming.on_drained("a")
    assert rank.released() == ["a"]
    rank.assert_nothing_is_left()


def test_a_request_is_received_from_its_writers_sessions() -> None:
    rank = Rank()
    rank.expect("a")
    assert rank.said == [TransferExpected(transfer_id="a")]
    (expected,) = rank.receiver.expected
    assert expected.plan is PLAN and expected.layout is OWN.layout and expected.num_tokens == PROMPT
    assert expected.wire_dtype is WRITERS.wire_dtype and expected.routes is WRITERS.routes
    assert expected.digest is WRITERS.digest and expected.scales is WRITERS.scales


@pytest.mark.parametrize(
    ("writers", "knows_all", "reason"),
    [
        (Unattached(reason="prefill rank 1 is not attached"), False, "prefill rank 1 is not attached"),
        (WRITERS, True, "an earlier request of the same id is still draining"),
    ],
)
def test_a_request_that_cannot_be_received_says_why_and_gives_its_pages_back_when_it_is_cancelled(
    writers: TransferTerms | Unattached, knows_all: bool, reason: str
) -> None:
    rank = Rank(writers=writers, knows_all=knows_all)
    rank.expect("a")
    assert rank.said == [TransferExpected(transfer_id="a", reason=reason)] and not rank.receiver.expected
    rank.worker.on_message(CancelIncoming(transfer_id="a", reason="it cannot be received"))
    assert rank.released() == ["a"] and not rank.receiver.draining
    rank.assert_nothing_is_left()
