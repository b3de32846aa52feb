"""The reference must be right by itself: it is held to a loop that computes every token from the whole text, without a cache."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvferry.cluster_spec import child_environment
from kvferry.reference_generate import ReferenceResult, result_of
from kvferry.reference_run import ReferenceRun
from transfer.errors import EngineError

PROMPTS = ("The captain counts the crates.", "Far away a bell rings seven times. " * 6)
NUM_TOKENS = 12


def greedy_without_cache(model: Any, tokenizer: Any, prompt: str) -> ReferenceResult:
    ids: list[int] = tokenizer(prompt).input_ids
    tokens: list[int] = []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([ids + tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return ReferenceResult(prompt_tokens=len(ids), token_ids=tuple(tokens))


async def test_reference_process_is_greedy_over_the_whole_context(demo_dir: Path) -> None:
    with ReferenceRun(demo_dir, PROMPTS, NUM_TOKENS, child_environment()) as run:
        results = await run.results()
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_dir, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(demo_dir, local_files_only=True).eval()
    assert results == [greedy_without_cache(model, tokenizer, prompt) for prompt in PROMPTS]
    assert tokenizer.bos_token_id == 0  # it has the id of padding here: a mask guessed from ids would hide it


async def test_reference_that_fails_is_an_error_and_no_result(tmp_path: Path) -> None:
    run = ReferenceRun(tmp_path / "missing", PROMPTS, NUM_TOKENS, child_environment())
    with run, pytest.raises(EngineError, match="single process that the tokens are compared with failed"):
        await run.results()


async def test_leaving_ends_the_process(demo_dir: Path) -> None:
    with ReferenceRun(demo_dir, PROMPTS * 100, 200, child_environment()) as run:
        await asyncio.sleep(0.1)
        process = run._process
        assert process is not None and process.poll() is None
    assert process.poll() == -9


@pytest.mark.parametrize(
    "line", ["{}", "[]", '{"prompt_tokens": 1}', '{"prompt_tokens": 1, "token_ids": [], "more": 1}', "warning"]
)
def test_lines_that_are_no_result(line: str) -> None:
    with pytest.raises(ValueError):
        result_of(line)
