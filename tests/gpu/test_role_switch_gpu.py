"""A node on a GPU changes its role and back: what a role has of the GPU's memory goes with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster.cluster import ClusterNode
from tests.cluster.calls import Caller, Reference, prompt, status_of, until, until_idle
from tests.cluster.open_nodes import open_nodes
from tests.embedded_engine.steps import Directory
from transfer.plain_text import ANYWHERE
from transfer.registry.security import PlainText

pytestmark = pytest.mark.timeout(300)

DEVICE = "cuda"
TRANSPORT = "cuda_ipc"
POOL_TOKENS = 262_144
"""Of each node: 2 KiB a token and more, so that a pool that stays shows beside what CUDA keeps for itself."""
KEPT_BYTES = 64 * 2**20
ROUNDS = 4


async def switch(node: ClusterNode, role: str) -> str:
    """The role that it had before."""
    async with NodeClient(node.address, security=PlainText(insecure=ANYWHERE)) as client:
        return (await client.switch_role(role, budget_s=60.0)).role_before


async def free_bytes() -> int:
    """Of the GPU, whatever has the rest; settled, for a process that ends gives its memory back a moment later."""
    last = -1
    while last != (now := torch.cuda.mem_get_info(0)[0]):
        last = now
        await asyncio.sleep(0.5)
    return now


async def test_a_node_goes_to_the_other_tier_and_back(model: Directory, tmp_path: Path) -> None:
    directory = model("llama")
    reference = Reference(directory)
    other = tmp_path / "as-prefill.yaml"
    other.write_text("pool: {page_size: 8}\nchunk: {chunk_tokens: 128}\n")
    with open_nodes(tmp_path) as nodes:
        ports = dict(zip(("prefill", "decode", "changing"), nodes.hold_ports(3), strict=True))
        at = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        shared = {"model": directory, "device": DEVICE, "transport.name": TRANSPORT, "pool.num_tokens": POOL_TOKENS}
        two_roles = {"other_role": other, "pool.page_size": 32}
        prefill = nodes.launch("prefill", shared | {"server.port": ports["prefill"]})
        await nodes.until_started(prefill)  # one after another: each looks at what memory is free
        decode = nodes.launch("decode", shared | {"server.port": ports["decode"]}, *at.values())
        await nodes.until_started(decode)
        changing = nodes.launch("decode", shared | two_roles | {"server.port": ports["changing"]}, *at.values())
        await nodes.until_started(changing)

        async def is_joined(of: ClusterNode, address: str) -> bool:
            status = await status_of(of)
            return status is not None and any(peer.address == address and peer.state == "joined" for peer in status.peers)

        async def ask(node: ClusterNode, num_requests: int, first: int) -> set[str]:
            """Prefill nodes that served; every token is compared with a single process on the CPU."""
            prompts = [prompt(300, first + index) for index in range(num_requests)]
            async with Caller(node.address) as caller:
                answers = await asyncio.gather(*(caller.ask(token_ids, 24) for token_ids in prompts))
            for token_ids, answer in zip(prompts, answers, strict=True):
                reference.check(token_ids, answer)
            return {answer.done.prefill_node for answer in answers if answer.done is not None}

        await until(lambda: is_joined(changing, at["prefill"]), "the changing node has joined")
        await ask(changing, 3, 0)
        await until_idle(prefill, decode, changing)
        processes = (changing.pid, *changing.rank_pids)
        free = [await free_bytes()]
        for number in range(ROUNDS):
            assert await switch(changing, "prefill") == "decode"
            await until(lambda: is_joined(decode, at["changing"]), "the decode node has joined the changed one")
            served: set[str] = set()
            for first in range(100, 200, 10):  # whichever of two idle nodes a decode node takes, four at once go to both
                served |= await ask(decode, 4, 1000 * number + first)
                if at["changing"] in served:
                    break
            assert at["changing"] in served
            await until_idle(prefill, decode, changing)
            assert await switch(changing, "decode") == "prefill"
            await until(lambda: is_joined(changing, at["prefill"]), "the changing node has joined again")
            await ask(changing, 3, 1000 * number + 500)
            await until_idle(prefill, decode, changing)
            assert (changing.pid, *changing.rank_pids) == processes, "no process was started again"
            free.append(await free_bytes())
    # What allocators keep for next time has come with the first round, in which each node had its first requests of every kind.
    assert max(free[1:]) - min(free[1:]) < KEPT_BYTES, free
