"""One rank: the engine's greedy tokens are those of transformers' own `generate`, however a prompt is cut, paged or batched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.forward_batch import NO_TOKEN
from embedded_engine.model_files import read_model_files
from tests.embedded_engine.conftest import Generate
from tests.embedded_engine.steps import (
    Directory,
    PageBook,
    Prompts,
    bind_pages,
    decode_ahead,
    decode_all,
    generate_all,
    pages_for,
    prefill_all,
)
from transfer.engine_types import DecodeItem, PrefillItem, RequestFault, SamplingParams
from transfer.errors import EngineError
from transfer.layer_groups import layer_groups
from transfer.layout import DType, Shard

NUM_TOKENS = 8


def make_engine(directory: Path, **shard: Any) -> EmbeddedEngine:
    cut = Shard(**shard)
    return EmbeddedEngine(directory, shard=cut, num_pages=3200 // cut.page_size)


@pytest.fixture(scope="module")
def engine(demo_dir: Path) -> EmbeddedEngine:
    return make_engine(demo_dir)


def expected(generate: Generate, directory: Path, prompts: Prompts, num_tokens: int = NUM_TOKENS) -> dict[str, list[int]]:
    return {str(length): generate(directory, tokens, num_tokens) for length, tokens in prompts.items()}


def named(prompts: Prompts) -> dict[str, tuple[int, ...]]:
    return {str(length): tokens for length, tokens in prompts.items()}


@pytest.mark.parametrize("chunk_tokens", [1, 16, 100, 256])
def test_chunked_prefill_is_exact(
    engine: EmbeddedEngine, demo_dir: Path, generate: Generate, prompts: Prompts, chunk_tokens: int
) -> None:
    # One token a step is slow: the longest prompts are left to the larger chunks.
    chosen = {length: tokens for length, tokens in prompts.items() if length <= 40 * chunk_tokens}
    assert generate_all(engine, named(chosen), 4, chunk_tokens=chunk_tokens) == expected(generate, demo_dir, chosen, 4)


def test_a_prefix_that_is_in_the_pool_is_not_computed_again(
    engine: EmbeddedEngine, demo_dir: Path, generate: Generate, prompts: Prompts
) -> None:
    tokens = prompts[129]
    tables = bind_pages(engine.pool.num_pages[0], engine.pool.page_size, {"first": 140, "second": 140})
    prefill_all(engine, {"first": tokens}, tables)
    shared = engine.pool.page_size * 5
    table = tables["first"][:5] + tables["second"][5:]
    item = PrefillItem(request_id="second", token_ids=tokens[shared:], first_token=shared, page_tables=(table,), is_last=True)
    first = engine.prefill([item])
    assert decode_all(engine, first, {"second": 129}, {"second": table}, 4) == {"second": generate(demo_dir, tokens, 4)}


def test_only_the_step_s_own_slots_are_written(engine: EmbeddedEngine, prompts: Prompts) -> None:
    pool = engine.pool
    tables = bind_pages(pool.num_pages[0], pool.page_size, {"a": 40})
    prefill_all(engine, {"a": prompts[33]}, tables)
    before = [pool.buffer(layer, is_v=is_v).clone() for layer in range(8) for is_v in (False, True)]
    engine.decode([DecodeItem(request_id="a", token_id=9, position=33, page_tables=(tables["a"],))])
    page, offset = tables["a"][33 // 16], 33 % 16
    after = [pool.buffer(layer, is_v=is_v) for layer in range(8) for is_v in (False, True)]
    for old, new in zip(before, after, strict=True):
        changed = (old != new).any(dim=(2, 3)).nonzero().tolist()
        assert changed == [[page, offset]]


@pytest.mark.parametrize(("layers_per_group", "calls"), [(None, [8]), (3, [3, 6, 8]), (20, [8])])
def test_layer_groups_are_reported_when_their_kv_is_in_the_pool(
    demo_dir: Path, prompts: Prompts, layers_per_group: int | None, calls: list[int]
) -> None:
    engine = EmbeddedEngine(demo_dir, shard=Shard(), num_pages=20, layers_per_group=layers_per_group)
    table = list(range(20))
    slots = torch.arange(33)
    seen: list[int] = []
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_layers_written(layers_done: int, event: object) -> None:
        assert event is None
        for layer in range(len(kept), layers_done):
            kept.append(engine.pool.read(layer, slots))
        for layer in range(layers_done, 8):
            assert not engine.pool.read(layer, slots)[0].any()
        seen.append(layers_done)

    item = PrefillItem(request_id="a", token_ids=prompts[33], first_token=0, page_tables=(table,), is_last=False)
    assert engine.prefill([item], on_layers_written) == {}
    assert seen == calls
    for layer, (k, v) in enumerate(kept):
        final_k, final_v = engine.pool.read(layer, slots)
        assert k.any() and torch.equal(k, final_k) and torch.equal(v, final_v)


def test_half_precision_model_and_narrower_pool(demo_dir: Path, prompts: Prompts) -> None:
    exact = make_engine(demo_dir)
    tokens = {"a": prompts[64]}
    wanted = generate_all(exact, tokens, 1)
    for options in ({"dtype": DType.BFLOAT16}, {"dtype": DType.FLOAT16}):
        engine = EmbeddedEngine(demo_dir, shard=Shard(), num_pages=20, **options)
        assert engine.layout.dtype is options["dtype"]
        assert engine.pool.buffer(0, is_v=True).dtype is getattr(torch, options["dtype"].value)
        generate_all(engine, tokens, 4)
    narrow = EmbeddedEngine(demo_dir, shard=Shard(dtype=DType.FLOAT16), num_pages=20)
    assert narrow.pool.buffer(0, is_v=True).dtype is torch.float16 and narrow.layout.dtype is DType.FLOAT32
    assert generate_all(narrow, tokens, 1) == wanted


def test_a_full_context_works_to_its_last_token(qwen_dir: Path) -> None:
    engine = make_engine(qwen_dir)
    assert engine.eos_token_ids == (1, 2)
    tokens = tuple(3 + index % 200 for index in range(511))
    table = list(range(32))
    first = engine.prefill([PrefillItem(request_id="a", token_ids=tokens, first_token=0, page_tables=(table,), is_last=True)])
    assert engine.decode([DecodeItem(request_id="a", token_id=first["a"], position=511, page_tables=(table,))])


def test_a_request_whose_numbers_are_broken_costs_the_others_of_its_step_nothing(demo_dir: Path, prompts: Prompts) -> None:
    engine = make_engine(demo_dir)
    tables = {"bad": [2, 3], "good": [0, 1]}
    first = prefill_all(engine, {"good": prompts[17], "bad": prompts[16]}, tables)
    items = [
        DecodeItem(request_id=name, token_id=first[name], position=position, page_tables=(tables[name],))
        for name, position in (("bad", 16), ("good", 17))
    ]
    alone = engine.decode(items[1:])
    engine.pool.buffer(0, is_v=True)[2] = float("nan")
    output = engine.forward_batch(engine.decode_batch(items))
    assert output.next_tokens.tolist() == [NO_TOKEN, alone["good"]]
    with pytest.raises(RequestFault, match="request bad are not finite") as fault:
        engine.decode(items)
    assert "good" not in str(fault.value) and fault.value.request_ids == ("bad",) and fault.value.tokens == alone
    assert engine.decode(items[1:]) == alone


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next"])
def test_a_step_uses_tokens_that_the_host_has_not_read(
    family_dir: Directory, generate: Generate, prompts: Prompts, family: str
) -> None:
    """Each step has another order of requests than the previous one. Pages that a window has passed contain NaN."""
    directory = family_dir(family)
    files = read_model_files(directory)
    engine = EmbeddedEngine(files, shard=Shard(page_size=4), num_pages=pages_for(layer_groups(files.layout()), 40))
    answers = {str(length): generate(directory, prompts[length], 9) for length in (5, 17)}
    book = PageBook.of(engine, {name: int(name) + 9 for name in answers})
    first = prefill_all(engine, {name: prompts[int(name)] for name in answers}, book)
    assert decode_ahead(engine, first, {name: int(name) for name in answers}, book, 9) == answers


def test_sampled_tokens_that_the_host_has_not_read(demo_dir: Path, prompts: Prompts) -> None:
    engine, sampling, tables = make_engine(demo_dir), SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=3), {"a": [2, 3]}
    first = prefill_all(engine, {"a": prompts[17]}, tables, sampling=sampling)
    found = [decode(engine, first, {"a": 17}, tables, 9, sampling=sampling) for decode in (decode_all, decode_ahead)]
    assert found[0] == found[1] and len(set(found[0]["a"])) > 3


def test_a_broken_request_in_the_next_step_costs_the_others_nothing(demo_dir: Path, prompts: Prompts) -> None:
    engine = make_engine(demo_dir)
    tables = {"bad": [2, 3], "good": [0, 1]}
    first = prefill_all(engine, {"good": prompts[17], "bad": prompts[16]}, tables)
    expected = decode_all(engine, {"good": first["good"]}, {"good": 17}, tables, 3)["good"]
    engine.pool.buffer(0, is_v=True)[2] = float("nan")
    items = [
        DecodeItem(request_id=name, token_id=first[name], position=position, page_tables=(tables[name],))
        for name, position in (("bad", 16), ("good", 17))
    ]
    reads = [engine.begin_decode(items)]
    reads.append(engine.begin_decode([replace(item, token_id=0, position=item.position + 1, is_unread=True) for item in items]))
    for read, token in zip(reads, expected[1:], strict=True):
        with pytest.raises(RequestFault, match="request bad are not finite") as fault:
            read()
        assert fault.value.tokens == {"good": token}


def test_a_token_that_no_step_has_chosen_is_refused(demo_dir: Path, prompts: Prompts) -> None:
    engine = make_engine(demo_dir)
    first = prefill_all(engine, {"a": prompts[17]}, {"a": [0, 1]})
    item = DecodeItem(request_id="a", token_id=first["a"], position=17, page_tables=([0, 1],))
    unread = replace(item, token_id=0, position=18, is_unread=True)
    complaint = "request 'a' is unread, and the previous step chose no token for it"
    for decode in (engine.begin_decode, engine.decode):
        with pytest.raises(EngineError, match=complaint):
            decode([unread])
    engine.begin_decode([item])
    with pytest.raises(EngineError, match="has 2 page tables"):
        engine.begin_decode([replace(unread, page_tables=([0],) * 2)])
    with pytest.raises(EngineError, match=complaint):
        engine.begin_decode([unread])
