"""Draft tokens: the tokens are those of steps without them, whatever the drafts are; good drafts save steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.loading import load_engine
from planner.plan import compare_with_real
from planner.workspace import XAttention
from tests.embedded_engine.conftest import Generate
from tests.embedded_engine.drafts import MOST_DRAFTS, half_right, near_copy, right, verify_all, wrong
from tests.embedded_engine.steps import Directory, PageBook, Prompts, decode_all, make_engine, prefill_all
from tests.runtime.instances import decode_config, prefill_config
from transfer.engine_types import GREEDY, DecodeItem, RequestFault, SamplingParams
from transfer.errors import ConfigError, EngineError
from transfer.layout import Shard

NUM_TOKENS = 14
LENGTHS = (5, 17, 33)


def made(directory: Path, **settings: Any) -> EmbeddedEngine:
    return make_engine(directory, Shard(page_size=4), num_speculative_tokens=MOST_DRAFTS, **settings)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_tokens_are_those_of_generate(family_dir: Directory, generate: Generate, prompts: Prompts, family: str) -> None:
    """Windows move, and pages that a window has passed hold no numbers."""
    directory = family_dir(family)
    engine = made(directory)
    answers = {str(length): generate(directory, prompts[length], NUM_TOKENS) for length in LENGTHS}
    book = PageBook.of(engine, {name: int(name) + NUM_TOKENS for name in answers})
    first = prefill_all(engine, {name: prompts[int(name)] for name in answers}, book)
    found, steps = verify_all(engine, first, book, answers, dict(zip(answers, (right, wrong, half_right), strict=True)))
    assert found == answers
    assert steps == NUM_TOKENS - 1, "the request with wrong drafts gets one token a step"


def test_right_drafts_save_steps(demo_dir: Path, generate: Generate, prompts: Prompts) -> None:
    engine = made(demo_dir)
    answers = {"17": generate(demo_dir, prompts[17], 16)}
    book = PageBook.of(engine, {"17": 33})
    found, steps = verify_all(engine, prefill_all(engine, {"17": prompts[17]}, book), book, answers, {"17": right})
    assert found == answers and steps == 3, "15 tokens, 5 a step"


def test_sampled_tokens_stay_the_same(demo_dir: Path, prompts: Prompts) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=5)
    engine = made(demo_dir)
    book = PageBook.of(engine, {"33": 33 + NUM_TOKENS})
    first = prefill_all(engine, {"33": prompts[33]}, book, sampling=sampling)
    answers = decode_all(engine, first, {"33": 33}, book, NUM_TOKENS, sampling=sampling)
    found, steps = verify_all(engine, first, book, answers, {"33": half_right}, sampling=sampling)
    assert found == answers and steps < NUM_TOKENS - 1


def test_damaged_kv_costs_the_request(demo_dir: Path, generate: Generate, prompts: Prompts) -> None:
    engine = made(demo_dir)
    answer = generate(demo_dir, prompts[16], NUM_TOKENS)
    table = list(range(10))
    first = prefill_all(engine, {"a": prompts[16]}, {"a": table})
    item = DecodeItem(request_id="a", token_id=first["a"], position=16, page_tables=(table,), draft_token_ids=tuple(answer[1:4]))
    head: torch.Tensor = engine.pool.buffer(0, is_v=True)
    assert engine.verify([item]) == {"a": tuple(answer[1:5])}
    head[3, 0] = float("nan")  # of a token that every row attends to
    with pytest.raises(RequestFault, match="request a are not finite") as fault:
        engine.verify([item])
    assert fault.value.tokens == {}


def test_steps_that_do_not_fit_are_refused(demo_dir: Path) -> None:
    engine = made(demo_dir)

    def verify(*drafts: int, pages: int = 10) -> None:
        item = DecodeItem(request_id="a", token_id=5, position=3, page_tables=(range(pages),), draft_token_ids=drafts)
        engine.verify([item])

    with pytest.raises(EngineError, match="'a' has 5 draft tokens; the engine is set up for at most 4"):
        verify(1, 2, 3, 4, 5)
    with pytest.raises(EngineError, match="'a' has token -1"):
        verify(-1)
    with pytest.raises(EngineError, match="has 1 pages of 4 tokens; 6 tokens need 2"):
        verify(1, 2, pages=1)


def test_recurrent_models_are_refused(family_dir: Directory) -> None:
    with pytest.raises(ConfigError, match="Qwen3NextForCausalLM has recurrent layers, whose state cannot drop a rejected draft"):
        made(family_dir("qwen3_next"))


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory, demo_dir: Path) -> Path:
    """A draft model for the demo model: the same, with weights that are a little off, so that it is mostly right."""
    return near_copy(demo_dir, tmp_path_factory.mktemp("draft"), noise=0.02)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.7, seed=3)])
def test_tokens_with_a_draft_model_are_those_without(
    demo_dir: Path, small_dir: Path, prompts: Prompts, sampling: SamplingParams
) -> None:
    """Requests ask for none, some and all draft tokens. The draft model reads nothing that was not written."""
    plain = make_engine(demo_dir, Shard(page_size=4))
    lengths = {str(length): length + NUM_TOKENS for length in LENGTHS}
    own = {str(length): prompts[length] for length in LENGTHS}
    book = PageBook.of(plain, lengths)
    first = prefill_all(plain, own, book, chunk_tokens=13, sampling=sampling)
    answers = decode_all(plain, first, {name: len(tokens) for name, tokens in own.items()}, book, NUM_TOKENS, sampling=sampling)
    engine = made(demo_dir, draft=small_dir)
    assert engine.layout.num_layers == 2 * plain.layout.num_layers and engine.weights_bytes == 2 * plain.weights_bytes
    book = PageBook.of(engine, lengths)
    assert prefill_all(engine, own, book, chunk_tokens=13, sampling=sampling) == first
    wanted = dict(zip(answers, (lambda answer, known: (), half_right, right), strict=True))
    found, _ = verify_all(engine, first, book, answers, wanted, sampling=sampling, has_draft_model=True)
    assert found == answers
    alone = {"33": answers["33"]}
    _, steps = verify_all(engine, {"33": first["33"]}, book, alone, {"33": right}, sampling=sampling, has_draft_model=True)
    assert steps < NUM_TOKENS - 3, "the draft model is mostly right"


def test_a_draft_model_that_is_the_model_is_always_right(demo_dir: Path, generate: Generate, prompts: Prompts) -> None:
    """Its KV is whole, therefore: also behind steps whose draft tokens were all accepted, and steps without any."""
    engine = made(demo_dir, draft=demo_dir)
    answers = {"17": generate(demo_dir, prompts[17], 18)}
    book = PageBook.of(engine, {"17": 35})
    first = prefill_all(engine, {"17": prompts[17]}, book)
    second = decode_all(engine, first, {"17": 17}, book, 2)["17"][1]
    assert second == answers["17"][1]
    turns = iter([0, 4, 4, 2, 4])
    found, steps = verify_all(
        engine, first, book, answers, {"17": lambda answer, known: right(answer, known)[: next(turns)]}, has_draft_model=True
    )
    assert found == answers and steps == 5, "1 + 5 + 5 + 3 + 3 tokens"


def test_draft_models_that_do_not_fit_are_refused(demo_dir: Path, family_dir: Directory) -> None:
    with pytest.raises(ConfigError, match=r"has a vocabulary of 240 tokens, and .* one of \d+; both need the same tokenizer"):
        made(demo_dir, draft=family_dir("qwen3"))
    with pytest.raises(ConfigError, match="Qwen3NextForCausalLM has recurrent layers"):
        made(demo_dir, draft=family_dir("qwen3_next"))
    with pytest.raises(ConfigError, match=r"xattention, and speculative.model is given; .*: remove one of them"):
        made(demo_dir, draft=demo_dir, sparse_prefill=XAttention(), chunk_tokens=64)


def test_the_memory_plan_counts_the_draft_model(demo_dir: Path, small_dir: Path, tmp_path: Path) -> None:
    """Its weights and its KV are as planned, and a change of role keeps both."""
    draft = {"model": small_dir}
    settings = {"pool": {"num_pages": 9}}
    engine = load_engine(prefill_config(demo_dir, speculative=draft, **settings), rank=0, rendezvous=tmp_path / "none")
    for _ in range(2):
        plan = engine.memory_plan
        assert plan is not None and engine.memory_warnings == ()
        real = {"weights": engine.weights_bytes, **{f"pool_{name}": size for name, size in engine.pool.storage_bytes.items()}}
        assert compare_with_real(plan, real) == []
        assert engine.pool.layout.num_layers == 16
        assert any(name.startswith("draft.") for name in engine.model_fields), "nodes with another draft model do not join"
        engine.switch_role(decode_config(demo_dir, speculative=draft | {"method": "draft_model"}, **settings))
