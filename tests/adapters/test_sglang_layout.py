"""SGLang's pools as ours, from the shapes that its own classes were seen to have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engines.sglang_layout import EngineCut, page_table, read_pool
from transfer.errors import LayoutError
from transfer.layout import DType, KVLayout, LayerKind

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "recorded" / "sglang-0.5.23-pools.json").read_text(encoding="utf-8")
)


def pool_of(name: str, **changes: Any) -> Any:
    """An object with the class name, attributes and tensors that were recorded."""
    described = {**RECORDED[name], **changes}
    pool = type(described.pop("class"), (), {})()
    for attribute, value in described.items():
        if attribute in ("dtype", "store_dtype"):
            value = getattr(torch, value.removeprefix("torch."))
        elif attribute.endswith("_buffer"):
            value = [
                torch.empty_strided(one["shape"], one["stride"], dtype=getattr(torch, one["dtype"].removeprefix("torch.")))
                for one in value
            ]
        elif isinstance(value, list):
            value = {layer: place for layer, place in value}
        setattr(pool, attribute, value)
    return pool


def cut(**changes: Any) -> EngineCut:
    given = {"num_layers": 4, "num_kv_heads": 4, "tp_size": 1, "tp_rank": 0, "dtype": "torch.float32"}
    return EngineCut(**{**given, **changes})


@pytest.mark.parametrize(
    ("name", "num_pages", "page_size"), [("mha", 257, 16), ("mha_page1", 4097, 1), ("mha_uneven", 7, 16), ("mha_v64", 7, 16)]
)
def test_pages_are_sglangs_own_memory(name: str, num_pages: int, page_size: int) -> None:
    pool = pool_of(name)
    view = read_pool(pool, cut())
    assert view.num_pages == (num_pages,)
    for layer in range(4):
        for is_v, theirs in ((False, pool.k_buffer[layer]), (True, pool.v_buffer[layer])):
            ours = view.buffer(layer, is_v=is_v)
            assert ours.data_ptr() == theirs.data_ptr() and tuple(ours.shape[:2]) == (num_pages, page_size)
            slot = num_pages * page_size - 3 if page_size > 3 else num_pages - 3
            theirs[slot].fill_(7)  # a slot of SGLang is a token at that place of ours
            assert torch.equal(ours[slot // page_size, slot % page_size], theirs[slot])


def test_layout_is_the_one_that_the_embedded_engine_has() -> None:
    found = read_pool(pool_of("mha"), cut())
    assert found.layout == KVLayout.uniform(num_layers=4, num_kv_heads=4, head_dim=32, dtype=DType.FLOAT32)
    assert found.shard.page_size == 16 and found.shard.dtype is DType.FLOAT32


def test_a_rank_of_two_has_its_half_of_the_heads() -> None:
    found = read_pool(pool_of("mha_tp2"), cut(tp_size=2, tp_rank=1))
    assert found.shard.tp_rank == 1 and found.buffer(0, is_v=True).shape[2] == 2


def test_heads_of_another_cut_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"k of layer 0 is \(4112, 2, 32\); must be \[slots, 4, 32\]"):
        read_pool(pool_of("mha_tp2"), cut())


def test_pool_in_another_dtype_than_the_model() -> None:
    found = read_pool(pool_of("mha_uneven"), cut(dtype="torch.float32"))
    assert found.layout.dtype is DType.FLOAT32 and found.shard.dtype is DType.BFLOAT16


def test_latents() -> None:
    found = read_pool(pool_of("mla"), cut(num_kv_heads=128, tp_size=8, tp_rank=3, dtype="bfloat16"))
    spec = found.layout.layers[0]
    assert (spec.kind, spec.num_kv_heads, spec.k_head_dim, spec.v_head_dim) == (LayerKind.MLA, 1, 576, 0)
    assert tuple(found.buffer(3, is_v=False).shape) == (7, 16, 1, 576)


@pytest.mark.parametrize(
    ("name", "pool", "changes", "message"),
    [
        ("swa", {}, {}, "layer 0 has a sliding window in a pool of its own"),
        ("hybrid", {}, {}, "layer 0 keeps a state and no KV"),
        ("mha", {"class": "PageInterleaveMHATokenToKVPool"}, {}, "layer 0 is in a pool of class PageInterleaveMHATokenToKVPool"),
        ("mha", {"kv_cache_layout": "vectorized_5d"}, {}, "layer 0 is stored as vectorized_5d"),
        ("mha_float8", {}, {}, "layer 0 is stored as torch.float8_e4m3fn .in torch.uint8., which cannot be moved yet"),
        ("mha_stage", {}, {"num_layers": 8}, r"the pool has layers \[4, 8\); must be all 8"),
    ],
)
def test_what_cannot_be_moved_is_named(name: str, pool: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        read_pool(pool_of(name, **pool), cut(**changes))


def test_a_draft_model_is_refused() -> None:
    with pytest.raises(LayoutError, match="layer 0 of the draft model"):
        read_pool(pool_of("mha"), cut(), draft_pool=pool_of("mha"))


def test_page_table_of_a_prompt_whose_beginning_is_there_already() -> None:
    assert page_table([7, 9], start_token=0, page_size=16) == (7, 9)
    assert page_table([7, 9], start_token=32, page_size=16) == (0, 0, 7, 9)
    with pytest.raises(LayoutError, match="start_token is 8; must be a multiple of the pool's page_size, 16"):
        page_table([7, 9], start_token=8, page_size=16)
