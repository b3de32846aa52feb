"""What fuzzing has found worth keeping, again in every run and without atheris: nothing fails, and nothing takes much memory."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from fuzz.plain import corpus_of
from fuzz.target import CORPUS, NAMES, load

MAX_FILES, MAX_BYTES = 500, 1_000_000

TAKEN_BYTES = 1 << 20
TAKEN_PER_BYTE = 512
"""Peak of what Python takes for one input: what the objects of a history or a tree come to, and never what is claimed."""


@pytest.mark.parametrize("name", NAMES)
def test_the_corpus_and_the_seeds_are_read_as_they_must_be(name: str) -> None:
    target = load(name)
    inputs = [(f"seed {number}", data) for number, data in enumerate(target.seeds())]
    assert all(target.execute(data) for _, data in inputs), "a seed is what an honest peer says"
    inputs += corpus_of(target)
    assert len(inputs) > len(target.seeds()), "no corpus"
    gc.collect()
    tracemalloc.start()
    try:
        for which, data in inputs:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            target.execute(data)
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken < TAKEN_BYTES + TAKEN_PER_BYTE * len(data), f"{name}, {which}: {len(data)} bytes took {taken}"
    finally:
        tracemalloc.stop()


def test_the_corpus_is_small_and_of_the_targets_that_there_are() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert len(files) <= MAX_FILES and sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert {path.parent.name for path in files} == set(NAMES)
