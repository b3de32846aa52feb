"""Copies on a GPU's queue: behind the engine's event, without the loop waiting, with the digest of what they moved."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.runtime.pieces import piece_of
from transfer.chunk import ChunkPlan, split_into_chunks
from transfer.copy import Kernels
from transfer.copy.copy_queue import CopyQueue, open_copy_queue
from transfer.copy.digest import DIGEST_WORDS, digest
from transfer.copy.piece_copier import PieceCopier, PieceCopy
from transfer.layout import DType, KVLayout, Shard, routes
from transfer.pool.kv_pool import KVPool

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=64, dtype=DType.BFLOAT16)
PAGES = [5, 2, 7, 0]
BUSY_CYCLES = 400_000_000  # 0.2 s of an H200


@dataclass(slots=True)
class Side:
    """A pool on the GPU, a queue beside it, and 64 tokens of a request."""

    name: str
    pool: KVPool
    copier: PieceCopier
    queue: CopyQueue

    @classmethod
    def open(cls, name: str, kernels: Kernels) -> Side:
        device = torch.device("cuda", torch.cuda.current_device())
        pool = KVPool(layout=LAYOUT, shard=Shard(page_size=16), num_pages=8, device=device)
        for buffer in (pool.buffer(layer, is_v=is_v) for layer in range(LAYOUT.num_layers) for is_v in (False, True)):
            buffer.normal_(std=float(name == "gather"))
        torch.cuda.synchronize()
        queue = open_copy_queue(name, device, asyncio.get_running_loop(), _crash)
        return cls(name, pool, PieceCopier(pool, is_source=name == "gather", kernels=kernels), queue)

    def piece(self) -> PieceCopy:
        (route,) = routes(LAYOUT, Shard(page_size=16), Shard(page_size=16))
        (chunk,) = split_into_chunks(ChunkPlan(chunk_tokens=64), num_tokens=64, num_layers=2)
        return self.copier.prepare(piece_of(LAYOUT, route, chunk, num_tokens=64, dtype=DType.BFLOAT16), [PAGES])

    def wire(self) -> Tensor:
        """Memory for the piece, there for every stream."""
        found = torch.zeros(self.piece().num_wire_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        return found

    def tokens(self) -> list[Tensor]:
        slots = (torch.tensor(PAGES, device="cuda")[:, None] * 16 + torch.arange(16, device="cuda")).view(-1)
        return [part for layer in range(2) for part in self.pool.read(layer, slots)]


def _crash(error: BaseException) -> None:
    raise AssertionError(f"the queue crashed: {error!r}")


async def gathered(side: Side, wire: Tensor, after: torch.cuda.Event | None) -> tuple[int, float]:
    """Return the digest, and the seconds of the copy."""
    done: asyncio.Future[tuple[int, float, float]] = asyncio.get_running_loop().create_future()
    side.queue.gather(
        side.piece(), wire, algorithm=DIGEST_WORDS, peer=1, after=after, on_done=lambda *result: done.set_result(result)
    )
    found, begun_s, ended_s = await asyncio.wait_for(done, 30)
    return found, ended_s - begun_s


async def scattered(side: Side, wire: Tensor, announced: int) -> tuple[bool, float]:
    done: asyncio.Future[tuple[bool, float]] = asyncio.get_running_loop().create_future()
    side.queue.scatter(
        side.piece(), wire, algorithm=DIGEST_WORDS, digest=announced, peer=1, on_done=lambda *result: done.set_result(result)
    )
    return await asyncio.wait_for(done, 30)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kernels", [Kernels.TRITON, Kernels.TORCH])
async def test_a_piece_goes_from_pool_to_pool_with_its_digest(kernels: Kernels) -> None:
    source, target = Side.open("gather", kernels), Side.open("scatter", kernels)
    wire = source.wire()
    for _ in range(3):  # the digest is the difference to the copy before
        found, seconds = await gathered(source, wire, None)
        assert found == digest(wire.cpu().numpy(), DIGEST_WORDS) and 0 < seconds < 10
        target.queue.expect(target.piece(), peer=1)
        is_intact, _ = await scattered(target, wire, found)
        assert is_intact
        assert not (await scattered(target, wire, found ^ 1))[0]
    for mine, theirs in zip(source.tokens(), target.tokens(), strict=True):
        assert torch.equal(mine, theirs)
    assert source.queue.close(5) and target.queue.close(5)
