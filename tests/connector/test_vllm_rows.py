"""Rows of values and scales between instances: latents of sparse attention, indexers and an MTP layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvferry.engines.connector import DECODE, PREFILL, Sides
from kvferry.engines.vllm_layout import describe
from tests.adapters.vllm_memory import Memory, facts_of, placed_apart, recorded, sparse_layers
from tests.connector.instances import PROMPT, Instance
from transfer.connector.bound_prompts import PromptState
from transfer.connector.incoming_rank import Settled
from transfer.layout import Shard
from transfer.pool.kv_pool import KVPool

NUM_BLOCKS = 12
JOIN = {"join_on_request": True}


class Sparse:
    """The ranks of a vLLM instance with a DeepSeek-V3.2 of two layers and an MTP layer, in host memory."""

    def __init__(self, *, tp_size: int, block_size: int, row_format: str, has_draft: bool = True) -> None:
        layers = sparse_layers(2, block_size=block_size, row_format=row_format)
        if has_draft:
            layers += [
                replace(one, is_draft=True) for one in sparse_layers(1, block_size=block_size, row_format=row_format, begin=2)
            ]
        self.facts = facts_of(
            recorded("mla")["rank0"]["facts"],
            layers=tuple(layers),
            model_layers=(),
            model_dtype="bfloat16",
            num_blocks=NUM_BLOCKS,
            tp_size=tp_size,
        )
        tensors, num_bytes = placed_apart(layers, num_blocks=NUM_BLOCKS)
        self.memories = [Memory(tensors, num_bytes) for _ in range(tp_size)]
        self.block_size = block_size
        self.tp_size = tp_size

    @property
    def num_tables(self) -> int:
        return len(describe(self.facts).groups)

    def pool_of(self, shard: Shard) -> KVPool:
        return describe(replace(self.facts, tp_rank=shard.tp_rank)).pool(self.memories[shard.tp_rank].caches)

    def rows(self, rank: int, blocks: list[int], num_tokens: int) -> dict[tuple[str, bool], Tensor]:
        """Indices of the prompt's values and scales in each layer's elements."""
        return {
            (layer.name, is_v): self.memories[rank].places(layer, blocks, range(num_tokens), is_v=is_v)
            for layer in self.facts.layers
            for is_v in (False, True)[: 2 if layer.v_head_dim else 1]
        }

    def fill(self, blocks: list[int], num_tokens: int) -> dict[tuple[str, bool], Tensor]:
        """Give all ranks the same KV; return its bytes."""
        generator = torch.Generator().manual_seed(1)
        kept = {}
        for key, places in self.rows(0, blocks, num_tokens).items():
            size = self.memories[0].elements(key[0]).element_size()
            kept[key] = torch.randint(0, 256, (places.numel() * size,), dtype=torch.uint8, generator=generator)
            for memory in self.memories:
                elements = memory.elements(key[0])
                elements[places.view(-1)] = kept[key].view(elements.dtype)
        return kept

    def instance(self, sides: Sides) -> Instance:
        return Instance(sides, tp_size=self.tp_size, page_size=self.block_size, pool_of=self.pool_of, settings=JOIN)


@pytest.mark.parametrize("row_format", ["", "fp8_ds_mla"])
@pytest.mark.parametrize(("prefill", "decode"), [((2, 64), (1, 32)), ((1, 32), (2, 64))])
def test_rows_arrive_where_vllm_reads_them(prefill: tuple[int, int], decode: tuple[int, int], row_format: str) -> None:
    source, target = (Sparse(tp_size=tp, block_size=size, row_format=row_format) for tp, size in (prefill, decode))
    held, wanted = [5, 2, 7, 1], [3, 11, 4, 9]
    kept = source.fill(held, len(PROMPT))
    sends, fetches = source.instance(PREFILL), target.instance(DECODE)
    try:
        sends.leader.offer("a", "t", PROMPT)
        sends.leader.begin("a")
        for rank in sends.ranks:
            rank.progress("a", [held] * source.num_tables, len(PROMPT))
        sends.finish("a")
        fetches.leader.want("b", "t", sends.leader.address, PROMPT)
        fetches.leader.bind("b", [wanted] * target.num_tables)
        assert not fetches.heard("b", Settled).failure
    finally:
        fetches.close()
        sends.close()
    for rank, memory in enumerate(target.memories):
        for key, places in target.rows(rank, wanted, len(PROMPT)).items():
            assert torch.equal(memory.elements(key[0])[places.view(-1)].view(torch.uint8), kept[key]), key


def test_a_prefill_side_without_draft_layers_is_refused_with_both_values() -> None:
    source, target = (Sparse(tp_size=1, block_size=64, row_format="fp8_ds_mla", has_draft=draft) for draft in (False, True))
    sends, fetches = source.instance(PREFILL), target.instance(DECODE)
    try:
        fetches.leader.want("b", "t", sends.leader.address, PROMPT)
        assert "num_layers: 4 != 6" in fetches.wait_until_failed("b")
        view = fetches.leader.view("b")
        assert view is not None and view.state is PromptState.FAILED
    finally:
        fetches.close()
        sends.close()
