"""What a server, or a router, answers: greedy tokens, asked for through OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from tests.vllm.commands import MODEL_NAME

MAX_TOKENS = 32
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Args:
    text: What was generated.
    token_ids: The same in tokens.
    finish_reason: "length" or "stop".
    num_prompt_tokens: As the server counted them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_prompt_tokens: int


def client(url: str) -> AsyncOpenAI:
    """Asks once: a failure is the test's to see."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


async def answer(
    asking: AsyncOpenAI, prompt: str, *, max_tokens: int = MAX_TOKENS, extra: Mapping[str, Any] | None = None
) -> Answer:
    """The greedy completion of one prompt; `extra` are fields of vLLM's own."""
    completion = await asking.completions.create(
        model=MODEL_NAME,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"return_token_ids": True} | dict(extra or {}),
    )
    (choice,) = completion.choices
    assert completion.usage is not None
    return Answer(
        text=choice.text,
        token_ids=tuple(choice.model_extra["token_ids"] if choice.model_extra else ()),
        finish_reason=choice.finish_reason,
        num_prompt_tokens=completion.usage.prompt_tokens,
    )


async def answers(url: str, prompts: Iterable[str], *, max_tokens: int = MAX_TOKENS, at_once: int | None = None) -> list[Answer]:
    """Of each prompt, in their order.

    Args:
        at_once: How many are asked at a time; None: all.
    """
    asked = list(prompts)
    turn = asyncio.Semaphore(at_once or len(asked))
    async with client(url) as asking:

        async def one(prompt: str) -> Answer:
            async with turn:
                return await answer(asking, prompt, max_tokens=max_tokens)

        return list(await asyncio.gather(*map(one, asked)))
