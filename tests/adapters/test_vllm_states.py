"""Recurrent states in vLLM's blocks: each rank receives the elements that vLLM keeps there, whatever the other side's degree.

Specs and tensors are those that vLLM 0.32 registered (record_vllm.py). Where a rank keeps which element is written down here, not
taken from kvferry: by vLLM's ``mamba_utils.py`` and the layers that divide the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry.engines.vllm_facts import LayerFacts, VllmFacts
from kvferry.engines.vllm_layout import VllmLayout, check, describe
from kvferry.engines.vllm_states import StateFacts, state_views
from tests.adapters.vllm_memory import Memory, facts_of, ranks, recorded
from transfer.copy import head_slice_copier
from transfer.errors import LayoutError
from transfer.layer_groups import NO_PAGE, GroupKind
from transfer.layout import DType, Range, routes, wire_buffers
from transfer.pool.kv_pool import KVPool

SD, DS = "SD", "DS"


def in_order(facts: VllmFacts, order: str) -> VllmFacts:
    """With another ``VLLM_SSM_CONV_STATE_LAYOUT``. The bytes of a state are as many."""

    def turned(state: StateFacts) -> StateFacts:
        (inputs, channels), *others = state.shapes
        return replace(state, shapes=((channels, inputs) if order == DS else (inputs, channels), *others))

    layers = [layer if layer.state is None else replace(layer, state=turned(layer.state)) for layer in facts.layers]
    return replace(facts, layers=tuple(layers))


@dataclass(frozen=True, kw_only=True)
class Rank:
    facts: VllmFacts
    memory: Memory
    described: VllmLayout
    order: str

    @classmethod
    def of(cls, written: dict[str, Any], order: str) -> Rank:
        facts = in_order(facts_of(written["facts"]), order)
        return cls(facts=facts, memory=Memory.of(written), described=describe(facts), order=order)

    @property
    def pool(self) -> KVPool:
        return self.described.pool(self.memory.caches)

    def state(self, layer: LayerFacts) -> bytes:
        """The bytes of the layer's state on this rank, made of the whole model's."""
        assert layer.state is not None
        (_, channels), _ = sorted(layer.state.shapes[0]), None
        heads, rows, columns = layer.state.shapes[1]
        rank, size = self.facts.tp_rank, self.facts.tp_size
        is_mamba2 = layer.state.kind == "MAMBA2"
        values = heads * (columns if layer.state.kind == "LINEAR" else rows)
        others = (channels - values) // 2
        shared = is_mamba2 and self.facts.num_state_groups == 1
        names = {"x": values, "B": others, "C": others} if is_mamba2 else {"q": others, "k": others, "v": values}
        parts = []
        for name, length in names.items():
            whole = numbers(f"{layer.name}.{name}", length * (1 if shared and name in "BC" else size), 3)
            parts.append(whole if shared and name in "BC" else whole[rank * length : (rank + 1) * length])
        convolution = torch.cat(parts).to(getattr(torch, layer.state.dtypes[0]))
        if self.order == SD:
            convolution = convolution.T
        recurrent = numbers(f"{layer.name}.state", heads * size, rows, columns)[rank * heads : (rank + 1) * heads]
        recurrent = recurrent.to(getattr(torch, layer.state.dtypes[1]))
        return b"".join(one.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in (convolution, recurrent))

    def block(self, layer: LayerFacts, block: int) -> Tensor:
        return self.memory.caches[layer.name][block].view(-1).view(torch.uint8)

    @property
    def state_layers(self) -> list[LayerFacts]:
        return [layer for layer in self.facts.layers if layer.state is not None]


def numbers(name: str, *shape: int) -> Tensor:
    """The same for a name everywhere."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def source_block(group: int) -> int:
    """Layers of different groups share memory, so a request has different blocks in them."""
    return 10 + 10 * group


def target_block(group: int) -> int:
    return 15 + 10 * group


def copy(senders: Sequence[Rank], receivers: Sequence[Rank]) -> int:
    """Move all states of a prompt over the wire, and return its bytes."""
    layout = senders[0].described.layout
    assert not layout.differences(receivers[0].described.layout)
    num_bytes = 0
    for route in routes(layout, senders[0].described.shard, receivers[0].described.shard):
        sender, receiver = senders[route.prefill_rank].pool, receivers[route.decode_rank].pool
        buffers = wire_buffers(
            layout, route, tokens=Range(begin=0, end=5), layers=route.layers, num_tokens=5, dtype=DType.FLOAT32
        )
        for buffer in buffers:
            if len(buffer.tokens) > 1:
                continue  # attention
            alone = replace(buffer, offset_bytes=0)
            wire = torch.zeros(buffer.num_bytes, dtype=torch.uint8)
            table = senders[0].described.block_groups[sender.group_of(buffer.layer)]
            for pool, block, heads, is_gather in (
                (sender, source_block(table), route.heads.source, True),
                (receiver, target_block(table), route.heads.target, False),
            ):
                part = pool.part_of(buffer.layer)
                plan = head_slice_copier(part, heads=heads, wire_dtype=part.element).plan([alone])
                (plan.gather if is_gather else plan.scatter)(torch.tensor([block]), wire)
            num_bytes += buffer.num_bytes
    return num_bytes


@pytest.mark.parametrize("order", [SD, DS])
@pytest.mark.parametrize(
    ("source", "receiving"),
    [
        ("qwen3-next", "qwen3-next"),
        ("qwen3-next-tp2", "qwen3-next"),
        ("qwen3-next", "qwen3-next-tp2"),
        ("granite4", "granite4"),
        ("granite4-tp2", "granite4"),
        ("granite4", "granite4-tp2"),
        ("granite4-tp2", "granite4-tp2"),
    ],
)
def test_states_between_recorded_instances(source: str, receiving: str, order: str) -> None:
    senders, receivers = ([Rank.of(written, order) for written in ranks(recorded(case))] for case in (source, receiving))
    for sender in senders:
        for layer in sender.state_layers:
            sender.block(layer, source_block(layer.group)).copy_(
                torch.frombuffer(bytearray(sender.state(layer)), dtype=torch.uint8)
            )
    moved = copy(senders, receivers)
    whole = sum(len(receiver.state(layer)) for receiver in receivers for layer in receiver.state_layers)
    assert moved == whole, "each rank receives its state, and nothing else"
    for receiver in receivers:
        for layer in receiver.state_layers:
            target = target_block(layer.group)
            assert receiver.block(layer, target).numpy().tobytes() == receiver.state(layer), layer.name
            assert not receiver.block(layer, target - 1).any() and not receiver.block(layer, target + 1).any()


@pytest.mark.parametrize("case", ["qwen3-next", "qwen3-next-tp2", "granite4", "granite4-tp2"])
def test_ranks_and_scheduler_say_the_same(case: str) -> None:
    record = recorded(case)
    scheduler = describe(facts_of(record["scheduler"]["facts"]))
    for rank, written in enumerate(ranks(record)):
        one = describe(facts_of(written["facts"]))
        assert one.layout == scheduler.layout
        assert one.shard == scheduler.shard.at(rank)
        assert one.groups == scheduler.groups and one.block_groups == scheduler.block_groups


def test_groups_and_tables() -> None:
    """Each layer has a block table here. A state's page is the block of the last token; a prompt has none for earlier ones."""
    record = recorded("qwen3-next")["rank0"]
    described = describe(facts_of(record["facts"]))
    state_groups = [group for group in described.groups if group.kind is GroupKind.STATE]
    assert len(described.groups) == 4 and len(state_groups) == 3
    assert described.block_groups == (3, 0, 1, 2)
    assert described.state_block_tokens == 128
    assert list(described.layer_ends.values()) == [10, 20, 30, 31]
    tables = described.page_tables([[0, 0, 4], [0, 0, 5], [0, 0, 6], [7, 8, 9]])
    assert described.tables_to_read(tables, 257) == ([7, 8, 9], [4], [5], [6])
    assert described.tables_to_fill([[0, 0, 4], [0, 0, 5], [0, 0, 6], [7, 8, 9]], 384) == ([7, 8, 9], [4], [5], [6])
    assert described.tables_to_read(tables, 384) == ([7, 8, 9], [4], [5], [6])
    assert tables[1] == [NO_PAGE, NO_PAGE, 4], "a table that grows is not changed"
    for num_tokens in (256, 385):
        with pytest.raises(LayoutError, match=f"no block for the state after {num_tokens} tokens; its table has 3 entries"):
            described.tables_to_read(tables, num_tokens)


def test_parts_of_two_element_types_have_page_tables_of_their_own() -> None:
    facts = facts_of(recorded("qwen3-next")["rank0"]["facts"])
    layers = [
        layer if layer.state is None else replace(layer, group=0, state=replace(layer.state, dtypes=("bfloat16", "float32")))
        for layer in facts.layers
    ]
    described = describe(replace(facts, layers=tuple(layers)))
    assert [group.kind for group in described.groups] == [GroupKind.FULL, GroupKind.STATE, GroupKind.STATE]
    assert described.block_groups == (3, 0, 0)
    assert described.tables_to_read(([1], [2], [2]), 9) == ([1], [2], [2])
    texts = described.layout.fields().values()
    assert sum("dtype=bfloat16" in text for text in texts) and sum("dtype=float32" in text for text in texts)


def test_two_orders_of_a_convolution_differ_at_attach() -> None:
    facts = facts_of(recorded("qwen3-next")["rank0"]["facts"])
    sd, ds = (describe(in_order(facts, order)).layout for order in (SD, DS))
    assert "num_layers: 31 != 13" in sd.differences(ds)


def test_attention_and_a_state_in_one_layer() -> None:
    """As in Falcon-H1. Attention is first, because vLLM reports its end."""
    facts = facts_of(recorded("qwen3-next")["rank0"]["facts"])
    *_, attention = facts.layers
    state = replace(facts.layers[0], name="model.layers.3.mamba")
    described = describe(replace(facts, layers=(state, attention)))
    assert [layer.name for layer in described.layers] == [attention.name, state.name]
    assert list(described.layer_ends.values()) == [1, 11]


def test_a_model_without_attention() -> None:
    facts = facts_of(recorded("qwen3-next")["rank0"]["facts"])
    described = describe(replace(facts, layers=facts.layers[:3]))
    assert described.layout.dtype is DType.FLOAT32 and described.state_block_tokens == 128
    assert described.kv_scales == ()


STATES = {
    "short convolution": (StateFacts(kind="SHORT_CONV", shapes=((2, 6),), dtypes=("float32",)), 2),
    "Mamba": (StateFacts(kind="MAMBA1", shapes=((6, 3), (6, 4)), dtypes=("bfloat16", "float32")), 2),
    "linear attention": (StateFacts(kind="LINEAR", shapes=((3, 4, 4),), dtypes=("float32",)), 1),
}


@pytest.mark.parametrize(("state", "num_parts"), STATES.values(), ids=STATES)
def test_states_of_other_kinds(state: StateFacts, num_parts: int) -> None:
    """Every byte of a block is in exactly one part."""
    num_bytes = sum(
        DType(dtype).num_bytes * torch.Size(shape).numel() for dtype, shape in zip(state.dtypes, state.shapes, strict=True)
    )
    cache = torch.zeros(4, num_bytes + 32, dtype=torch.int8)[:, :num_bytes].view(4, 1, 1, num_bytes)
    parts = list(state_views("one", state, cache, 4))
    assert len(parts) == num_parts
    for part in parts:
        part[2].view(-1).view(torch.int8).copy_(part[2].view(-1).view(torch.int8) + 1)
    assert cache[2].eq(1).all() and not cache[1].any() and not cache[3].any()


def test_groups_of_mamba2_on_more_ranks() -> None:
    facts = facts_of(recorded("granite4-tp2")["rank0"]["facts"])
    assert facts.num_state_groups == 1
    heads = {spec.num_kv_heads for spec in describe(facts).layout.layers[:10]}
    assert heads == {4, 1}
    assert {spec.num_kv_heads for spec in describe(replace(facts, num_state_groups=2)).layout.layers[:10]} == {4, 2}
    with pytest.raises(
        LayoutError, match=r"layer model\.layers\.0\.\S+: each of 2 ranks has 1 group of B and C, .* says nothing"
    ):
        describe(replace(facts, num_state_groups=0))


def refused(**changes: Any) -> str:
    facts = facts_of(recorded("qwen3-next-tp2")["rank0"]["facts"])
    layers = [layer if layer.state is None else replace(layer, state=replace(layer.state, **changes)) for layer in facts.layers]
    with pytest.raises(LayoutError) as caught:
        describe(replace(facts, layers=tuple(layers)))
    return str(caught.value)


def test_states_that_are_refused() -> None:
    name = "layer model.layers.0.linear_attn (KV cache group 0)"
    assert refused(kind="TOMORROW").startswith(f"{name} keeps a recurrent state of kind TOMORROW; kvferry moves GDN_ATTN")
    three = refused(shapes=((3, 40), (2, 8, 4), (2, 8)), dtypes=("float32",) * 3)
    assert three.startswith(f"{name} keeps 3 tensors per state of kind GDN_ATTN; must be 2: start vLLM without")
    assert refused(num_draft_blocks=2).startswith(f"{name} keeps 2 further states for speculative decoding")
    assert refused(is_replicated=True).endswith("use tensor_parallel_size 1")
    assert refused(shapes=((3, 17), (2, 8, 4))).startswith(f"{name}: a state of kind GDN_ATTN has shapes")
    assert refused(shapes=((3, 16), (2, 8, 4))).startswith(f"{name}: a state of kind GDN_ATTN has shapes")
    assert refused(shapes=((3, 3), (2, 8, 4))).startswith(f"{name}: a convolution's state is (3, 3)")
    assert refused(dtypes=("float64", "float32")).startswith(f"{name}: a state has dtype float64; must be one of")


def test_a_store_keeps_no_states() -> None:
    facts = facts_of(recorded("qwen3-next")["rank0"]["facts"])
    with pytest.raises(LayoutError, match=r"layers\.0\.linear_attn keeps a recurrent state, which a store cannot keep"):
        check(facts, has_store=True)


def test_pipeline_stages_with_states_are_refused() -> None:
    """With one block table too, as in a model without attention."""
    facts = facts_of(recorded("granite4")["rank0"]["facts"], pp_size=2, stage_layers=(2, 2))
    one_table = [replace(layer, group=0) for layer in facts.layers if layer.state is not None]
    for case in (facts, replace(facts, layers=tuple(one_table))):
        with pytest.raises(LayoutError, match=r"keeps a recurrent state, .* of pipeline stages; use pipeline_parallel_size 1"):
            check(case, has_store=False)


def test_tensors_that_are_refused() -> None:
    rank = Rank.of(recorded("qwen3-next")["rank0"], SD)
    name = rank.state_layers[0].name
    for wrong in (rank.memory.caches[name][1:], rank.memory.caches[name].view(torch.float32)):
        with pytest.raises(LayoutError, match=rf"layer {name} has a tensor .*; must be bytes \(128, 1, 1, 19456\)"):
            rank.described.pool({**rank.memory.caches, name: wrong})
