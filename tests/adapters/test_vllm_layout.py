"""vLLM's KV caches as our pools: bytes gathered from them are K and V, and scattered ones lie where vLLM reads them.

Shapes on a CPU are those that a running vLLM 0.32 was seen to register (record_vllm.py), shapes on GPUs are made by the rules of
its source. What vLLM's kernels keep where is written down in vllm_memory.py, apart from what kvferry takes them to be.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embedded_engine.model_files import read_model_files
from kvferry.engines.vllm_facts import LayerFacts, VllmFacts
from kvferry.engines.vllm_layout import VllmLayout, WindowLayers, describe, layer_index
from kvferry.engines.vllm_windows import WindowTable
from tests.adapters.vllm_memory import Memory, facts_of, placed, placed_apart, ranks, recorded, sparse_layers
from transfer.copy import head_slice_copier
from transfer.errors import LayoutError
from transfer.layer_groups import NO_PAGE, layer_groups
from transfer.layout import (
    DType,
    HeadSlice,
    LayerKind,
    LayerSpec,
    Range,
    Route,
    Shard,
    TokenOrder,
    WireBuffer,
    routes,
    wire_buffers,
    wire_bytes,
)

MOVABLE = (
    "llama-block32", "llama-block128", "llama-tp2-block32", "llama-tp2-block128", "llama-tp2-one-head", "llama-pp2",
    "llama-head80-bfloat16", "llama-kv-bfloat16", "llama-fp8", "qwen3-block128", "mla", "mla-tp2", "gemma3", "gemma3-tp2",
    "llama-eagle3", "mla-mtp-tp2",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank: what vLLM says, its memory, and what we make of both."""

    facts: VllmFacts
    memory: Memory
    described: VllmLayout

    @classmethod
    def of(cls, written: dict[str, Any], **changes: Any) -> Rank:
        facts = facts_of(written["facts"], **changes)
        return cls(facts=facts, memory=Memory.of(written), described=describe(facts))

    def fill(self, blocks: list[int], tokens: range) -> dict[tuple[int, bool], Tensor]:
        """Put numbers where vLLM keeps the KV of some tokens; returns them as [tokens, heads, dim] by (layer, is_v)."""
        kept: dict[tuple[int, bool], Tensor] = {}
        is_latent = any(layer.kind is LayerKind.MLA for layer in self.described.layout.layers)  # and so the same on all ranks
        generator = torch.Generator().manual_seed(0 if is_latent else self.described.shard.rank)
        for index, layer in self.numbered():
            for is_v in (False, True)[: 2 if layer.v_head_dim else 1]:
                elements = self.memory.elements(layer.name)
                places = self.memory.places(layer, blocks, tokens, is_v=is_v)
                if elements.dtype is torch.uint8:
                    values = torch.randint(0, 120, places.shape, generator=generator, dtype=torch.uint8)
                else:
                    values = torch.randn(places.shape, generator=generator).to(elements.dtype)
                elements[places.view(-1)] = values.view(-1)
                kept[index, is_v] = values
        return kept

    def numbered(self) -> Iterator[tuple[int, LayerFacts]]:
        """Layers by their index in the model."""
        return enumerate(self.described.layers, self.described.shard.layers(self.described.layout).begin)

    def buffers(self, tokens: Range, group: int) -> list[WireBuffer]:
        layout, layers = self.described.layout, self.described.shard.layers(self.described.layout)
        heads = HeadSlice(source_start=0, target_start=0, count=self.facts.layers[0].num_kv_heads)
        route = Route(index=0, prefill_rank=0, decode_rank=0, layers=layers, heads=heads)
        dtype = self.described.shard.pool_dtype(layout)
        found = wire_buffers(layout, route, tokens=tokens, layers=layers, num_tokens=tokens.end, dtype=dtype)
        return [one for one in found if one.layer in layer_groups(layout)[group].layers]


def assert_moves(rank: Rank) -> None:
    """A gather gives what vLLM kept, token by token; a scatter puts it where vLLM reads it, and touches nothing else."""
    size = rank.described.shard.page_size
    blocks, others = [5, 2, 7, 1], [3, 6, 4, 2]
    tokens = Range(begin=size // 2 + 1, end=3 * size + size // 3)  # part of a block at both ends
    within = range(tokens.begin, tokens.end)
    kept = rank.fill(blocks, within)
    pool = rank.described.pool(rank.memory.caches)
    buffers = rank.buffers(tokens, 0)
    wire = torch.zeros(buffers[-1].offset_bytes + buffers[-1].num_bytes, dtype=torch.uint8)
    plans = []
    for part in pool.parts:
        heads = Range(begin=0, end=part.num_heads(part.layers[0]))
        mine = [buffer for buffer in buffers if buffer.layer in part.layers]
        plans.append(head_slice_copier(part, heads=heads, wire_dtype=part.element).plan(mine))
        plans[-1].gather(torch.tensor(blocks), wire)
    for buffer in buffers:
        found = wire[buffer.offset_bytes : buffer.offset_bytes + buffer.num_bytes]
        values = kept[buffer.layer, buffer.is_v]
        assert torch.equal(found, values.reshape(-1).view(torch.uint8)), f"layer {buffer.layer}"
    expected = rank.memory.bytes.clone()
    before, rank.memory.bytes = rank.memory.bytes, expected
    for index, layer in rank.numbered():
        for is_v in (False, True)[: 2 if layer.v_head_dim else 1]:
            places = rank.memory.places(layer, others, within, is_v=is_v).view(-1)
            assert len(places.unique()) == len(places)
            rank.memory.elements(layer.name)[places] = kept[index, is_v].view(-1)
    rank.memory.bytes = before
    assert not torch.equal(before, expected)
    for plan in plans:
        plan.scatter(torch.tensor(others), wire)
    assert torch.equal(before, expected)


@pytest.mark.parametrize("case", MOVABLE)
def test_bytes_of_a_recorded_vllm(case: str) -> None:
    for written in ranks(recorded(case)):
        rank = Rank.of(written)
        pool = rank.described.pool(rank.memory.caches)
        storages = {storage.data_ptr() for part in pool.parts for storage in part.storages()}
        assert storages == {rank.memory.bytes.data_ptr()}  # shared, not copied
        assert_moves(rank)


def test_a_block_that_vllm_filled_holds_what_transformers_computes() -> None:
    record = recorded("llama-block32")
    rank, prompt = Rank.of(record["rank0"]), record["prompt"]
    layer = rank.described.layers[prompt["layer"]]
    rank.memory.caches[layer.name][prompt["block"], prompt["head"]] = floats(prompt["bytes"]).view(32, 64)
    k, v = rank.described.pool(rank.memory.caches).read(prompt["layer"], prompt["block"] * 32 + torch.arange(32))
    for found, computed in ((k, prompt["k"]), (v, prompt["v"])):
        assert torch.allclose(found[:, prompt["head"]], floats(computed).view(32, 32), atol=1e-5)
    assert k[:, prompt["head"]].abs().min() > 0


def floats(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("llama-tp2-block32", "llama-block128"),
        ("llama-block128", "llama-tp2-block32"),
        ("llama-pp2", "llama-tp2-block128"),
        ("mla-tp2", "mla"),
        ("gemma3", "gemma3-tp2"),
    ],
)
def test_between_recorded_instances_that_are_cut_differently(source: str, target: str) -> None:
    senders, receivers = ([Rank.of(written) for written in ranks(recorded(case))] for case in (source, target))
    layout = senders[0].described.layout
    assert layout.fingerprint() == receivers[0].described.layout.fingerprint()
    num_tokens = 100
    held, wanted = (
        [7 - page for page in range(-(-num_tokens // one[0].described.shard.page_size))] for one in (senders, receivers)
    )
    kept = [sender.fill(held, range(num_tokens)) for sender in senders]
    for route in routes(layout, senders[0].described.shard, receivers[0].described.shard):
        sender, receiver = senders[route.prefill_rank], receivers[route.decode_rank]
        buffers = wire_buffers(
            layout,
            route,
            tokens=Range(begin=0, end=num_tokens),
            layers=route.layers,
            num_tokens=num_tokens,
            dtype=DType.FLOAT32,
        )
        wire = torch.zeros(sum(one.num_bytes for one in buffers), dtype=torch.uint8)
        for rank, table, start, is_gather in (
            (sender, held, route.heads.source_start, True),
            (receiver, wanted, route.heads.target_start, False),
        ):
            [part] = rank.described.pool(rank.memory.caches).parts
            heads = Range(begin=start, end=start + route.heads.count)
            plan = head_slice_copier(part, heads=heads, wire_dtype=DType.FLOAT32).plan(buffers)
            (plan.gather if is_gather else plan.scatter)(torch.tensor(table), wire)
    for receiver in receivers:
        mine = receiver.described.shard
        for index, layer in receiver.numbered():
            for is_v in (False, True)[: 2 if layer.v_head_dim else 1]:
                places = receiver.memory.places(layer, wanted, range(num_tokens), is_v=is_v)
                heads = mine.heads(layout.layers[index].num_kv_heads)
                expected = all_heads(senders, kept, index, is_v=is_v)[:, heads.begin : heads.end]
                assert torch.equal(receiver.memory.elements(layer.name)[places], expected)


def all_heads(senders: list[Rank], kept: list[dict[tuple[int, bool], Tensor]], index: int, *, is_v: bool) -> Tensor:
    """Of one layer of the model, from the ranks that have it, each head once."""
    total = senders[0].described.layout.layers[index].num_kv_heads
    by_head: dict[int, Tensor] = {}
    for sender, values in zip(senders, kept, strict=True):
        heads = sender.described.shard.heads(total)
        if (index, is_v) in values:
            for head in range(heads.begin, heads.end):
                by_head.setdefault(head, values[index, is_v][:, head - heads.begin])
    return torch.stack([by_head[head] for head in range(total)], dim=1)


@pytest.mark.parametrize("case", MOVABLE)
def test_ranks_and_scheduler_say_the_same(case: str) -> None:
    record = recorded(case)
    found = [describe(facts_of(written["facts"])) for written in ranks(record)]
    scheduler = describe(facts_of(record["scheduler"]["facts"]))
    assert scheduler.shard == found[0].shard and scheduler.block_groups == found[0].block_groups == (0,)
    for rank, one in enumerate(found):
        assert one.layout == scheduler.layout
        assert one.shard == scheduler.shard.at(rank)


@pytest.mark.parametrize(
    ("case", "windows"),
    [
        ("llama-tp2-block32", WindowLayers.WHOLE),
        ("llama-pp2", WindowLayers.WHOLE),
        ("qwen3-block128", WindowLayers.WHOLE),
        ("mla", WindowLayers.WHOLE),
        ("gemma3", WindowLayers.LAST_WINDOW),
    ],
)
def test_an_embedded_node_of_the_same_model_can_be_joined(case: str, windows: WindowLayers, tmp_path: Path) -> None:
    record = recorded(case)
    (tmp_path / "config.json").write_text(json.dumps(record["model_config"]), encoding="utf-8")
    embedded = read_model_files(tmp_path, dummy_seed=0)
    described = describe(facts_of(record["rank0"]["facts"], has_prefix_caching=False), windows=windows)
    assert described.layout.differences(embedded.layout(DType.FLOAT32)) == []
    assert described.layout.fingerprint() == embedded.layout(DType.FLOAT32).fingerprint()
    fields = record["model_fields"]
    assert fields.pop("weights").startswith("xxh3-128:")  # there are none here; that they are told alike is the engine's own test
    assert fields == {name: value for name, value in embedded.fields.items() if name != "weights"}


def test_draft_layers_follow_the_layers_of_the_model() -> None:
    """They are computed after all of them, whatever their number and their place among the groups."""
    draft = tuple(replace(layer, name=f"draft_model.{layer.name}", is_draft=True) for layer in LLAMA.layers[:2])
    described = describe(replace(LLAMA, layers=(*draft, *LLAMA.layers[::-1]), draft_num_kv_heads=4))
    assert list(described.layer_ends.items()) == [(layer.name, end) for end, layer in enumerate((*LLAMA.layers, *draft), 1)]
    without = describe(LLAMA).layout
    assert described.layout.differences(without) == ["layers[0:4]: absent != attention kv_heads=4 k_dim=32 v_dim=32 window=0",
        "layers[0:6]: attention kv_heads=4 k_dim=32 v_dim=32 window=0 != absent", "num_layers: 6 != 4"]  # fmt: skip


# GPUs: shapes by the rules of vLLM's source, in host memory


def gpu_layers(backend: str, k_dim: int, v_dim: int, *, block_size: int, heads: int = 4, **more: Any) -> list[LayerFacts]:
    spec = "FullAttentionSpec" if v_dim else "MLAAttentionSpec"
    return [
        LayerFacts(
            name=f"model.layers.{index}.self_attn.attn",
            group=0,
            spec=spec,
            block_size=block_size,
            num_kv_heads=heads if v_dim else 1,
            k_head_dim=k_dim,
            v_head_dim=v_dim,
            backend=backend,
            **{"dtype": "bfloat16", **more},
        )
        for index in range(3)
    ]


def gpu_rank(
    layers: list[LayerFacts], order: str, *, dtype: str = "bfloat16", kernel_size: int | None = None, **changes: Any
) -> Rank:
    tensors, num_bytes = placed(layers, order=order, num_blocks=10, dtype=dtype, kernel_size=kernel_size)
    facts = facts_of(
        recorded("llama-block32")["rank0"]["facts"],
        **{
            "layers": tuple(layers),
            "model_layers": (),
            "stage_layers": (3,),
            "model_dtype": "bfloat16",
            "cache_layout": order,
            "num_blocks": 10,
            **changes,
        },
    )
    return Rank(facts=facts, memory=Memory(tensors, num_bytes), described=describe(facts))


TOKENS = Range(begin=0, end=100)
ORDERS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("backend", "k_dim", "v_dim"),
    [
        ("FLASH_ATTN", 128, 128),  # flash_attn.py: kv_cache.transpose(1, 2).split(head_size, dim=-1)
        ("TRITON_ATTN", 64, 64),  # triton_attn.py: the same
        ("FLASHINFER", 128, 128),  # flashinfer.py: kv_cache_permute.split(hs, dim=-1)
        ("FLASH_ATTN_DIFFKV", 192, 128),  # flash_attn_diffkv.py: head_size_k + head_size_v
        ("TRITON_MLA", 576, 0),  # triton_mla.py: kv_c and k_pe behind it
        ("FLASHMLA", 576, 0),
    ],
)
def test_bytes_of_gpu_backends(backend: str, k_dim: int, v_dim: int, order: str) -> None:
    rank = gpu_rank(gpu_layers(backend, k_dim, v_dim, block_size=16), order)
    assert rank.described.shard.order is (TokenOrder.NHD if order.endswith("NHC") else TokenOrder.HND)
    [part] = rank.described.pool(rank.memory.caches).parts
    assert part.has_adjacent_elements  # or a GPU's kernels could not move it
    assert_moves(rank)


def test_bytes_of_fp8_with_a_scale_for_each_layer() -> None:
    layers = gpu_layers("FLASH_ATTN", 64, 64, block_size=16, dtype="uint8", quant_mode="FP8_PER_TENSOR", k_scale=0.5, v_scale=2.0)
    rank = gpu_rank(layers, "LBNHC", dtype="uint8", cache_dtype="fp8")
    assert rank.described.shard.pool_dtype(rank.described.layout) is DType.FLOAT8_E4M3
    assert rank.described.layout.dtype is DType.BFLOAT16
    assert rank.described.kv_scales == ((0.5, 2.0),) * 3
    assert_moves(rank)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("row_format", ["fp8_per_token_head", "int8_per_token_head"])
def test_bytes_of_scales_of_each_token_and_head(row_format: str, order: str) -> None:
    """The scales are behind K and behind V of their token and head, and are moved with them."""
    more = {"dtype": "uint8", "quant_mode": row_format.upper(), "row_format": row_format}
    rank = gpu_rank(gpu_layers("TRITON_ATTN", 68, 68, block_size=16, **more), order, dtype="uint8", cache_dtype=row_format)
    assert rank.described.layout.layers[0] == LayerSpec(num_kv_heads=4, k_head_dim=68, v_head_dim=68, dtype=DType.INT8)
    assert rank.described.row_formats == {"engine.kv_rows": row_format} and not rank.described.kv_scales
    assert_moves(rank)
    with pytest.raises(LayoutError, match=r"backend FLASH_ATTN and rows of fp8_per_token_head with head dims 68 and 68"):
        layers = tuple(replace(layer, backend="FLASH_ATTN", row_format="fp8_per_token_head") for layer in rank.facts.layers)
        describe(replace(rank.facts, layers=layers)).pool(rank.memory.caches)


def sparse_rank(row_format: str = "", *, block_size: int = 64, tensors_of: int = 0, **changes: Any) -> Rank:
    layers = sparse_layers(3, block_size=block_size, row_format=row_format)
    registered = [replace(layer, block_size=tensors_of or block_size) for layer in layers]
    tensors, num_bytes = placed_apart(registered, num_blocks=10 * block_size // (tensors_of or block_size))
    settings = {"layers": tuple(layers), "model_layers": (), "stage_layers": (3,), "model_dtype": "bfloat16", "num_blocks": 10}
    facts = facts_of(recorded("mla")["rank0"]["facts"], **{**settings, **changes})
    return Rank(facts=facts, memory=Memory(tensors, num_bytes), described=describe(facts))


@pytest.mark.parametrize(
    ("row_format", "latent"),
    [
        ("", LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=576, v_head_dim=0)),
        ("fp8_ds_mla", LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=656, v_head_dim=0, dtype=DType.INT8)),
        ("nvfp4_ds_mla", LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=352, v_head_dim=0, dtype=DType.INT8)),
    ],
)
def test_bytes_of_sparse_attention(row_format: str, latent: LayerSpec) -> None:
    """Indexers precede the attention of their layer, because they are computed before it."""
    rank = sparse_rank(row_format)
    indexer = LayerSpec(num_kv_heads=1, k_head_dim=128, v_head_dim=4, dtype=DType.INT8)
    assert rank.described.layout.layers == (indexer, latent) * 3
    assert list(rank.described.layer_ends)[:2] == ["model.layers.0.self_attn.indexer.k_cache", "model.layers.0.self_attn.attn"]
    assert rank.described.row_formats == {"engine.kv_rows": ", ".join(sorted({row_format or "indexer_fp8", "indexer_fp8"}))}
    assert_moves(rank)


def test_latents_and_indexers_are_sent_by_one_rank_each() -> None:
    """All tensor parallel ranks have them, so a decode rank gets them once, and the decode ranks share the prefill ranks."""
    layout = sparse_rank("fp8_ds_mla").described.layout
    for prefill, decode in ((2, 1), (1, 2), (4, 2), (2, 4)):
        found = routes(layout, Shard(tp_size=prefill), Shard(tp_size=decode))
        assert [route.decode_rank for route in found] == list(range(decode))
        assert len({route.prefill_rank for route in found}) == min(prefill, decode)
        sent = [
            wire_bytes(layout, route, tokens=TOKENS, layers=route.layers, num_tokens=100, dtype=DType.BFLOAT16) for route in found
        ]
        assert sent == [100 * 3 * (656 + 132)] * decode


def test_pipeline_stages_of_sparse_attention() -> None:
    stages = {"pp_size": 2, "stage_layers": (3, 5)}
    described = sparse_rank("fp8_ds_mla", **stages).described
    assert described.layout.num_layers == 2 * 8 and described.shard.stage_layers == (6, 10)
    assert described.shard.layers(described.layout) == Range(begin=0, end=6)
    facts = sparse_rank(**stages).facts
    with pytest.raises(LayoutError, match="the layers of this stage differ"):
        describe(replace(facts, layers=facts.layers[:-1]))


def test_indexers_that_are_refused() -> None:
    divided = sparse_rank(block_size=128, tensors_of=64)
    with pytest.raises(
        LayoutError, match=r"indexer\.k_cache has a tensor .*\(20, 1, 64, 132\).*; start vLLM with --block-size 64"
    ):
        divided.described.pool(divided.memory.caches)
    rank = sparse_rank()
    name = "model.layers.0.self_attn.indexer.k_cache"
    apart = torch.zeros(10, 1, 132, 64, dtype=torch.uint8).transpose(2, 3)
    with pytest.raises(LayoutError, match="the tokens of an indexer's block must be one run"):
        rank.described.pool({**rank.memory.caches, name: apart})


def test_two_sides_with_other_rows_differ() -> None:
    plain, rows = sparse_rank().described, sparse_rank("fp8_ds_mla").described
    assert "layers[1:2]: mla kv_heads=1 k_dim=576 v_dim=0 window=0 != mla kv_heads=1 k_dim=656 v_dim=0 window=0 dtype=int8" in (
        plain.layout.differences(rows.layout)
    )


def test_windows_of_latents() -> None:
    """As other windows, but the same on all ranks."""
    facts = sparse_rank("fp8_ds_mla", tp_size=4).facts
    layers = [replace(layer, spec="SlidingWindowMLASpec", window_tokens=100) for layer in facts.layers[::2]]
    described = describe(replace(facts, layers=tuple(layers)))
    window = LayerSpec(
        kind=LayerKind.SLIDING_WINDOW, num_kv_heads=1, k_head_dim=656, v_head_dim=0, window_tokens=100, dtype=DType.INT8
    )
    assert described.layout.layers == (window,) * 3
    assert described.window_tables == (WindowTable(group=0, window_tokens=100, block_size=64),)


@pytest.mark.parametrize(("backend", "v_dim", "order"), [("FLASHINFER", 64, "LBNHC"), ("FLASHMLA", 0, "LBHNC")])
def test_blocks_that_are_cut_for_the_kernel_are_joined_where_strides_can_say_so(backend: str, v_dim: int, order: str) -> None:
    rank = gpu_rank(gpu_layers(backend, 64, v_dim, block_size=32), order, kernel_size=16)
    assert_moves(rank)


def test_blocks_that_are_cut_for_the_kernel_and_cannot_be_joined() -> None:
    rank = gpu_rank(gpu_layers("FLASHINFER", 64, 64, block_size=32), "LBHNC", kernel_size=16)
    with pytest.raises(LayoutError, match=r"divides its blocks of 32 tokens into 2 .* start it with --block-size 16"):
        rank.described.pool(rank.memory.caches)


# What is refused, by name


def with_layer(facts: VllmFacts, **changes: Any) -> VllmFacts:
    """The rank's last layer is another."""
    *others, last = facts.layers
    return replace(facts, layers=(*others, replace(last, **changes)))


LAST = WindowLayers.LAST_WINDOW
LLAMA = facts_of(recorded("llama-block32")["rank0"]["facts"])
FP8 = facts_of(recorded("llama-fp8")["rank0"]["facts"])
STAGE = facts_of(ranks(recorded("llama-pp2"))[1]["facts"])
"""Layers 2 and 3, of the second of two pipeline stages."""


@pytest.mark.parametrize(
    ("facts", "match"),
    [
        (with_layer(LLAMA, spec="CrossAttentionSpec"), r"layer model\.layers\.3\.self_attn\.attn attends to an encoder's output"),
        (with_layer(LLAMA, spec="TomorrowSpec"), r"has a KV cache that kvferry does not know \(TomorrowSpec\)"),
        (
            with_layer(LLAMA, is_packed_otherwise=True),
            r"layers\.3\.\S+ has rows .*, float32, KV cache group 0\); .*fp8_ds_mla",
        ),
        (with_layer(FP8, quant_mode="INT8_PER_TOKEN_HEAD"), r"layers\.3\.\S+ is quantised as INT8_PER_TOKEN_HEAD"),
        (
            replace(FP8, cache_dtype="fp8_e5m2"),
            r"is quantised as FP8_PER_TENSOR \(--kv-cache-dtype fp8_e5m2, scales: 1, KV cache group 0\)",
        ),
        (with_layer(FP8, num_scales=4), r"is quantised as FP8_PER_TENSOR \(--kv-cache-dtype fp8, scales: 4, KV cache group 0\)"),
        (with_layer(LLAMA, dtype="bfloat16"), r"layers\.0\.\S+ keeps float32, \S+layers\.3\.\S+ bfloat16"),
        (replace(LLAMA, model_dtype="int8"), "--dtype has dtype int8"),
        (
            replace(STAGE, stage_tables=STAGE.stage_tables * 2, model_layers=()),
            "the layers have 2 block tables, and kvferry does not know the model's architecture, and so not the layers of other",
        ),
        (replace(LLAMA, layers=()), "no layer of this rank keeps KV"),
        (with_layer(LLAMA, name="model.layers.2.cross.attn"), r"layers\.2\.\S+ and \S+\.2\.cross\.attn are caches of one layer"),
        (with_layer(LLAMA, name="model.layers.3.mtp.0.attn"), "has 2 numbers in its name"),
        # The heads of the whole model
        (
            with_layer(replace(LLAMA, tp_size=2, model_layers=(), total_num_kv_heads=8), num_kv_heads=1),
            r"layers\.3\.\S+ has 1 KV head on each of 2 ranks, and the model has 8",
        ),
        (
            with_layer(replace(LLAMA, tp_size=4, model_layers=(), total_num_kv_heads=3), num_kv_heads=1),
            r"layers\.3\.\S+ has 3 KV heads on 4 ranks; must divide them",
        ),
        (
            with_layer(
                replace(LLAMA, tp_size=2, model_layers=(), total_num_kv_heads=2, draft_num_kv_heads=8),
                num_kv_heads=1,
                is_draft=True,
            ),
            r"layers\.3\.\S+ has 1 KV head on each of 2 ranks, and the model has 8",
        ),
        # The layers of other stages
        (replace(STAGE, layers=STAGE.layers[:1]), r"stage 1 keeps KV of layers 2; with pipeline stages .* here \[2, 4\)"),
        (with_layer(STAGE, v_head_dim=64), r"layer 3 keeps .*v_head_dim=64.*; config\.json says .*v_head_dim=32"),
        (with_layer(replace(STAGE, model_layers=()), v_head_dim=64), "the layers of this stage differ"),
        (with_layer(replace(FP8, pp_size=2, stage_layers=(4, 4)), v_scale=0.5), r"layers\.3\.\S+ has scales \(1\.0, 0\.5\)"),
    ],
)
def test_layers_that_are_refused(facts: VllmFacts, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        describe(facts)


def pool_with(**changes: Any) -> None:
    rank = Rank.of(recorded("llama-block32")["rank0"])
    layers = tuple(replace(layer, **changes) for layer in rank.facts.layers)
    describe(replace(rank.facts, layers=layers)).pool(rank.memory.caches)


def test_backends_and_instruction_sets_that_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"layers\.0\.\S+ has the attention backend ROCM_ATTN with head dims 32 and 32, which"):
        pool_with(backend="ROCM_ATTN")
    with pytest.raises(
        LayoutError, match=r"packs its blocks for amx, which kvferry cannot read; .*: start vLLM with --dtype float32"
    ):
        pool_with(isa="amx")
    with pytest.raises(LayoutError, match=r"has head dims 16 and 48, .* half of it K"):
        pool_with(k_head_dim=16, v_head_dim=48)


def test_tensors_that_are_refused() -> None:
    rank = Rank.of(recorded("llama-block32")["rank0"])
    caches, first = rank.memory.caches, "model.layers.0.self_attn.attn"
    assert rank.described.pool(caches).num_pages == (rank.facts.num_blocks,)
    pool = rank.described.pool
    with pytest.raises(LayoutError, match=r"layer model\.layers\.0\.self_attn\.attn has no tensor; vLLM registered 3"):
        pool({name: cache for name, cache in caches.items() if name != first})
    with pytest.raises(LayoutError, match=r"layer draft\.0 has a tensor, but is in none"):
        pool({**caches, "draft.0": caches[first]})
    with pytest.raises(LayoutError, match="the content of a block and head must be one run"):
        pool({**caches, first: torch.zeros(64, 4, 64, 32).transpose(2, 3)})
    for wrong in (
        caches[first][:-1],
        caches[first].transpose(1, 2),
        caches[first].bfloat16(),
        caches[first].unflatten(3, (2, 32)),
    ):
        with pytest.raises(
            LayoutError, match=rf"layer {first} has a tensor torch\.\w+ .*; must be torch\.float32 \(64, 4, 32, 64\)"
        ):
            pool({**caches, first: wrong})


# Heads, stages, windows, groups


@pytest.mark.parametrize(
    ("per_rank", "total", "tp_size", "found"),
    [(4, 4, 1, 4), (2, 4, 2, 4), (1, 4, 4, 4), (1, 2, 4, 2), (1, 1, 2, 1), (3, 6, 2, 6)],
)
def test_heads_of_the_whole_model(per_rank: int, total: int, tp_size: int, found: int) -> None:
    layers = tuple(replace(layer, num_kv_heads=per_rank) for layer in LLAMA.layers)
    for model_layers in (LLAMA.model_layers[:0], tuple(replace(spec, num_kv_heads=total) for spec in LLAMA.model_layers)):
        described = describe(replace(LLAMA, layers=layers, tp_size=tp_size, total_num_kv_heads=total, model_layers=model_layers))
        assert {spec.num_kv_heads for spec in described.layout.layers} == {found}
        # As vLLM deals heads out: consecutive ranks share one where there are more ranks than heads.
        held = [described.shard.at(rank).heads(found) for rank in range(tp_size)]
        assert [span.begin for span in held] == [rank * total // tp_size for rank in range(tp_size)]


def test_stages_of_a_model_that_kvferry_does_not_know() -> None:
    known = describe(STAGE)
    assert describe(replace(STAGE, model_layers=())).layout == known.layout
    assert known.shard.stages(known.layout) == (Range(begin=0, end=2), Range(begin=2, end=4))
    assert list(known.layer_ends.values()) == [3, 4], "of the second stage"
    uneven = describe(replace(STAGE, stage_layers=(3, 1), layers=STAGE.layers[1:]))
    assert uneven.shard.stages(uneven.layout) == (Range(begin=0, end=3), Range(begin=3, end=4))


def test_windows_of_a_model_with_blocks_for_every_token() -> None:
    """Without the hybrid manager vLLM merges full attention and windows to one group, with one block table."""
    facts = facts_of(recorded("gemma3")["rank0"]["facts"])
    assert {layer.group for layer in facts.layers} == {0} and facts.has_prefix_caching and facts.is_consumer
    whole = describe(facts)
    assert {spec.kind for spec in whole.layout.layers} == {LayerKind.ATTENTION} and whole.block_groups == (0,)
    assert not whole.window_tables
    with pytest.raises(LayoutError, match=r"keeps blocks for later prompts; start vLLM .*--no-enable-prefix-caching"):
        describe(facts, windows=WindowLayers.LAST_WINDOW)
    for able in (replace(facts, has_prefix_caching=False), replace(facts, is_consumer=False)):
        last = describe(able, windows=WindowLayers.LAST_WINDOW)
        kinds = [spec.kind for spec in last.layout.layers]
        assert kinds == [LayerKind.SLIDING_WINDOW] * 5 + [LayerKind.ATTENTION]
        assert {spec.window_tokens for spec in last.layout.layers[:5]} == {64}
        assert [group.name for group in layer_groups(last.layout)] == ["full", "window_64"] and last.block_groups == (0, 0)
        assert last.page_tables([[4, 3]]) == ([4, 3], [4, 3])
        assert not last.window_tables and last.first_needed_pages(200) == (0, 0), "vLLM keeps all blocks"
    with pytest.raises(LayoutError, match="does not know the model's architecture, nor so which layers have a window"):
        describe(replace(facts, model_layers=(), is_consumer=False), windows=WindowLayers.LAST_WINDOW)


@pytest.mark.parametrize("case", ["mistral-window", "mistral-window-groups"])
def test_a_window_in_every_layer(case: str) -> None:
    record = recorded(case)
    facts = facts_of(record["rank0"]["facts"])
    described = describe(facts)
    assert {spec.window_tokens for spec in described.layout.layers} == {64}
    assert described.page_tables([[0, 0, 7]]) == ([NO_PAGE, NO_PAGE, 7],)
    assert described.window_tables == (WindowTable(group=0, window_tokens=64, block_size=32),)
    assert_moves_window(Rank(facts=facts, memory=Memory.of(record["rank0"]), described=described))
    assert describe(facts, windows=WindowLayers.LAST_WINDOW) == described
    with pytest.raises(LayoutError, match=r"layers\.0\.\S+ keeps only a window of 64 tokens.*--disable-hybrid-kv-cache-manager"):
        describe(facts, windows=WindowLayers.WHOLE)


def test_windows_with_block_tables_of_their_own() -> None:
    """vLLM divides the layers into groups of equal size, here of one layer. Layers of one window have several block tables."""
    record = recorded("gemma3-groups")["rank0"]
    facts = facts_of(record["facts"])
    described = describe(facts)
    assert described.layout == describe(facts_of(recorded("gemma3")["rank0"]["facts"], is_consumer=False), windows=LAST).layout
    assert [(group.name, group.layers) for group in described.groups] == [("full", (5,))] + [
        ("window_64", (layer,)) for layer in range(5)
    ]
    assert described.block_groups == (5, 0, 1, 2, 3, 4)
    assert [table.group for table in described.window_tables] == [0, 1, 2, 3, 4]
    pool = described.pool(Memory.of(record).caches)
    assert [pool.group_of(layer) for layer in range(6)] == [1, 2, 3, 4, 5, 0]
    blocks = [[0, 0, 10 + group, 20 + group] for group in range(5)] + [[1, 2, 3, 4]]
    assert described.page_tables(blocks) == ([1, 2, 3, 4], *([NO_PAGE, NO_PAGE, 10 + group, 20 + group] for group in range(5)))
    assert described.first_needed_pages(130) == (0, 2, 2, 2, 2, 2)


def test_stages_number_block_tables_alike() -> None:
    """The scheduler knows the layers of the first stage only, and sends one set of page tables to all stages."""
    record = recorded("gemma3-groups")["rank0"]
    facts = facts_of(record["facts"])
    whole, memory = describe(facts), Memory.of(record)
    of_stages = replace(facts, pp_size=2, stage_layers=(3, 3), stage_tables=tuple(facts.tables.values()))
    blocks = [[0, 0, 10 + group, 20 + group] for group in range(5)] + [[1, 2, 3, 4]]
    for stage in range(2):
        mine = tuple(layer for layer in facts.layers if layer_index(layer.name) // 3 == stage)
        described = describe(replace(of_stages, pp_rank=stage, layers=mine))
        assert (described.layout, described.shard.page_size) == (whole.layout, whole.shard.page_size)
        assert (described.block_groups, described.page_sizes) == (whole.block_groups, whole.page_sizes)
        assert described.window_tables == whole.window_tables
        assert described.tables_to_fill(blocks, 128) == whole.tables_to_fill(blocks, 128)
        assert described.first_needed_pages(130) == whole.first_needed_pages(130)
        pool = described.pool({layer.name: memory.caches[layer.name] for layer in mine})
        layers = range(3 * stage, 3 * stage + 3)
        assert [pool.group_of(layer) for layer in layers] == [[1, 2, 3, 4, 5, 0][layer] for layer in layers]


def test_chunked_local_attention() -> None:
    """Llama 4. kvferry's own engine does not know the architecture; vLLM's specs suffice."""
    record = recorded("llama4-groups")["rank0"]
    facts = facts_of(record["facts"])
    described = describe(facts)
    assert [str(spec.kind) for spec in described.layout.layers] == ["chunked_local"] * 3 + ["attention"]
    assert [(group.name, group.layers) for group in described.groups] == [("full", (3,))] + [
        ("chunk_64", (layer,)) for layer in range(3)
    ]
    assert described.block_groups == (3, 0, 1, 2)
    assert described.window_tables == tuple(
        WindowTable(group=group, window_tokens=64, block_size=32, is_chunked=True) for group in range(3)
    )
    assert described.first_needed_pages(128) == (0, 4, 4, 4)
    with pytest.raises(LayoutError, match=r"layers\.0\.\S+ keeps only a chunk of 64 tokens.*--disable-hybrid-kv-cache-manager"):
        describe(facts, windows=WindowLayers.WHOLE)


def test_blocks_of_a_chunk_that_vllm_frees_after_the_prompt() -> None:
    table = WindowTable(group=0, window_tokens=64, block_size=32, is_chunked=True)
    assert [(table.first_token(num), table.lost_blocks(num)) for num in (64, 127, 128, 129)] == [
        (0, range(2)), (64, range(2, 2)), (64, range(2, 4)), (128, range(4, 4)),
    ]  # fmt: skip


def test_block_tables_with_blocks_of_different_sizes() -> None:
    """vLLM gives layers with smaller heads longer blocks, so that all blocks have the same number of bytes."""
    record = recorded("gemma4-groups")["rank0"]
    facts = facts_of(record["facts"])
    assert not facts.model_layers, "kvferry's own engine has no Gemma 4"
    described = describe(facts)
    assert described.page_sizes == (32, 64, 64, 64, 64, 64) and described.shard.page_size == 32
    pool = described.pool(Memory.of(record).caches)
    assert [part.page_size for part in pool.parts] == list(described.page_sizes)
    assert pool.num_pages == (256,) * 6
    assert described.first_needed_pages(192) == (0, 2, 2, 2, 2, 2)
    blocks = [[0, 0, 3]] * 5 + [[4, 5, 6, 7, 8, 9]]
    assert described.tables_to_fill(blocks, 191) == ([4, 5, 6, 7, 8, 9], *[[NO_PAGE, 0, 3]] * 5)


@pytest.mark.parametrize(
    ("num_tokens", "blocks", "filled"),
    [
        (128, [0, 0, 7, 8], [NO_PAGE, NO_PAGE, 7, 8]),  # the window begins with a block
        (127, [0, 0, 7, 8], [NO_PAGE, 0, 7, 8]),  # its first token is the last one of a block, which vLLM does not need
        (129, [0, 0, 7, 8], [NO_PAGE, NO_PAGE, 7, 8, 0]),  # vLLM computes the last token, and has no block for it yet
    ],
)
def test_tokens_without_a_block_go_to_the_null_block(num_tokens: int, blocks: list[int], filled: list[int]) -> None:
    described = describe(facts_of(recorded("mistral-window-groups")["rank0"]["facts"]))
    assert described.tables_to_fill([blocks], num_tokens) == (filled,)


def assert_moves_window(rank: Rank) -> None:
    size, num_tokens = rank.described.shard.page_size, 150
    blocks = [0, 0, 7, 1, 3]  # of 32 tokens: the last 64 begin in the third
    window = range(num_tokens - 64, num_tokens)
    kept = rank.fill(blocks, window)
    [part] = rank.described.pool(rank.memory.caches).parts
    buffers = [
        replace(one, tokens=Range(begin=one.tokens.begin - 2 * size, end=one.tokens.end - 2 * size))
        for one in rank.buffers(Range(begin=0, end=num_tokens), 0)
    ]
    plan = head_slice_copier(part, heads=Range(begin=0, end=4), wire_dtype=part.element).plan(buffers)
    wire = torch.zeros(plan.num_wire_bytes, dtype=torch.uint8)
    plan.gather(torch.tensor(blocks), wire, first_page=2)
    for buffer in plan.buffers:
        found = wire[buffer.offset_bytes : buffer.offset_bytes + buffer.num_bytes]
        assert torch.equal(found, kept[buffer.layer, buffer.is_v].reshape(-1).view(torch.uint8))


def test_layers_that_share_the_kv_of_others_are_not_in_the_layout() -> None:
    rank = Rank.of(recorded("llama-block32")["rank0"])
    shared = {"model.layers.3.self_attn.attn": "model.layers.1.self_attn.attn"}
    described = describe(replace(rank.facts, layers=rank.facts.layers[:3], shared_layers=shared))
    assert described.layout.num_layers == 3
    caches = rank.memory.caches
    caches["model.layers.3.self_attn.attn"] = caches["model.layers.1.self_attn.attn"]
    assert described.pool(caches).parts[0].layers == (0, 1, 2)
