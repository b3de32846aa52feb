"""vLLM and kvferry's own nodes hand prompts to each other, both ways: as one vLLM, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster.node import ClusterNode
from tests.cluster.calls import until, until_idle
from tests.cluster.open_nodes import Nodes, open_nodes
from tests.free_port import free_port
from tests.samples import sample
from tests.vllm.answers import MAX_TOKENS, Answer, answer, client
from tests.vllm.commands import MAX_MODEL_LEN
from tests.vllm.instances import assert_nothing_is_left, connector, kvferry_addresses, kvferry_metrics, page
from tests.vllm.our_nodes import all_generated, generated, launch
from tests.vllm.servers import Server
from tests.vllm.test_hand_over import token_bytes
from transfer.errors import ConfigError
from transfer.pb import kvferry_pb2 as pb

SETTLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`tp2` computes prompts for `decode`; `tp1` does that, too, and generates from what `prefill` computes."""

    tp2: Server
    tp1: Server
    prefill: ClusterNode
    decode: ClusterNode


@pytest.fixture(scope="module")
def parts(vllm_server: Callable[..., Server], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    with contextlib.ExitStack() as stack:
        nodes: Nodes = stack.enter_context(open_nodes(tmp_path_factory.mktemp("nodes")))

        def start(role: str, tp: int, settings: Mapping[str, Any]) -> tuple[Server, str]:
            port, address = (stack.enter_context(free_port()) for _ in range(2))
            own = {"api_url": f"http://127.0.0.1:{port}", "server": {"port": address}}
            server = vllm_server(
                model,
                tp=tp,
                kv_transfer_config=connector(role, own | dict(settings)),
                name=f"with-nodes-tp{tp}",
                in_core=tp == 1,
                port=port,
                args=["--max-num-batched-tokens", "128", "--enable-log-requests"],  # so that prompts have a middle
            )
            return server, f"127.0.0.1:{address}"

        tp2, tp2_address = start("kv_producer", 2, {})
        tp1, tp1_address = start("kv_both", 1, {"join_on_request": True})
        prefill = launch(nodes, "prefill", model, limits__max_step_tokens=128, chunk__chunk_tokens=64)
        decode = launch(nodes, "decode", model, tp2_address, tp1_address)
        tp2.wait_ready()
        tp1.wait_ready()

        async def are_all_joined() -> bool:
            return [peer.state for peer in (await decode.status()).peers] == ["joined", "joined"]

        asyncio.run(nodes.until_started(prefill, decode))
        asyncio.run(until(are_all_joined, "the decode node has joined both vLLM servers", within_s=SETTLE_S))
        yield Parts(tp2=tp2, tp1=tp1, prefill=prefill, decode=decode)


def moved_bytes(*servers: Server) -> float:
    return sum(sample(kvferry_metrics(server), "kvferry_transferred_bytes_total") for server in servers)


def num_aborted(server: Server) -> int:
    """Requests that vLLM was told to give up."""
    return len(re.findall(r"Request cmpl-\S+ aborted", server.log.read_text(encoding="utf-8", errors="replace")))


def is_ready(router: Server) -> bool:
    try:
        return bool(page(f"{router.url}/readyz"))
    except urllib.error.HTTPError:
        return False


# vLLM computes, the embedded engine generates


async def test_a_decode_node_goes_on_where_vllm_has_computed(
    parts: Parts, model: Path, prompts: Mapping[int, str], reference: Mapping[int, Answer]
) -> None:
    found = await all_generated(parts.decode.address, list(prompts.values()), max_tokens=MAX_TOKENS)
    assert {length: made for length, (made, _) in zip(prompts, found, strict=True)} == reference
    assert {done.prefill_node for _, done in found} == {kvferry_addresses(server)[0] for server in (parts.tp2, parts.tp1)}
    # Each token's KV once, in whatever blocks vLLM has it and whatever pages the node.
    assert sum(done.stats.bytes for _, done in found) == token_bytes(model) * sum(prompts)
    assert [(done.retries, done.stats.resends) for _, done in found] == [(0, 0)] * len(found)
    assert_nothing_is_left(parts.tp2, parts.tp1)
    await until_idle(parts.decode, within_s=SETTLE_S)


async def test_the_command_line(parts: Parts, model: Path, prompts: Mapping[int, str], reference: Mapping[int, Answer]) -> None:
    token_ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(prompts[33]).ids
    command = [sys.executable, "-m", "kvferry", "generate", "--target", parts.decode.address, "--insecure", "--json"]
    command += ["--token-ids", ",".join(map(str, token_ids)), "--max-new-tokens", str(MAX_TOKENS)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    assert process.returncode == 0
    assert tuple(json.loads(printed)["token_ids"]) == reference[33].token_ids


async def test_sampled_tokens_are_the_same_again(parts: Parts, prompts: Mapping[int, str]) -> None:
    """The first one is chosen by vLLM, as the client of the node has said."""

    async def first_token(seed: int) -> int:
        request = pb.GenerateRequest(
            prompt=prompts[100], max_new_tokens=1, sampling=pb.SamplingParams(temperature=2.0, top_k=50, top_p=0.9, seed=seed)
        )
        async with NodeClient(parts.decode.address) as asking:
            (token,) = [token async for event in asking.generate(request, timeout_s=60) for token in event.tokens.token_ids]
        return token

    seeds = (1, 2, 3, 4, 2**63 - 1)
    once = [await first_token(seed) for seed in seeds]
    assert once == [await first_token(seed) for seed in seeds]
    assert len(set(once)) > 1


async def test_clients_of_the_node_that_go_away(
    parts: Parts, prompts: Mapping[int, str], reference: Mapping[int, Answer]
) -> None:
    """At any moment; vLLM computes no prompt to its end for nobody."""
    before = [num_aborted(server) for server in (parts.tp2, parts.tp1)]

    async def leave(after_s: float) -> None:
        request = pb.GenerateRequest(prompt=prompts[600], max_new_tokens=300)
        async with NodeClient(parts.decode.address) as asking, contextlib.aclosing(asking.generate(request)) as events:
            await anext(events)  # it has its place
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    async for _ in events:
                        pass

    await asyncio.gather(*(leave(0.02 * step) for step in range(1, 25)))
    assert_nothing_is_left(parts.tp2, parts.tp1)
    await until_idle(parts.decode, within_s=SETTLE_S)
    assert all(num_aborted(server) > seen for server, seen in zip((parts.tp2, parts.tp1), before, strict=True))
    again, _ = await generated(parts.decode.address, prompts[600], max_tokens=MAX_TOKENS)
    assert again == reference[600]


async def test_a_prompt_that_vllm_cannot_take(parts: Parts) -> None:
    async with NodeClient(parts.decode.address) as asking:
        longest = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * (MAX_MODEL_LEN - 1)), max_new_tokens=2)
        assert [event.done.prompt_tokens async for event in asking.generate(longest) if event.HasField("done")] == [
            MAX_MODEL_LEN - 1
        ]
        longer = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * MAX_MODEL_LEN), max_new_tokens=2)
        with pytest.raises(ConfigError, match=f"prompt has {MAX_MODEL_LEN} tokens; a context of {MAX_MODEL_LEN}"):
            async for _ in asking.generate(longer):
                pass
    await until_idle(parts.decode, within_s=SETTLE_S)


# The embedded engine computes, vLLM generates


def fetched_from(address: str, *, salt: str = "") -> dict[str, Any]:
    """What of a request to vLLM says that the prompt's KV comes from that node, and who shares its prefix cache."""
    params = {"do_remote_prefill": True, "remote_address": address}
    return {"kv_transfer_params": params} | ({"cache_salt": salt} if salt else {})


async def all_answers(url: str, prompts: Sequence[str], extra: Mapping[str, Any]) -> list[Answer]:
    async with client(url) as asking:
        return list(await asyncio.gather(*(answer(asking, prompt, extra=extra) for prompt in prompts)))


async def test_vllm_goes_on_where_a_prefill_node_has_computed(
    parts: Parts, model: Path, prompts: Mapping[int, str], reference: Mapping[int, Answer]
) -> None:
    moved = []
    await asyncio.sleep(1.0)  # what a rank says of itself is half a second old; the test before this one moved bytes, too
    for _ in range(2):
        before = moved_bytes(parts.tp1)
        found = await all_answers(
            parts.tp1.url, list(prompts.values()), fetched_from(parts.prefill.address, salt="with-our-nodes")
        )
        assert dict(zip(prompts, found, strict=True)) == reference
        assert_nothing_is_left(parts.tp1)
        await until_idle(parts.prefill, within_s=SETTLE_S)
        await asyncio.sleep(1.0)
        moved.append(moved_bytes(parts.tp1) - before)
    # The second time vLLM has the whole blocks of what it has seen, but for a prompt's last token, and fetches the rest.
    cached = sum((length - 1) // 128 * 128 for length in prompts)
    assert moved == [token_bytes(model) * sum(prompts), token_bytes(model) * (sum(prompts) - cached)]


async def test_clients_of_vllm_that_go_away(parts: Parts, prompts: Mapping[int, str], reference: Mapping[int, Answer]) -> None:
    async def leave(after_s: float) -> None:
        async with client(parts.tp1.url) as asking:
            with contextlib.suppress(TimeoutError, openai.APIError):
                async with asyncio.timeout(after_s):
                    extra = fetched_from(parts.prefill.address, salt=str(after_s))
                    await answer(asking, prompts[600], max_tokens=300, extra=extra)

    await asyncio.gather(*(leave(0.02 * step) for step in range(1, 25)))
    assert_nothing_is_left(parts.tp1)
    await until_idle(parts.prefill, within_s=SETTLE_S)
    found = await all_answers(parts.tp1.url, [prompts[600]], fetched_from(parts.prefill.address, salt="again"))
    assert found == [reference[600]]


async def test_the_router_before_vllm_and_prefill_nodes(
    parts: Parts, prompts: Mapping[int, str], reference: Mapping[int, Answer], route: Callable[..., Server]
) -> None:
    args = ["--prefill", f"grpc://{parts.prefill.address}", "--insecure"]
    router = route(prefill=[], decode=[parts.tp1], name="route-nodes", args=args).wait_ready()
    await until(lambda: is_ready(router), "the router is ready", within_s=SETTLE_S)
    before = moved_bytes(parts.tp1)
    found = await all_answers(router.url, list(prompts.values()), {"cache_salt": "by the router"})
    assert dict(zip(prompts, found, strict=True)) == reference
    assert sample(page(f"{router.url}/metrics"), "kvferry_router_flows_total", flow="fetched") == len(prompts)
    await asyncio.sleep(1.0)
    assert moved_bytes(parts.tp1) > before
    assert_nothing_is_left(parts.tp1)
    await until_idle(parts.prefill, within_s=SETTLE_S)
