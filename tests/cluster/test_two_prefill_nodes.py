"""One decode node behind two prefill nodes: they share its requests, and the other takes all when one of them dies or freezes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvferry.local_cluster import ClusterNode
from tests.cluster.calls import Caller, Reference, prompt, status_of, until, until_arriving, until_idle
from tests.cluster.conftest import POOL_TOKENS
from tests.cluster.nodes import Nodes, open_nodes

pytestmark = pytest.mark.timeout(240)

LONG = 3000
NOTICE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trio:
    """The three nodes."""

    nodes: Nodes
    prefills: tuple[ClusterNode, ClusterNode]
    decode: ClusterNode

    async def states(self) -> dict[str, str]:
        """Address -> state of the decode node's peers."""
        status = await status_of(self.decode)
        return {peer.address: peer.state for peer in status.peers} if status is not None else {}

    async def num_joined(self) -> int:
        return sum(state == "joined" for state in (await self.states()).values())

    async def are_joined(self) -> bool:
        return await self.num_joined() == 2


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Trio]:
    with open_nodes(tmp_path_factory.mktemp("trio")) as nodes:
        settings = {"model": model, "pool.num_tokens": 2 * POOL_TOKENS}
        ports = nodes.hold_ports(2)
        first, second = (nodes.launch("prefill", settings | {"server.port": port}) for port in ports)
        decode = nodes.launch("decode", settings, *(f"127.0.0.1:{port}" for port in ports))
        yield Trio(nodes=nodes, prefills=(first, second), decode=decode)


@pytest.fixture
async def trio(launched: Trio) -> AsyncIterator[Trio]:
    """All joined, whatever the test before this one did to them; and nothing of a request is left."""
    for node in launched.prefills:
        if node.exit_code is not None:
            launched.nodes.relaunch(node)
    await launched.nodes.until_started(*launched.prefills, launched.decode)
    await until(launched.are_joined, "both prefill nodes joined")
    yield launched
    await until_idle(launched.decode, *(node for node in launched.prefills if node.exit_code is None))


async def test_a_frozen_prefill_rank(trio: Trio, reference: Reference) -> None:
    """Its requests end in time, it is given no others while a healthy node is there, and it is used again once it wakes."""
    decode, (frozen, healthy) = trio.decode, trio.prefills
    pids, incarnation = frozen.rank_pids, frozen.incarnation
    async with Caller(decode.address) as caller:
        flights = [caller.begin(prompt(LONG, variant), 4)[1] for variant in range(2)]
        await until_arriving(decode)
        os.kill(pids[0], signal.SIGSTOP)
        try:
            since_s = time.monotonic()

            async def is_left() -> bool:
                return (await trio.states())[frozen.address] in ("lost", "joining")

            await until(is_left, "the frozen rank's node is left", within_s=NOTICE_S)
            for number in range(3):  # few: a rank that says nothing for ten seconds is taken for hanging, and started anew
                answer = await caller.ask(prompt(60, number))
                reference.check(prompt(60, number), answer)
                assert answer.done is not None and answer.done.prefill_node == healthy.address
        finally:
            os.kill(pids[0], signal.SIGCONT)
        answers = await asyncio.gather(*(asyncio.wait_for(flight, 60) for flight in flights))
        (lost,) = [answer for answer in answers if answer.code is grpc.StatusCode.UNAVAILABLE]
        assert lost.ended_s - since_s < NOTICE_S, f"{lost.details} took {lost.ended_s - since_s:.1f} s"
        assert "silent" in lost.details, lost.details
        (whole,) = [answer for answer in answers if answer is not lost]
        assert whole.code is grpc.StatusCode.OK and len(whole.tokens) == 4
        await until(trio.are_joined, "the node that woke joined again")
        assert (frozen.rank_pids, frozen.incarnation) == (pids, incarnation), "the same life goes on"
        answers = await asyncio.gather(*(caller.ask(prompt(200, variant)) for variant in range(4)))
        for variant, answer in enumerate(answers):
            reference.check(prompt(200, variant), answer)
        assert {answer.done.prefill_node for answer in answers if answer.done} == {frozen.address, healthy.address}


async def test_requests_are_shared_until_a_node_dies(trio: Trio, reference: Reference) -> None:
    async with Caller(trio.decode.address) as caller:
        prompts = [prompt(200, variant) for variant in range(6)]
        answers = await asyncio.gather(*(caller.ask(token_ids) for token_ids in prompts))
        for token_ids, answer in zip(prompts, answers, strict=True):
            reference.check(token_ids, answer)
        served = Counter(answer.done.prefill_node for answer in answers if answer.done is not None)
        assert served == {node.address: 3 for node in trio.prefills}

        killed, survivor = trio.prefills
        os.kill(killed.pid, signal.SIGKILL)

        async def is_noticed() -> bool:
            return await trio.num_joined() == 1

        await until(is_noticed, "the killed node noticed", within_s=NOTICE_S)
        killed.reap(10)
        answers = await asyncio.gather(*(caller.ask(token_ids) for token_ids in prompts[:3]))
        for token_ids, answer in zip(prompts, answers, strict=False):
            reference.check(token_ids, answer)
            assert answer.done is not None and answer.done.prefill_node == survivor.address
