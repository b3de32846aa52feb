"""MLA: each rank has whole latents, and the tokens are those of one vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.samples import sample
from tests.vllm.answers import Answer, answers
from tests.vllm.commands import vllm_command, vllm_environment
from tests.vllm.instances import assert_nothing_is_left, connector, kvferry_metrics
from tests.vllm.latents import ARGS, latent_layer_bytes, make_latents
from tests.vllm.servers import Server, Servers

# vLLM does not divide prompts of latents on a CPU.
WHOLE_PROMPTS = [*ARGS, "--max-num-batched-tokens", "8192"]


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_latents(tmp_path_factory.mktemp("models") / "latents")


@pytest.fixture(scope="module")
def expected(servers: Servers, latents: Path, prompts: Mapping[int, str]) -> dict[int, Answer]:
    """What one vLLM answers to each prompt alone, and to all at once."""
    command = vllm_command(latents, args=WHOLE_PROMPTS)
    plain = servers.start("latents-reference", command, vllm_environment(in_core=True)).wait_ready()
    alone, together = (asyncio.run(answers(plain.url, prompts.values(), at_once=number)) for number in (1, None))
    plain.kill()
    assert alone == together, "tokens depend on nothing but the prompt"
    return dict(zip(prompts, alone, strict=True))


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["tp2-to-tp1", "tp1-to-tp2"])
def cut(request: pytest.FixtureRequest) -> tuple[int, int]:
    """TP degree of the prefill and of the decode side."""
    found: tuple[int, int] = request.param
    return found


@pytest.fixture(scope="module")
def pair(
    cut: tuple[int, int], vllm_server: Callable[..., Server], route: Callable[..., Server], latents: Path, expected: object
) -> Iterator[tuple[Server, Server, Server]]:
    """Prefill, decode and router."""
    roles = {"kv_producer": None, "kv_consumer": {"join_on_request": True}}
    prefill, decode = (
        vllm_server(
            latents,
            tp=tp,
            kv_transfer_config=connector(role, settings),
            name=f"latents-{role}-tp{tp}",
            in_core=tp == 1,
            args=WHOLE_PROMPTS,
        )
        for (role, settings), tp in zip(roles.items(), cut, strict=True)
    )
    prefill.wait_ready()
    decode.wait_ready()
    router = route(prefill=[prefill], decode=[decode], name="latents-route").wait_ready()
    yield prefill, decode, router
    for server in (router, prefill, decode):
        server.kill()


async def test_tokens_and_bytes(
    pair: tuple[Server, Server, Server],
    cut: tuple[int, int],
    latents: Path,
    prompts: Mapping[int, str],
    expected: Mapping[int, Answer],
) -> None:
    """Each decode rank receives all latents of the prompts once."""
    prefill, decode, router = pair
    found = await answers(router.url, prompts.values())
    assert dict(zip(prompts, found, strict=True)) == expected
    assert_nothing_is_left(prefill, decode)
    await asyncio.sleep(1.0)  # what a rank says of itself is half a second old
    config = json.loads((latents / "config.json").read_text(encoding="utf-8"))
    token_bytes = config["num_hidden_layers"] * latent_layer_bytes(config)
    moved = sample(kvferry_metrics(prefill), "kvferry_transferred_bytes_total")
    assert moved == cut[1] * sum(prompts) * token_bytes
    assert sample(kvferry_metrics(decode), "kvferry_requests_total", role="decode", outcome="done") == len(prompts)
