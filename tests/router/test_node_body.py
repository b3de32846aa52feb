"""OpenAI requests as requests of a decode node: what becomes what, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.router.api import CHAT, COMPLETIONS, ApiError
from kvferry.router.node_body import CHAT_TOKENS, COMPLETION_TOKENS, check, node_body, prompt_of
from transfer.pb import kvferry_pb2 as pb

MODEL = "tiny"


def request_for(path: str, body: dict[str, Any], prompt: str | list[int]) -> pb.GenerateRequest:
    return node_body(path, body, prompt).request


def wants_usage(body: dict[str, Any]) -> bool:
    return node_body(COMPLETIONS, body, "x").with_usage


def test_every_field_that_a_node_has_is_carried() -> None:
    body = {
        "prompt": [5, 6],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 4,
        "seed": 2**63 - 1,
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "cache_salt": "tenant",
    }
    check(COMPLETIONS, MODEL, body)
    request = request_for(COMPLETIONS, body, prompt_of(body))
    assert list(request.token_ids.ids) == [5, 6] and request.max_new_tokens == 9
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.75, 4, 2**63 - 1)
    assert list(request.stop_token_ids) == [1, 2] and request.ignore_eos
    assert request.cache_salt == "tenant"


def test_missing_fields_have_the_defaults_of_openais_api() -> None:
    request = request_for(COMPLETIONS, {}, "text")
    assert request.prompt == "text" and request.max_new_tokens == COMPLETION_TOKENS and not request.ignore_eos
    assert request_for(COMPLETIONS, {"cache_salt": None}, "text").cache_salt == request.cache_salt == ""
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 0)
    assert request.sampling.seed != request_for(COMPLETIONS, {}, "text").sampling.seed
    assert request_for(CHAT, {}, [1]).max_new_tokens == CHAT_TOKENS
    assert request_for(CHAT, {"max_tokens": 7}, [1]).max_new_tokens == 7
    assert request_for(CHAT, {"max_tokens": 7, "max_completion_tokens": 8}, [1]).max_new_tokens == 8
    assert request_for(COMPLETIONS, {"top_k": -1}, [1]).sampling.top_k == 0


@pytest.mark.parametrize(
    "body",
    [
        {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "stop": None, "suffix": None},
        {"stop": [], "logit_bias": {}, "presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0},
        {"user": "me", "metadata": {"a": 1}, "service_tier": "auto", "store": True},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
    ],
)
def test_fields_that_ask_for_nothing_else_are_taken(body: dict[str, Any]) -> None:
    check(COMPLETIONS, MODEL, body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("stop", ["END"]),
        ("tools", [{"type": "function"}]),
        ("never_heard_of", 1),
    ],
)
def test_what_a_node_cannot_do_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ApiError, match=f"^{field} is ") as raised:
        check(COMPLETIONS, MODEL, {field: value})
    assert raised.value.status == 400 and raised.value.param == field


@pytest.mark.parametrize("prompt", [None, [1, "x"], [2**32], ["a", "b"]])
def test_prompts_that_are_none_or_several(prompt: object) -> None:
    with pytest.raises(ApiError, match=r"^prompt "):
        prompt_of({"prompt": prompt})


@pytest.mark.parametrize(("prompt", "found"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ("", "")])
def test_one_prompt_however_it_is_wrapped(prompt: object, found: object) -> None:
    assert prompt_of({"prompt": prompt}) == found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", "hot"),
        ("seed", 2**63),
        ("cache_salt", "t" * 129),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ApiError, match=f"^{field} is ") as raised:
        request_for(COMPLETIONS, {field: value}, "x")
    assert raised.value.param == field


def test_usage_of_streams() -> None:
    assert not wants_usage({}) and not wants_usage({"stream_options": {}})
    assert wants_usage({"stream_options": {"include_usage": True, "continuous_usage_stats": False}})
    for options in (5, {"include_usage": 1}, {"continuous_usage_stats": True}):
        with pytest.raises(ApiError, match="stream_options"):
            wants_usage({"stream_options": options})
