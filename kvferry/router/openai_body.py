"""Bodies of requests: check the client's, and make those for prefill and decode. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from kvferry.router.api import CHAT, ApiError, Body

KV_FIELD: Final = "kv_transfer_params"
_EXTRA_FIELD: Final = "vllm_xargs"  # vLLM merges its members with kv_transfer_params

MAX_DEPTH: Final = 100
"""Maximum depth of nested objects and lists. Requests have about ten, and the schema of a tool a few more. Python's recursion
limits, which differ between versions, must not be reached."""

_CHARS_PER_TOKEN: Final = 4  # a rough estimate, to compare loads

_NOT_FOR_PREFILL: Final = (
    *("stream", "stream_options", "stream_interval", "n", "best_of", "echo", "stop"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "return_tokens_as_token_ids", "return_token_ids"),
)
"""Fields of the answer's form. The prefill server's answer is not used, and some of these depend on changed ones: `best_of` may
not be below `n`."""

_CHANGED_FOR_PREFILL: Final = ("max_tokens", "max_completion_tokens", "min_tokens")

_NESTS: Final = (dict, list)
_WITH_TEXT: Final = (str, dict, list)


def parse_body(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a request. Raises ApiError if the body is no JSON object, or no server accepts it."""
    body = load_body(content)
    check_body(content, body)
    return body


def load_body(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a request, for `check_body`. Integers of more than 64 bits become floats.

    Raises:
        ApiError: The body is no JSON object, has a number that does not fit a 64-bit float, or has half of a surrogate pair.
    """
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = _load_strange(content)
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}; it must be an object")
    return body


def _load_strange(content: bytes) -> Any:
    """Return the JSON value of a body that orjson rejects. It can be valid JSON with a byte order mark, or nested very deeply.

    Raises:
        ApiError: No server accepts the body. `param` is the name of the invalid member, if there is one.
    """
    try:
        body = json.loads(content.decode("utf-8-sig"), parse_constant=_no_constant, parse_int=_integer)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    for name, value in body.items() if isinstance(body, dict) else ():
        try:
            json.dumps({name: value}, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            half = json.dumps(error.object[error.start])
            raise ApiError(
                400, f"{shown(name)} has {half}, half of a surrogate pair; it must be Unicode text", param=name
            ) from None
        except RecursionError:
            raise _too_deep() from None
        except ValueError:
            raise ApiError(400, f"{name} has a number that is too large; it must fit a 64-bit float", param=name) from None
    return body


def check_body(content: bytes, body: Mapping[str, Any]) -> None:
    """Reject a body that no server accepts.

    Raises:
        ApiError: The body is nested too deeply, sets a field of the router, or has a bad `stream`.
    """
    if _is_too_deep(content, body):
        raise _too_deep()
    if KV_FIELD in body:
        raise ApiError(400, f"{KV_FIELD} is set by the router; a client cannot give it", param=KV_FIELD)
    extra = body.get(_EXTRA_FIELD)
    if isinstance(extra, dict) and KV_FIELD in extra:
        raise ApiError(400, f"{_EXTRA_FIELD} has {KV_FIELD}, which a client cannot give", param=_EXTRA_FIELD)
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_value("stream", stream, "it must be true or false")


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested too deeply; it must have at most {MAX_DEPTH} objects and lists in each other")


def _is_too_deep(content: bytes, body: Mapping[str, Any]) -> bool:
    if content.count(b"[") + content.count(b"{") <= MAX_DEPTH:
        return False
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        members = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for inner in members for one in inner if isinstance(one, _NESTS)]
        if not level:
            return False
    return True


def shown(value: object) -> str:
    """Return a value in a form that a message can quote."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def bad_value(name: str, value: object, bound: str) -> ApiError:
    """Return the error for a field's value. `bound` describes the valid values."""
    return ApiError(400, f"{name} is {shown(value)}; {bound}", param=name.partition(".")[0])


def _integer(text: str) -> int | float:
    value = float(text)
    if not -(2.0**63) <= value <= 2.0**64:
        return value
    number = int(text)
    return number if -(1 << 63) <= number < 1 << 64 else value  # as orjson


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def prompt_tokens(path: str, body: Mapping[str, Any]) -> int:
    """Return the number of the prompt's tokens, at least 1: ids are counted, the tokens of text are estimated."""
    given = body.get("messages") if path == CHAT else body.get("prompt")
    return max(1, _num_ids(given) + -(-_num_chars(given) // _CHARS_PER_TOKEN))


def _num_ids(given: object) -> int:
    if not isinstance(given, list):
        return 0
    if given and isinstance(given[0], int):
        return len(given)
    return sum(len(one) for one in given if isinstance(one, list) and one and isinstance(one[0], int))


def _num_chars(given: object) -> int:
    """Return the number of characters of all texts in a prompt, messages, or parts of a message."""
    if isinstance(given, str):
        return len(given)
    if isinstance(given, list):
        return 0 if given and isinstance(given[0], int) else sum(_num_chars(one) for one in given if isinstance(one, _WITH_TEXT))
    if isinstance(given, dict):
        return _num_chars(given.get("content")) + _num_chars(given.get("text"))
    return 0


def why_decode_alone(body: Mapping[str, Any]) -> str | None:
    """Return why the decode server must compute the prompt itself, as one constant word; None if it need not.

    A hand-off supports one prompt, which is read once and is the same on both sides.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "several_prompts"
    if any(_above(body.get(name), 1) for name in ("n", "best_of")) or body.get("use_beam_search"):
        return "several_choices"
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs") is not None):
        return "prompt_logprobs"  # only prefill would have the logits
    if _above(0, body.get("truncate_prompt_tokens")):
        return "truncation"  # depends on max_tokens, which differs between the sides
    return None


def _above(value: object, limit: object) -> bool:
    return isinstance(value, int) and isinstance(limit, int) and value > limit


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmBody(Body):
    """A request to vLLM servers as JSON, without the members that the router adds.

    Args:
        shared: Members of the JSON object for both servers.
        for_decode: Members for the decode server alone.
        has_completion_limit: Whether `max_completion_tokens` is one of `for_decode`.
        may_end_at_once: Whether the client allows an end token as the first token (`min_tokens` is 0 or absent).
    """

    shared: bytes
    for_decode: bytes
    has_completion_limit: bool
    may_end_at_once: bool

    def prefill(self, params: Mapping[str, Any], *, uses_first_token: bool) -> bytes:
        """Return the body for the prefill server: the same prompt, one token, in one answer.

        Args:
            uses_first_token: The client's answer can begin with this token, so it may be an end token if the client allows an
                empty answer. Otherwise `min_tokens` is 1, because other connectors transfer no KV of a request that ended with
                an end token.
        """
        min_tokens = 0 if self.may_end_at_once and uses_first_token else 1
        own: dict[str, Any] = {"max_tokens": 1, "min_tokens": min_tokens, "stream": False, "n": 1, KV_FIELD: params}
        if self.has_completion_limit:
            own["max_completion_tokens"] = 1
        return _object(self.shared, _members(own))

    def decode(self, params: Mapping[str, Any] | None) -> bytes:
        """Return the body for the decode server: the client's own, with the source of the KV. None means no source."""
        return _object(self.shared, self.for_decode, b"" if params is None else _members({KV_FIELD: params}))


def vllm_body(path: str, body: Mapping[str, Any]) -> VllmBody:
    """Return the request to the servers for a body of `parse_body`."""
    own = {*_NOT_FOR_PREFILL, *_CHANGED_FOR_PREFILL}
    return VllmBody(
        shared=_members({name: value for name, value in body.items() if name not in own}),
        for_decode=_members({name: value for name, value in body.items() if name in own}),
        prompt_tokens=prompt_tokens(path, body),
        alone=why_decode_alone(body),
        has_completion_limit="max_completion_tokens" in body,
        may_end_at_once=not body.get("min_tokens"),
    )


def _members(fields: Mapping[str, Any]) -> bytes:
    """Return an object's JSON without its braces."""
    return orjson.dumps(fields)[1:-1]


def _object(*members: bytes) -> bytes:
    return b"{" + b",".join(filter(None, members)) + b"}"


def prefill_params(transfer_id: str, *, is_sequential: bool) -> dict[str, Any]:
    """Return `kv_transfer_params` of a prefill request; in the sequential flow with the keys of other connectors."""
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    if is_sequential:
        params |= {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
    return params
