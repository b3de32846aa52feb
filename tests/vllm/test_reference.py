"""What the other tests here are held against: one plain vLLM, whose greedy tokens depend on nothing but the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.vllm.answers import MAX_TOKENS, Answer, answers
from tests.vllm.servers import Server


def test_prompts_of_ten_to_six_hundred_tokens_are_answered(prompts: Mapping[int, str], reference: Mapping[int, Answer]) -> None:
    assert len(prompts) == 20 and min(prompts) == 10 and max(prompts) == 600
    for length, found in reference.items():
        assert found.num_prompt_tokens == length
        assert len(found.token_ids) == MAX_TOKENS and found.finish_reason == "length" and found.text
    assert len({found.token_ids for found in reference.values()}) == len(prompts), "every prompt has an answer of its own"


@pytest.mark.parametrize("at_once", [1, 3])
async def test_tokens_do_not_depend_on_what_else_is_in_the_batch(
    reference_server: Server, prompts: Mapping[int, str], reference: Mapping[int, Answer], at_once: int
) -> None:
    """The reference was asked for all at once; also now, when the prefix cache has every prompt's blocks."""
    found = await answers(reference_server.url, prompts.values(), at_once=at_once)
    assert dict(zip(prompts, found, strict=True)) == reference


async def test_damage_to_the_prompt_changes_the_tokens(
    reference_server: Server, prompts: Mapping[int, str], reference: Mapping[int, Answer]
) -> None:
    """One word in the middle: KV that is wrong anywhere shows."""
    for length in (33, 128, 600):
        words = prompts[length].split()
        words[len(words) // 2] = "harbour" if words[len(words) // 2] != "harbour" else "ferry"
        (found,) = await answers(reference_server.url, [" ".join(words)])
        assert found.token_ids != reference[length].token_ids


async def test_two_ranks_generate_the_text_of_one(
    vllm_server: object, model: Path, prompts: Mapping[int, str], reference: Mapping[int, Answer]
) -> None:
    """So that a difference between TP degrees is the connector's fault, and not that of float32 sums in another order."""
    server = vllm_server(model, tp=2, name="tp2").wait_ready()  # type: ignore[operator]
    found = await answers(server.url, prompts.values())
    assert dict(zip(prompts, found, strict=True)) == reference
    assert len(server.processes()) >= 4, "API server, engine core, two workers"
    assert server.stop() == {}, "nothing is left of a server that was asked to end"
