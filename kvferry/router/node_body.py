"""Convert between OpenAI's API and decode nodes. Reject, by name, fields that a decode node does not support. Pure."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvferry.router.api import CHAT, COMPLETIONS, ApiError, Body
from kvferry.router.openai_body import bad_value, shown
from kvferry.router.sse import DONE
from transfer.connector.prompt import MAX_CACHE_SALT_CHARS
from transfer.pb import kvferry_pb2 as pb

COMPLETION_TOKENS: Final = 16
"""Default of `max_tokens` for completions, as in OpenAI's API."""

CHAT_TOKENS: Final = 256
"""Default of `max_tokens` for chats. vLLM's is the length of the context, which a router does not know."""

_UINT32: Final = 2**32 - 1
_LARGE: Final = 1e30  # floats of the wire contract have 32 bits

# Supported values, besides null, of fields that a node does not have.
_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "stop": ([], ""),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "return_token_ids": (False,),
}
# These change no token.
_OF_NO_EFFECT: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id", "priority", "session_id"}
)
_TAKEN: Final = frozenset(
    {"model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "seed"}
    | {"stop_token_ids", "ignore_eos", "cache_salt"}
)
MAX_CHAT_VALUES: Final = 10_000
"""Largest number of JSON values of a costly chat: a thousand messages of several parts. The router unpickles them in 2 ms."""

_OF_COMPLETIONS: Final = frozenset({"prompt"})
_OF_CHATS: Final = frozenset({"messages", "max_completion_tokens", "chat_template_kwargs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBody(Body):
    """A request to a decode node.

    Args:
        request: The node's request.
        is_stream: Whether the client wants a stream.
        with_usage: Whether the stream ends with an event with the number of tokens.
    """

    request: pb.GenerateRequest
    is_stream: bool
    with_usage: bool


def completion(model: str, body: Mapping[str, Any]) -> NodeBody:
    """Return the request for a completion by `model`. Raises ApiError if decode nodes do not support it."""
    check(COMPLETIONS, model, body)
    return node_body(COMPLETIONS, body, prompt_of(body))


def check(path: str, model: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body. Raises ApiError if a decode node of `model` does not support one of its fields."""
    name = body.get("model")
    if name is not None and name != model:
        raise ApiError(404, f"The model {shown(name)} does not exist; it is called {model} here.", param="model")
    known = _TAKEN | (_OF_CHATS if path == CHAT else _OF_COMPLETIONS)
    for name, value in body.items():
        if name in known or name in _OF_NO_EFFECT or value is None:
            continue
        if name not in _FIXED:
            raise ApiError(400, f"{name} is not known to a kvferry decode node", param=name)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in _FIXED[name]):
            only = " or ".join(json.dumps(one) for one in _FIXED[name])
            raise bad_value(name, value, f"a kvferry decode node can do {only} only")
    return body


def check_costly_chat(path: str, model: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body as `check` does, and limit the time to transfer it from the process that reads costly bodies.

    Raises:
        ApiError: `check` raises it, or the body has too many values.
    """
    num_values = 0
    level: list[Any] = [check(path, model, body)]
    while level:
        members = [list(one.values()) if isinstance(one, dict) else one for one in level]
        num_values += sum(map(len, members))
        if num_values > MAX_CHAT_VALUES:
            raise ApiError(413, f"a chat of this size can have {MAX_CHAT_VALUES} JSON values, and long texts; it has more")
        level = [one for inner in members for one in inner if isinstance(one, dict | list)]
    return body


def prompt_of(body: Mapping[str, Any]) -> str | list[int]:
    """Return the prompt of a completion, text or token ids. Raises ApiError if there is not exactly one."""
    given = body.get("prompt")
    if isinstance(given, list) and given and not isinstance(given[0], int):
        if len(given) > 1:
            raise ApiError(400, f"prompt has {len(given)} prompts; a kvferry decode node accepts one per request", param="prompt")
        given = given[0]
    if isinstance(given, str):
        return given
    if given and _are_ids(given):
        return given  # type: ignore[no-any-return]
    raise bad_value("prompt", given, "it must be text, or a list of token ids from 0")


def node_body(path: str, body: Mapping[str, Any], prompt: str | Sequence[int]) -> NodeBody:
    """Return the request for a body that passed `check`. Raises ApiError if a value is out of range."""
    default = CHAT_TOKENS if path == CHAT else COMPLETION_TOKENS
    limit = "max_completion_tokens" if path == CHAT and body.get("max_completion_tokens") is not None else "max_tokens"
    seed = _integer(body, "seed", None, least=0, most=2**63 - 1)
    request = pb.GenerateRequest(
        prompt=prompt if isinstance(prompt, str) else None,
        token_ids=None if isinstance(prompt, str) else pb.TokenIds(ids=prompt),
        max_new_tokens=_integer(body, limit, default, least=1, most=_UINT32),
        sampling=pb.SamplingParams(
            temperature=_number(body, "temperature", 1.0, least=0.0),
            top_p=_number(body, "top_p", 1.0, least=1e-6, most=1.0),  # for a node, 0 means the default
            top_k=max(0, _integer(body, "top_k", 0, least=-1, most=_UINT32) or 0),  # -1 keeps all, as vLLM has it
            # A node's default seed is always the same, but a client without a seed expects different answers.
            seed=seed if seed is not None else secrets.randbits(63),
        ),
        stop_token_ids=_value(body, "stop_token_ids", lambda ids: not ids or _are_ids(ids), "a list of token ids") or (),
        ignore_eos=bool(_value(body, "ignore_eos", lambda flag: not flag or flag is True, "true or false")),
        cache_salt=_value(
            body,
            "cache_salt",
            lambda salt: isinstance(salt, str) and 1 <= len(salt) <= MAX_CACHE_SALT_CHARS,  # vLLM rejects an empty one, too
            f"text of 1 to {MAX_CACHE_SALT_CHARS} characters",
        ),
    )
    return NodeBody(request=request, is_stream=bool(body.get("stream")), with_usage=_wants_usage(body))


def _wants_usage(body: Mapping[str, Any]) -> bool:
    """Return whether a stream ends with an event with the number of tokens."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise bad_value("stream_options", options, 'it can be {"include_usage": true}')
    for name, value in options.items():
        if name != "include_usage" and value:
            raise bad_value(f"stream_options.{name}", value, "it is not known here")
    return bool(options.get("include_usage", False))


def _are_ids(given: object) -> bool:
    """Return whether all values of a list are token ids. A list can have a million."""
    if not isinstance(given, list):
        return False
    return set(map(type, given)) <= {int} and min(given, default=0) >= 0 and max(given, default=0) <= _UINT32


def _value(body: Mapping[str, Any], name: str, is_right: Callable[[Any], bool], bound: str) -> Any:
    value = body.get(name)
    if value is not None and not is_right(value):
        raise bad_value(name, value, f"it must be {bound}")
    return value


def _integer(body: Mapping[str, Any], name: str, default: int | None, *, least: int, most: int) -> int | None:
    bound = f"a whole number in [{least}, {most}]"
    value = _value(body, name, lambda number: type(number) is int and least <= number <= most, bound)
    return default if value is None else int(value)


def _number(body: Mapping[str, Any], name: str, default: float, *, least: float, most: float = _LARGE) -> float:
    bound = f"in [{least:g}, {most:g}]" if most < _LARGE else f"{least:g} or above"
    value = _value(body, name, lambda number: type(number) in (int, float) and least <= number <= most and number < _LARGE, bound)
    return default if value is None else float(value)


class Shapes:
    """The answer to one request to `path`, in the shapes of OpenAI's API."""

    def __init__(self, path: str, model: str, request_id: str) -> None:
        self._is_chat = path == CHAT
        self._model = model
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request_id}"
        self._created = int(time.time())

    def whole(self, text: str, done: pb.GenerateDone) -> bytes:
        """Return the whole answer."""
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": done.finish_reason}
        return json.dumps(self._object("", [choice]) | {"usage": _usage(done)}).encode()

    def beginning(self) -> bytes:
        """Return the beginning of a stream before the first text: the role of a chat."""
        return self._event({"role": "assistant", "content": ""}) if self._is_chat else b""

    def some(self, text: str) -> bytes:
        """Return an event with more text of a stream."""
        return self._event({"content": text} if self._is_chat else text)

    def end(self, done: pb.GenerateDone, *, with_usage: bool) -> bytes:
        """Return the end of a stream."""
        last = self._event({} if self._is_chat else "", done.finish_reason)
        usage = _sse(self._object(".chunk", []) | {"usage": _usage(done)}) if with_usage else b""
        return last + usage + b"data: " + DONE + b"\n\n"

    def _event(self, said: Mapping[str, str] | str, finish_reason: str | None = None) -> bytes:
        key = "delta" if self._is_chat else "text"
        return _sse(self._object(".chunk", [{"index": 0, key: said, "logprobs": None, "finish_reason": finish_reason}]))

    def _object(self, suffix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


def _usage(done: pb.GenerateDone) -> dict[str, int]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.generated_tokens,
        "total_tokens": done.prompt_tokens + done.generated_tokens,
    }


def _sse(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
