"""Decode steps with compiled layers on a CPU: tokens, no compilation in a step, and a missing compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.loading import load_engine
from tests.cluster.engines.ranks import GroupOfRanks, RankServer
from tests.embedded_engine.conftest import Generate
from tests.embedded_engine.drafts import MOST_DRAFTS, half_right, right, verify_all, wrong
from tests.embedded_engine.steps import Directory, PageBook, Prompts, bind_pages, decode_all, make_engine, prefill_all
from tests.runtime.instances import decode_config
from transfer.errors import ConfigError
from transfer.layout import LayerKind, Shard

pytestmark = pytest.mark.timeout(600)  # a compilation takes about ten seconds on a free core

NUM_TOKENS = 8
LENGTHS = (5, 17, 33)


@pytest.fixture(scope="module")
def compiled(demo_dir: Path) -> EmbeddedEngine:
    """An engine that compiles steps of up to eight rows, and runs steps of up to fifteen."""
    settings = {"num_speculative_tokens": MOST_DRAFTS, "max_running_requests": len(LENGTHS), "torch_compile_max_bs": 8}
    return make_engine(demo_dir, Shard(page_size=4), **settings)


def calls_in(step: Callable[[], Any]) -> int:
    """Return how often a step calls compiled code."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(event.name.startswith("Torch-Compiled Region") for event in profile.events())


def test_tokens_are_those_of_generate_and_no_step_compiles(
    compiled: EmbeddedEngine, demo_dir: Path, generate: Generate, prompts: Prompts
) -> None:
    """Steps of one to fifteen rows; those of up to eight are compiled."""
    answers = {str(length): generate(demo_dir, prompts[length], NUM_TOKENS) for length in LENGTHS}
    own = {name: prompts[int(name)] for name in answers}
    book = PageBook.of(compiled, {name: int(name) + NUM_TOKENS for name in own})
    graphs = counters["stats"]["unique_graphs"]
    first = prefill_all(compiled, own, book)
    for names in (("17",), ("5", "33"), tuple(own)):
        lengths = {name: int(name) for name in names}
        found: dict[str, list[int]] = {}
        calls = calls_in(
            lambda names=names, lengths=lengths, found=found: found.update(
                decode_all(compiled, {name: first[name] for name in names}, lengths, book, NUM_TOKENS)
            )
        )
        assert found == {name: answers[name] for name in names}
        assert calls == (NUM_TOKENS - 1) * compiled.layout.num_layers
    book = PageBook.of(compiled, {name: int(name) + NUM_TOKENS for name in own})
    first = prefill_all(compiled, own, book)
    verified, _ = verify_all(compiled, first, book, answers, dict(zip(own, (right, wrong, half_right), strict=True)))
    assert verified == answers
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_tokens_of_other_layers_are_those_of_generate(
    family_dir: Directory, generate: Generate, prompts: Prompts, family: str
) -> None:
    """Latent attention, and recurrent layers, which are not compiled."""
    directory = family_dir(family)
    engine = make_engine(directory, Shard(page_size=4), max_running_requests=2, torch_compile_max_bs=2)
    own = {str(length): prompts[length] for length in LENGTHS[:2]}
    book = PageBook.of(engine, {name: int(name) + NUM_TOKENS for name in own})
    first = prefill_all(engine, own, book)
    found: dict[str, list[int]] = {}
    calls = calls_in(lambda: found.update(decode_all(engine, first, {name: int(name) for name in own}, book, NUM_TOKENS)))
    assert found == {name: generate(directory, tokens, NUM_TOKENS) for name, tokens in own.items()}
    recurrent = sum(layer.kind is LayerKind.RECURRENT_STATE for layer in engine.layout.layers)
    assert calls == (NUM_TOKENS - 1) * (engine.layout.num_layers - recurrent)


def test_ranks_of_a_group_have_the_same_tokens(
    demo_dir: Path, rank_server: RankServer, generate: Generate, prompts: Prompts
) -> None:
    """The ranks compile independently, and call collectives in each step."""
    described = GroupOfRanks(size=2, model=demo_dir, settings={"max_running_requests": 2, "torch_compile_max_bs": 2})
    ranks = rank_server.start({"compiled": described})["compiled"]
    own = {str(length): prompts[length] for length in LENGTHS[:2]}
    tables = bind_pages(200, 16, {name: int(name) + NUM_TOKENS for name in own})
    found = decode_all(ranks, prefill_all(ranks, own, tables), {name: int(name) for name in own}, tables, NUM_TOKENS)
    assert found == {name: generate(demo_dir, tokens, NUM_TOKENS) for name, tokens in own.items()}


def test_without_a_compiler_a_node_runs_uncompiled_steps_after_a_warning(
    demo_dir: Path, tmp_path: Path, generate: Generate, prompts: Prompts
) -> None:
    torch.compiler.reset()
    with fresh_cache(), inductor_config.patch({"cpp.cxx": ("/bin/false",)}), capture_logs() as logs:
        config = decode_config(demo_dir, torch_compile=True, limits={"max_running_requests": 1})
        engine = load_engine(config, rank=0, rendezvous=tmp_path / "unused")
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warning["event"] == "torch_compile_unusable" and "set torch_compile to false" in warning["advice"]
    assert "compiler" in warning["reason"].lower() and "\n" not in warning["reason"]
    assert engine.memory_plan is not None and engine.memory_plan.planned_bytes("inductor") == 2 << 20
    tables = bind_pages(engine.pool.num_pages[0], engine.pool.page_size, {"5": 5 + NUM_TOKENS})
    first = prefill_all(engine, {"5": prompts[5]}, tables)
    assert decode_all(engine, first, {"5": 5}, tables, NUM_TOKENS)["5"] == generate(demo_dir, prompts[5], NUM_TOKENS)


def test_a_negative_size_is_rejected(demo_dir: Path) -> None:
    with pytest.raises(ConfigError, match="torch_compile_max_bs is -1; must be 0 or more"):
        make_engine(demo_dir, Shard(page_size=4), torch_compile_max_bs=-1)
