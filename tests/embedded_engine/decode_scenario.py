"""A life of a decode engine: requests of different lengths come and go, windows move, pages and rows are used again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.embedded_engine.steps import PageBook, decode_all, prefill_all
from transfer.engine_types import GREEDY, SamplingParams

PROMPTS = {"a": 17, "b": 5, "c": 33, "d": 15, "e": 2}
"""Request -> length of its prompt; each is the prompt of that length."""
MAX_RUNNING = 4
MAX_SEQ_LEN = 96


def tokens_of_a_life(
    engine: Any, prompts: Mapping[int, tuple[int, ...]], num_steps: int = 6, *, sampling: SamplingParams = GREEDY
) -> dict[str, list[int]]:
    """All tokens of each request: of three at once, of two, of four with pages of one that is over, of one.

    What the pool holds of nobody is no number, also where a window has passed: whatever reads it shows.
    """
    lengths = {name: PROMPTS[name] + 4 * num_steps for name in ("a", "b", "c", "d")} | {"e": 2 + 2 * num_steps}
    book = PageBook.of(engine, lengths)
    found: dict[str, list[int]] = {}

    def prefill(*names: str) -> None:
        first = prefill_all(engine, {name: prompts[PROMPTS[name]] for name in names}, book, chunk_tokens=13, sampling=sampling)
        found.update({name: [token] for name, token in first.items()})

    def decode(*names: str) -> None:
        at = {name: PROMPTS[name] + len(found[name]) - 1 for name in names}
        last = {name: found[name][-1] for name in names}
        for name, tokens in decode_all(engine, last, at, book, num_steps + 1, sampling=sampling).items():
            found[name] += tokens[1:]

    prefill("a", "b", "c")
    decode("c", "a", "b")
    decode("a", "b")
    book.give("c", "e")
    prefill("d", "e")
    decode("a", "e", "b", "d")
    decode("d")
    return found
