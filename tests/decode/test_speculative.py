"""Speculative decoding in a decode leader: draft tokens go out with the steps, and as many tokens come back as are right."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from decode_node.rank_messages import FinishRequest
from decode_node.requests import GenerationRequest
from node_runtime.rank_messages import StepDone
from tests.decode.leader_world import FIRST_TOKEN, World, take, turns
from transfer.config import SpeculativeConfig
from transfer.pb import kvferry_pb2 as pb

NUM_RANKS = 2


@pytest.fixture
async def world() -> AsyncIterator[World]:
    settings = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2)
    one = World(speculative=settings)
    yield one
    await one.close()


async def begun(world: World, prompt: Sequence[int], *, new: int, end_ids: frozenset[int] = frozenset()) -> GenerationRequest:
    """A request whose first token, `FIRST_TOKEN`, is returned."""
    request = world.submit("a", prompt=prompt, new=new, end_ids=end_ids)
    await turns()
    world.reserve("a")
    world.call("a").first_token()
    world.call("a").sent()
    await turns()
    for rank in range(NUM_RANKS):
        world.expected(rank, "a")
        world.complete(rank, "a")
    await turns()
    assert [list(event.token_ids) for event in take(request)] == [[FIRST_TOKEN]]
    return request


def answer(world: World, model: Callable[[int], int]) -> int:
    """Rank 0 does a step of a model that chooses the next token by its position. Return how many draft tokens it had."""
    assert world.step is not None
    step = world.steps.popleft()
    (part,) = step.parts
    drafts = part.draft_token_ids
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == model(part.position + 1 + accepted):
        accepted += 1
    world.leader.on_step_done(
        StepDone(
            step=step.step,
            tokens={"a": model(part.position + 1 + accepted)},
            accepted={"a": drafts[:accepted]} if accepted else {},
            compute_s=0.0,
        )
    )
    return len(drafts)


def told(request: GenerationRequest) -> tuple[list[int], str]:
    """The tokens of all events, and the finish reason."""
    *events, done = take(request)
    assert isinstance(done, pb.GenerateDone)
    return [token for event in events for token in event.token_ids], done.finish_reason


async def test_a_repetitive_prompt_takes_fewer_steps_than_tokens(world: World) -> None:
    """The model repeats the prompt: 7 8 9 4, again and again."""
    cycle = (FIRST_TOKEN, 8, 9, 4)
    request = await begun(world, cycle * 2, new=14)
    steps = 0
    while world.step is not None:
        answer(world, lambda position: cycle[position % 4])
        steps += 1
    tokens, reason = told(request)
    assert tokens == [8, 9, 4, 7] * 3 + [8] and reason == "length"
    assert request.generated == [cycle[index % 4] for index in range(14)]
    assert steps == 4 and world.drafts == [(3, 3), (3, 3), (3, 3)], "the last step has no room for a draft token"
    assert isinstance(world.sent[-1], FinishRequest)


async def test_draft_tokens_beyond_the_wanted_ones_are_not_computed(world: World) -> None:
    """Their KV would need pages that the request does not have."""
    request = await begun(world, (FIRST_TOKEN, 8, 9, 4), new=3)
    assert answer(world, lambda position: (FIRST_TOKEN, 8, 9, 4)[position % 4]) == 1
    assert told(request) == ([8, 9], "length") and world.drafts == [(1, 1)]


async def test_wrong_draft_tokens_cost_nothing_but_rows(world: World) -> None:
    request = await begun(world, (FIRST_TOKEN, 8, 9, 4), new=4)
    while world.step is not None:
        answer(world, lambda position: 20 + position)
    assert told(request) == ([25, 26, 27], "length")
    assert world.drafts == [(2, 0)], "the new tokens occur nowhere"


async def test_an_end_token_among_accepted_ones_ends_the_generation(world: World) -> None:
    """Tokens behind it are not returned, although they were computed."""
    request = await begun(world, (FIRST_TOKEN, 8, 9, 4), new=9, end_ids=frozenset({9}))
    cycle = (FIRST_TOKEN, 8, 9, 4)
    assert answer(world, lambda position: cycle[position % 4]) == 3
    assert told(request) == ([8, 9], "stop")
    assert world.step is None and request.generated == [FIRST_TOKEN, 8, 9]


async def test_draft_tokens_of_a_draft_model_are_counted_only() -> None:
    """The ranks find them."""
    world = World(speculative=SpeculativeConfig(method="draft_model", model=Path("draft"), num_speculative_tokens=3))
    request = await begun(world, (FIRST_TOKEN, 8, 9, 4), new=6)
    assert world.step is not None and world.step.parts[0].draft_token_ids == ()
    assert world.step.parts[0].num_draft_tokens == 3
    step = world.steps.popleft()
    world.leader.on_step_done(StepDone(step=step.step, tokens={"a": 13}, accepted={"a": (11, 12)}, compute_s=0.0))
    assert world.step.parts[0].num_draft_tokens == 1, "two tokens are wanted"
    world.finish_step(14)
    world.finish_step(15)
    assert told(request) == ([11, 12, 13, 14, 15], "length") and world.drafts == [(3, 2), (1, 0)]
    await world.close()


async def test_text_of_several_tokens_is_joined(world: World) -> None:
    request = await begun(world, (FIRST_TOKEN, 8, 9, 4), new=9)
    answer(world, lambda position: (FIRST_TOKEN, 8, 9, 4)[position % 4])
    (event,) = take(request)
    assert event.text == "<8><9><4><7>"
