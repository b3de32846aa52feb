"""SGLang's pools as ours, from the shapes that its own classes were seen to have."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.engines.sglang_layout import EngineCut, StageLayers, page_addresses, page_tables, read_pool
from transfer.copy.request_tables import RequestTables
from transfer.errors import LayoutError
from transfer.layer_groups import NO_PAGE, GroupKind
from transfer.layout import DType, KVLayout, LayerKind, TokenOrder
from transfer.local_pair import LocalPair

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "recorded" / "sglang-0.5.23-pools.json").read_text(encoding="utf-8")
)
FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


def tensor_of(one: dict[str, Any]) -> torch.Tensor:
    return torch.empty_strided(one["shape"], one["stride"], dtype=torch_dtype(one["dtype"]))


def pool_of(name: str, **changes: Any) -> Any:
    """An object with the class name, attributes and tensors that were recorded. Changes of a part are a dict."""
    return built({**RECORDED[name], **changes})


def built(described: dict[str, Any]) -> Any:
    attributes = dict(described)
    pool = type(attributes.pop("class"), (), {})()
    for attribute, value in attributes.items():
        if attribute in ("dtype", "store_dtype"):
            value = torch_dtype(value)
        elif attribute.endswith("_buffer"):
            value = [tensor_of(one) for one in value]
        elif attribute.endswith("_mapping"):
            value = {layer: place for layer, place in value}
        elif attribute == "mamba_cache":
            value = SimpleNamespace(conv=[tensor_of(one) for one in value["conv"]], temporal=tensor_of(value["temporal"]))
        elif attribute == "num_state_entries":
            attribute, value = "get_contiguous_buf_infos", lambda count=value: ([0] * count, [], [])
        elif isinstance(value, dict):
            value = built(value)
        setattr(pool, attribute, value)
    return pool


def part_of(name: str, part: str, **changes: Any) -> dict[str, Any]:
    """Changes of a recorded pool that change a part of it."""
    return {part: {**RECORDED[name][part], **changes}}


def cut(**changes: Any) -> EngineCut:
    given = {"num_layers": 4, "num_kv_heads": 4, "window_kv_heads": 4, "tp_size": 1, "tp_rank": 0, "dtype": "torch.float32"}
    return EngineCut(**{**given, **changes})


@pytest.mark.parametrize(
    ("name", "num_pages", "page_size"), [("mha", 257, 16), ("mha_page1", 4097, 1), ("mha_uneven", 7, 16), ("mha_v64", 7, 16)]
)
def test_pages_are_sglangs_own_memory(name: str, num_pages: int, page_size: int) -> None:
    pool = pool_of(name)
    view = read_pool(pool, cut()).view
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
    assert found.view.layout == KVLayout.uniform(num_layers=4, num_kv_heads=4, head_dim=32, dtype=DType.FLOAT32)
    assert found.view.shard.page_size == 16 and found.view.shard.dtype is DType.FLOAT32 and found.kv_scales == ()


def test_a_rank_of_two_has_its_half_of_the_heads() -> None:
    found = read_pool(pool_of("mha_tp2"), cut(tp_size=2, tp_rank=1)).view
    assert found.shard.tp_rank == 1 and found.buffer(0, is_v=True).shape[2] == 2


def test_heads_of_another_cut_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"k of layer 0 is \(4112, 2, 32\); must be \[slots, 4, 32\]"):
        read_pool(pool_of("mha_tp2"), cut())


def test_pool_in_another_dtype_than_the_model() -> None:
    found = read_pool(pool_of("mha_uneven"), cut(dtype="torch.float32")).view
    assert found.layout.dtype is DType.FLOAT32 and found.shard.dtype is DType.BFLOAT16


def test_latents() -> None:
    found = read_pool(pool_of("mla"), cut(num_kv_heads=128, tp_size=8, tp_rank=3, dtype="bfloat16")).view
    spec = found.layout.layers[0]
    assert (spec.kind, spec.num_kv_heads, spec.k_head_dim, spec.v_head_dim) == (LayerKind.MLA, 1, 576, 0)
    assert tuple(found.buffer(3, is_v=False).shape) == (7, 16, 1, 576)


@pytest.mark.parametrize("name", ["mha_float8", "mla_float8"])
def test_eight_bit_floats_have_the_scales_of_their_layers(name: str) -> None:
    """SGLang keeps them as bytes."""
    pool = pool_of(name)
    scale = (1.0, 1.0) if name == "mla_float8" else (0.5, 0.25)
    found = read_pool(pool, cut(dtype="bfloat16", scales={2: scale}))
    assert found.view.shard.dtype is DType.FLOAT8_E4M3
    assert found.kv_scales == ((1.0, 1.0), (1.0, 1.0), scale, (1.0, 1.0))
    theirs = (pool.kv_buffer if name == "mla_float8" else pool.k_buffer)[1]
    ours = found.view.buffer(1, is_v=False)
    theirs[20] = torch.full_like(theirs[20], 1.5, dtype=torch.float8_e4m3fn).view(torch.uint8)
    assert theirs.dtype is torch.uint8 and ours.data_ptr() == theirs.data_ptr()
    assert (ours[1, 4].float() == 1.5).all()


def test_pages_with_the_heads_first() -> None:
    pool = pool_of("mha_hnd")
    view = read_pool(pool, cut()).view
    assert view.order is TokenOrder.HND and view.num_pages == (7,)
    pool.v_buffer[3][2, 1, 5] = 7.0
    slots = torch.tensor([2 * 16 + 5])
    assert (view.read(3, slots)[1][0, 1] == 7.0).all()
    addresses, sizes, page_sizes = page_addresses(pool)
    assert addresses == [one.data_ptr() for one in (*pool.k_buffer, *pool.v_buffer)]
    assert set(page_sizes) == {4 * 16 * 32 * 4} and set(sizes) == {7 * page_sizes[0]}


# Sliding windows


def test_windows_have_pages_of_their_own() -> None:
    pool = pool_of("swa")
    view = read_pool(pool, cut(window_tokens=40)).view
    assert [spec.window_tokens for spec in view.layout.layers] == [40, 0, 40, 0]
    assert [group.kind for group in view.groups] == [FULL, WINDOW] and view.num_pages == (7, 4)
    assert view.buffer(2, is_v=False).data_ptr() == pool.swa_kv_pool.k_buffer[1].data_ptr()
    assert view.buffer(3, is_v=True).data_ptr() == pool.full_kv_pool.v_buffer[1].data_ptr()


def test_a_model_of_windows_alone_has_one_table() -> None:
    mapping = {"layers_mapping": [[0, [0, True]], [1, [1, True]]]}
    view = read_pool(pool_of("swa", **mapping), cut(num_layers=2, window_tokens=40)).view
    assert [group.kind for group in view.groups] == [WINDOW]


def test_table_of_a_window_ends_with_the_prompt() -> None:
    """SGLang has the pages from the one with the window's first token on. Tokens of pages are counted from token 0."""
    groups = read_pool(pool_of("swa"), cut(window_tokens=40)).view.groups
    tables = page_tables(groups, range(20, 29), {WINDOW: [3, 1, 2, 5]}, start_token=0, num_tokens=135, page_size=16)
    assert tables == (tuple(range(20, 29)), (*(NO_PAGE,) * 5, 3, 1, 2, 5))
    assert page_tables(groups, [7], {}, start_token=0, num_tokens=135, page_size=16) == ((7,), ())
    with pytest.raises(LayoutError, match="SGLang has 4 pages of window_40 for 33 tokens, in pages of 16"):
        page_tables(groups, [7, 8, 9], {WINDOW: [3, 1, 2, 5]}, start_token=0, num_tokens=33, page_size=16)


# States


def test_a_state_is_one_layer_for_each_part_that_is_sharded_by_itself() -> None:
    pool = pool_of("hybrid_gdn")
    view = read_pool(pool, cut()).view
    states = [spec for spec in view.layout.layers if spec.kind is LayerKind.RECURRENT_STATE]
    assert [(spec.num_kv_heads, spec.k_head_dim, spec.dtype) for spec in states[:4]] == [
        (32, 3, DType.BFLOAT16), (32, 3, DType.BFLOAT16), (64, 3, DType.BFLOAT16), (8, 64, DType.FLOAT32),
    ]  # fmt: skip
    assert len(states) == 8 and view.layout.num_layers == 10
    assert [group.kind for group in view.groups] == [FULL, STATE, STATE] and view.num_pages == (7, 7, 7)
    pool.mamba_pool.mamba_cache.conv[0][1, 5, 32:64] = 9.0
    keys = view.buffer(6, is_v=False)  # of layer 2: after three blocks, a recurrence, layer 1, and the block of queries
    assert (keys[5] == 9.0).all() and keys.shape == (7, 1, 32, 3)
    tables = page_tables(view.groups, [4, 5], {STATE: [6]}, start_token=0, num_tokens=20, page_size=16)
    assert tables == ((4, 5), (6,), (6,))


def test_states_of_two_ranks_are_parts_of_the_same_layout() -> None:
    one = read_pool(pool_of("hybrid_gdn"), cut()).view
    two = read_pool(pool_of("hybrid_tp2_gdn"), cut(tp_size=2, tp_rank=1)).view
    assert two.layout == one.layout


def test_states_whose_shards_are_unknown_go_to_the_same_ranks_only() -> None:
    one = read_pool(pool_of("hybrid_mamba2"), cut()).view
    convolution = one.layout.layers[0]
    assert (convolution.num_kv_heads, convolution.k_head_dim) == (1, 128 * 3)
    two = read_pool(pool_of("hybrid_mamba2"), cut(tp_size=2, tp_rank=0, num_kv_heads=8)).view
    assert any("layers[0:1]: recurrent_state kv_heads=1" in text for text in one.layout.differences(two.layout))


def test_inputs_of_kdas_convolutions_are_parts_of_their_own() -> None:
    """Its channels are the last dimension, and on a GPU a head's elements must be adjacent."""
    pool = pool_of("hybrid_kda")
    view = read_pool(pool, cut(tp_size=2, tp_rank=0, num_kv_heads=8)).view
    specs = [(spec.num_kv_heads, spec.k_head_dim) for spec in view.layout.layers[:10]]
    assert specs == [(64, 1)] * 9 + [(8, 64)]
    pool.mamba_pool.mamba_cache.conv[0][1, 5, 2, 32:64] = 3.0  # of layer 2, the newest input, the second block
    found = view.buffer(10 + 1 + 7, is_v=False)
    assert (found[5] == 3.0).all() and found.shape == (7, 1, 32, 1) and found.stride(-1) == 1


async def test_states_of_two_ranks_become_those_of_one() -> None:
    """In SGLang's own tensors: convolutions by blocks of channels, recurrences by heads."""
    sources, target = [pool_of("hybrid_tp2_gdn") for _ in range(2)], pool_of("hybrid_gdn")
    views = [read_pool(pool, cut(tp_size=2, tp_rank=rank)).view for rank, pool in enumerate(sources)]
    whole = read_pool(target, cut()).view
    convolution, recurrence = torch.randn(128, 3).bfloat16(), torch.randn(8, 8, 8)  # of layer 2, which is index 1
    blocks = convolution.split([32, 32, 64])
    for rank, pool in enumerate(sources):
        cache = pool.mamba_pool.mamba_cache
        cache.conv[0][1, 3] = torch.cat([block.chunk(2)[rank] for block in blocks])
        cache.temporal[1, 3] = recurrence.chunk(2)[rank]
    async with LocalPair(views, [whole]) as pair:
        tables = [((4, 5), (3,), (3,))] * 2, [((1, 2), (6,), (6,))]
        await pair.transfer("a", num_tokens=20, prefill_tables=tables[0], decode_tables=tables[1])
    cache = target.mamba_pool.mamba_cache
    assert torch.equal(cache.conv[0][1, 6], convolution) and torch.equal(cache.temporal[1, 6], recurrence)


def test_states_that_the_pool_does_not_have_are_refused() -> None:
    """In SGLang, models with windows and states (Inkling) have a pool of windows, and states that only requests refer to."""
    with pytest.raises(LayoutError, match="SGLang keeps state pages beside its SWAKVPool, which cannot be moved yet"):
        read_pool(pool_of("swa"), cut(window_tokens=40), kinds=[WINDOW, STATE])
    assert read_pool(pool_of("hybrid_gdn"), cut(), kinds=[STATE]).view.groups[1].kind is STATE


# Sparse indexers


async def test_indexers_move_values_and_scales_with_their_tokens() -> None:
    """A page has the values of all its tokens before their scales. Layers 1 and 3 use the indexer of another one."""
    source, target = pool_of("dsa"), pool_of("dsa")
    views = [read_pool(pool, cut(dtype="bfloat16")).view for pool in (source, target)]
    assert [(spec.k_head_dim, spec.v_head_dim, spec.dtype) for spec in views[0].layout.layers] == [
        (128, 4, DType.INT8), (576, 0, None), (576, 0, None), (128, 4, DType.INT8), (576, 0, None), (576, 0, None),
    ]  # fmt: skip
    assert [group.kind for group in views[0].groups] == [FULL, FULL]
    page = torch.randint(0, 255, (64 * 132,), dtype=torch.uint8)
    source.index_k_with_scale_buffer[2][1], target.index_k_with_scale_buffer[2][2] = page, 0
    async with LocalPair(views[:1], views[1:]) as pair:
        await pair.transfer("a", num_tokens=3, prefill_tables=[((1,), (1,))], decode_tables=[((2,), (2,))])
    found = target.index_k_with_scale_buffer[2][2]
    assert torch.equal(found[: 3 * 128], page[: 3 * 128]) and not found[3 * 128 : 64 * 128].any()
    assert torch.equal(found[64 * 128 :][:12], page[64 * 128 :][:12]) and not found[64 * 128 + 12 :].any()


def test_packed_latents_are_rows_of_bytes() -> None:
    view = read_pool(pool_of("dsa_packed"), cut(dtype="bfloat16")).view
    assert (view.layout.layers[1].k_head_dim, view.layout.layers[1].dtype) == (656, DType.INT8)
    assert len(view.groups) == 1 and view.shard.dtype is DType.BFLOAT16


# Draft models and pipeline stages


def test_a_draft_model_is_the_last_layers() -> None:
    draft = pool_of("draft")
    view = read_pool(pool_of("mha"), cut(draft_kv_heads=2), draft_pool=draft).view
    assert [spec.num_kv_heads for spec in view.layout.layers] == [4, 4, 4, 4, 2]
    assert view.num_pages == (257,) and view.buffer(4, is_v=True).data_ptr() == draft.v_buffer[0].data_ptr()


def test_a_stage_knows_the_layers_of_the_others() -> None:
    stage = RECORDED["mha_stage"]
    first = read_pool(pool_of("mha_stage", start_layer=0), cut(num_layers=8, pp_size=2), gather_stages=lambda own: [own, own])
    given: list[StageLayers] = []

    def gather(own: StageLayers) -> list[StageLayers]:
        given.append(own)
        return [own, own]

    last = read_pool(pool_of("mha_stage"), cut(num_layers=8, pp_size=2, pp_rank=1), gather_stages=gather).view
    assert stage["start_layer"] == 4 and len(given[0].specs) == 4
    assert last.layout == first.view.layout and last.layout.num_layers == 8
    assert last.shard.stage_layers == (4, 4) and last.shard.rank == 1 and last.num_pages == (7,)
    assert last.buffer(7, is_v=False).shape == (7, 16, 4, 32)


def test_a_stage_without_a_window_counts_the_pages_of_the_others() -> None:
    """The leader compares the numbers of pages of its ranks."""
    stages: list[StageLayers] = []
    read_pool(pool_of("swa"), cut(window_tokens=40), gather_stages=lambda own: [stages.append(own) or own])
    first, second = pool_of("mha_stage", start_layer=0), cut(num_layers=8, pp_size=2, window_tokens=40)
    view = read_pool(first, second, gather_stages=lambda own: [own, *stages]).view
    assert view.num_pages == (7, 4) and view.shard.stage_layers == (4, 4)


def test_a_stage_without_attention_has_the_element_type_of_the_others() -> None:
    """Decode counts the bytes of a prompt by the element type of any rank of prefill."""
    stages: list[StageLayers] = []
    read_pool(pool_of("mha_float8"), cut(dtype="bfloat16"), gather_stages=lambda own: [stages.append(own) or own])
    states = pool_of("hybrid_gdn", full_attention_layer_id_mapping=[])
    second = cut(num_layers=8, pp_size=2, pp_rank=1, dtype="bfloat16")
    found = read_pool(states, second, gather_stages=lambda own: [*stages, own])
    assert found.view.shard.dtype is DType.FLOAT8_E4M3 and len(found.kv_scales) == found.view.layout.num_layers
    with pytest.raises(LayoutError, match=r"stages store layers in 2 element types \(float32, float8_e4m3fn\); must"):
        read_pool(pool_of("mha_stage"), second, gather_stages=lambda own: [*stages, own])


# Refusals


@pytest.mark.parametrize(
    ("name", "pool", "changes", "message"),
    [
        ("mha", {"class": "PageInterleaveMHATokenToKVPool"}, {}, "layer 0 is in a pool of class PageInterleaveMHATokenToKVPool"),
        ("mha", {"kv_cache_layout": "vectorized_5d"}, {}, "layer 0 is stored as vectorized_5d"),
        ("mha_float8_e5m2", {}, {}, "layer 0 is stored as float8_e5m2, which cannot be moved; must be one of float32"),
        ("mha_float8", {"is_quantized_kv_cache": True}, {}, "layer 0 is stored as torch.float8_e4m3fn .in torch.uint8."),
        ("mla_float8", {}, {"dtype": "bfloat16", "scales": {2: (0.5, 0.5)}}, "layer 2 keeps latents in 8-bit floats with scale"),
        ("mha", {"store_dtype": "torch.uint8"}, {}, "layer 0 is stored as torch.float32 .in torch.uint8., which cannot be moved"),
        ("mha_stage", {}, {"num_layers": 8}, r"the pool has layers \[4, 8\); must be all 8"),
        ("swa", {}, {"window_tokens": 0}, "layer 0 keeps a window of latents, or of unknown size"),
        ("swa", part_of("swa", "full_kv_pool", **{"class": "DSATokenToKVPool"}), {"window_tokens": 9},
         "layer 1 is in a pool of class DSATokenToKVPool, which cannot be moved yet; must be MHATokenToKVPool or MLATok"),
        ("swa", part_of("swa", "swa_kv_pool", kv_cache_layout="hnd"), {}, "layer 0 is stored as hnd and nhd"),
        ("swa", part_of("swa", "swa_kv_pool", **RECORDED["mha_uneven"]), {"window_tokens": 9},
         "layers are stored in 2 element types .layer 0 in torch.bfloat16, layer 1 in torch.float32.; must be one"),
        ("hybrid_gdn", part_of("hybrid_gdn", "mamba_pool", conv_shard_groups=[32, 32, 32]), {},
         r"convolution of layer 0 has 128 channels on each of 1 ranks; the model has \[32, 32, 32\]"),
        ("dsa", {"index_kpool": 2}, {}, "indexer of layer 0 keeps a value for 2 tokens, which cannot be moved yet"),
        ("dsa", {"index_head_dim": 64}, {}, r"indexer of layer 0 is torch.uint8 .4, 8448.; only that of NVIDIA GPUs"),
        ("hybrid_gdn", part_of("hybrid_gdn", "mamba_pool", **{"class": "UnifiedMambaPool"}), {},
         "states are in a pool of class UnifiedMambaPool, which cannot be moved yet; must be MambaPool"),
        ("hybrid_gdn", part_of("hybrid_gdn", "mamba_pool", num_state_entries=6), {}, "layer 0 keeps more than the states"),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_is_named(name: str, pool: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        read_pool(pool_of(name, **pool), cut(**changes))


def test_a_state_whose_elements_lie_apart_is_refused() -> None:
    pool = pool_of("hybrid_gdn")
    cache = pool.mamba_pool.mamba_cache
    cache.temporal = cache.temporal.transpose(-1, -2)
    with pytest.raises(LayoutError, match=r"state of layer 0 has strides .*; the elements of a head must be adjacent"):
        read_pool(pool, cut())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("draft", {"draft_kv_heads": 0}, "layer 0 of the draft model has an unknown number of KV heads"),
        ("swa", {}, "layer 0 of the draft model is in a pool of class SWAKVPool, which cannot be moved yet"),
        ("mha_hnd", {}, "the draft model is stored as hnd, the model as nhd; must be alike"),
        ("mha_uneven", {}, "layers are stored in 2 element types .layer 0 in torch.float32, layer 4 in torch.bfloat16"),
    ],
)
def test_draft_models_that_cannot_be_moved_are_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        read_pool(pool_of("mha"), cut(**{"draft_kv_heads": 4, **changes}), draft_pool=pool_of(name))


def test_a_draft_model_of_latents_beside_pages_with_the_heads_first_is_named() -> None:
    """SGLang's pool of latents has no setting of the order."""
    with pytest.raises(LayoutError, match="the draft model is stored as nhd, the model as hnd; must be alike"):
        read_pool(pool_of("mha_hnd"), cut(), draft_pool=pool_of("mla"))


def test_page_table_of_a_prompt_whose_beginning_is_there_already() -> None:
    groups = read_pool(pool_of("mha"), cut()).view.groups

    def table(start_token: int) -> tuple[int, ...]:
        (found,) = page_tables(groups, [7, 9], {}, start_token=start_token, num_tokens=64, page_size=16)
        return found

    assert table(0) == (7, 9)
    assert table(32) == (NO_PAGE, NO_PAGE, 7, 9)
    RequestTables(torch.device("cpu"), 16).cover("room", table(32), 2, 4)  # as on a GPU: a page must not come twice
    with pytest.raises(LayoutError, match="start_token is 8; must be a multiple of the pool's page_size, 16"):
        table(8)
