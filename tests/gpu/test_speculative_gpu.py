"""Draft tokens on a real GPU: replayed steps with several rows of a request, against the CPU's steps without draft tokens."""

from __future__ import annotations

import pytest

from tests.embedded_engine.drafts import MOST_DRAFTS, half_right, right, verify_all, wrong
from tests.embedded_engine.steps import Directory, PageBook, decode_all, make_engine, prefill_all
from tests.gpu.small_engines import prompts_of
from transfer.layout import Shard

pytestmark = pytest.mark.timeout(600)  # the first of each shape compiles its kernels

NUM_TOKENS = 14
LENGTHS = (5, 17, 33)
CAPTURED = (3, 8, 15)


@pytest.mark.parametrize("has_draft_model", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_tokens_are_those_of_the_cpu_without_draft_tokens(model: Directory, name: str, has_draft_model: bool) -> None:
    """In float32. The draft model is the model itself."""
    directory, prompts = model(name), prompts_of(LENGTHS)
    own = {str(length): prompts[length] for length in LENGTHS}
    lengths = {length: int(length) + NUM_TOKENS for length in own}
    on_cpu = make_engine(directory, Shard(page_size=4))
    book = PageBook.of(on_cpu, lengths)
    first = prefill_all(on_cpu, own, book)
    answers = decode_all(on_cpu, first, {length: int(length) for length in own}, book, NUM_TOKENS)
    engine = make_engine(
        directory,
        Shard(page_size=4),
        device="cuda",
        max_seq_len=96,
        max_running_requests=3,
        cuda_graph_batch_sizes=CAPTURED,
        num_speculative_tokens=MOST_DRAFTS,
        draft=directory if has_draft_model else None,
    )
    book = PageBook.of(engine, lengths)
    assert prefill_all(engine, own, book) == first
    kinds = dict(zip(own, (right, wrong, half_right), strict=True))
    found, steps = verify_all(engine, first, book, answers, kinds, has_draft_model=has_draft_model)
    assert found == answers
    assert steps <= 4 if has_draft_model else steps == NUM_TOKENS - 1
