"""`kvferry generate`: send one request to a decode node and stream its output."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvferry.cli.options import check_range, check_timeout
from node_runtime import exit_codes
from transfer.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from transfer.pb import kvferry_pb2 as pb
    from transfer.registry.security import Security

_MOST_DIGITS: Final = 20
"""Longest token id, with leading zeros; Python refuses to parse numbers of thousands of digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Options of a request. Each field is an option of the command line.

    Raises:
        ConfigError: A value cannot be sent. The node checks everything else, such as the length of the prompt.
    """

    prompt: Annotated[str | None, typer.Argument(help="The prompt, tokenised by the decode node.")] = None
    token_ids: Annotated[str | None, typer.Option(help="Token ids instead of a prompt, with commas between them.")] = None
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Nucleus sampling, above 0 and at most 1.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Keep the k most likely; 0 keeps all.")] = 0
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the model's end token.")] = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.token_ids is None):
            raise ConfigError("give either a prompt or --token-ids")
        check_range("--max-new-tokens", self.max_new_tokens, 1, 2**32 - 1)
        check_range("--top-k", self.top_k, 0, 2**32 - 1)
        check_range("--seed", self.seed, 0, 2**63 - 1)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"--temperature is {self.temperature}; it must be 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p is {self.top_p}; it must be above 0 and at most 1")

    def request(self) -> pb.GenerateRequest:
        """Return the request.

        Raises:
            ConfigError: A token id is invalid.
        """
        from transfer.pb import kvferry_pb2 as pb

        return pb.GenerateRequest(
            prompt=self.prompt,
            token_ids=None if self.token_ids is None else pb.TokenIds(ids=parse_token_ids(self.token_ids)),
            max_new_tokens=self.max_new_tokens,
            sampling=pb.SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed),
            ignore_eos=self.ignore_eos,
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
    from kvferry.cli.node_client import NodeClient

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
        return exit_codes.exit_code_of(error, is_call=True)
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
