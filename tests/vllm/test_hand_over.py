"""Two vLLM instances, joined by the connector, the router in front: as one vLLM, and nothing is left.

Their TP degrees differ, except on a machine with one GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from tests.samples import sample
from tests.vllm.answers import Answer, answer, answers, client
from tests.vllm.commands import MAX_TP, MODEL_NAME
from tests.vllm.instances import assert_nothing_is_left, connector, kvferry_metrics, page
from tests.vllm.servers import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    prefill: Server
    decode: Server
    router: Server  # asks both at once
    one_by_one: Server  # decode after prefill


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)] if MAX_TP > 1 else [(1, 1)], ids=lambda tp: f"{tp[0]}to{tp[1]}")
def pair(
    request: pytest.FixtureRequest,
    vllm_server: Callable[..., Server],
    route: Callable[..., Server],
    model: Path,
    started_reference: Server,
) -> Iterator[Pair]:
    prefill_tp, decode_tp = request.param
    # Prompts are computed in many steps, so that there is a middle of them; of decode's blocks there are too few for all prompts.
    # Unless TP is 1 to 2, prefill sends each layer of a step as its own piece.
    prefill = vllm_server(
        model,
        tp=prefill_tp,
        kv_transfer_config=connector("kv_producer", {"chunk": {"layers_per_group": 1}} if decode_tp == 1 else None),
        name=f"prefill-tp{prefill_tp}",
        in_core=prefill_tp == 1,
        args=["--max-num-batched-tokens", "128"],
    )
    decode = vllm_server(
        model,
        tp=decode_tp,
        kv_transfer_config=connector("kv_consumer", {"join_on_request": True}),
        name=f"decode-tp{decode_tp}",
        in_core=decode_tp == 1,
        # On CPUs, vLLM uses model runner V1, so FirstTokenScheduler must behave as vLLM's scheduler there.
        args=["--num-gpu-blocks-override", "24", "--scheduler-cls", "kvferry.engines.vllm_scheduler.FirstTokenScheduler"],
    )
    prefill.wait_ready()
    decode.wait_ready()
    router = route(prefill=[prefill], decode=[decode])
    one_by_one = route(prefill=[prefill], decode=[decode], args=["--flow", "sequential"])
    yield Pair(prefill=prefill, decode=decode, router=router.wait_ready(), one_by_one=one_by_one.wait_ready())
    for server in (router, one_by_one, prefill, decode):
        server.kill()  # or they would take the processors from the next pair until the module ends


def token_bytes(model: Path) -> int:
    """KV of a token, in float32."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2 * 4)


def moved_bytes(server: Server) -> float:
    return sample(kvferry_metrics(server), "kvferry_transferred_bytes_total")


def counted(name: str, *servers: Server) -> list[float]:
    """Return a counter of each vLLM."""
    return [sample(page(f"{server.url}/metrics"), f"vllm:{name}_total") for server in servers]


def uncached() -> dict[str, str]:
    """Return fields of a request that finds nothing in prefix caches."""
    return {"cache_salt": secrets.token_hex()}


@pytest.mark.parametrize("flow", ["router", "one_by_one"])
async def test_tokens_as_of_one_vllm(
    pair: Pair, model: Path, prompts: Mapping[int, str], reference: Mapping[int, Answer], flow: str
) -> None:
    before = moved_bytes(pair.prefill), moved_bytes(pair.decode)
    found = await answers(getattr(pair, flow).url, prompts.values())
    assert dict(zip(prompts, found, strict=True)) == reference
    assert_nothing_is_left(pair.prefill, pair.decode)
    if flow == "router":
        # Each token's KV once, and not a byte more; it is gathered once and scattered once, so the host copies each byte twice.
        wanted = token_bytes(model) * sum(prompts)
        await asyncio.sleep(1.0)  # what a rank says of itself is half a second old
        assert moved_bytes(pair.prefill) - before[0] == wanted
        assert moved_bytes(pair.decode) - before[1] == wanted
        assert sample(kvferry_metrics(pair.prefill), "kvferry_resends_total") == 0


async def test_streams_and_chats(pair: Pair, reference_server: Server) -> None:
    messages = [{"role": "user", "content": "Where is the ferry, and when does it leave?"}]
    texts = []
    for url in (reference_server.url, pair.router.url):
        async with client(url) as asking:
            assert [one.id async for one in asking.models.list()] == [MODEL_NAME]
            stream = await asking.chat.completions.create(  # type: ignore[call-overload]
                model=MODEL_NAME, messages=messages, max_tokens=24, temperature=0, stream=True
            )
            texts.append("".join([part.choices[0].delta.content or "" async for part in stream if part.choices]))
    assert texts[0] and texts[0] == texts[1]
    assert_nothing_is_left(pair.prefill, pair.decode)


async def test_prefix_cache_hits_on_both_sides(
    pair: Pair, model: Path, prompts: Mapping[int, str], reference_server: Server
) -> None:
    """Prefill computes only the end of a prompt, and decode receives only what follows its own blocks."""
    other_end = prompts[600].rpartition(" ")[0] + " ferry"
    wanted = await answers(reference_server.url, [prompts[600], other_end], at_once=1)
    found = await answers(pair.one_by_one.url, [prompts[600]])
    await asyncio.sleep(1.0)  # a rank reports its counters every half second
    moved, hits = moved_bytes(pair.prefill), counted("prefix_cache_hits", pair.prefill, pair.decode)
    found += await answers(pair.one_by_one.url, [other_end])
    assert found == wanted
    hits_after = counted("prefix_cache_hits", pair.prefill, pair.decode)
    assert [after - before for before, after in zip(hits, hits_after, strict=True)] == [512, 512]
    await asyncio.sleep(1.0)
    assert moved_bytes(pair.prefill) - moved == token_bytes(model) * (wanted[1].num_prompt_tokens - 512)


async def test_preempted_requests_go_on(pair: Pair, prompts: Mapping[int, str], reference_server: Server) -> None:
    """Decode has blocks for eight prompts, but not for their answers, which are long enough to overlap if prefill is slow."""
    asked = [prompts[130]] * 8
    (wanted,) = await answers(reference_server.url, asked[:1], max_tokens=450)
    (before,) = counted("num_preemptions", pair.decode)
    async with client(pair.router.url) as asking:
        found = await asyncio.gather(*(answer(asking, prompt, max_tokens=450, extra=uncached()) for prompt in asked))
    assert found == [wanted] * 8
    assert counted("num_preemptions", pair.decode) > [before]
    assert_nothing_is_left(pair.prefill, pair.decode)


async def test_clients_that_go_away(pair: Pair, prompts: Mapping[int, str], reference: Mapping[int, Answer]) -> None:
    """At any moment of prefill, transfer and generation; what others ask at the same time is answered as ever."""

    async def leave(after_s: float) -> None:
        async with client(pair.router.url) as asking:
            with contextlib.suppress(TimeoutError, openai.APIError):
                async with asyncio.timeout(after_s):
                    await answer(asking, prompts[600], max_tokens=300, extra=uncached())

    leaving = [leave(0.02 * step) for step in range(1, 25)]
    steady = answers(pair.router.url, [prompts[length] for length in (33, 129, 300)])
    *_, found = await asyncio.gather(*leaving, steady)
    assert found == [reference[length] for length in (33, 129, 300)]
    assert_nothing_is_left(pair.prefill, pair.decode)
    (again,) = await answers(pair.router.url, [prompts[600]])
    assert again == reference[600]


async def test_the_prefill_server_is_killed(pair: Pair, prompts: Mapping[int, str], reference: Mapping[int, Answer]) -> None:
    """Each request ends, with the right tokens or with an error that says so; decode goes on, and holds nothing."""

    async def one(number: int, length: int) -> Answer | openai.APIError:
        await asyncio.sleep(0.02 * number)
        async with client(pair.router.url) as asking:
            try:
                return await answer(asking, prompts[length], extra=uncached())
            except openai.APIError as error:
                return error

    asked = list(prompts)[-8:] * 4
    asking = [asyncio.create_task(one(number, length)) for number, length in enumerate(asked)]
    await asyncio.sleep(0.3)
    pair.prefill.kill()
    async with asyncio.timeout(100):
        found = await asyncio.gather(*asking)
    for length, what in zip(asked, found, strict=True):
        assert isinstance(what, openai.APIStatusError) or what == reference[length], what
    assert_nothing_is_left(pair.decode)
    alone = await answers(pair.decode.url, [prompts[length] for length in (10, 300)])
    assert alone == [reference[length] for length in (10, 300)], "without a prefill server it is a vLLM like any other"
