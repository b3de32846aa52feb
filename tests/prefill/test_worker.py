"""A prefill rank's worker: which chunks a step completes, and when pages that a window has passed are released."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from node_runtime.rank_messages import StepDone
from prefill_node.rank_messages import PrefillStepPart, RunPrefillStep
from prefill_node.scheduler import STEPS_AHEAD, PrefillScheduler, page_needs
from tests.prefill.workers import Sender, decode_peer, new_worker, start_request
from tests.runtime.instances import instance
from tests.runtime.paged_memory import GROUPS, LAYOUT, PAGE_SIZE, SHARD, WINDOW_TOKENS, HeldThread, PagedMemory
from transfer.chunk import ChunkPlan
from transfer.connector.messages import CancelOutgoing, PagesReleased, TransferNotSent
from transfer.engine_types import PrefillItem
from transfer.layer_groups import PageCounts, layer_groups
from transfer.layout import DType, KVLayout, Shard, routes
from transfer.pool.page_allocator import GroupAllocator
from transfer.send.events import SentStats

CHUNK_TOKENS, NUM_TOKENS = 8, 85
NEEDS = page_needs(GROUPS, PAGE_SIZE, chunk_tokens=CHUNK_TOKENS)
PLAN = ChunkPlan(chunk_tokens=CHUNK_TOKENS, layers_per_group=LAYOUT.num_layers)
SCALES = {(0, False): 0.5}


class Engine:
    """Reads and writes the same KV as a step of a real engine."""

    pool = SimpleNamespace(device="cpu")
    layout, shard = LAYOUT, SHARD

    def __init__(self, memory: PagedMemory) -> None:
        self._memory = memory

    def prefill(self, items: Sequence[PrefillItem], on_layers_written: Callable[[int, None], None]) -> dict[str, int]:
        for item in items:
            if item.first_token:
                self._memory.read(item.request_id, item.page_tables, item.first_token, window_tokens=WINDOW_TOKENS - 1)
            self._memory.write(item.request_id, item.page_tables, range(item.first_token, item.end_token))
        on_layers_written(LAYOUT.num_layers, None)
        return {item.request_id: 7 for item in items if item.is_last}


class Rank:
    """A worker between a leader's scheduler and a sender that gathers on request."""

    def __init__(self, pool_pages: tuple[int, ...], max_step_tokens: int = 3 * CHUNK_TOKENS) -> None:
        self.memory, self.thread, self.said = PagedMemory(), HeldThread(), list[Any]()
        self.computed: dict[str, set[int]] = {}
        self.engine = Engine(self.memory)
        self.allocator = GroupAllocator(NEEDS, pool_pages)
        self.scheduler = PrefillScheduler(
            pool_pages=PageCounts(pool_pages),
            needs=NEEDS,
            chunk_tokens=CHUNK_TOKENS,
            max_step_tokens=max_step_tokens,
            max_running=9,
        )
        self.num_steps = 0
        decode = instance(2, layout=LAYOUT)
        every = routes(LAYOUT, SHARD, decode.shard)
        peer = decode_peer(decode, digest="kvferry-words-64", scales=SCALES, routes=every, sessions={0: 1})
        self.sender = Sender(lambda request_id, chunk: self.computed.setdefault(request_id, set()).add(chunk))
        self.worker = new_worker(
            thread=self.thread,
            send=self.said.append,
            engine=self.engine,
            allocator=self.allocator,
            sender=self.sender,
            peer=lambda: peer,
        )

    def submit(self, request_id: str, num_tokens: int = NUM_TOKENS) -> None:
        self.scheduler.submit(request_id, num_tokens, destination=1)

    def start_all(self) -> list[str]:
        """Every request that there is room for."""
        for request_id in self.scheduler.next_to_ask():
            self.scheduler.accept(request_id)
        started = self.scheduler.start_accepted()
        for request_id in started:
            self.worker.on_message(start_request(request_id, PLAN, NUM_TOKENS, decode_incarnation=1))
        for request in self.sender.started:
            assert request.plan == PLAN and request.digest == "kvferry-words-64" and request.scales is SCALES
        return started

    def send_step(self) -> bool:
        items = self.scheduler.next_step()
        if items:
            self.num_steps += 1
            parts = tuple(
                PrefillStepPart(
                    request_id=item.request_id,
                    token_ids=tuple(range(item.begin, item.end)),
                    first_token=item.begin,
                    is_last=item.is_last,
                )
                for item in items
            )
            self.worker.on_message(RunPrefillStep(step=self.num_steps, parts=parts))
        return bool(items)

    def compute_all(self) -> None:
        """With as many steps sent as there can be at a rank other than 0, which looks later."""
        while True:
            while len(self.thread) <= STEPS_AHEAD and self.send_step():
                pass
            self.allocator.check_invariants()
            if not len(self.thread):
                return
            self.thread.run_next()

    def gather(self, request_id: str) -> None:
        """The last window of a prompt, and everything of the other layers."""
        tables = self.worker.tables_of(request_id)
        self.memory.read(request_id, tables, NUM_TOKENS, window_tokens=WINDOW_TOKENS)
        self.worker.outgoing.on_source_released(request_id)
        self.worker.outgoing.on_sent(request_id, SentStats())

    def released(self) -> list[str]:
        return [message.transfer_id for message in self.said if isinstance(message, PagesReleased)]

    def assert_nothing_is_left(self) -> None:
        self.allocator.check_invariants()
        assert all(pages.num_free == pages.num_pages for _, pages in self.allocator.by_group)
        assert self.worker.check_idle()


def room_for(num_requests: int) -> tuple[int, ...]:
    return tuple(num_requests * count for count in NEEDS.peak(NUM_TOKENS).by_group)


def test_more_prompts_run_at_once_than_their_windows_have_tokens() -> None:
    rank = Rank(room_for(3))
    full, window, _ = NEEDS.peak(NUM_TOKENS).by_group
    assert 3 * window < 2 * full, "with pages for every token there would not be room for two of them"
    for request_id in "abcd":
        rank.submit(request_id)
    assert rank.start_all() == ["a", "b", "c"]
    rank.compute_all()
    assert all(len(chunks) == 11 for chunks in rank.computed.values())
    assert [message.tokens for message in rank.said if isinstance(message, StepDone)][-1].keys() == {"a", "b", "c"}
    assert not rank.released(), "they still have to be gathered"
    bound = [pages.num_bound for _, pages in rank.allocator.by_group]
    assert bound == [3 * full, 3 * 3, 3], "of a window, the pages of the last six tokens, 79 to 84"
    for request_id in "bac":
        rank.gather(request_id)
    assert rank.released() == ["b", "a", "c"]
    rank.assert_nothing_is_left()


@pytest.mark.parametrize("order", ["gathers end first", "steps end first"])
@pytest.mark.parametrize("num_steps_over", [0, 1, 4, 7])
def test_an_abort_in_the_middle_gives_everything_back_once(num_steps_over: int, order: str) -> None:
    rank = Rank(room_for(2), max_step_tokens=2 * CHUNK_TOKENS)
    rank.submit("a")
    rank.submit("b")
    assert rank.start_all() == ["a", "b"]
    for _ in range(STEPS_AHEAD + 1):
        rank.send_step()
    for _ in range(num_steps_over):
        rank.thread.run_next()
        rank.send_step()
    rank.scheduler.withdraw("a")
    rank.worker.on_message(CancelOutgoing(transfer_id="a", reason="the client left"))
    assert rank.sender.aborted == ["a"] and not rank.released()
    if order == "gathers end first":
        rank.worker.outgoing.on_source_released("a")
        assert not rank.released(), "steps that were sent still use its pages"
    while "a" not in rank.released() and len(rank.thread):
        rank.thread.run_next()
        rank.allocator.check_invariants()
    if order == "steps end first":
        assert not rank.released(), "a gather may still read its pages"
        rank.worker.outgoing.on_source_released("a")
    assert rank.released() == ["a"]
    assert not any(isinstance(message, TransferNotSent) for message in rank.said), "its last bytes may still be under way"
    rank.worker.outgoing.on_failed("a", "the client left")
    assert rank.said[-1] == TransferNotSent(transfer_id="a", reason="the client left")
    rank.compute_all()
    rank.gather("b")
    assert rank.released() == ["a", "b"]
    rank.assert_nothing_is_left()


# Chunks are complete with the last of their layers on this rank

STAGED = KVLayout.uniform(num_layers=8, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT32)
STAGED_PEER = decode_peer(instance(2, layout=STAGED))
STEP = RunPrefillStep(step=1, parts=(PrefillStepPart(request_id="r", token_ids=(1,) * 16, first_token=0, is_last=True),))


class LayerByLayerEngine:
    """Writes one layer after the other, and records the chunks that are computed with each."""

    layout = STAGED

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.pool = type("Pool", (), {"device": "cpu"})()
        self.heard: list[int] = []
        self.chunks_after: dict[int, list[int]] = {}

    def prefill(self, items: Any, on_layers_written: Callable[[int, None], None]) -> dict[str, int]:
        for layers_done in range(1, len(self.shard.layers(STAGED)) + 1):
            self.heard.clear()
            on_layers_written(layers_done, None)
            if self.heard:
                self.chunks_after[layers_done] = list(self.heard)
        return {"r": 7}


@pytest.mark.parametrize(
    ("stages", "stage", "layers_per_group", "told"),
    [
        (1, 0, 0, {8: [0]}),
        (1, 0, 4, {4: [0], 8: [1]}),
        (2, 0, 0, {4: [0]}),
        (2, 1, 0, {4: [0]}),
        # Groups that lie in another stage alone are nothing to wait for: no route of this rank carries any of them.
        (2, 0, 3, {3: [0], 4: [1, 2]}),
        (2, 1, 3, {1: [0], 2: [1], 4: [2]}),
    ],
)
def test_a_chunk_is_computed_with_the_last_of_its_layers_here(
    stages: int, stage: int, layers_per_group: int, told: dict[int, list[int]]
) -> None:
    engine, thread = LayerByLayerEngine(Shard(pp_size=stages, pp_rank=stage)), HeldThread()
    worker = new_worker(
        thread=thread,
        send=lambda message: None,
        engine=engine,
        allocator=GroupAllocator(page_needs(layer_groups(STAGED), 4, chunk_tokens=16), (4,)),
        sender=Sender(lambda request_id, chunk: engine.heard.append(chunk)),
        peer=lambda: STAGED_PEER,
    )
    plan = ChunkPlan(chunk_tokens=16, layers_per_group=layers_per_group)
    worker.on_message(start_request("r", plan, 16, decode_incarnation=2))
    worker.on_message(STEP)
    thread.run_next()
    assert engine.chunks_after == told
