"""The pure parts: events of streams, bodies, estimates; against the recorded answers of a real vLLM, too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router import sse
from kvferry.router.api import CHAT, COMPLETIONS
from kvferry.router.kv_source import KVSource, source_of
from kvferry.router.openai_body import parse_body, prompt_tokens, vllm_body, why_decode_alone
from tests.router.vllm_server import SHAPES, recorded, recorded_events


@given(
    texts=st.lists(st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)), max_size=20), max_size=8),
    ends=st.lists(st.sampled_from([b"\n\n", b"\r\n\r\n"]), min_size=8, max_size=8),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=50),
)
def test_events_are_whole_however_the_bytes_come(texts: list[str], ends: list[bytes], cuts: list[int]) -> None:
    events = [f"data: {text}".encode() + end for text, end in zip(texts, ends, strict=False)]
    stream, buffer, found = b"".join(events), sse.EventBuffer(), []
    for cut in cuts * (len(stream) + 1):
        if not stream:
            break
        found += buffer.feed(stream[:cut])
        stream = stream[cut:]
    assert found == events
    assert [sse.data_of(event).decode() for event in found] == texts[: len(events)]


def test_an_event_without_an_end_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    buffer = sse.EventBuffer()
    assert buffer.feed(b"x" * 600) == []
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        buffer.feed(b"x" * 600)


@pytest.mark.parametrize("name", [name for name in SHAPES if name.endswith("_stream") and SHAPES[name]["status"] == 200])
def test_recorded_streams_are_read_as_they_are(name: str) -> None:
    body = SHAPES[name]["body"].encode()
    events = sse.EventBuffer().feed(body)
    assert b"".join(events) == body and sse.data_of(events[-1]) == sse.DONE
    contents = [sse.object_of(event) for event in events[:-1]]
    assert contents == recorded_events(name)


def test_the_first_token_of_recorded_streams_is_found() -> None:
    def judged(name: str) -> list[str]:
        found = []
        for content in recorded_events(name):
            error = sse.error_of(content)
            found.append(f"error {error[0]}" if error else "empty" if sse.is_empty(content) else "token")
        return found

    assert judged("completion_decode_stream") == ["token"] * 4  # the last is the usage
    assert judged("chat_decode_stream") == ["empty", "token", "token", "token"]
    assert judged("load_fails_stream") == ["error 500"]
    assert judged("load_fails_chat_stream") == ["empty", "error 500"]


@pytest.mark.parametrize(
    ("choice", "is_empty"),
    [
        ({"text": "", "finish_reason": None}, False),
        ({"finish_reason": None}, True),
        ({"finish_reason": "stop"}, False),
        ({"finish_reason": None, "token_ids": [5]}, False),
        ({"text": " "}, False),
        ({"delta": {"role": "assistant"}}, True),
        ({"delta": {"role": "assistant", "content": ""}}, True),
        ({"delta": {"content": ""}}, False),
        ({"delta": {"tool_calls": [{"index": 0}]}}, False),
    ],
)
def test_only_events_without_content_are_empty(choice: dict[str, Any], is_empty: bool) -> None:
    assert sse.is_empty({"choices": [choice]}) is is_empty


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_an_event_with_usage_is_empty_before_the_first_token(num_tokens: int) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": num_tokens, "total_tokens": 5 + num_tokens}
    event = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": usage}
    assert sse.is_empty(event) is (num_tokens == 0)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({}, None),
        ({"error": "gone"}, (500, "gone")),
        ({"error": {"message": "m", "code": 400}}, (400, "m")),
    ],
)
def test_errors_in_streams(content: dict[str, Any], error: tuple[int, str] | None) -> None:
    assert sse.error_of(content) == error


def test_an_event_with_numbers_that_json_does_not_allow_is_read() -> None:
    event = b'data: {"error": {"message": "m", "code": 503}, "logprob": -Infinity}\n\n'
    content = sse.object_of(event)
    assert content is not None and sse.error_of(content) == (503, "m")
    assert sse.object_of(b"data: [DONE\n\n") is None and sse.object_of(b"data: [1]\n\n") is None


def test_where_the_kv_is_by_the_answer() -> None:
    ours = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "x",
        "remote_address": "h:1",
        "remote_engine_id": "e",
    }
    source = source_of(ours)
    assert source == KVSource(address="h:1", engine_id="e")
    assert source.params("x") == ours | {"use_first_token": True}
    for name in ("completion_prefill", "chat_prefill"):  # another connector's, as it was recorded
        assert source_of(recorded(name)["kv_transfer_params"]) is None
    assert recorded("completion_decode")["kv_transfer_params"] is None and source_of(None) is None
    for wrong in ({"remote_address": 5}, {"remote_engine_id": None}, {"remote_address": ""}):
        assert source_of({**ours, **wrong}) is None


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (COMPLETIONS, {"prompt": "x" * 400}, 100),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, 3),
        (COMPLETIONS, {}, 1),
        (CHAT, {"messages": [{"content": "x" * 200}, {"content": [{"type": "text", "text": "y" * 200}]}]}, 100),
    ],
)
def test_estimates_of_prompts(path: str, body: dict[str, Any], tokens: int) -> None:
    assert prompt_tokens(path, body) == tokens


_SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5)
_NAMES = st.sampled_from(["text", "content", "role"])


@given(st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner), max_leaves=20))
def test_no_body_is_too_strange(value: object) -> None:
    for name in ("prompt", "messages", "n", "best_of", "echo", "truncate_prompt_tokens", "max_tokens"):
        body = {name: value, "kept": value}
        assert prompt_tokens(COMPLETIONS, body) >= 1 and prompt_tokens(CHAT, body) >= 1
        why_decode_alone(body)
        sent = vllm_body(COMPLETIONS, body)
        for_prefill, for_decode = json.loads(sent.prefill({"a": 1}, uses_first_token=False)), json.loads(sent.decode({"b": 2}))
        assert for_prefill["kept"] == value and for_prefill["max_tokens"] == for_prefill["n"] == 1
        assert for_prefill["kv_transfer_params"] == {"a": 1} and for_decode == {**body, "kv_transfer_params": {"b": 2}}
        assert json.loads(sent.decode(None)) == body


@pytest.mark.parametrize("number", [-(2**63) - 1, -(2**63), 2**64 - 1, 2**64])
def test_a_byte_order_mark_changes_no_number(number: int) -> None:
    content = json.dumps({"prompt": "x", "seed": number}).encode()
    bodies = [vllm_body(COMPLETIONS, parse_body(mark + content)) for mark in (b"", b"\xef\xbb\xbf")]
    assert bodies[0] == bodies[1]
