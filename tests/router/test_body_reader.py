"""The loop parses light bodies itself, and a separate process parses costly ones."""

from __future__ import annotations

import asyncio
import json
import signal
from asyncio.subprocess import Process
from typing import Any

import pytest

from kvferry.router import body_reader
from kvferry.router.api import CHAT, ApiError
from kvferry.router.body_reader import BodyReader, is_light
from kvferry.router.node_model import NodeModel
from kvferry.router.settings import RouterSettings
from tests.router.conftest import routing


def repeated(value: str, number: int) -> bytes:
    return f'{{"prompt": [{", ".join([value] * number)}]}}'.encode()


@pytest.fixture
def all_by_process(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Let processes parse all bodies, and return these processes."""
    made: list[Process] = []
    make = asyncio.create_subprocess_exec

    async def create(*args: Any, **options: Any) -> Process:
        made.append(await make(*args, **options))
        return made[-1]

    monkeypatch.setattr(body_reader, "MAX_LIGHT_VALUES", 0)
    monkeypatch.setattr(body_reader, "SMALL_BYTES", -1)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", create)
    return made


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(repeated("12345", 131_072), id="a long prompt of ids"),
        pytest.param(json.dumps({"messages": [{"content": "iVBORw0KGgo" * 250_000}]}).encode(), id="a photo"),
    ],
)
def test_what_clients_send_is_read_on_the_loop(content: bytes) -> None:
    assert is_light(content)


@pytest.mark.parametrize("value", ["1e1:", "1e1,", "1e1", ":", ",", ".", "1"])
def test_a_small_body_is_light_without_its_weight(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (value * body_reader.SMALL_BYTES)[: body_reader.SMALL_BYTES - 200].encode() + b"[" * 200
    assert is_light(body) and not is_light(body.replace(value.encode(), b"[" * len(value)))
    monkeypatch.setattr(body_reader, "SMALL_BYTES", -1)
    assert is_light(body)


@pytest.mark.parametrize("value", ["1", "1.5", "12345678901234567e-300", "[]", "{}", '""', '{"a": [1]}'])
def test_a_mebibyte_of_small_values_is_not(value: str) -> None:
    assert not is_light(repeated(value, (1 << 20) // (len(value) + 2)))


async def test_answers_are_the_same_whoever_read_the_body(all_by_process: list[Process]) -> None:
    async with routing(learnt=True) as setup:
        answer = await setup.client.complete("é\U0001f600" * 10, max_tokens=5, stop=["x"])
        assert answer.status == 200 and answer.text.startswith("<20>"), answer.body
        before, after = setup.prefill[0].requests[0], setup.decode[0].requests[0]
        assert before["prompt"] == after["prompt"] == "é\U0001f600" * 10
        assert (before["max_tokens"], after["max_tokens"], after["stop"]) == (1, 5, ["x"]) and "stop" not in before
    assert all_by_process


async def test_a_process_that_is_killed_costs_its_request_alone(all_by_process: list[Process]) -> None:
    reader = BodyReader()
    with pytest.raises(ApiError, match="ended with code -9") as failed:
        await reader.read(b"{}", eval, "__import__('signal').raise_signal(9)")
    assert failed.value.status == 503
    assert await reader.read(b'{"a": 5}', eval, "a") == 5


async def test_a_process_whose_request_is_given_up_is_ended(all_by_process: list[Process]) -> None:
    reader = BodyReader()
    for _ in range(body_reader.MAX_PROCESSES + 1):  # each gives its place back
        reading = asyncio.create_task(reader.read(b"{}", eval, "__import__('time').sleep(600)"))
        number = len(all_by_process)
        while len(all_by_process) == number:
            await asyncio.sleep(0.001)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert all_by_process[-1].returncode == -signal.SIGKILL


async def test_a_costly_chat_with_a_node_has_few_values_and_texts_of_any_length() -> None:
    settings = RouterSettings(prefill=(), decode=("grpc://127.0.0.1:1",))
    model = NodeModel(settings)
    document = json.dumps({"messages": [{"role": "user", "content": "[1.5, 2.5]," * 60_000}]}).encode()
    values = json.dumps({"messages": [[]] * 40_000}).encode()
    assert not is_light(document) and not is_light(values)
    with pytest.raises(ApiError, match="chats need a chat template"):  # the next thing that is looked at
        await model.read(CHAT, document)
    with pytest.raises(ApiError, match="can have 10000 JSON values") as refused:
        await model.read(CHAT, values)
    assert refused.value.status == 413
