"""An engine that finds no memory while it loads raises the line that its node logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from embedded_engine import engine, tensor_parallel
from embedded_engine.engine import EmbeddedEngine
from planner.workspace import XAttention
from transfer.errors import EngineError, OutOfMemory
from transfer.layout import Shard

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def refuse(*_: Any, **__: Any) -> Any:
    raise NO_MEMORY


def test_a_pool_that_the_system_refuses(demo_dir: Path) -> None:
    """The system refuses a real allocation of half an exbibyte."""
    says = (
        r"^out of memory while allocating the KV pool of 35184372088832 pages: [\d,.]+ GiB asked for, the host has .* free; "
        r"lower memory.static_fraction or pool.num_pages$"
    )
    with pytest.raises(OutOfMemory, match=says):
        EmbeddedEngine(demo_dir, shard=Shard(page_size=1), num_pages=2**45)


def test_weights_that_do_not_fit_where_they_go(demo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedModel, "to", refuse)
    says = r"^out of memory while loading the weights: [\d.]+ MiB asked for, .*; raise parallel.tp_size"
    with pytest.raises(OutOfMemory, match=says):
        EmbeddedEngine(demo_dir, shard=Shard(), num_pages=2)


def test_workspaces_that_do_not_fit(demo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SparsePrefill", refuse)
    says = (
        r"^out of memory while allocating the workspaces of block-sparse prefill: .*; lower chunk.chunk_tokens, "
        r"limits.max_seq_len or memory.static_fraction, or raise prefill.sparse_stride$"
    )
    with pytest.raises(OutOfMemory, match=says):
        EmbeddedEngine(demo_dir, shard=Shard(), num_pages=2, sparse_prefill=XAttention(), chunk_tokens=16)


@pytest.mark.parametrize("num_after", [1, 2])
def test_a_loader_that_hides_why_it_failed(demo_dir: Path, monkeypatch: pytest.MonkeyPatch, num_after: int) -> None:
    """transformers does where it joins the tensors of experts; torch counts the failures all the same."""
    counts = iter((1, num_after))
    monkeypatch.setattr(tensor_parallel, "num_ooms", lambda device: next(counts))

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("We encountered some issues during automatic conversion of the weights.")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", fail)
    with pytest.raises(EngineError) as failed:
        EmbeddedEngine(demo_dir, shard=Shard(), num_pages=2)
    assert isinstance(failed.value, OutOfMemory) is (num_after == 2)
