"""Every family, one rank: greedy tokens are those of transformers' own `generate`, whatever a layer keeps of earlier tokens.

Pools are full of numbers that are none before anything is written, and wherever a window has passed: what a mask, a window's
bound or a state's first step gets wrong shows as a request without tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from embedded_engine.architectures import ARCHITECTURES
from embedded_engine.engine import EmbeddedEngine
from tests.embedded_engine.conftest import Generate
from tests.embedded_engine.families import FAMILIES
from tests.embedded_engine.steps import Directory, PageBook, Prompts, copy_kv, decode_all, fill_with_nan, make_engine, prefill_all
from transfer.engine_types import DecodeItem, PrefillItem
from transfer.errors import EngineError
from transfer.layout import DType, Shard, TokenOrder

NUM_TOKENS = 24
LENGTHS = (1, 5, 17, 64, 129)
SETTINGS: Mapping[str, tuple[int, Shard]] = {
    "small": (7, Shard(page_size=4)),
    "large": (64, Shard(page_size=16, order=TokenOrder.HND)),
    "tokens": (200, Shard(page_size=1)),
}
"""Chunk tokens and the rank's cut."""
MODELS = ("llama", "qwen3", *FAMILIES)
OF_EACH_KIND = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next")
"""Full attention alone; windows with a cap; windows with sinks; latents; states."""


def generated(engine: EmbeddedEngine, prompts: Mapping[str, tuple[int, ...]], chunk_tokens: int) -> dict[str, list[int]]:
    lengths = {name: len(tokens) for name, tokens in prompts.items()}
    book = PageBook.of(engine, {name: length + NUM_TOKENS for name, length in lengths.items()})
    first = prefill_all(engine, prompts, book, chunk_tokens=chunk_tokens)
    return decode_all(engine, first, lengths, book, NUM_TOKENS)


def test_there_is_a_model_of_every_architecture() -> None:
    covered = {f"{stem}ForCausalLM" for stem, _ in FAMILIES.values()} | {"LlamaForCausalLM", "Qwen3ForCausalLM"}
    assert covered == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("family", "setting"),
    [*((family, "small") for family in MODELS), *((family, one) for family in OF_EACH_KIND for one in ("large", "tokens"))],
)
def test_greedy_tokens_are_those_of_transformers(
    family_dir: Directory, generate: Generate, prompts: Prompts, family: str, setting: str
) -> None:
    directory = family_dir(family)
    chunk_tokens, shard = SETTINGS[setting]
    engine = make_engine(directory, shard)
    found = generated(engine, {str(length): prompts[length] for length in LENGTHS}, chunk_tokens)
    assert found == {str(length): generate(directory, prompts[length], NUM_TOKENS) for length in LENGTHS}
    assert len({token for tokens in found.values() for token in tokens}) > 25, "generations that repeat themselves prove little"


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_requests_join_and_leave_between_steps(family_dir: Directory, generate: Generate, prompts: Prompts, family: str) -> None:
    """Chunks from the middle of one prompt and from the beginning of another in a step, and rows of states used again."""
    directory = family_dir(family)
    engine = make_engine(directory, Shard(page_size=4))
    book = PageBook.of(engine, {name: int(name) + NUM_TOKENS for name in ("129", "64", "17", "33")})
    chunk = {"129": 40, "64": 25, "17": 17}
    begins = {"129": -40, "64": -75, "17": -34}  # negative: waits for its turn
    first: dict[str, int] = {}
    while len(first) < 3:
        items = []
        for name, size in chunk.items():
            tokens, begin = prompts[int(name)], begins[name] + size
            begins[name] = begin
            if 0 <= begin < len(tokens):
                part = tokens[begin : begin + size]
                is_last = begin + size >= len(tokens)
                tables = book.at(name, begin)
                items.append(PrefillItem(request_id=name, token_ids=part, first_token=begin, page_tables=tables, is_last=is_last))
        first |= engine.prefill(items)
    lengths = {name: int(name) for name in chunk}
    decode_all(engine, {"64": first["64"]}, lengths, book, 3)  # ends here; its pages are given to another request
    book.give("64", "33")
    late = prefill_all(engine, {"33": prompts[33]}, book, chunk_tokens=10)
    found = decode_all(engine, {"129": first["129"], "17": first["17"]} | late, lengths | {"33": 33}, book, NUM_TOKENS)
    assert found == {name: generate(directory, prompts[int(name)], NUM_TOKENS) for name in ("129", "17", "33")}


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_what_a_transfer_moves_is_all_that_decode_needs(
    family_dir: Directory, generate: Generate, prompts: Prompts, family: str
) -> None:
    directory = family_dir(family)
    lengths = {str(length): length for length in (1, 17, 129)}
    chosen = {name: prompts[length] for name, length in lengths.items()}
    source = make_engine(directory, Shard(page_size=4))
    source_book = PageBook.of(source, lengths, seed=1)
    first = prefill_all(source, chosen, source_book, chunk_tokens=50)
    target = make_engine(directory, Shard(page_size=7, order=TokenOrder.HND))
    book = PageBook.of(target, {name: length + NUM_TOKENS for name, length in lengths.items()}, seed=2)
    for name, length in lengths.items():
        # The source's tables as they were in the last step; the target has pages for what travels, and no others.
        last_step = (length - 1) // 50 * 50
        copy_kv(source.pool, source_book.at(name, last_step), target.pool, book.at(name, length - 1), length)
    found = decode_all(target, first, lengths, book, NUM_TOKENS)
    assert found == {name: generate(directory, own, NUM_TOKENS) for name, own in chosen.items()}


def test_half_precision_keeps_states_whole(family_dir: Directory, prompts: Prompts) -> None:
    directory = family_dir("qwen3_next")
    engine = make_engine(directory, Shard(dtype=DType.FLOAT16), dtype=DType.BFLOAT16)
    assert engine.pool.buffer(0, is_v=False).dtype is torch.float32
    assert engine.pool.buffer(1, is_v=False).dtype is torch.float16
    assert len(generated(engine, {"64": prompts[64], "5": prompts[5]}, 30)["5"]) == NUM_TOKENS


def test_a_decode_step_may_be_a_request_s_first(family_dir: Directory) -> None:
    """Its row of states may hold anything: a prompt of one token gives the same."""
    engine = make_engine(family_dir("qwen3_next"), Shard(page_size=4))
    fill_with_nan(engine.pool)
    decoded = engine.decode([DecodeItem(request_id="a", token_id=5, position=0, page_tables=([7], [3]))])
    item = PrefillItem(request_id="a", token_ids=(5,), first_token=0, page_tables=([8], [3]), is_last=True)
    assert decoded == engine.prefill([item])


def test_a_damaged_state_costs_its_own_request_only(family_dir: Directory, generate: Generate, prompts: Prompts) -> None:
    directory = family_dir("qwen3_next")
    engine = make_engine(directory, Shard(page_size=4))
    book = PageBook.of(engine, {"17": 60, "64": 100})
    first = prefill_all(engine, {"17": prompts[17], "64": prompts[64]}, book)
    fill_with_nan(engine.pool, [0], book.at("64", 64)[1][0])
    items = [
        DecodeItem(request_id=name, token_id=first[name], position=int(name), page_tables=book.at(name, int(name)))
        for name in ("64", "17")
    ]
    with pytest.raises(EngineError, match="request 64 are not finite") as fault:
        engine.decode(items)
    assert fault.value.tokens == {"17": generate(directory, prompts[17], 2)[1]}  # type: ignore[attr-defined]


def test_gated_delta_nets_say_which_transformers_they_take(family_dir: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, which would fail in the middle of transformers."""
    monkeypatch.delattr("transformers.cache_utils.Cache.get_conv_state")
    with pytest.raises(EngineError, match=r"Qwen3Next\w* has gated delta nets.* 5\.21 or newer; \d+\.\d+.* is installed"):
        make_engine(family_dir("qwen3_next"), Shard(page_size=4))
