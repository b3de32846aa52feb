"""Steps with draft tokens that are right, wrong, or right up to a place."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from tests.embedded_engine.steps import PageBook
from transfer.engine_types import GREEDY, DecodeItem, SamplingParams

MOST_DRAFTS: Final = 4

Drafts = Callable[[Sequence[int], int], tuple[int, ...]]
"""(tokens of the whole answer, how many of them are known) -> draft tokens."""


def right(answer: Sequence[int], known: int) -> tuple[int, ...]:
    return tuple(answer[known : known + MOST_DRAFTS])


def wrong(answer: Sequence[int], known: int) -> tuple[int, ...]:
    return tuple((token + 1) % 200 for token in right(answer, known))


def half_right(answer: Sequence[int], known: int) -> tuple[int, ...]:
    """As many right ones as tokens are known, modulo 5."""
    number = known % (MOST_DRAFTS + 1)
    return right(answer, known)[:number] + wrong(answer, known)[number:]


def verify_all(
    engine: Any,
    first: Mapping[str, int],
    book: PageBook,
    answers: Mapping[str, Sequence[int]],
    drafts: Mapping[str, Drafts],
    *,
    sampling: SamplingParams = GREEDY,
    has_draft_model: bool = False,
) -> tuple[dict[str, list[int]], int]:
    """Tokens of every request, and the number of steps. Requests with fewer tokens left than a step may have ask for fewer.

    With a draft model, only the number of the draft tokens counts.
    """
    tokens = {name: [token] for name, token in first.items()}
    steps = 0
    while True:
        items = []
        for name, own in tokens.items():
            left = len(answers[name]) - len(own)
            if left:
                position = int(name) + len(own) - 1
                guesses = drafts[name](answers[name], len(own))[: left - 1]
                items.append(
                    DecodeItem(
                        request_id=name,
                        token_id=own[-1],
                        position=position,
                        page_tables=book.at(name, position),
                        sampling=sampling,
                        draft_token_ids=() if has_draft_model else guesses,
                        num_draft_tokens=len(guesses) if has_draft_model else 0,
                    )
                )
        if not items:
            return tokens, steps
        steps += 1
        for name, found in engine.verify(items).items():
            tokens[name] += found


def near_copy(directory: Path, target: Path, *, noise: float) -> Path:
    """Copy a model with weights that differ by `noise`, relative to their spread."""
    shutil.copytree(directory, target, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    for file in target.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            weights[name] = weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
        save_file(weights, file, metadata={"format": "pt"})
    return target
