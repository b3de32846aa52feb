"""The reference is held to a loop that computes every token from the whole text, without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvferry.demo.reference import ReferenceResult, generate_all

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


def test_the_reference_is_greedy_over_the_whole_context(demo_dir: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_dir, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(demo_dir, local_files_only=True).eval()
    found = list(generate_all(demo_dir, PROMPTS, NUM_TOKENS, dtype="float32"))
    assert found == [greedy_without_cache(model, tokenizer, prompt) for prompt in PROMPTS]
    assert tokenizer.bos_token_id == 0  # it has the id of padding here: a mask guessed from ids would hide it
