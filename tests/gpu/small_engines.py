"""Engines of small models, on a GPU and on the CPU that it is held against, and prompts for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from embedded_engine.engine import EmbeddedEngine
from tests.embedded_engine import steps
from tests.embedded_engine.decode_scenario import MAX_RUNNING, MAX_SEQ_LEN
from tests.embedded_engine.steps import Prompts
from transfer.layout import Shard


def make_engine(
    directory: Path,
    device: str,
    *,
    captured: Sequence[int] = (),
    shard: Shard | None = None,
    num_tokens: int = 400,
    max_seq_len: int = MAX_SEQ_LEN,
    **settings: Any,
) -> EmbeddedEngine:
    """An engine whose pool has room for so many tokens, on pages of four unless the shard says otherwise."""
    return steps.make_engine(
        directory,
        shard or Shard(page_size=4),
        num_tokens=num_tokens,
        num_states=5,
        device=device,
        max_seq_len=max_seq_len,
        max_running_requests=MAX_RUNNING,
        cuda_graph_batch_sizes=captured,
        **settings,
    )


def prompts_of(lengths: Iterable[int]) -> Prompts:
    """Prompts by length, of tokens that every model of these tests has."""
    generator = torch.Generator().manual_seed(11)
    return {length: tuple(torch.randint(3, 240, (length,), generator=generator).tolist()) for length in lengths}
