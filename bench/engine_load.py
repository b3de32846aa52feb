"""Send prompts to an OpenAI-compatible server from a fixed number of clients, and measure each answer.

Each client sends its next prompt when its last answer ended (a closed loop). Times are those of `vllm bench serve`: the time to
first token ends with the first chunk that has a choice, and each later chunk is one inter-token interval.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import aiohttp

ANSWER_TIMEOUT_S: Final = 300.0


@dataclass(slots=True, kw_only=True)
class Answer:
    """One request.

    Attributes:
        text: Generated text. A token with a part of a character shows only with the rest of it.
        token_ids: Generated tokens; empty if the load did not ask for them.
        num_tokens: Generated tokens, as the server counts them.
        ttft_s: Seconds until the first token; 0 without one.
        intervals_s: Seconds between tokens.
        end_to_end_s: Seconds until the end.
        error: Reason of the failure; empty if the request succeeded.
        is_given_up: The client closed the connection before the answer was complete.
    """

    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    ttft_s: float = 0.0
    intervals_s: list[float] = field(default_factory=list)
    end_to_end_s: float = 0.0
    error: str = ""
    is_given_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """All answers of one load, in the order of the prompts, and its duration."""

    answers: tuple[Answer, ...]
    duration_s: float


async def send_load(
    urls: Sequence[str],
    prompts: Sequence[Sequence[int]],
    *,
    in_flight: int,
    output_tokens: int,
    salt: str,
    has_token_ids: bool = False,
    patience_s: Mapping[int, float] = MappingProxyType({}),
) -> Load:
    """Send all prompts and return the answers.

    Args:
        urls: Base URLs, used in turn.
        prompts: Token ids.
        in_flight: Number of clients.
        output_tokens: Tokens that every request generates (greedily).
        salt: Keeps the prefix caches of servers apart from those of other loads.
        has_token_ids: Ask for token ids. vLLM then sends those of the prompt, too, with the first token: milliseconds of a long
            prompt, twice behind a router.
        patience_s: Seconds after which a client closes its connection, by index of the prompt. Other clients wait for the end.
    """
    common: dict[str, Any] = {
        "model": "model",
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
    }
    if has_token_ids:
        common["return_token_ids"] = True

    async def ask(session: aiohttp.ClientSession, index: int, answer: Answer) -> None:
        await _ask(session, urls[index % len(urls)], {"prompt": list(prompts[index]), **common}, answer)

    return await run_clients(prompts, ask, in_flight=in_flight, patience_s=patience_s)


async def run_clients(
    prompts: Sequence[Sequence[int]],
    ask: Callable[[aiohttp.ClientSession, int, Answer], Awaitable[None]],
    *,
    in_flight: int,
    patience_s: Mapping[int, float],
) -> Load:
    """Let `in_flight` clients ask for the prompts, one after the other. `ask` fills in the answer of a prompt, by its index."""
    answers = [Answer(prompt_tokens=len(prompt)) for prompt in prompts]
    waiting = iter(range(len(prompts)))
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def run_client() -> None:
            for index in waiting:
                try:
                    async with asyncio.timeout(patience_s.get(index)):
                        await ask(session, index, answers[index])
                except TimeoutError:
                    answers[index].error, answers[index].is_given_up = "", True

        begin_s = time.perf_counter()
        await asyncio.gather(*(run_client() for _ in range(in_flight)))
        return Load(answers=tuple(answers), duration_s=time.perf_counter() - begin_s)


async def _ask(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], answer: Answer) -> None:
    begin_s = last_s = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                choice = _choice(line, answer)
                if choice is None:
                    continue
                now_s = time.perf_counter()
                if answer.ttft_s:
                    answer.intervals_s.append(now_s - last_s)
                else:
                    answer.ttft_s = now_s - begin_s
                last_s = now_s
                answer.text += choice.get("text") or ""
                answer.token_ids += choice.get("token_ids") or []
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.end_to_end_s = time.perf_counter() - begin_s
        if not answer.error and answer.num_tokens != body["max_tokens"]:
            answer.error = f"the answer has {answer.num_tokens} tokens instead of {body['max_tokens']}"


def _choice(line: bytes, answer: Answer) -> dict[str, Any] | None:
    """Return the choice of a chunk; None if the line has none. An error in the stream becomes the answer's error."""
    if not line.startswith(b"data: {"):
        return None
    content = json.loads(line[6:])
    if "error" in content:
        answer.error = str(content["error"])[:300]
    if usage := content.get("usage"):
        answer.num_tokens = usage["completion_tokens"]
    choices = content.get("choices") or [None]
    choice: dict[str, Any] | None = choices[0]
    return choice
