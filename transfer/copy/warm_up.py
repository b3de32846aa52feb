"""What a first request would wait for, done when a session is attached."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from transfer.chunk import ChunkPlan
from transfer.copy.piece_copier import PieceCopier
from transfer.layout import DType, KVLayout, Range, Route


async def warm_up(
    copier: PieceCopier,
    mine: Sequence[Route],
    plan: ChunkPlan,
    *,
    device: torch.device,
    layout: KVLayout,
    dtype: DType,
    scales: Mapping[tuple[int, bool], float] | None,
    is_gather: bool,
) -> None:
    """Compile the kernels that the routes' pieces need, beside the owner's loop. Nothing to do for a pool in host memory.

    Args:
        mine: Routes of this rank.
        plan: How requests are cut.
        device: Of the pool.
        dtype: Element type on the wire.
        is_gather: Whether this rank is their source.
    """
    if device.type == "cpu":
        return
    for route in mine:
        start = route.heads.source_start if is_gather else route.heads.target_start
        heads = Range(begin=start, end=start + route.heads.count)
        work = partial(copier.warm, layout, route, plan, heads=heads, dtype=dtype, scales=scales, is_gather=is_gather)
        await asyncio.get_running_loop().run_in_executor(None, work)
