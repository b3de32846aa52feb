"""Runs a target without atheris: the corpus again, and a blind search with the same mutators, the same for the same seed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fuzz.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An input at which something is wrong.

    Args:
        after: Executions until then, this one included.
    """

    data: bytes
    error: BaseException
    after: int


def corpus_of(target: Target) -> list[tuple[str, bytes]]:
    """The target's committed inputs, by name."""
    return [(path.name, path.read_bytes()) for path in sorted(target.corpus.glob("*")) if path.is_file()]


def search(target: Target, *, executions: int, seed: int = 0, inputs: Iterable[bytes] = ()) -> Found | None:
    """Mutate the inputs (the corpus, or else the seeds), again and again; None where nothing is found."""
    rng = random.Random(seed)
    first = [data for data in inputs or [data for _, data in corpus_of(target)] or target.seeds()]
    taken = list(first)
    for number in range(1, executions + 1):
        data = rng.choice(first if rng.random() < 0.5 else taken)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = target.mutate(data, rng)[: target.max_bytes]
        try:
            is_taken = target.execute(data)
        except Exception as error:
            return Found(data=data, error=error, after=number)
        if is_taken and len(taken) < 500:
            taken.append(data)
    return None


def minimised(target: Target, inputs: Iterable[bytes]) -> list[bytes]:
    """Of the inputs, the shortest first, those that step from a line of the target's modules to another as none before did."""
    kept: list[bytes] = []
    known: set[tuple[str, int, int]] = set()
    for data in sorted(set(inputs), key=lambda one: (len(one), one)):
        taken = _ways(target, data)
        if not taken <= known:
            known |= taken
            kept.append(data)
    return kept


def _ways(target: Target, data: bytes) -> set[tuple[str, int, int]]:
    """Every step from one line to the next that an input takes in the target's modules."""
    files = {
        str(module.__file__)
        for name, module in sys.modules.items()
        if any(name == one or name.startswith(f"{one}.") for one in target.modules)
    }
    taken: set[tuple[str, int, int]] = set()

    def call(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if name not in files:
            return None
        before = 0

        def line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            nonlocal before
            taken.add((name, before, frame.f_lineno))
            before = frame.f_lineno
            return line

        return line

    outer = sys.gettrace()
    sys.settrace(call)
    try:
        target.execute(data)
    finally:
        sys.settrace(outer)
    return taken


def replay(target: Target, path: Path) -> None:
    """One input again, loudly: for a file that atheris has left."""
    target.execute(path.read_bytes())
