"""The bodies of requests: what a client sent, and what prefill and decode are sent for it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kvferry.router.api import CHAT, ApiError

KV_FIELD: Final = "kv_transfer_params"

_CHARS_PER_TOKEN: Final = 4  # about, in most languages that are written with letters; only loads are compared by it

_NOT_FOR_PREFILL: Final = (
    *("stream", "stream_options", "stream_interval", "n", "best_of", "echo", "stop"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "return_tokens_as_token_ids", "return_token_ids"),
)
"""Fields that say what the answer looks like. The prefill server's answer is read by nobody, and some of these go with others
that are changed: `best_of` may not be below `n`."""


def parse_body(content: bytes) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        ApiError: It is none.
    """
    try:
        body = json.loads(content, parse_constant=_no_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}; it must be an object")
    if KV_FIELD in body:
        raise ApiError(400, f"{KV_FIELD} is set by the router; a client cannot give it", param=KV_FIELD)
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise ApiError(400, f"stream is {json.dumps(stream)}; it must be true or false", param="stream")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def prompt_tokens(path: str, body: Mapping[str, Any]) -> int:
    """About how many tokens the prompt has, at least 1: ids are counted, text is guessed by its length."""
    given = body.get("messages") if path == CHAT else body.get("prompt")
    return max(1, _num_ids(given) + -(-_num_chars(given) // _CHARS_PER_TOKEN))


def _num_ids(given: object) -> int:
    if not isinstance(given, list):
        return 0
    if given and isinstance(given[0], int):
        return len(given)
    return sum(len(one) for one in given if isinstance(one, list) and one and isinstance(one[0], int))


def _num_chars(given: object) -> int:
    """Of all texts in a prompt, messages, or parts of a message."""
    if isinstance(given, str):
        return len(given)
    if isinstance(given, list):
        return 0 if given and isinstance(given[0], int) else sum(_num_chars(one) for one in given)
    if isinstance(given, dict):
        return _num_chars(given.get("content")) + _num_chars(given.get("text"))
    return 0


def why_decode_alone(body: Mapping[str, Any]) -> str | None:
    """Why the decode server has to compute the prompt of this request by itself, in a constant word; None where it need not.

    One hand-off is one prompt, read once, and the same on both sides.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "several_prompts"
    if any(_above(body.get(name), 1) for name in ("n", "best_of")) or body.get("use_beam_search"):
        return "several_choices"
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs") is not None):
        return "prompt_logprobs"  # of tokens whose logits prefill alone would have
    if _above(0, body.get("truncate_prompt_tokens")):
        return "truncation"  # to what max_tokens leaves, which is another length on either side
    return None


def _above(value: object, limit: object) -> bool:
    return isinstance(value, int) and isinstance(limit, int) and value > limit


def prefill_body(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The body for the prefill server: the same prompt, one token, in one answer.

    `min_tokens` keeps that token from being one that ends an answer: connectors hand over nothing of a request that has ended so.
    """
    sent = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    sent |= {"max_tokens": 1, "min_tokens": 1, "stream": False, "n": 1, KV_FIELD: dict(params)}
    if "max_completion_tokens" in body:
        sent["max_completion_tokens"] = 1
    return sent


def prefill_params(transfer_id: str, *, is_sequential: bool) -> dict[str, Any]:
    """`kv_transfer_params` of a prefill request; in the sequential flow with the keys that other connectors look for."""
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    if is_sequential:
        params |= {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
    return params


def decode_body(body: Mapping[str, Any], params: Mapping[str, Any] | None) -> dict[str, Any]:
    """The body for the decode server: the client's own, and where the KV comes from (None: from nowhere)."""
    return dict(body) if params is None else {**body, KV_FIELD: dict(params)}
