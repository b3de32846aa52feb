"""A prefill rank loads pages that decode ranks have stored, in their sharding, into its own pages, within a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prefill_node.prefix_loader import PrefixLoader
from prefill_node.scheduler import page_needs
from prefill_node.stored_prefix import StoredPrefix, page_sources
from tests.prefill.stored_pages import Prompt, at_rank, cut, store_client
from tests.runtime.hand_clock import HandClock
from tests.storage.stores import MemoryStore, Seen
from transfer.instance import Instance
from transfer.layer_groups import NO_PAGE, GroupKind, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, TokenOrder
from transfer.pool.kv_pool import KVPool
from transfer.pool.page_allocator import GroupAllocator
from transfer.storage.base import Outcome, Store
from transfer.storage.directory import DirectoryStore
from transfer.storage.keys import fingerprint_of
from transfer.worker_thread import WorkerThread

MLA = LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=6, v_head_dim=0)
FULL = LayerSpec(num_kv_heads=4, k_head_dim=4, v_head_dim=2)
FEW_HEADS = LayerSpec(num_kv_heads=2, k_head_dim=4, v_head_dim=4)
WINDOW = LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=2, k_head_dim=4, v_head_dim=4, window_tokens=10)
PLAIN = KVLayout(layers=(FULL,) * 3, dtype=DType.FLOAT32)
MIXED = KVLayout(layers=(FULL, WINDOW, FEW_HEADS, WINDOW), dtype=DType.FLOAT32)
LATENT = KVLayout(layers=(MLA,) * 2, dtype=DType.BFLOAT16)
NHD, HND = TokenOrder
SCALES = ((0.5, 2.0), (0.25, 1.0), (3.0, 0.75))
NUM_TOKENS = 45


@dataclass
class Rank:
    """One prefill rank's loader, over a real pool whose pages are in no order."""

    own: Instance
    pool: KVPool
    allocator: GroupAllocator
    loader: PrefixLoader
    seen: Seen

    async def load(self, prefix: StoredPrefix) -> int:
        """As the worker has it loaded."""
        assert self.allocator.reserve("a", NUM_TOKENS)
        end = prefix.num_pages * prefix.page_size
        self.allocator.advance("a", end)
        return await self.loader.load(prefix, self.allocator.cover("a", end))


@asynccontextmanager
async def rank_of(
    own: Instance, store: Store, *, timeout_s: float = 10.0, batch_bytes: int = 1 << 20, device: str = "cpu"
) -> AsyncIterator[Rank]:
    groups = layer_groups(own.layout)
    needs = page_needs(groups, own.shard.page_size, chunk_tokens=8)
    num_pages = [count + 7 for count in needs.peak(NUM_TOKENS).by_group]
    pool = KVPool(layout=own.layout, shard=own.shard, num_pages=num_pages, device=device)
    allocator = GroupAllocator(needs, num_pages)
    for other in "xy":  # so that the request's own pages are neither the first ones nor adjacent
        assert allocator.reserve(other, 3)
        allocator.cover(other, 3)
    allocator.release("x")
    seen = Seen()
    client = store_client(store, seen, timeout_s=timeout_s)
    thread = WorkerThread("engine", asyncio.get_running_loop(), lambda error: pytest.fail(str(error)))
    loader = PrefixLoader(client, pool=pool, own=own, thread=thread, timeout_s=timeout_s, batch_bytes=batch_bytes)
    try:
        yield Rank(own, pool, allocator, loader, seen)
    finally:
        if isinstance(store, MemoryStore):
            store.gate.set()
        await client.close()
        assert thread.close(timeout_s=10.0)


def shard(tp_size: int = 1, page_size: int = 4, order: TokenOrder = NHD, **fields: Any) -> Shard:
    return Shard(tp_size=tp_size, page_size=page_size, order=order, **fields)


@pytest.mark.parametrize(
    ("layout", "own", "decode"),
    [
        (PLAIN, shard(page_size=16), shard(page_size=4)),
        (PLAIN, shard(page_size=3), shard(page_size=5)),
        (PLAIN, shard(order=NHD, page_size=8), shard(order=HND)),
        (PLAIN, shard(tp_size=2, order=HND), shard(tp_size=4, order=HND, page_size=8)),
        (PLAIN, shard(tp_size=8), shard(tp_size=2)),  # more ranks than heads, on either side
        (PLAIN, shard(), shard(pp_size=2, tp_size=2)),
        (PLAIN, shard(dtype=DType.FLOAT32), shard(dtype=DType.BFLOAT16)),
        (PLAIN, shard(dtype=DType.FLOAT16), shard(dtype=DType.FLOAT32)),
        (PLAIN, shard(dtype=DType.INT8), shard(dtype=DType.INT8)),
        (MIXED, shard(page_size=2), shard(page_size=8, tp_size=2)),
        (MIXED, shard(page_size=8, tp_size=4), shard(page_size=2, tp_size=2, order=HND)),
        (MIXED, shard(page_size=3), shard(page_size=4, dtype=DType.BFLOAT16)),
        (LATENT, shard(tp_size=2), shard(tp_size=4, page_size=8)),
    ],
)
async def test_ranks_of_any_shard_read_pages_of_ranks_of_any_shard(
    tmp_path: Path, layout: KVLayout, own: Shard, decode: Shard
) -> None:
    prompt, reader, writer = Prompt(layout, NUM_TOKENS), cut(layout, own), cut(layout, decode)
    store = DirectoryStore(tmp_path)
    prefix = prompt.store(store, writer)
    whole = (NUM_TOKENS - 1) // decode.page_size * decode.page_size
    for number in range(own.num_ranks):
        # A batch of a few pages, so that there are several.
        async with rank_of(at_rank(reader, number), store, batch_bytes=2000) as rank:
            assert await rank.load(prefix) == whole
            prompt.check(rank.pool, rank.own, writer, rank.allocator.tables("a"), whole)
            for group, table in zip(rank.pool.groups, rank.allocator.tables("a"), strict=True):
                first = group.first_needed_token(whole) // own.page_size
                assert set(table[:first]) <= {NO_PAGE} and NO_PAGE not in table[first:]


@pytest.mark.parametrize("eight_bits", ["own", "decode", "both"])
async def test_scales_of_8_bit_floats_are_those_of_the_side_that_has_them(tmp_path: Path, eight_bits: str) -> None:
    prompt = Prompt(PLAIN, NUM_TOKENS)
    eight, four = (shard(dtype=DType.FLOAT8_E4M3), {"kv_scales": SCALES}), (shard(), dict[str, Any]())
    own_shard, own_fields = four if eight_bits == "decode" else eight
    decode_shard, decode_fields = four if eight_bits == "own" else eight
    reader, writer = cut(PLAIN, own_shard, **own_fields), cut(PLAIN, decode_shard, **decode_fields)
    store = DirectoryStore(tmp_path)
    prefix = prompt.store(store, writer)
    async with rank_of(reader, store) as rank:
        assert await rank.load(prefix) == 44
        prompt.check(rank.pool, reader, writer, rank.allocator.tables("a"), 44)


async def test_other_pages_are_untouched(tmp_path: Path) -> None:
    prompt, instance = Prompt(PLAIN, NUM_TOKENS), cut(PLAIN, shard())
    store = DirectoryStore(tmp_path)
    prefix = prompt.store(store, instance)
    async with rank_of(instance, store) as rank:
        await rank.load(prefix)
        mine = set(rank.allocator.tables("a")[0])
        others = [page for page in range(rank.pool.num_pages[0]) if page not in mine]
        assert others and not any(rank.pool.buffer(layer, is_v=False)[others].any() for layer in range(3))


def key_of(prefix: StoredPrefix, kind: GroupKind, page: int) -> list[str]:
    return prefix.keys([group for group in layer_groups(prefix.decode.layout) if group.kind is kind], [page])


def file_of(directory: Path, key: str) -> Path:
    (found,) = directory.rglob(key[len(fingerprint_of(key)) + 1 :])
    return found


@pytest.mark.parametrize("batch_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("missing", [0, 1, 6, 10])
async def test_what_lies_before_the_first_missing_page_is_loaded(missing: int, batch_bytes: int) -> None:
    prompt, instance, store = Prompt(PLAIN, NUM_TOKENS), cut(PLAIN, shard(tp_size=2)), MemoryStore()
    prefix = prompt.prefix(instance)
    last = key_of(prefix, GroupKind.FULL, missing)[-1]
    prompt.store(store, instance, leave_out=[last])
    async with rank_of(cut(PLAIN, shard(page_size=8)), store, batch_bytes=batch_bytes) as rank:
        assert await rank.load(prefix) == 4 * missing
        if missing:
            prompt.check(rank.pool, rank.own, instance, rank.allocator.tables("a"), 4 * missing)


@pytest.mark.parametrize(("kind", "page"), [(GroupKind.FULL, 5), (GroupKind.WINDOW, 9)])
async def test_with_windows_it_is_all_or_nothing(kind: GroupKind, page: int) -> None:
    prompt, instance, store = Prompt(MIXED, NUM_TOKENS), cut(MIXED, shard()), MemoryStore()
    prompt.store(store, instance, leave_out=key_of(prompt.prefix(instance), kind, page))
    async with rank_of(instance, store) as rank:
        assert await rank.load(prompt.prefix(instance)) == 0


async def test_windows_need_no_pages_that_they_have_passed() -> None:
    prompt, instance, store = Prompt(MIXED, NUM_TOKENS), cut(MIXED, shard()), MemoryStore()
    prefix = prompt.prefix(instance)
    passed = [key for page in range(8) for key in key_of(prefix, GroupKind.WINDOW, page)]  # 44 - 10 + 1 is on page 8
    prompt.store(store, instance, leave_out=passed)
    async with rank_of(instance, store) as rank:
        assert await rank.load(prefix) == 44
        prompt.check(rank.pool, instance, instance, rank.allocator.tables("a"), 44)


async def test_a_broken_page_is_a_miss(tmp_path: Path) -> None:
    prompt, instance, store = Prompt(PLAIN, NUM_TOKENS), cut(PLAIN, shard()), DirectoryStore(tmp_path)
    prefix = prompt.store(store, instance)
    path = file_of(tmp_path, key_of(prefix, GroupKind.FULL, 3)[0])
    path.write_bytes(path.read_bytes()[:-1] + b"\xaa")
    async with rank_of(instance, store) as rank:
        assert await rank.load(prefix) == 12
        prompt.check(rank.pool, instance, instance, rank.allocator.tables("a"), 12)
        assert any(Outcome.CORRUPT in outcomes for _, outcomes in rank.seen.operations)


async def test_a_store_of_another_model_has_nothing(tmp_path: Path) -> None:
    prompt, store = Prompt(PLAIN, NUM_TOKENS), DirectoryStore(tmp_path)
    prompt.store(store, cut(PLAIN, shard()))
    for other in (
        cut(PLAIN, shard(page_size=2)),
        cut(PLAIN, shard(order=HND)),
        cut(PLAIN, shard(dtype=DType.BFLOAT16)),
        cut(PLAIN, shard(dtype=DType.FLOAT8_E4M3), kv_scales=SCALES),
    ):
        async with rank_of(cut(PLAIN, shard()), store) as rank:
            assert await rank.load(prompt.prefix(other)) == 0


async def test_a_store_of_another_tenant_has_nothing(tmp_path: Path) -> None:
    prompt, store, instance = Prompt(PLAIN, NUM_TOKENS), DirectoryStore(tmp_path), cut(PLAIN, shard())
    mine = prompt.store(store, instance, store_salt="a", request_salt="b")
    async with rank_of(instance, store) as rank:
        assert await rank.load(prompt.prefix(instance, store_salt="a", request_salt="c")) == 0
        rank.allocator.release("a")
        assert await rank.load(prompt.prefix(instance, store_salt="ab")) == 0
        rank.allocator.release("a")
        assert await rank.load(mine) == 44


async def test_a_store_that_hangs_costs_its_deadline_and_what_came_before_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, instance, store = Prompt(PLAIN, NUM_TOKENS), cut(PLAIN, shard()), MemoryStore()
    prefix = prompt.store(store, instance)
    page_bytes = sum(source.page_bytes for source in page_sources(PLAIN, instance.shard, instance.shard))
    async with rank_of(instance, store, timeout_s=2.0, batch_bytes=2 * page_bytes) as rank:
        await has_entered(store, num_calls=store.num_calls)
        store.hang_after = 3
        clock = HandClock(monkeypatch)
        loading = asyncio.ensure_future(rank.load(prefix))
        await has_entered(store, num_calls=4)
        assert not loading.done()
        await clock.advance(2.0)
        assert await loading == 2 * 4 * 3
        prompt.check(rank.pool, instance, instance, rank.allocator.tables("a"), 24)


async def has_entered(store: MemoryStore, *, num_calls: int) -> None:
    """Wait until the store's threads have made so many more calls."""
    while num_calls:
        num_calls -= await asyncio.to_thread(store.entered.acquire)
