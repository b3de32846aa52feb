"""Two LoRA adapters and the model without them: moved and stored apart, with the tokens of one vLLM."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.samples import sample
from tests.vllm.adapters import RANK, make_adapter
from tests.vllm.answers import Answer, answer, client
from tests.vllm.commands import MODEL_NAME, vllm_command, vllm_environment
from tests.vllm.instances import assert_nothing_is_left, connector, kvferry_metrics
from tests.vllm.servers import Server, Servers
from tests.vllm.test_store import num_blocks, pages_of, store_connector, until, until_pages

NAMES = ("sql", "chat", MODEL_NAME)


def lora_args(adapters: Path) -> list[str]:
    modules = [f"{name}={adapters / name}" for name in NAMES[:2]]
    return ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK), "--lora-modules", *modules]


async def answers_of(url: str, prompts: Mapping[int, str]) -> dict[tuple[str, int], Answer]:
    """Answers of each adapter to each prompt: those of both adapters at once, and then those without one.

    vLLM 0.32 on a CPU computes a prompt without an adapter with the last adapter, if other prompts of the step have one.
    """
    found: dict[tuple[str, int], Answer] = {}
    async with client(url) as asking:
        for names in (NAMES[:2], NAMES[2:]):
            keys = list(itertools.product(names, prompts))
            given = await asyncio.gather(*(answer(asking, prompts[length], extra={"model": name}) for name, length in keys))
            found |= dict(zip(keys, given, strict=True))
    return found


def received(server: Server, outcome: str = "done") -> float:
    return sample(kvferry_metrics(server), "kvferry_requests_total", role="decode", outcome=outcome)


@pytest.fixture(scope="module")
def few(prompts: Mapping[int, str]) -> dict[int, str]:
    return {length: prompts[length] for length in (64, 384, 513, 600)}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES[:2]):
        make_adapter(folder / name, model, seed=seed)
    return folder


@pytest.fixture(scope="module")
def expected(servers: Servers, model: Path, adapters: Path, few: Mapping[int, str]) -> dict[tuple[str, int], Answer]:
    """Answers of one vLLM without a connector."""
    server = servers.start("lora-reference", vllm_command(model, args=lora_args(adapters)), vllm_environment(in_core=True))
    found = asyncio.run(answers_of(server.wait_ready().url, few))
    server.kill()
    for length in few:
        assert len({found[name, length].token_ids for name in NAMES}) == len(NAMES), "each adapter has other tokens"
    return found


@pytest.fixture(scope="module")
def pair(
    vllm_server: Callable[..., Server], route: Callable[..., Server], model: Path, adapters: Path, expected: object
) -> Iterator[tuple[Server, Server, Server]]:
    """Prefill, decode and router."""
    args = lora_args(adapters)
    prefill = vllm_server(model, tp=2, kv_transfer_config=connector("kv_producer"), name="lora-prefill", args=args)
    settings = {"join_on_request": True}
    decode = vllm_server(
        model, kv_transfer_config=connector("kv_consumer", settings), name="lora-decode", in_core=True, args=args
    )
    prefill.wait_ready()
    decode.wait_ready()
    router = route(prefill=[prefill], decode=[decode]).wait_ready()
    yield prefill, decode, router
    for server in (router, prefill, decode):
        server.kill()


async def test_adapters_are_moved_with_the_tokens_of_one_vllm(
    pair: tuple[Server, Server, Server], few: Mapping[int, str], expected: Mapping[tuple[str, int], Answer]
) -> None:
    prefill, decode, router = pair
    assert await answers_of(router.url, few) == expected
    assert received(decode) == len(expected), "each prompt came from the prefill side"
    assert_nothing_is_left(prefill, decode)


async def test_the_same_prompt_of_another_adapter_is_recomputed(
    pair: tuple[Server, Server, Server], few: Mapping[int, str], expected: Mapping[tuple[str, int], Answer]
) -> None:
    """The router's mistake: prefill computes with one adapter, and decode is asked for the other."""
    prefill, decode, _ = pair
    prompt = "another " + few[384]
    before = received(decode)
    async with client(prefill.url) as at_prefill, client(decode.url) as at_decode:
        asked = {"model": "sql", "kv_transfer_params": {"do_remote_decode": True, "transfer_id": "mistake"}}
        completion = await at_prefill.completions.create(
            model="sql", prompt=prompt, max_tokens=1, temperature=0, extra_body=asked
        )
        params = completion.model_extra["kv_transfer_params"]  # type: ignore[index]
        found = await answer(at_decode, prompt, extra={"model": "chat", "kv_transfer_params": params})
        own = await answer(at_prefill, prompt, extra={"model": "chat"})
    assert found == own
    assert received(decode) == before
    assert "LoRA adapter or revision differ" in decode.log.read_text(encoding="utf-8", errors="replace")
    assert_nothing_is_left(prefill, decode)


def test_stored_pages_belong_to_a_revision(
    vllm_server: Callable[..., Server],
    model: Path,
    adapters: Path,
    few: Mapping[int, str],
    expected: Mapping[tuple[str, int], Answer],
    tmp_path: Path,
) -> None:
    """After a restart, the adapter sql has other weights in the same directory. Only its pages are not used."""
    folder, places = tmp_path / "pages", tmp_path / "adapters"
    for seed, name in enumerate(NAMES[:2]):
        make_adapter(places / name, model, seed=seed)

    def start(name: str) -> Server:
        transfer = store_connector(folder)
        return vllm_server(model, kv_transfer_config=transfer, name=name, in_core=True, args=lora_args(places)).wait_ready()

    saves = start("lora-saves")
    assert asyncio.run(answers_of(saves.url, few)) == expected
    until(lambda: len(pages_of(folder)) == len(NAMES) * num_blocks(few), "all whole blocks of each adapter are in the store")
    assert not saves.stop()
    make_adapter(places / "sql", model, seed=1)  # the weights of chat
    loads = start("lora-loads")
    found = asyncio.run(answers_of(loads.url, few))
    wanted = {key: expected["chat" if key[0] == "sql" else key[0], key[1]] for key in expected}
    assert found == wanted
    until_pages(loads, "get", "ok", 2 * num_blocks(few))
    loads.kill()
