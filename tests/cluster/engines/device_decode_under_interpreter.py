"""Whole models whose decode steps go as on a GPU, under Triton's interpreter; run by test_under_interpreter.py.

A stand-in for CUDA graphs launches the step again at every replay. Everything else of a replayed step is as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embedded_engine import device_decode
from embedded_engine.engine import EmbeddedEngine
from tests.embedded_engine.conftest import Generate
from tests.embedded_engine.decode_scenario import MAX_RUNNING, MAX_SEQ_LEN, tokens_of_a_life
from tests.embedded_engine.drafts import MOST_DRAFTS, half_right, right, verify_all
from tests.embedded_engine.steps import (
    Directory,
    PageBook,
    Prompts,
    decode_ahead,
    decode_all,
    fill_with_nan,
    make_engine,
    prefill_all,
)
from transfer.engine_types import DecodeItem
from transfer.layout import Shard
from transfer.pool.kv_pool import KVPool

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

NUM_STEPS = 2  # of each phase; an interpreted kernel takes as long as thousands of compiled ones


class Relaunched:
    """In the place of `DecodeGraphs`."""

    def __init__(
        self,
        batch_sizes: Sequence[int],
        load: Callable[[int], None],
        step: Callable[[int], Tensor],
        device: torch.device,
        advice: str,
        beside: Relaunched | None = None,
    ) -> None:
        self.batch_sizes = tuple(sorted(batch_sizes))
        self.num_bytes = 0
        self.replayed: list[int] = []
        self._step = step
        for size in self.batch_sizes:
            load(size)
            self._logits = step(size).clone()

    size_for = device_decode.DecodeGraphs.size_for

    def replay(self, size: int) -> Tensor:
        self.replayed.append(size)
        self._logits[:size].copy_(self._step(size))
        return self._logits[:size]


def relaunch_graphs(patch: pytest.MonkeyPatch) -> list[Relaunched]:
    """Let decoders make stand-ins; returns those that are made from now on."""
    made: list[Relaunched] = []

    class Noted(Relaunched):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    patch.setattr(device_decode, "DecodeGraphs", Noted)
    return made


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Relaunched]:
    return relaunch_graphs(monkeypatch)


def made(directory: Path, *, batch_sizes: Sequence[int] = (), has_decode_kernels: bool = True, **settings: Any) -> EmbeddedEngine:
    return make_engine(
        directory,
        Shard(page_size=4),
        num_tokens=320,
        num_states=5,
        max_seq_len=MAX_SEQ_LEN,
        max_running_requests=MAX_RUNNING,
        cuda_graph_batch_sizes=batch_sizes,
        has_decode_kernels=has_decode_kernels,
        **settings,
    )


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_tokens_are_those_of_the_cpu_s_path(
    graphs: list[Relaunched], family_dir: Directory, prompts: Prompts, family: str
) -> None:
    """Steps of 3, 2, 4 and 1 requests, padded to 4, 2, 4 and 2."""
    directory = family_dir(family)
    found = tokens_of_a_life(made(directory, batch_sizes=(2, 4)), prompts, NUM_STEPS)
    assert found == tokens_of_a_life(made(directory, has_decode_kernels=False), prompts, NUM_STEPS)
    assert graphs[0].replayed == [size for size in (4, 2, 4, 2) for _ in range(NUM_STEPS)]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_draft_tokens_are_rows_of_the_step(
    graphs: list[Relaunched], family_dir: Directory, generate: Generate, prompts: Prompts, family: str
) -> None:
    """Steps of two requests with up to 5 rows each, padded to 6 or 10 rows."""
    directory, num_tokens = family_dir(family), 7
    engine = made(directory, batch_sizes=(6, 10), num_speculative_tokens=MOST_DRAFTS)
    answers = {str(length): generate(directory, prompts[length], num_tokens) for length in (5, 17)}
    book = PageBook.of(engine, {name: int(name) + num_tokens for name in answers})
    first = prefill_all(engine, {name: prompts[int(name)] for name in answers}, book)
    found, steps = verify_all(engine, first, book, answers, {"5": half_right, "17": right})
    assert found == answers and steps < num_tokens - 1
    assert graphs[0].replayed[0] == 10 and set(graphs[0].replayed) == {6, 10}


def test_a_draft_model_has_graphs_of_its_own(graphs: list[Relaunched], family_dir: Directory, prompts: Prompts) -> None:
    """The model guesses for itself, so all draft tokens are accepted: 1 + 2 + 3 tokens of each request."""
    directory = family_dir("gemma2")
    plain = made(directory, has_decode_kernels=False)
    lengths = {"5": 5 + 8, "17": 17 + 8}
    book = PageBook.of(plain, lengths)
    own = {name: prompts[int(name)] for name in lengths}
    first = prefill_all(plain, own, book)
    answers = decode_all(plain, first, {name: int(name) for name in own}, book, 7)
    engine = made(directory, batch_sizes=(2, 6), num_speculative_tokens=2, draft=directory)
    book = PageBook.of(engine, lengths)
    assert prefill_all(engine, own, book) == first
    counts = {name: iter([0, 1, 2]) for name in own}
    guesses = {name: lambda answer, known, name=name: right(answer, known)[: next(counts[name])] for name in own}
    found, steps = verify_all(engine, first, book, answers, guesses, has_draft_model=True)
    assert found == answers and steps == 3
    of_model, of_draft = graphs
    assert of_model.replayed == [2, 6, 6] and of_draft.replayed == [2] * (1 + 2 + 3)


def test_a_step_uses_tokens_that_the_host_has_not_read(graphs: list[Relaunched], family_dir: Directory, prompts: Prompts) -> None:
    """Replayed steps share the memory of their inputs."""
    directory, own = family_dir("gemma2"), {name: prompts[int(name)] for name in ("5", "17")}
    lengths = {name: int(name) for name in own}
    found = []
    for has_decode_kernels, decode in ((False, decode_all), (True, decode_ahead)):
        engine = made(directory, batch_sizes=(2,) if has_decode_kernels else (), has_decode_kernels=has_decode_kernels)
        book = PageBook.of(engine, {name: length + 4 for name, length in lengths.items()})
        found.append(decode(engine, prefill_all(engine, own, book), lengths, book, 4))
    assert found[0] == found[1] and graphs[0].replayed == [2] * 3


@pytest.mark.usefixtures("graphs")
def test_padding_touches_no_state_and_no_page(family_dir: Directory) -> None:
    """One request in a step of four: what the pool holds of others stays, also in the rows that come first."""
    engine = made(family_dir("qwen3_next"), batch_sizes=(4,))
    for layer in range(engine.layout.num_layers):
        engine.pool.buffer(layer, is_v=False).fill_(0.5)  # not what a padded step of the capture may have left
    before = contents(engine.pool)
    engine.decode([DecodeItem(request_id="a", token_id=5, position=9, page_tables=([7, 8, 9], [3]))])
    after = contents(engine.pool)
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        is_state = engine.layout.layers[layer].v_head_dim == 0
        changed = {int(page) for page in (old != new).flatten(1).any(1).nonzero()}
        assert changed == ({3} if is_state else {9})


@pytest.mark.usefixtures("graphs")
def test_a_request_begins_without_a_state(family_dir: Directory) -> None:
    engine = made(family_dir("qwen3_next"), batch_sizes=(2,))
    fill_with_nan(engine.pool)
    item = DecodeItem(request_id="a", token_id=5, position=0, page_tables=([7], [3]))
    assert engine.decode([item]) == engine.decode([item])


def contents(pool: KVPool) -> list[Tensor]:
    return [pool.buffer(layer, is_v=False).clone() for layer in range(pool.layout.num_layers)]
