"""Every kind of layer cut over ranks in real processes: same tokens, and each pool holds what a whole model's would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embedded_engine.architectures import ARCHITECTURES
from embedded_engine.engine import EmbeddedEngine
from embedded_engine.model_config import check_before_start
from embedded_engine.model_files import read_model_files
from tests.cluster.engines.ranks import GroupOfRanks, Ranks, RankServer
from tests.embedded_engine.conftest import Generate
from tests.embedded_engine.families import FAMILIES
from tests.embedded_engine.steps import Directory, PageBook, decode_all, pages_for, prefill_all
from transfer.engine_types import PrefillItem
from transfer.errors import ConfigError
from transfer.layer_groups import GroupKind, layer_groups
from transfer.layout import LayerKind, Shard

NUM_TOKENS = 24
CUTS = {
    "llama": (2, 3),
    "qwen3": (2,),
    "qwen2": (2,),
    "qwen3_moe": (2,),
    "mixtral": (2,),
    "mistral": (2,),
    "gemma2": (2,),
    "gemma3": (2, 4),
    "glm": (2,),
    "glm4": (2,),
    "deepseek_v2": (2, 4),
    "deepseek_v3": (4,),
    "deepseek_v3_moe": (2,),
    "qwen3_next": (4,),
    "qwen3_next_moe": (2,),
}
CASES = [(family, size) for family, sizes in CUTS.items() for size in sizes]


@pytest.fixture(scope="module")
def groups(family_dir: Directory, rank_server: RankServer) -> dict[str, Ranks]:
    return rank_server.start({f"{family}_{size}": GroupOfRanks(size=size, model=family_dir(family)) for family, size in CASES})


def test_every_family_that_can_be_cut_is_cut() -> None:
    made = {family for family, (stem, _) in FAMILIES.items() if ARCHITECTURES[f"{stem}ForCausalLM"].is_cut}
    assert set(CUTS) == made | {"llama", "qwen3"}


@pytest.mark.parametrize(("family", "size"), CASES)
def test_tokens_are_those_of_one_rank(
    groups: dict[str, Ranks],
    family_dir: Directory,
    generate: Generate,
    prompts: dict[int, tuple[int, ...]],
    family: str,
    size: int,
) -> None:
    directory = family_dir(family)
    chosen = {str(length): prompts[length] for length in (5, 64)}
    lengths = {name: len(tokens) for name, tokens in chosen.items()}
    book = book_of(directory, {name: length + NUM_TOKENS for name, length in lengths.items()})
    first = prefill_all(groups[f"{family}_{size}"], chosen, book, chunk_tokens=50)
    tokens = decode_all(groups[f"{family}_{size}"], first, lengths, book, NUM_TOKENS)
    assert tokens == {name: generate(directory, own, NUM_TOKENS) for name, own in chosen.items()}


@pytest.mark.parametrize(("family", "size"), CASES)
def test_the_ranks_pools_beside_each_other_are_a_whole_model_s(
    groups: dict[str, Ranks], family_dir: Directory, prompts: dict[int, tuple[int, ...]], family: str, size: int
) -> None:
    """That is also a hand-over between tiers of different cuts. A latent is the same on every rank."""
    directory = family_dir(family)
    whole = EmbeddedEngine(directory, shard=Shard(), num_pages=num_pages_of(directory))
    tables = book_of(directory, {"a": 33}).at("a", 0)
    item = PrefillItem(request_id="a", token_ids=prompts[33], first_token=0, page_tables=tables, is_last=True)
    assert groups[f"{family}_{size}"].prefill([item]) == whole.prefill([item])
    assert groups[f"{family}_{size}"].call("fields") == [whole.model_fields] * size
    for layer in range(whole.layout.num_layers):
        index = whole.pool.group_of(layer)
        is_state = whole.pool.groups[index].kind is GroupKind.STATE
        slots = list(tables[index]) if is_state else [page * 16 + offset for page in tables[index] for offset in range(16)][:33]
        parts = groups[f"{family}_{size}"].call("read", layer, slots)
        is_latent = whole.layout.layers[layer].kind is LayerKind.MLA
        for is_v, expected in enumerate(whole.pool.read(layer, torch.tensor(slots))[: whole.layout.layers[layer].num_buffers]):
            own = [torch.from_numpy(part[is_v]) for part in parts]
            assert len(own) == size
            for found in own if is_latent else [torch.cat(own, dim=1)]:
                torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


def num_pages_of(directory: Path) -> tuple[int, ...]:
    return pages_for(layer_groups(read_model_files(directory).layout()), 200)


def book_of(directory: Path, lengths: dict[str, int]) -> PageBook:
    """As every rank has them: pages of 16 tokens."""
    return PageBook(layer_groups(read_model_files(directory).layout()), num_pages_of(directory), 16, lengths)


@pytest.mark.parametrize(
    ("family", "tp_size", "named"),
    [
        ("gpt_oss", 2, "it must be 1: the embedded engine does not shard GptOssForCausalLM"),
        ("qwen3_next", 8, "does not divide num_key_value_heads (4) of the model's config.json; it must be one of 1, 2, 4"),
    ],
)
def test_cuts_that_the_engine_does_not_serve_are_refused_before_and_by_the_ranks(
    family_dir: Directory, family: str, tp_size: int, named: str
) -> None:
    directory = family_dir(family)
    for check in (
        lambda: check_before_start(directory, tp_size, dummy_weights=False),
        lambda: read_model_files(directory).check_shard(Shard(tp_size=tp_size)),
    ):
        with pytest.raises(ConfigError) as caught:
            check()
        text: Any = str(caught.value)
        assert f"parallel.tp_size (--tp) is {tp_size}" in text and named in text
