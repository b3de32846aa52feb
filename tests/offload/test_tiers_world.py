"""Whatever happens in whatever order: every step reads the right KV in one tier or the other, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from tests.offload.tiers_world import PREFILL, World


async def play(world: World, *, num_requests: int, prompts: list[list[int]], longest_new: int, give_up: float) -> None:
    chance = world.chance
    left = num_requests
    for _ in range(40_000):
        if left and chance.random() < 0.05:
            left -= 1
            shared = chance.choice(prompts)
            cut = chance.randint(1, len(shared))
            prompt = shared[:cut] + [chance.randint(0, 49) for _ in range(chance.randint(0, 3))]
            world.submit(prompt, chance.randint(1, longest_new), chance.choice(["", "", "b"]))
        if chance.random() < give_up and world.jobs:
            world.give_up(chance.choice(list(world.jobs.values())))
        if chance.random() < give_up / 2 and world.jobs:
            world.damage(chance.choice(list(world.jobs.values())))
        await world.turn()
        if not left and all(job.is_over and not job.holding for job in world.jobs.values()):
            break
    else:
        raise AssertionError(f"the world does not come to an end: {world.shown()}")
    await world.drain()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_windows", [0, 1, 2])
async def test_every_token_is_read_where_it_lies(seed: int, num_windows: int) -> None:
    chance = random.Random(seed)
    world = World(
        chance,
        device_pages=chance.choice([14, 16, 24]),
        host_pages=chance.choice([12, 30, 60]),
        window_tokens=chance.choice([None, 2, 4]),
        stride_pages=chance.choice([1, 2]),
        windows=tuple(chance.sample([3, 5, 6, 9, 16], num_windows)),
        has_slow_saves=chance.random() < 0.3,
        failing=chance.choice([0.0, 0.2]),
        num_drafts=3 * (seed % 2),
    )
    prompts = [[chance.randint(0, 49) for _ in range(30)] for _ in range(2)]
    await asyncio.wait_for(play(world, num_requests=25, prompts=prompts, longest_new=20, give_up=0.002), 120)
    assert (world.num_accepted > 0) == (seed % 2 > 0), "draft tokens are accepted in every second world"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("windows", [(), (3,), (5, 9)], ids=["no window", "a window", "two windows"])
async def test_a_step_that_is_sent_ahead_finds_its_pages_until_its_tokens_are_read(seed: int, windows: tuple[int, ...]) -> None:
    """Requests end by end tokens, by their length and early, so that some have a row in a step after their end."""
    chance = random.Random(seed)
    world = World(
        chance, device_pages=chance.choice([14, 24]), host_pages=30, window_tokens=None, windows=windows, has_slow_saves=seed == 1
    )
    prompts = [[chance.randint(0, 49) for _ in range(12)] for _ in range(2)]
    await asyncio.wait_for(play(world, num_requests=25, prompts=prompts, longest_new=14, give_up=0.002), 120)
    assert world.num_ahead > 20


@pytest.mark.parametrize("seed", range(8))
async def test_later_requests_never_read_damaged_pages(seed: int) -> None:
    """Also not from those who had loaded it before it was known."""
    chance = random.Random(seed)
    world = World(chance, window_tokens=chance.choice([None, 4]), windows=(6,)[: seed % 2], num_drafts=seed % 4)
    prompts = [[chance.randint(0, 49) for _ in range(20)]]
    await asyncio.wait_for(play(world, num_requests=30, prompts=prompts, longest_new=12, give_up=0.02), 120)


@pytest.mark.parametrize("num_windows", [0, 2])
@pytest.mark.parametrize("seed", range(3))
async def test_a_request_that_device_and_host_memory_cannot_hold_reads_the_store(seed: int, num_windows: int) -> None:
    """Its tokens lie in three places, and every step finds them. A store that fails ends its requests, and no others."""
    chance = random.Random(seed)
    world = World(
        chance,
        device_pages=chance.choice([14, 16, 24]),
        host_pages=chance.choice([12, 16, 30]),
        window_tokens=chance.choice([2, 4]),
        windows=(5, 9)[:num_windows],
        has_slow_saves=chance.random() < 0.3,
        failing=0.15 if seed == 2 else 0.0,
        block_pages=chance.choice([1, 2, 3]),
        num_drafts=3 * (seed % 2),
    )
    prompts = [[chance.randint(0, 49) for _ in range(length)] for length in (200, 30)]
    await asyncio.wait_for(play(world, num_requests=12, prompts=prompts, longest_new=60, give_up=0.001), 120)
    assert world.most_stored > 2, "requests had blocks in the store"
    assert (world.num_accepted > 0) == (seed % 2 > 0), "the others have draft tokens in every second world"
    lost = [job for job in world.jobs.values() if job.is_lost]
    assert all(len(job.prompt) + job.max_new > 40 for job in lost) and (seed == 2 or not lost)


def evicted(world: World, group: int, page_hashes: Sequence[bytes]) -> list[int]:
    """The pages' places in the prompt, in the order in which they make room when all of host memory is needed."""
    found: list[int] = []
    while world.tier.take(group, None) is not None:
        gone = [place for place, page_hash in enumerate(page_hashes) if world.tier.find(group, page_hash) is None]
        found += [place for place in gone if place not in found]
    return found


@pytest.mark.parametrize("seed", range(3))
async def test_a_prompts_end_makes_room_before_its_beginning(seed: int) -> None:
    """In every group of layers, although it was saved, and backed up, from the beginning on."""
    world = World(random.Random(seed), device_pages=24, host_pages=30, window_tokens=None, windows=(16,))
    job = world.submit(list(range(30)), 12, last_new=12)
    assert job is not None
    await asyncio.wait_for(world.drain(), 120)
    chain = world.looking[job.request_id].result().chain
    assert chain is not None and len(chain.hashes) == 20
    for group in range(len(world.groups)):
        kept = [place for place, page_hash in enumerate(chain.hashes) if world.tier.find(group, page_hash) is not None]
        missing = [place for place in range(20) if place not in kept]
        assert len(kept) > 8 and evicted(world, group, chain.hashes) == [*missing, *reversed(kept)]


@pytest.mark.parametrize("windows", [(), (3,), (5, 9)], ids=["no window", "a window", "two windows"])
async def test_whoever_waits_for_copies_is_woken_by_them(windows: tuple[int, ...]) -> None:
    """Two of one prompt, one copying from the other, and nobody else whose step would wake them."""
    num_sleeps = 0
    for seed in range(3):
        world = World(random.Random(seed), device_pages=20, host_pages=60, window_tokens=2, windows=windows, has_slow_saves=True)
        prompt = list(range(12))
        for job in [world.submit(prompt, 40), world.submit([*prompt, 1, 2, 3], 50)]:
            assert job is not None
            while not job.is_running:
                await world.turn()
        await asyncio.wait_for(world.drain(), 120)
        num_sleeps += world.num_sleeps
        assert world.metrics.counter("offload_stalls").value == len(world.stalled), "each once"
    assert num_sleeps > 0


async def test_no_prefix_is_fetched_for_a_prompt_that_must_be_computed_whole() -> None:
    stored: dict[str, bytes] = {}
    first = World(random.Random(1), windows=(), stored=stored)
    assert first.submit(list(range(20)), 4) is not None
    await asyncio.wait_for(first.drain(), 120)
    assert stored
    second = World(random.Random(1), windows=(), stored=stored)
    async with asyncio.timeout(60):  # no rank answers, so a request that has it fetched waits
        known = await second.leader.look_up(list(range(20)), "", prefill=PREFILL, may_skip=False)
    assert known.chain is not None and not known.fetched and not second.sent


async def test_nothing_is_fetched_for_a_prompt_that_does_not_fit() -> None:
    stored: dict[str, bytes] = {}
    first = World(random.Random(1), windows=(), stored=stored)
    assert first.submit(list(range(20)), 4) is not None
    await asyncio.wait_for(first.drain(), 120)
    second = World(random.Random(1), windows=(), stored=stored, host_pages=12, block_pages=1)
    async with asyncio.timeout(60):
        known = await second.leader.look_up(list(range(200)), "", prefill=PREFILL, may_skip=True)
    assert not known.fetched and not second.sent
