"""An engine that changes its role: the weights stay, the pool is another one, and what it computes is the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from embedded_engine import causal_model
from embedded_engine.loading import NodeEngine, load_engine
from tests.runtime.instances import decode_config, prefill_config
from transfer.engine_types import DecodeItem, PrefillItem, SamplingParams
from transfer.errors import MemoryPlanError

PROMPT = tuple(range(3, 28))


def prefill(engine: NodeEngine) -> int:
    item = PrefillItem(
        request_id="a",
        token_ids=PROMPT,
        first_token=0,
        page_tables=(tables(engine),),
        sampling=SamplingParams(),
        is_last=True,
    )
    return engine.prefill([item])["a"]


def generate(engine: NodeEngine, first: int, count: int) -> list[int]:
    """Decode from the KV that a prompt of the same pool has."""
    tokens = [first]
    for position in range(len(PROMPT), len(PROMPT) + count):
        item = DecodeItem(
            request_id="a", token_id=tokens[-1], position=position, page_tables=(tables(engine),), sampling=SamplingParams()
        )
        tokens.append(engine.decode([item])["a"])
    return tokens


def tables(engine: NodeEngine) -> Sequence[int]:
    return range(-(-64 // engine.pool.page_size))


def test_each_role_computes_what_an_engine_that_was_loaded_for_it_computes(
    demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_prefill = prefill_config(demo_dir, pool={"page_size": 8, "num_pages": 16}, chunk={"layers_per_group": 3})
    as_decode = decode_config(demo_dir, pool={"page_size": 32, "num_pages": 9}, limits={"max_seq_len": 100})
    engine = load_engine(as_prefill, rank=0, rendezvous=tmp_path / "first")
    expected = generate(engine, prefill(engine), 5)
    monkeypatch.setattr(causal_model, "load_causal_lm", None)  # the weights stay
    for config, page_size, pages, most, layers in (
        (as_decode, 32, (9,), 100, engine.layout.num_layers),
        (as_prefill, 8, (16,), engine.files.max_context_tokens, 3),
    ):
        before: Any = weakref.ref(engine.pool)
        assert engine.switch_role(config) is engine
        gc.collect()
        assert before() is None, "the pool before is given back"
        assert (engine.pool.page_size, engine.pool.num_pages, engine.shard.page_size) == (page_size, pages, page_size)
        assert (engine.max_context_tokens, engine.layers_per_group) == (most, layers)
        assert generate(engine, prefill(engine), 5) == expected
    engine.close()


def test_an_engine_that_has_no_room_for_a_role_goes_back_to_the_other(demo_dir: Path, tmp_path: Path) -> None:
    first = prefill_config(demo_dir, pool={"num_pages": 8})
    engine = load_engine(first, rank=0, rendezvous=tmp_path / "first")
    token = prefill(engine)
    with pytest.raises(MemoryPlanError):
        engine.switch_role(decode_config(demo_dir, ring={"capacity_bytes": 1 << 50}))
    assert engine.switch_role(first) is engine and prefill(engine) == token
    engine.close()
