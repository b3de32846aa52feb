"""Speculative decoding: draft layers are moved like others, and both tokens and accepted drafts are those of one vLLM.

Each prompt is computed in one step. If vLLM 0.32 divides prompts while others are in the step, its draft layers have other KV:
one vLLM without a connector accepted other numbers of drafts for 4 of 20 prompts than for the same prompts one by one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.samples import sample
from tests.vllm import latents
from tests.vllm.answers import MAX_TOKENS, client
from tests.vllm.commands import MODEL_NAME, vllm_command, vllm_environment
from tests.vllm.drafts import add_mtp_layer, draft_layer_bytes, keep_few_words, make_eagle3, make_few_words
from tests.vllm.instances import assert_nothing_is_left, connector, kvferry_metrics
from tests.vllm.servers import Server, Servers


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model, and what vLLM needs for its drafts.

    Args:
        token_bytes: KV of a token in all layers, the draft layers included.
        blocks: Tokens of a block on the prefill and on the decode side.
        has_latents: Whether each decode rank gets all of a token's KV.
    """

    model: Path
    speculative: Mapping[str, Any]
    token_bytes: int
    blocks: tuple[int, int]
    has_latents: bool = False

    def args(self, block: int) -> list[str]:
        settings = ["--block-size", str(block), "--speculative-config", json.dumps(self.speculative)]
        settings += ["--max-num-batched-tokens", "8192", "--per-request-spec-decode-metrics", "summary"]
        return [*settings, *latents.ARGS] if self.has_latents else settings


@pytest.fixture(scope="module")
def few_words(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return make_few_words(tmp_path_factory.mktemp("models") / "few-words", model)


def llama_with_eagle3(folder: Path, few_words: Path) -> Family:
    draft = make_eagle3(folder / "eagle3", few_words)
    speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
    config = json.loads((few_words / "config.json").read_text(encoding="utf-8"))
    token_bytes = (config["num_hidden_layers"] + 1) * draft_layer_bytes(config)
    return Family(model=few_words, speculative=speculative, token_bytes=token_bytes, blocks=(32, 64))


def deepseek_with_mtp(folder: Path) -> Family:
    model = latents.make_latents(folder / "mtp")
    keep_few_words(model)
    add_mtp_layer(model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return Family(
        model=model,
        speculative={"method": "mtp", "num_speculative_tokens": 1, "attention_backend": latents.BACKEND},
        token_bytes=(config["num_hidden_layers"] + 1) * latents.latent_layer_bytes(config),
        blocks=(latents.BLOCK_SIZE, latents.BLOCK_SIZE),
        has_latents=True,
    )


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, few_words: Path) -> Family:
    folder = tmp_path_factory.mktemp("drafts")
    return deepseek_with_mtp(folder) if request.param == "mtp" else llama_with_eagle3(folder, few_words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """Generated tokens and the number of drafts that were accepted, of each prompt."""

    tokens: dict[int, tuple[int, ...]]
    num_accepted: dict[int, int]

    def differing(self, other: Drafted) -> list[int]:
        return [length for length, count in self.num_accepted.items() if other.num_accepted[length] != count]


async def drafted(url: str, prompts: Mapping[int, str]) -> Drafted:
    """Ask for all prompts at once."""
    async with client(url) as asking:

        async def one(prompt: str) -> tuple[tuple[int, ...], int]:
            completion = await asking.completions.create(
                model=MODEL_NAME, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, extra_body={"return_token_ids": True}
            )
            assert completion.model_extra is not None and completion.choices[0].model_extra is not None
            accepted = completion.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
            return tuple(completion.choices[0].model_extra["token_ids"]), accepted

        found = dict(zip(prompts, await asyncio.gather(*map(one, prompts.values())), strict=True))
    return Drafted(
        tokens={length: tokens for length, (tokens, _) in found.items()},
        num_accepted={length: accepted for length, (_, accepted) in found.items()},
    )


@pytest.fixture(scope="module")
def expected(servers: Servers, family: Family, prompts: Mapping[int, str]) -> Drafted:
    """What one vLLM without a connector generates and accepts."""
    command = vllm_command(family.model, args=family.args(family.blocks[0]))
    plain = servers.start("drafts-reference", command, vllm_environment(in_core=True)).wait_ready()
    found = asyncio.run(drafted(plain.url, prompts))
    plain.kill()
    assert sum(map(bool, found.num_accepted.values())) > len(prompts) / 2, "enough to see a change"
    return found


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["tp2-to-tp1", "tp1-to-tp2"])
def pair(
    request: pytest.FixtureRequest,
    vllm_server: Callable[..., Server],
    route: Callable[..., Server],
    family: Family,
    expected: object,
) -> Iterator[tuple[Server, Server, Server]]:
    """Prefill, decode and router."""
    roles = {"kv_producer": None, "kv_consumer": {"join_on_request": True}}
    prefill, decode = (
        vllm_server(
            family.model,
            tp=tp,
            kv_transfer_config=connector(role, settings),
            name=f"drafts-{role}-tp{tp}",
            in_core=tp == 1,
            args=family.args(block),
        )
        for (role, settings), tp, block in zip(roles.items(), request.param, family.blocks, strict=True)
    )
    prefill.wait_ready()
    decode.wait_ready()
    router = route(prefill=[prefill], decode=[decode], name="drafts-route").wait_ready()
    yield prefill, decode, router
    for server in (router, prefill, decode):
        server.kill()


async def test_tokens_drafts_and_bytes(
    pair: tuple[Server, Server, Server],
    family: Family,
    prompts: Mapping[int, str],
    expected: Drafted,
) -> None:
    """A draft layer without the prompt's KV drafts other tokens, and most prompts have another number of accepted ones."""
    prefill, decode, router = pair
    num_copies = 2 if family.has_latents and "tp2" in decode.name else 1
    found = await drafted(router.url, prompts)
    assert found.tokens == expected.tokens
    assert len(found.differing(expected)) <= 1, (found.num_accepted, expected.num_accepted)
    assert_nothing_is_left(prefill, decode)
    await asyncio.sleep(1.0)  # what a rank says of itself is half a second old
    assert sample(kvferry_metrics(prefill), "kvferry_transferred_bytes_total") == num_copies * sum(prompts) * family.token_bytes
    assert sample(kvferry_metrics(decode), "kvferry_requests_total", role="decode", outcome="done") == len(prompts)
