"""Blocks of running requests in a directory: they are read as they were put, ahead of their use, and a fault ends one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import torch

from decode_node.offload.running_blocks import RunningBlocks
from tests.runtime.instances import instance
from transfer.breaker import BreakerSettings
from transfer.engine_types import StoredRead
from transfer.layout import DType, KVLayout, LayerSpec, Shard
from transfer.metrics import RankMetrics
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool
from transfer.storage.base import Outcome, Store
from transfer.storage.client import StoreClient, StoreClientSettings
from transfer.storage.directory import DirectoryStore
from transfer.storage.object_store import ObjectStore

WIDE = LayerSpec(num_kv_heads=2, k_head_dim=4, v_head_dim=2)
NARROW = LayerSpec(num_kv_heads=2, k_head_dim=2, v_head_dim=2)
LAYERS = (WIDE, NARROW, WIDE)
PAGES = 2
"""Pages of a block."""


class FaultyDirectory(DirectoryStore):
    """Fails the next so many puts, and counts gets."""

    num_faults = 0
    num_gets = 0

    def put(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        if self.num_faults:
            self.num_faults -= 1
            return [Outcome.FAILED] * len(pages)
        return super().put(pages, used_ns=used_ns)

    def get(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        self.num_gets += len(pages)
        return super().get(pages, used_ns=used_ns)


class Rank:
    """A rank's host pool, and its blocks in a directory."""

    def __init__(self, directory: Path, store: Store | None = None) -> None:
        loop = asyncio.get_running_loop()
        pool = KVPool(layout=KVLayout(layers=LAYERS, dtype=DType.FLOAT32), shard=Shard(page_size=4), num_pages=1, device="cpu")
        self.directory = directory
        self.host = HostPool(pool, num_pages=[10])
        self.host.pages(0).copy_(torch.randint(0, 255, self.host.pages(0).shape, dtype=torch.uint8))
        metrics = RankMetrics(role="decode", rank=0)
        self.store = FaultyDirectory(directory)
        self.client = StoreClient(
            store or self.store,
            loop=loop,
            settings=StoreClientSettings(
                put_timeout_s=30,
                get_timeout_s=30,
                queue_bytes=1 << 20,
                threads=2,
                breaker=BreakerSettings(failures=1000, window_s=1.0, pause_s=1.0, max_pause_s=1.0),
            ),
            observer=metrics.store,
        )
        self.blocks = RunningBlocks(
            self.host,
            self.client,
            loop=loop,
            instance=instance(1),
            pool=pool,
            pages_per_block=PAGES,
            num_buffers=3,
            pause_s=0.0,
        )

    def files(self) -> list[Path]:
        return [path for path in self.directory.glob("*/*/*") if path.is_file()]

    async def put(self, request_id: str, *host_pages: Sequence[int]) -> list[int]:
        found = [await self.blocks.put(request_id, index, pages) for index, pages in enumerate(host_pages)]
        return [number for number in found if number is not None]

    def step(self, numbers: Sequence[int]) -> list[bytes | None]:
        """What a step reads of these blocks, layer by layer; on the engine's thread."""
        reads = [StoredRead(layer=layer, block=number) for layer in range(len(LAYERS)) for number in numbers]
        self.blocks.begin(reads)
        found: list[bytes | None] = []
        for read in reads:
            buffer = self.blocks.next()
            if buffer is None:
                found.append(None)
                continue
            num_bytes = PAGES * self._slice(read.layer)[1]
            found.append(self.blocks.buffers[buffer][:num_bytes].numpy().tobytes())
            self.blocks.release(buffer)
        return found

    @staticmethod
    def _slice(layer: int) -> tuple[int, int]:
        """First byte and size of a layer's part of a page."""
        sizes = [4 * one.num_kv_heads * (one.k_head_dim + one.v_head_dim) * 4 for one in LAYERS]
        return sum(sizes[:layer]), sizes[layer]

    def expected(self, *host_pages: Sequence[int]) -> list[bytes]:
        found = []
        for layer in range(len(LAYERS)):
            begin, size = self._slice(layer)
            found += [self.host.pages(0)[list(pages), begin : begin + size].numpy().tobytes() for pages in host_pages]
        return found


@pytest.fixture
async def rank(tmp_path: Path) -> AsyncIterator[Rank]:
    found = Rank(tmp_path)
    yield found
    await found.client.close()


async def test_every_layer_of_every_block_is_read_as_it_was_put(rank: Rank) -> None:
    pages = [(3, 1), (0, 9), (7, 4), (2, 6)]
    numbers = await rank.put("a", *pages)
    expected = rank.expected(*pages)
    rank.host.pages(0).zero_()
    for _ in range(2):
        assert await asyncio.to_thread(rank.step, numbers) == expected
    assert len(rank.files()) == len(LAYERS) * len(pages)
    await rank.blocks.forget(numbers[:2])
    assert await asyncio.to_thread(rank.step, numbers[2:]) == [expected[at] for at in (2, 3, 6, 7, 10, 11)]
    await rank.blocks.forget(numbers[2:])
    assert not rank.files() and not rank.blocks.take_lost()


async def test_an_object_store_has_the_same_objects(tmp_path: Path) -> None:
    rank = Rank(tmp_path, ObjectStore(f"file://{tmp_path}", timeout_s=30.0))
    numbers = await rank.put("a", (3, 1), (0, 9))
    assert await asyncio.to_thread(rank.step, numbers) == rank.expected((3, 1), (0, 9))
    assert len([path for path in tmp_path.rglob("*-running") if path.is_file()]) == 2 * len(LAYERS)
    await rank.blocks.forget(numbers)
    assert not [path for path in tmp_path.rglob("*-running") if path.is_file()]
    await rank.client.close()


async def test_a_block_that_is_gone_ends_its_request_alone(rank: Rank) -> None:
    """Once it is known, no other block of the request is asked for in that step."""
    lost, other = await rank.put("a", (0, 1), (2, 3), (4, 5)), await rank.put("b", (6, 7))
    for path in rank.files():
        if path.name in {key.partition("/")[2] for key in rank.blocks.keys_of(lost[1]).values()}:
            path.unlink()
    numbers = [*other, *lost]
    found = await asyncio.to_thread(rank.step, numbers)
    assert [found[4 * layer] for layer in range(len(LAYERS))] == rank.expected((6, 7))
    assert found[2] is None and found[-3:] == [None] * 3
    assert rank.store.num_gets < len(found) + 2, "three attempts at the lost one, and not all of those behind it"
    lost_requests = rank.blocks.take_lost()
    assert lost_requests.keys() == {"a"} and str(rank.directory) in lost_requests["a"]
    assert not rank.blocks.take_lost()


async def test_what_a_failed_step_has_not_used_is_given_up(rank: Rank) -> None:
    numbers = await rank.put("a", (0, 1), (2, 3), (4, 5), (6, 7))

    def failed_step() -> None:
        rank.blocks.begin([StoredRead(layer=0, block=number) for number in numbers])
        buffer = rank.blocks.next()
        assert buffer is not None
        rank.blocks.release(buffer)

    await asyncio.to_thread(failed_step)
    assert await asyncio.to_thread(rank.step, numbers) == rank.expected((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(("num_faults", "is_stored"), [(2, True), (3, False)])
async def test_a_put_is_tried_again_and_leaves_nothing_behind(rank: Rank, num_faults: int, is_stored: bool) -> None:
    rank.store.num_faults = num_faults
    numbers = await rank.put("a", (0, 1))
    assert bool(numbers) is is_stored
    assert len(rank.files()) == (len(LAYERS) if is_stored else 0)
