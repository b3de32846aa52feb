"""Sliding windows and chunked local attention, in schedulers that allocate and free blocks of each table as vLLM 0.32 does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry.engines.connector import DECODE, PREFILL, Sides
from kvferry.engines.vllm_layout import VllmLayout
from kvferry.engines.vllm_sides import SchedulerSide, StepMessage, WorkerSide
from kvferry.engines.vllm_windows import WindowBlocks, WindowTable
from tests.connector.instances import DIM, HEADS, PAGES, Instance, kv_of, prompt_of, slots_of, target, wait_for
from transfer.errors import ConfigError
from transfer.layer_groups import layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard
from transfer.pool.kv_pool import KVPool, LayerBuffers, PoolView

WINDOW = 48
GROUPS = {0: (0, 1), 1: (2,), 2: (3,)}
"""Layers of each of vLLM's block tables; the last table is that of full attention."""

FULL = LayerSpec(num_kv_heads=HEADS, k_head_dim=DIM, v_head_dim=DIM)
SLIDING = LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=HEADS, k_head_dim=DIM, v_head_dim=DIM, window_tokens=WINDOW)
CHUNKED = replace(SLIDING, kind=LayerKind.CHUNKED_LOCAL)
LOSING = {SLIDING: 111, CHUNKED: 96}
"""Tokens of a prompt of which vLLM frees blocks that travel."""


def layout_of(shard: Shard, sizes: Sequence[int], local: LayerSpec) -> VllmLayout:
    """`sizes` are the tokens of a block in each of vLLM's block tables; `local` is the kind of all layers but the last."""
    layout = KVLayout(layers=(local, local, local, FULL), dtype=DType.FLOAT32)
    full, window = layer_groups(layout)
    return VllmLayout(
        layout=layout,
        shard=shard,
        layers=(),
        kv_scales=(),
        groups=(full, *(replace(window, layers=GROUPS[group]) for group in (0, 1))),
        block_groups=(2, 0, 1),
        page_sizes=(sizes[2], sizes[0], sizes[1]),
        window_tables=tuple(
            WindowTable(group=group, window_tokens=WINDOW, block_size=sizes[group], is_chunked=local is CHUNKED)
            for group in (0, 1)
        ),
        num_blocks=PAGES,
        shared_layers=frozenset(),
    )


def pool_of(shard: Shard, sizes: Sequence[int], local: LayerSpec) -> KVPool:
    heads, layout = len(shard.heads(HEADS)), layout_of(shard, sizes, local)
    shapes = [(PAGES, sizes[group], heads, DIM) for group, layers in GROUPS.items() for _ in layers]
    buffers = [LayerBuffers(k=torch.zeros(shape), v=torch.zeros(shape)) for shape in shapes]
    return PoolView(layout=layout.layout, shard=shard, buffers=buffers, groups=layout.groups, page_sizes=layout.page_sizes)


@dataclass(eq=False)
class Block:
    """vLLM's KVCacheBlock."""

    block_id: int
    ref_cnt: int = 0


class BlockPool:
    """vLLM's BlockPool without a cache; block 0 is the null block. A freed block is the next to be used."""

    def __init__(self) -> None:
        self.null = Block(0)
        self.unused = [Block(number) for number in range(PAGES - 1, 0, -1)]

    def take(self) -> Block:
        block = self.unused.pop()
        block.ref_cnt = 1
        return block

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt and block is not self.null:
                self.unused.append(block)


@dataclass
class Tables:
    """vLLM's SingleTypeKVCacheManager of one group."""

    local: LayerSpec
    block_size: int
    num_cached_block: dict[str, int] = field(default_factory=dict)

    def num_skipped_tokens(self, num_computed: int) -> int:
        if self.local is CHUNKED:
            return num_computed // WINDOW * WINDOW
        return max(0, num_computed - WINDOW + 1) if self.local is SLIDING else 0


class Manager:
    """vLLM's KVCacheManager, which is its own coordinator."""

    def __init__(self, sizes: Sequence[int], local: LayerSpec) -> None:
        self.block_pool = BlockPool()
        self.single_type_managers = tuple(Tables(one, size) for one, size in zip((local, local, FULL), sizes, strict=True))
        self.coordinator = self
        self.tables: dict[str, list[list[Block]]] = {}

    def get_blocks(self, request_id: str) -> Any:
        tables = self.tables[request_id]
        return SimpleNamespace(
            blocks=tables, get_block_ids=lambda: tuple([block.block_id for block in table] for table in tables)
        )

    def remove_skipped(self, request_id: str, num_computed: int) -> None:
        for table, of in zip(self.tables.setdefault(request_id, [[], [], []]), self.single_type_managers, strict=True):
            skipped = of.num_skipped_tokens(num_computed) // of.block_size
            freed = [block for block in table[:skipped] if block is not self.block_pool.null]
            self.block_pool.free_blocks(freed)
            table[:skipped] = [self.block_pool.null] * skipped

    def allocate(self, request_id: str, num_tokens: int) -> tuple[list[int], ...]:
        new: list[list[int]] = [[], [], []]
        for table, added, of in zip(self.tables[request_id], new, self.single_type_managers, strict=True):
            while len(table) < -(-num_tokens // of.block_size):
                table.append(self.block_pool.take())
                added.append(table[-1].block_id)
        return tuple(new)

    def free(self, request_id: str) -> None:
        for table in self.tables.pop(request_id):
            self.block_pool.free_blocks(table)


class Vllm:
    """An engine with the connector's parts; see `tests.connector.test_vllm_sides.Vllm`."""

    def __init__(self, instance: Instance, sides: Sides, sizes: Sequence[int], local: LayerSpec) -> None:
        self.instance, self.local = instance, local
        self.manager = Manager(sizes, local)
        layout = layout_of(Shard(page_size=instance.page_size), sizes, local)
        windows = WindowBlocks(layout.window_tables)
        self.scheduler = SchedulerSide(
            instance.leader, layout.tables_to_fill, sides=sides, engine_id="e", recomputes=True, windows=windows
        )
        self.scheduler.use_cache_manager(self.manager)
        self.workers = [
            WorkerSide(rank, layout.page_tables, first_needed_pages=layout.first_needed_pages) for rank in instance.ranks
        ]
        self.done: list[set[str]] = [set() for _ in self.workers]

    def request(self, name: str, prompt: Sequence[int], params: dict[str, Any] | None, *, max_tokens: int = 1) -> Any:
        request = SimpleNamespace(
            request_id=name,
            prompt_token_ids=list(prompt),
            kv_transfer_params=params,
            max_tokens=max_tokens,
            mm_features=[],
            prompt_embeds=None,
            num_computed_tokens=0,
            output_token_ids=[],
            status="RUNNING",
            sampling_params=SimpleNamespace(num_logprobs=None),
            use_structured_output=False,
            resumable=False,
        )
        self.scheduler.added(request)
        return request

    def step(self, request: Any = None, num_tokens: int = 0, *, preempted: Sequence[str] = ()) -> None:
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        scheduled = SimpleNamespace(
            preempted_req_ids=set(preempted), scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={}
        )
        if request is not None:
            name, begin = request.request_id, request.num_computed_tokens
            is_new = name not in self.manager.tables
            self.manager.remove_skipped(name, begin)
            new = self.manager.allocate(name, begin + num_tokens)
            cached.req_ids.append(name)
            cached.new_block_ids.append(new)
            cached.num_computed_tokens.append(begin)
            cached.resumed_req_ids |= {name} if is_new else set()
            scheduled.num_scheduled_tokens[name] = num_tokens
        plan: StepMessage = self.scheduler.plan(scheduled)
        for worker in self.workers:
            worker.preempt(plan)
        if request is not None:
            request.num_computed_tokens += num_tokens
            self.write(request, range(begin, begin + num_tokens))
        for worker, done in zip(self.workers, self.done, strict=True):
            worker.computed(plan)
            found = worker.results()
            assert not found.failed
            done |= found.sent | found.received

    def write(self, request: Any, tokens: range) -> None:
        for layer, slots in self.slots(request, tokens):
            k, v = kv_of(request.prompt_token_ids, layer)
            for pool in self.instance.pools:
                heads = pool.shard.heads(HEADS)
                mine = slice(heads.begin, heads.end)
                pool.write(layer, slots, k[tokens.start : tokens.stop, mine], v[tokens.start : tokens.stop, mine])

    def slots(self, request: Any, tokens: range) -> Iterator[tuple[int, Tensor]]:
        tables = self.manager.get_blocks(request.request_id).get_block_ids()
        for group, layers in GROUPS.items():
            for layer in layers:
                yield layer, slots_of(tables[group], tokens, self.manager.single_type_managers[group].block_size)

    def finish(self, request: Any) -> dict[str, Any]:
        request.status, request.output_token_ids = "FINISHED_LENGTH_CAPPED", [7]
        self.manager.remove_skipped(request.request_id, request.num_computed_tokens)
        is_held, answer = self.scheduler.finished(request, is_done=True)
        assert is_held and answer is not None
        return answer

    def wait_for(self, name: str) -> None:
        def look() -> bool:
            self.step()
            return all(name in done for done in self.done)

        wait_for(look, f"{name} is sent or received")

    def load(self, name: str, prompt: Sequence[int], params: dict[str, Any], num_loaded: int) -> Any:
        """Fetch a prompt into new blocks."""
        request = self.request(name, prompt, dict(params))

        def look() -> bool:
            self.step()
            return self.scheduler.matched(request, 0)[0] is not None

        wait_for(look, "the prompt can be loaded")
        assert self.scheduler.matched(request, 0) == (num_loaded, True)
        self.manager.remove_skipped(name, 0)
        for table, of in zip(self.manager.tables[name], self.manager.single_type_managers, strict=True):
            skipped = of.num_skipped_tokens(num_loaded) // of.block_size
            table.extend([self.manager.block_pool.null] * skipped)
        self.manager.allocate(name, num_loaded)
        self.scheduler.allocated(request, self.manager.get_blocks(name).get_block_ids(), num_loaded)
        self.wait_for(name)
        return request

    def assert_has(self, request: Any) -> None:
        """The tokens that vLLM reads when it computes the prompt's last one, in all layers."""
        prompt = request.prompt_token_ids
        for layer, _ in self.slots(request, range(0)):
            begin = 0 if layer in GROUPS[2] else self.local.first_travelling_token(len(prompt))
            tokens = range(begin, len(prompt) - 1)
            slots = dict(self.slots(request, tokens))[layer].long()  # of no token, if only the last one travels
            block_size = self.instance.pools[0].part_of(layer).page_size
            assert (slots >= block_size).all(), "none is in the null block"
            for pool in self.instance.pools:
                heads = pool.shard.heads(HEADS)
                for found, wanted in zip(pool.read(layer, slots), kv_of(prompt, layer), strict=True):
                    assert torch.equal(found, wanted[begin : len(prompt) - 1, heads.begin : heads.end]), f"layer {layer}"


@pytest.fixture(params=[SLIDING, CHUNKED], ids=["windows", "chunks"])
def local(request: pytest.FixtureRequest) -> LayerSpec:
    spec: LayerSpec = request.param
    return spec


@pytest.fixture(params=[(1, (16, 16, 16), 2, (8, 8, 8)), (2, (8, 8, 16), 1, (16, 16, 8))], ids=str)
def pair(request: pytest.FixtureRequest, local: LayerSpec) -> Iterator[tuple[Vllm, Vllm]]:
    prefill_tp, prefill_sizes, decode_tp, decode_sizes = request.param
    source = Instance(
        PREFILL,
        tp_size=prefill_tp,
        page_size=min(prefill_sizes),
        pool_of=partial(pool_of, sizes=prefill_sizes, local=local),
        settings={"chunk.chunk_tokens": 24},  # so that a chunk begins within a block of one table, and with one of another
    )
    try:
        decode_pool_of = partial(pool_of, sizes=decode_sizes, local=local)
        decode = target(source, tp_size=decode_tp, page_size=min(decode_sizes), pool_of=decode_pool_of)
        try:
            yield Vllm(source, PREFILL, prefill_sizes, local), Vllm(decode, DECODE, decode_sizes, local)
        finally:
            decode.close()
    finally:
        source.close()


@pytest.mark.parametrize("num_tokens", [30, 48, 95, 96, 97, 100, 103, 111])
def test_windows_arrive_from_blocks_that_vllm_has_freed_and_used_again(pair: tuple[Vllm, Vllm], num_tokens: int) -> None:
    """The prompt ends before the other side asks for it. Meanwhile, another one takes the blocks that vLLM has freed."""
    prefill, decode = pair
    prompt = prompt_of(num_tokens)
    request = prefill.request("a", prompt, {"do_remote_decode": True})
    steps = [range(begin, min(begin + 24, num_tokens)) for begin in range(0, num_tokens, 24)]
    for step in steps:
        prefill.step(request, len(step))
    params = prefill.finish(request)
    other = prefill.request("other", prompt_of(40, 5), None)
    prefill.step(other, 40)
    tables = decode.manager.single_type_managers[0]
    travelling = decode.local.first_travelling_token(num_tokens) // tables.block_size
    loses = tables.num_skipped_tokens(num_tokens) // tables.block_size > travelling
    received = decode.load("b", prompt, params, num_tokens - loses)
    decode.assert_has(received)
    prefill.wait_for("a")
    prefill.scheduler.sent(["a"])
    prefill.manager.free("a")
    prefill.manager.free("other")
    assert len(prefill.manager.block_pool.unused) == PAGES - 1, "nothing is kept"


def test_blocks_that_are_not_written_whole_stay_out_of_the_prefix_cache(pair: tuple[Vllm, Vllm]) -> None:
    prefill, decode = pair
    prompt = prompt_of(100)
    request = prefill.request("a", prompt, {"do_remote_decode": True})
    prefill.step(request, 100)
    decode.load("b", prompt, prefill.finish(request), 100)
    first_whole = -(-decode.local.first_travelling_token(100) // decode.manager.single_type_managers[0].block_size)
    assert [one.num_cached_block.get("b") for one in decode.manager.single_type_managers] == [first_whole, first_whole, None]
    prefill.wait_for("a")


def test_a_preempted_prompt_releases_the_blocks_that_it_keeps(pair: tuple[Vllm, Vllm]) -> None:
    prefill, _ = pair
    num_tokens = LOSING[prefill.local]
    request = prefill.request("a", prompt_of(num_tokens), {"do_remote_decode": True})
    prefill.step(request, num_tokens)
    prefill.manager.remove_skipped("a", num_tokens)
    prefill.manager.free("a")
    prefill.step(preempted=["a"])
    assert len(prefill.manager.block_pool.unused) == PAGES - 1


def test_a_prompt_whose_request_generates_is_not_handed_over(pair: tuple[Vllm, Vllm], capsys: pytest.CaptureFixture[str]) -> None:
    prefill, _ = pair
    request = prefill.request("a", prompt_of(100), {"do_remote_decode": True}, max_tokens=9)
    assert request.kv_transfer_params == {"do_remote_decode": False}
    assert "its max_tokens is 9; it must be 1" in "".join(capsys.readouterr())


def test_a_vllm_with_other_block_tables_is_refused() -> None:
    windows = WindowBlocks([WindowTable(group=0, window_tokens=WINDOW, block_size=16)])
    with pytest.raises(ConfigError, match=r"not one that kvferry knows .* no attribute 'coordinator'"):
        windows.use(SimpleNamespace())
