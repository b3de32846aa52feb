"""Decode context parallelism of vLLM between instances: each rank receives the tokens of vLLM's slot mapping, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry.engines.connector import DECODE, PREFILL, Sides
from kvferry.engines.vllm_facts import LayerFacts, VllmFacts
from kvferry.engines.vllm_layout import VllmLayout, describe
from tests.adapters.vllm_memory import Memory, placed
from tests.adapters.vllm_slots import kept_tokens
from tests.connector.instances import PROMPT, Instance, prompt_of
from transfer.connector.bound_prompts import PromptState
from transfer.connector.incoming_rank import Settled
from transfer.layout import Shard
from transfer.pool.kv_pool import KVPool

NUM_BLOCKS = 64
LAYERS = 2
HELD, WANTED = [1 + (5 * entry + 4) % 63 for entry in range(30)], [1 + (8 * entry + 2) % 63 for entry in range(30)]
KINDS: dict[str, dict[str, Any]] = {
    "latents": {"spec": "MLAAttentionSpec", "k_head_dim": 24, "v_head_dim": 0, "backend": "FLASHMLA"},
    "two heads": {"spec": "FullAttentionSpec", "k_head_dim": 8, "v_head_dim": 8, "backend": "FLASH_ATTN"},
}
HEADS = {"latents": 1, "two heads": 2}


class Divided:
    """The ranks of a vLLM instance in host memory.

    Args:
        tp_size, dcp_size, interleave, block_size: vLLM's settings.
    """

    def __init__(self, kind: str, *, tp_size: int, dcp_size: int = 1, interleave: int = 1, block_size: int = 16) -> None:
        layers = tuple(
            LayerFacts(
                name=f"model.layers.{layer}.self_attn.attn",
                group=0,
                block_size=block_size,
                num_kv_heads=max(1, HEADS[kind] // tp_size),
                dtype="float32",
                **KINDS[kind],
            )
            for layer in range(LAYERS)
        )
        self.facts = VllmFacts(
            tp_size=tp_size,
            tp_rank=0,
            pp_size=1,
            pp_rank=0,
            stage_layers=(LAYERS,),
            model_dtype="float32",
            cache_dtype="auto",
            cache_layout="LBNHC",
            total_num_kv_heads=HEADS[kind],
            num_blocks=NUM_BLOCKS,
            has_prefix_caching=True,
            is_consumer=True,
            layers=layers,
            dcp_size=dcp_size,
            interleave_tokens=interleave,
        )
        self.num_heads = HEADS[kind]
        tensors, num_bytes = placed(layers, order="LBNHC", num_blocks=NUM_BLOCKS, dtype="float32")
        self.memories = [Memory(tensors, num_bytes) for _ in range(tp_size)]

    def layout_of(self, rank: int) -> VllmLayout:
        return describe(replace(self.facts, tp_rank=rank))

    def pool_of(self, shard: Shard) -> KVPool:
        return self.layout_of(shard.tp_rank).pool(self.memories[shard.tp_rank].caches)

    def instance(self, sides: Sides, **settings: Any) -> Instance:
        settings = {"join_on_request": True} | settings
        return Instance(sides, shard=self.layout_of(0).shard, pool_of=self.pool_of, settings=settings)

    def memory_with(self, rank: int, blocks: list[int], num_tokens: int, start: int = 0) -> Tensor:
        """Return the memory of a rank that has tokens [start, num_tokens), and 7 in all other elements."""
        memory, shard = self.memories[rank], self.layout_of(rank).shard
        wanted = torch.full_like(memory.elements(self.facts.layers[0].name), 7)
        kept = kept_tokens(shard, num_tokens, self.facts.layers[0].block_size)
        heads = shard.heads(self.num_heads)
        for layer, one in enumerate(self.facts.layers):
            for is_v in (False, True)[: 2 if one.v_head_dim else 1]:
                for token in range(start, num_tokens):
                    if token in kept:
                        places = memory.places(one, blocks, range(kept[token], kept[token] + 1), is_v=is_v)[0]
                        numbers = 32 * torch.arange(heads.begin, heads.end)[:, None] + torch.arange(places.shape[1])
                        wanted[places] = ((layer * 2 + is_v) * 1000 + token) * 64.0 + numbers
        return wanted

    def fill(self, rank: int, values: Tensor) -> None:
        self.memories[rank].elements(self.facts.layers[0].name).copy_(values)

    @property
    def ranks(self) -> range:
        return range(self.facts.tp_size)


def moved(
    source: Divided, target: Divided, num_tokens: int, *, start: int = 0, steps: tuple[int, ...] = (), **settings: Any
) -> None:
    """Send a prompt, in steps, and check every byte of the target."""
    prompt = prompt_of(num_tokens)
    for rank in source.ranks:
        source.fill(rank, source.memory_with(rank, HELD, num_tokens))
    for rank in target.ranks:
        target.fill(rank, target.memory_with(rank, WANTED, 0))
    sends, fetches = source.instance(PREFILL, **settings), target.instance(DECODE)
    try:
        sends.leader.offer("a", "t", prompt)
        sends.leader.begin("a")
        for num_computed in (*steps, num_tokens):
            for rank, one in enumerate(sends.ranks):
                one.progress("a", source.layout_of(rank).page_tables([HELD]), num_computed)
        sends.finish("a")
        fetches.leader.want("b", "t", sends.leader.address, prompt, start_token=start)
        block_tokens = target.facts.layers[0].block_size * target.facts.dcp_size
        blocks = WANTED[: -(-num_tokens // block_tokens)]
        fetches.leader.bind("b", target.layout_of(0).tables_to_fill([blocks], num_tokens), start_token=start)
        assert not fetches.heard("b", Settled).failure
        sends.assert_idle()
    finally:
        fetches.close()
        sends.close()
    for rank in target.ranks:
        found = target.memories[rank].elements(target.facts.layers[0].name)
        assert torch.equal(found, target.memory_with(rank, WANTED, num_tokens, start)), rank


@pytest.mark.parametrize("num_tokens", [1, 99])
@pytest.mark.parametrize(
    ("kind", "prefill", "decode"),
    [
        ("latents", {"tp_size": 2, "dcp_size": 2}, {"tp_size": 4, "dcp_size": 2, "block_size": 8}),
        ("latents", {"tp_size": 3, "dcp_size": 3, "interleave": 4}, {"tp_size": 3, "dcp_size": 3, "interleave": 4}),
        (
            "two heads",
            {"tp_size": 4, "dcp_size": 2, "interleave": 2},
            {"tp_size": 4, "dcp_size": 2, "interleave": 2, "block_size": 8},
        ),
    ],
)
def test_equal_dcp_sizes(kind: str, prefill: dict[str, int], decode: dict[str, int], num_tokens: int) -> None:
    """Chunks of 32 tokens end inside interleaves and blocks. A prompt of one token has none for most ranks."""
    moved(Divided(kind, **prefill), Divided(kind, **decode), num_tokens)


@pytest.mark.parametrize(
    ("kind", "prefill", "decode"),
    [
        ("latents", {"tp_size": 1, "block_size": 8}, {"tp_size": 2, "dcp_size": 2, "interleave": 16}),
        ("latents", {"tp_size": 4, "dcp_size": 4, "interleave": 16}, {"tp_size": 1}),
        ("latents", {"tp_size": 2, "dcp_size": 2, "interleave": 16}, {"tp_size": 4, "dcp_size": 4, "interleave": 16}),
        ("two heads", {"tp_size": 2, "block_size": 4}, {"tp_size": 4, "dcp_size": 2, "interleave": 8}),
        ("two heads", {"tp_size": 4, "dcp_size": 2, "interleave": 16}, {"tp_size": 1}),
    ],
)
def test_different_dcp_sizes(kind: str, prefill: dict[str, int], decode: dict[str, int]) -> None:
    moved(Divided(kind, **prefill), Divided(kind, **decode), 61)


@pytest.mark.parametrize("decode_dcp", [2, 4])
def test_a_prompt_is_sent_in_steps_from_a_prefix_hit_on(decode_dcp: int) -> None:
    """Steps and the start of the fetched part lie inside interleaves."""
    source = Divided("latents", tp_size=2, dcp_size=2, interleave=8, block_size=8)
    target = Divided("latents", tp_size=4, dcp_size=decode_dcp, interleave=8, block_size=8)
    moved(source, target, 90, start=21, steps=(13, 50, 77), **{"chunk.chunk_tokens": 12})


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [
        ({"tp_size": 2, "dcp_size": 2}, {"tp_size": 2, "dcp_size": 2, "interleave": 4}, "interleave_tokens: 1 != 4"),
        ({"tp_size": 1}, {"tp_size": 2, "dcp_size": 2, "interleave": 4}, "dcp_size: 1 != 2 (the interleave of 4 tokens must"),
        (
            {"tp_size": 2, "dcp_size": 2, "interleave": 16},
            {"tp_size": 3, "dcp_size": 3, "interleave": 16},
            "dcp_size: 2 != 3 (one must divide the other)",
        ),
    ],
)
def test_sides_that_do_not_fit_are_refused_with_both_values(prefill: dict[str, int], decode: dict[str, int], named: str) -> None:
    sends = Divided("latents", **prefill).instance(PREFILL)
    fetches = Divided("latents", **decode).instance(DECODE)
    try:
        fetches.leader.want("b", "t", sends.leader.address, PROMPT)
        assert named in fetches.wait_until_failed("b")
        view = fetches.leader.view("b")
        assert view is not None and view.state is PromptState.FAILED
    finally:
        fetches.close()
        sends.close()
