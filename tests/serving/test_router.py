"""Requests to a router in front of the running cluster."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvferry.router.serve import OpenRouter, open_router
from kvferry.router.settings import RouterSettings
from tests.cluster.calls import Reference, leftovers, prompt, status_of, until
from tests.router.conftest import Client
from tests.serving.conftest import Serving

TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ['user', 'system', 'assistant'] %}"
    "{{ raise_exception('no such role: ' + message.role) }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if shout is defined %}LOUD {% endif %}assistant: "
)


@pytest.fixture(scope="module")
def tokenizer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the model's tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizers") / "demo-chat"
    folder.mkdir()
    for file in model.glob("*token*.json"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class NodeSetup:
    def __init__(self, router: OpenRouter, client: Client, serving: Serving) -> None:
        self.router = router
        self.client = client
        self._serving = serving

    async def idle(self) -> None:
        """Wait until no request is left on the nodes and in the router."""

        async def is_idle() -> bool:
            return not [left for node in self._serving.cluster.nodes for left in leftovers(await status_of(node))]

        await until(is_idle, "both nodes idle")
        assert [server.outstanding for server in self.router.backend.decode.servers] == [0] * len(
            self.router.backend.decode.servers
        )


@asynccontextmanager
async def routed(serving: Serving, *more: str, **options: Any) -> AsyncIterator[NodeSetup]:
    address = next(node.address for node in serving.cluster.nodes if node.role == "decode")
    options = {"health_interval_s": 0.1, **options}
    settings = RouterSettings(prefill=(), decode=tuple(f"grpc://{one}" for one in (address, *more)), port=0, **options)
    async with open_router(settings, serving.security()) as router:
        client = Client(router.address)
        try:
            await until(lambda: router.backend.readiness().is_ready, "the router to be ready")
            yield NodeSetup(router, client, serving)
        finally:
            await client.session.close()


def text_of(model: Path, tokens: list[int]) -> str:
    loader: Any = AutoTokenizer
    return str(loader.from_pretrained(model, local_files_only=True).decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("is_stream", [False, True])
async def test_completions_match_the_single_process_reference(
    serving: Serving, model: Path, reference: Reference, is_stream: bool
) -> None:
    async with routed(serving) as setup:
        asked = [prompt(length, variant) for variant, length in enumerate((10, 150, 400))]
        answers = await asyncio.gather(
            *(
                setup.client.post(
                    "/v1/completions",
                    {"prompt": list(ids), "max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream": is_stream},
                )
                for ids in asked
            )
        )
        for ids, answer in zip(asked, answers, strict=True):
            assert answer.status == 200, answer.body
            assert answer.text == text_of(model, reference.tokens(ids, 16))
        if not is_stream:
            content = answers[1].json
            assert content["usage"] == {"prompt_tokens": 150, "completion_tokens": 16, "total_tokens": 166}
            assert (content["object"], content["model"]) == ("text_completion", "kvferry")
            assert content["choices"][0]["finish_reason"] == "length"
        await setup.idle()


async def test_a_completion_stream_ends_with_finish_reason_usage_and_done(serving: Serving) -> None:
    async with routed(serving, model_name="demo") as setup:
        answer = await setup.client.post(
            "/v1/completions",
            {
                "model": "demo",
                "prompt": "The harbour",
                "max_tokens": 5,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            headers={"X-Request-Id": "r-1"},
        )
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        *events, done = answer.events
        contents = [json.loads(event) for event in events]
        assert done == "[DONE]" and {(one["id"], one["model"], one["object"]) for one in contents} == {
            ("cmpl-r-1", "demo", "text_completion")
        }
        assert [one["choices"][0]["finish_reason"] for one in contents[:-1]] == [None] * (len(contents) - 2) + ["length"]
        assert contents[-1]["choices"] == [] and contents[-1]["usage"]["completion_tokens"] == 5


async def test_a_chat_completion_equals_the_completion_of_its_rendered_template(serving: Serving, tokenizer: Path) -> None:
    async with routed(serving, tokenizer=tokenizer) as setup:
        models = (await setup.client.get("/v1/models")).json["data"]
        assert [one["id"] for one in models] == ["demo-chat"]
        same = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "harbour"}]
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
        chat = await setup.client.post("/v1/chat/completions", {"messages": messages, **same})
        assert chat.status == 200, chat.body
        text = "system: Be brief.\nuser: The harbour\nassistant: "
        loader: Any = AutoTokenizer
        ids = loader.from_pretrained(tokenizer, local_files_only=True)(text, add_special_tokens=False)["input_ids"]
        plain = await setup.client.post("/v1/completions", {"prompt": ids, **same})
        assert chat.text == plain.text and chat.json["usage"] == plain.json["usage"]
        assert chat.json["choices"][0]["message"]["role"] == "assistant"
        streamed = await setup.client.post("/v1/chat/completions", {"messages": messages, **same, "stream": True})
        assert streamed.text == chat.text
        first = json.loads(streamed.events[0])
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""} and first["object"] == "chat.completion.chunk"
        loud = await setup.client.post(
            "/v1/chat/completions", {"messages": messages, **same, "chat_template_kwargs": {"shout": True}}
        )
        assert loud.json["usage"]["prompt_tokens"] > chat.json["usage"]["prompt_tokens"]
        for body, message in (
            ({"messages": [{"role": "pirate", "content": "arr"}]}, "no such role: pirate"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content must be text"),
            ({"messages": []}, "messages is missing or empty"),
            ({"messages": messages, "chat_template_kwargs": {"chat_template": "x"}}, "which is not for clients"),
            ({"messages": messages, "tools": [{"type": "function"}]}, "tools is"),
        ):
            answer = await setup.client.post("/v1/chat/completions", body)
            assert answer.status == 400 and message in answer.error, answer.body


async def test_a_chat_without_a_template_is_rejected_and_names_the_option(serving: Serving) -> None:
    async with routed(serving) as setup:
        answer = await setup.client.chat()
        assert answer.status == 404  # the client asks for the model "tiny"
        answer = await setup.client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert answer.status == 400 and "--tokenizer" in answer.error


async def test_a_request_that_the_node_rejects_is_a_client_error(serving: Serving) -> None:
    async with routed(serving) as setup:
        for body, message in (
            ({"prompt": ""}, "prompt is empty"),
            ({"prompt": [10**6]}, "vocabulary"),
            ({"prompt": list(prompt(100)), "max_tokens": 10**6}, "max_new_tokens is 1000000"),
            ({"prompt": "x", "top_p": 0}, "top_p"),
        ):
            answer = await setup.client.post("/v1/completions", body)
            assert answer.status == 400 and message in answer.error and "127.0.0.1" not in answer.error, answer.body
        assert await setup.client.metric("retries_total") == 0
        huge = await setup.client.post("/v1/completions", {"prompt": "x" * (14 << 20)})
        assert huge.status in (400, 413), huge.body


async def test_completions_repeat_with_a_seed_and_differ_without_one(serving: Serving) -> None:
    async with routed(serving) as setup:
        body = {"prompt": "The harbour", "max_tokens": 24, "ignore_eos": True, "temperature": 2.0}
        same = [(await setup.client.post("/v1/completions", {**body, "seed": 7})).text for _ in range(2)]
        others = {(await setup.client.post("/v1/completions", body)).text for _ in range(3)}
        assert same[0] == same[1] and len(others) == 3


@pytest.mark.parametrize("is_stream", [False, True])
async def test_generation_ends_when_the_client_disconnects(serving: Serving, is_stream: bool) -> None:
    async with routed(serving) as setup:
        body = {"prompt": list(prompt(64)), "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": is_stream}
        asking = asyncio.create_task(setup.client.post("/v1/completions", body))
        decode = next(node for node in serving.cluster.nodes if node.role == "decode")

        async def runs() -> bool:
            status = await status_of(decode)
            return status is not None and status.running_requests == 1

        await until(runs, "the request to run")
        asking.cancel()
        await setup.idle()
        assert await setup.client.metric("requests_total", endpoint="completions", outcome="disconnected") == 1


async def test_requests_go_to_the_reachable_node(serving: Serving) -> None:
    async with routed(serving, "127.0.0.1:1") as setup:
        for _ in range(3):
            answer = await setup.client.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
            assert answer.status == 200, answer.body
        assert await setup.client.metric("servers", tier="decode", state="healthy") == 1


async def test_a_prefill_node_is_not_used_as_a_decode_node(serving: Serving) -> None:
    address = next(node.address for node in serving.cluster.nodes if node.role == "prefill")
    settings = RouterSettings(prefill=(), decode=(f"grpc://{address}",), port=0, health_interval_s=0.1)
    async with open_router(settings, serving.security()) as router:
        await until(lambda: "prefill node" in router.backend.readiness().reason, "the router to report a prefill node")
