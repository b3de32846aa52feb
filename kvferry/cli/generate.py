"""`kvferry generate`: send one request to a decode node and stream its output."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from typing import Any, Final

from kvferry.cli import exit_codes
from kvferry.cli.node_client import NodeClient
from kvferry.cli.options import check_timeout
from transfer.errors import ConfigError, TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.security import Security

_MOST_DIGITS: Final = 20
"""Longest token id, with leading zeros; Python refuses to parse numbers of thousands of digits."""


def make_request(
    *,
    prompt: str | None,
    token_ids: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    ignore_eos: bool,
) -> pb.GenerateRequest:
    """Return the request of the command's arguments.

    Raises:
        ConfigError: An argument cannot be sent. The node checks everything else, such as the length of the prompt.
    """
    if (prompt is None) == (token_ids is None):
        raise ConfigError("give either a prompt or --token-ids")
    for name, value, least, most in (
        ("--max-new-tokens", max_new_tokens, 1, 2**32 - 1),
        ("--top-k", top_k, 0, 2**32 - 1),
        ("--seed", seed, 0, 2**63 - 1),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{name} is {value}; it must be in [{least}, {most}]")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"--temperature is {temperature}; it must be 0 (greedy) or above")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p is {top_p}; it must be above 0 and at most 1")
    return pb.GenerateRequest(
        prompt=prompt,
        token_ids=None if token_ids is None else pb.TokenIds(ids=parse_token_ids(token_ids)),
        max_new_tokens=max_new_tokens,
        sampling=pb.SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
        ignore_eos=ignore_eos,
    )


def parse_token_ids(text: str) -> list[int]:
    """Parse token ids such as ``"1,15,27"``; spaces may also separate them.

    Raises:
        ConfigError: A part is not a token id.
    """
    ids = []
    for part in text.replace(",", " ").split():
        if not (part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS and int(part) < 2**32):
            raise ConfigError(f"--token-ids has {part!r}; each must be a whole number from 0, for example 1,15,27")
        ids.append(int(part))
    return ids


async def run_generate(
    target: str, request: pb.GenerateRequest, *, security: Security | None = None, timeout_s: float | None, is_json: bool
) -> int:
    """Send the request, print its output, and return the exit code. Cancelling this cancels the request at the node."""
    token_ids: list[int] = []
    text = ""
    answer: dict[str, Any] = {}
    try:
        if timeout_s is not None:
            check_timeout(timeout_s)
        async with (
            NodeClient(target, security=security) as client,
            contextlib.aclosing(client.generate(request, timeout_s=timeout_s)) as events,
        ):
            async for event in events:
                match event.WhichOneof("event"):
                    case "accepted":
                        answer["request_id"] = event.accepted.request_id
                    case "tokens":
                        token_ids.extend(event.tokens.token_ids)
                        text += event.tokens.text
                        if not is_json:
                            sys.stdout.write(event.tokens.text)
                            sys.stdout.flush()
                    case "done":
                        answer |= _done_fields(event.done)
    except TransferError as error:
        if text and not is_json:
            print()
        # The node's log has the id of an accepted request.
        which = f" (request {answer['request_id']})" if "request_id" in answer else ""
        print(f"kvferry generate: {error}{which}", file=sys.stderr)
        return exit_codes.exit_code_of(error)
    print(json.dumps(answer | {"text": text, "token_ids": token_ids}) if is_json else "")
    return exit_codes.OK


def _done_fields(done: pb.GenerateDone) -> dict[str, Any]:
    stats = done.stats
    return {
        "finish_reason": done.finish_reason,
        "prompt_tokens": done.prompt_tokens,
        "generated_tokens": done.generated_tokens,
        "ttft_seconds": done.ttft_s,
        "prefill_node": done.prefill_node,
        "retries": done.retries,
        "bytes_moved": stats.bytes,
        "writes": stats.writes,
        "writes_without_staging": stats.writes_without_staging,
        "transfer_seconds": stats.transfer_s,
        "exposed_seconds": stats.exposed_s,
        "resends": stats.resends,
    }
