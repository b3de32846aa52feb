"""Long prompts are hashed without holding a loop up."""

from __future__ import annotations

import asyncio

import pytest

from transfer.storage import hashing
from transfer.storage.hashing import SLICE_TOKENS, HashingTurns
from transfer.storage.keys import PageHashes, page_hashes

SEED = bytes(32)


def chain(page_size: int = 1) -> PageHashes:
    return PageHashes(page_size=page_size, seed=SEED)


@pytest.mark.parametrize("page_size", [1, 3, 4, 50])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 47])
async def test_the_chain_is_that_of_all_tokens(monkeypatch: pytest.MonkeyPatch, page_size: int, num_tokens: int) -> None:
    monkeypatch.setattr(hashing, "SLICE_TOKENS", 4)
    found = chain(page_size)
    await HashingTurns().extend(found, range(num_tokens))
    assert found.hashes == page_hashes(range(num_tokens), page_size=page_size, seed=SEED)
    assert found.num_tokens == num_tokens


async def test_however_many_prompts_there_are_a_turn_of_the_loop_has_one_slice() -> None:
    turns, chains = HashingTurns(), [chain() for _ in range(4)]
    prompt = tuple(range(4 * SLICE_TOKENS))
    tasks = [asyncio.create_task(turns.extend(one, prompt)) for one in chains]
    most, hashed = 0, 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        now = sum(one.num_tokens for one in chains)
        most, hashed = max(most, now - hashed), now
        assert max(one.num_tokens for one in chains) - min(one.num_tokens for one in chains) <= SLICE_TOKENS, "in turns"
    assert (most, hashed) == (SLICE_TOKENS, 4 * len(prompt))


async def test_a_prompt_that_is_given_up_does_not_keep_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "SLICE_TOKENS", 4)
    turns, found = HashingTurns(), chain()
    given_up = asyncio.create_task(turns.extend(chain(), range(400)))
    await asyncio.sleep(0)
    given_up.cancel()
    async with asyncio.timeout(5):
        await turns.extend(found, range(40))
    assert given_up.cancelled() and found.num_tokens == 40
