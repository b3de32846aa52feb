"""Gathers and scatters of host pools beside the loop: their digest tells what did not arrive as it was sent."""

from __future__ import annotations

import asyncio

import pytest
import torch

from node_runtime.host_copy_lane import HostCopyLane
from node_runtime.piece_copier import PieceCopier, PieceCopy
from tests.runtime.instances import until
from transfer.chunk import Chunk
from transfer.errors import LocalProtocolError
from transfer.kernels.digest import DIGEST_WORDS, DIGEST_XXH3, digest
from transfer.kv_pool import KVPool
from transfer.layout import DType, HeadSlice, KVLayout, Route, Shard, Span

LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=8, dtype=DType.FLOAT16)
NUM_TOKENS = 21
LAYERS = Span(begin=0, end=3)
NUM_BYTES = NUM_TOKENS * 3 * 2 * 2 * 8 * 2


def pool_of(page_size: int, *, is_filled: bool) -> KVPool:
    pool = KVPool(layout=LAYOUT, shard=Shard(page_size=page_size), num_pages=9)
    for layer in range(3) if is_filled else ():
        for is_v in (False, True):
            pool.part_of(layer).buffer(layer, is_v=is_v).normal_()
    return pool


def piece(pool: KVPool, pages: list[int]) -> PieceCopy:
    heads = HeadSlice(source_start=0, target_start=0, count=2)
    return PieceCopier(pool).prepare(
        LAYOUT,
        Route(index=0, prefill_rank=0, decode_rank=0, layers=LAYERS, heads=heads),
        Chunk(index=0, tokens=Span(begin=0, end=NUM_TOKENS), layers=LAYERS),
        request_id="r",
        heads=Span(begin=0, end=2),
        num_tokens=NUM_TOKENS,
        dtype=DType.FLOAT16,
        tables=(pages,),
    )


def tokens_of(pool: KVPool, pages: list[int]) -> torch.Tensor:
    size = pool.page_size
    slots = (torch.tensor(pages)[:, None] * size + torch.arange(size)).view(-1)[:NUM_TOKENS]
    return torch.stack([torch.stack(pool.part_of(layer).read(layer, slots)) for layer in range(3)])


@pytest.mark.parametrize("algorithm", [DIGEST_XXH3, DIGEST_WORDS])
async def test_what_was_gathered_is_scattered_and_a_changed_byte_is_told(algorithm: str) -> None:
    crashes: list[BaseException] = []
    lane = HostCopyLane("copies", asyncio.get_running_loop(), crashes.append)
    source, target = pool_of(4, is_filled=True), pool_of(8, is_filled=False)
    pages, target_pages = [5, 0, 3, 6, 1, 8], [7, 2, 4]
    wire = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    gathered: list[int] = []
    scattered: list[bool] = []
    lane.gather(
        piece(source, pages), wire, algorithm=algorithm, peer=1, after=None, on_done=lambda found, seconds: gathered.append(found)
    )
    await until(lambda: bool(gathered))
    assert gathered == [digest(wire, algorithm)]
    wire[NUM_BYTES // 2] ^= 1
    for _ in range(2):  # broken, then as it was sent
        lane.scatter(
            piece(target, target_pages),
            wire,
            algorithm=algorithm,
            digest=gathered[0],
            peer=1,
            on_done=lambda is_intact, seconds: scattered.append(is_intact),
        )
        seen = len(scattered) + 1
        await until(lambda seen=seen: len(scattered) == seen)  # type: ignore[misc]
        wire[NUM_BYTES // 2] ^= 1
    assert scattered == [False, True]
    assert torch.equal(tokens_of(target, target_pages), tokens_of(source, pages))
    others = [page for page in range(9) if page not in target_pages]
    for layer in range(3):
        assert not target.part_of(layer).buffer(layer, is_v=False)[others].any()
    assert not crashes
    assert lane.close(timeout_s=5.0)


async def test_memory_known_only_by_its_address_is_refused() -> None:
    lane = HostCopyLane("copies", asyncio.get_running_loop(), lambda error: None)
    with pytest.raises(LocalProtocolError, match="peer's device memory"):
        lane.gather(
            piece(pool_of(4, is_filled=True), [0, 1, 2, 3, 4, 5]),
            object(),  # type: ignore[arg-type]
            algorithm=DIGEST_XXH3,
            peer=1,
            after=None,
            on_done=print,
        )
    assert lane.close(timeout_s=5.0)
