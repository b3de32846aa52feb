"""Requests most of whose pages leave the device while they run, on small engines of either kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.graphs import DecodeGraphs
from tests.embedded_engine.steps import PageBook, Prompts, prefill_all
from tests.embedded_engine.tiers import ALL_BUT_NEWEST, HALF, HostEnd, StoredPages, Tiers, full_group, host_pool_of, largest_slice
from tests.gpu.small_engines import make_engine

LENGTHS = {"a": 129, "b": 5, "c": 64, "d": 33}
ENDS: dict[str, HostEnd] = {"a": ALL_BUT_NEWEST, "c": HALF, "d": ALL_BUT_NEWEST}
NUM_TOKENS = 8
NUM_ROWS = 4
LAUNCHED, REPLAYED = 3, 60
"""Pages of a block, for the lengths above: fewer than half of a step's host pages, and more."""


def roomy_engine(directory: Path, device: str, **settings: Any) -> EmbeddedEngine:
    return make_engine(directory, device, num_tokens=480, max_seq_len=160, has_host_pages=True, **settings)


def tiered_tokens(engine: Any, prompts: Prompts, pages_per_block: int, *, stored_pages: int = 0) -> dict[str, list[int]]:
    """`NUM_TOKENS` tokens of each request.

    Args:
        engine: A `roomy_engine`, or what stands for one; it has had no host pool yet.
        prompts: By their lengths.
        pages_per_block: Of its host blocks.
        stored_pages: Pages of a block that moves on to the store; 0 if nothing does.
    """
    book = PageBook.of(engine, {name: length + NUM_TOKENS for name, length in LENGTHS.items()})
    host = host_pool_of(engine, 240 // engine.pool.page_size + 8)
    group = full_group(engine.pool.groups)
    stored = StoredPages(host, group, pages_per_block=stored_pages) if stored_pages else None
    engine.use_host_pool(host, block_bytes=pages_per_block * largest_slice(host, group), stored=stored)
    first = prefill_all(engine, {name: prompts[length] for name, length in LENGTHS.items()}, book)
    found = Tiers(engine, host, book, ENDS, stored).decode(first, LENGTHS, NUM_TOKENS)
    if engine.pool.device.type == "cuda":
        torch.cuda.synchronize(engine.pool.device)
    host.close()
    return found


def note_replays(patch: Any) -> list[int]:
    """The batch size of every step that is replayed from now on.

    Args:
        patch: `pytest.MonkeyPatch`, or what has its `setattr`.
    """
    replayed: list[int] = []
    replay = DecodeGraphs.replay

    def noted(graphs: DecodeGraphs, size: int) -> Tensor:
        replayed.append(size)
        return replay(graphs, size)

    patch.setattr(DecodeGraphs, "replay", noted)
    return replayed
