"""What one process makes of the same prompts: transformers' own `generate`, greedy, with its own attention and cache.

Run as a program it reads one JSON object from standard input and writes one line of JSON for each prompt, in order:
``{"model": DIR, "dtype": NAME, "max_new_tokens": N, "prompts": [text, ...]}`` gives ``{"prompt_tokens": P, "token_ids": [...]}``.
It shares nothing with the tiers but the model directory, its tokenizer's Python half included.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NICENESS = 5  # the tiers start meanwhile, and they are what the demo waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    """What a single process generated for one prompt."""

    prompt_tokens: int
    token_ids: tuple[int, ...]


def generate_all(model_dir: Path, prompts: Sequence[str], max_new_tokens: int, *, dtype: str) -> Iterator[ReferenceResult]:
    """Generate for each prompt by itself, greedily, past the model's own end token.

    Args:
        model_dir: Hugging Face directory.
        max_new_tokens: Tokens to generate for each, exactly.
        dtype: What the model computes in, by torch's name for it; ``auto`` leaves it to the directory.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, local_files_only=True).eval()
    no_end = [model.config.vocab_size]  # an id that no token has: nothing ends the generation early
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                eos_token_id=no_end,
                pad_token_id=0,
            )
        prompt_tokens = ids.shape[1]
        yield ReferenceResult(prompt_tokens=prompt_tokens, token_ids=tuple(output[0, prompt_tokens:].tolist()))


def result_of(line: str) -> ReferenceResult:
    """Parse one line of the program's output.

    Raises:
        ValueError: It is none.
    """
    content = json.loads(line)
    if not isinstance(content, dict) or set(content) != {"prompt_tokens", "token_ids"}:
        raise ValueError(f"no line of the reference: {line[:80]!r}")
    return ReferenceResult(prompt_tokens=content["prompt_tokens"], token_ids=tuple(content["token_ids"]))


def _main() -> None:
    task = json.load(sys.stdin)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    for result in generate_all(Path(task["model"]), task["prompts"], task["max_new_tokens"], dtype=task["dtype"]):
        print(json.dumps({"prompt_tokens": result.prompt_tokens, "token_ids": result.token_ids}), flush=True)


if __name__ == "__main__":
    _main()
