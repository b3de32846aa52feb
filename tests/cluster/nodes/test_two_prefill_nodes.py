"""Two decode nodes behind two prefill nodes, which share their requests: when one dies or freezes, the other takes over.

One decode node tries a request again where its prefill node is lost before the first token, as all do by default; the other one,
the strict one, is told not to.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvferry.local_cluster import ClusterNode
from node_runtime import exit_codes
from tests.cluster.calls import Answer, Caller, Reference, prompt, status_of, until, until_arriving, until_idle
from tests.cluster.conftest import POOL_TOKENS
from tests.cluster.open_nodes import Nodes, open_nodes
from transfer.pb import kvferry_pb2 as pb

pytestmark = pytest.mark.timeout(240)

LONG = 1500
LESS = 1400  # so that whoever knows of one of these on one node, and not yet of that on the other, still gives each a LONG one
SHORT = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The four nodes."""

    nodes: Nodes
    prefills: tuple[ClusterNode, ClusterNode]
    decode: ClusterNode
    strict: ClusterNode

    async def peer(self, address: str, of: ClusterNode | None = None) -> pb.PeerStatus:
        """What a decode node, the one that retries unless told otherwise, says of the prefill node at that address."""
        status = await status_of(of or self.decode)
        found = [peer for peer in status.peers if peer.address == address] if status is not None else []
        return found[0] if found else pb.PeerStatus(state="unknown")

    async def are_joined(self) -> bool:
        return all(
            [
                (await self.peer(prefill.address, of)).state == "joined"
                for prefill in self.prefills
                for of in (self.decode, self.strict)
            ]
        )

    async def is_working_on_both(self, of: ClusterNode) -> bool:
        return all([(await self.peer(prefill.address, of)).outstanding_tokens for prefill in self.prefills])

    async def is_left(self, prefill: ClusterNode) -> bool:
        return (await self.peer(prefill.address)).state in ("lost", "joining")

    async def num_retries(self, of: ClusterNode) -> int:
        _, page = await of.http("/metrics")
        (value,) = re.findall(r"^kvferry_retries_total\{[^}]*\} ([\d.]+)$", page, re.MULTILINE)
        return int(float(value))


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Tiers]:
    with open_nodes(tmp_path_factory.mktemp("tiers")) as nodes:
        settings = {"model": model, "pool.num_tokens": 2 * POOL_TOKENS, "restart.backoff_s": 0.1, "restart.max_restarts": 10}
        ports = nodes.hold_ports(2)
        first, second = (nodes.launch("prefill", settings | {"server.port": port}) for port in ports)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        decode = nodes.launch("decode", settings, *addresses)
        strict = nodes.launch("decode", settings | {"limits.prefill_retries": 0}, *addresses)
        yield Tiers(nodes=nodes, prefills=(first, second), decode=decode, strict=strict)


@pytest.fixture
async def tiers(launched: Tiers) -> AsyncIterator[Tiers]:
    """All joined and trusted, whatever the test before this one did to them; and nothing of a request is left."""
    for node in launched.prefills:
        if node.exit_code is not None:
            launched.nodes.relaunch(node)
    await launched.nodes.until_started(*launched.prefills, launched.decode, launched.strict)
    await until(launched.are_joined, "both prefill nodes joined")
    for decode in (launched.decode, launched.strict):
        async with Caller(decode.address) as caller:

            async def is_trusted(caller: Caller = caller, decode: ClusterNode = decode) -> bool:
                if all([(await launched.peer(prefill.address, decode)).breaker == "closed" for prefill in launched.prefills]):
                    return True
                await caller.ask(prompt(5), 1)
                return False

            await until(is_trusted, "every breaker closed")
    yield launched
    await until_idle(
        launched.decode, launched.strict, *(node for node in launched.prefills if node.exit_code is None), within_s=10
    )


async def comes_back(tiers: Tiers, node: ClusterNode, reference: Reference) -> None:
    """A node that was lost gets nothing at first, then one request that tries it, and then its share."""

    async def is_half_open() -> bool:
        peer = await tiers.peer(node.address)
        return (peer.state, peer.breaker) == ("joined", "half-open")

    await until(is_half_open, "the node has joined again, and may be tried", within_s=60)
    prompts = [prompt(SHORT, variant) for variant in range(3)]
    async with Caller(tiers.decode.address) as caller:
        trial, *others = await asyncio.gather(*(caller.ask(token_ids, 4) for token_ids in prompts))
        for token_ids, answer in zip(prompts, (trial, *others), strict=True):
            reference.check(token_ids, answer)
        served = Counter(answer.done.prefill_node for answer in (trial, *others) if answer.done is not None)
        assert served[node.address] == 1, f"one tries it, the others go elsewhere: {served}"
        assert (await tiers.peer(node.address)).breaker == "closed"
        answers = await asyncio.gather(*(caller.ask(token_ids) for token_ids in (prompt(200, variant) for variant in range(6))))
    served = Counter(answer.done.prefill_node for answer in answers if answer.done is not None)
    # Not always three each: a prompt may have been sent, and count no more, before the last of them are placed.
    assert served.total() == 6 and all(served[prefill.address] >= 2 for prefill in tiers.prefills), served


async def kill_in_mid_transfer(tiers: Tiers, reference: Reference, victim: int) -> None:
    """Kill a process of the first prefill node: every token is the reference's; who asked for no retries is told at once."""
    _, survivor = tiers.prefills
    prompts = [prompt(LONG, variant) for variant in range(3)]
    strict_prompts = [prompt(LESS, variant) for variant in range(2)]
    before = await tiers.num_retries(tiers.decode)
    async with Caller(tiers.decode.address) as caller, Caller(tiers.strict.address) as strict:
        strict_flights = [strict.begin(token_ids, 4) for token_ids in strict_prompts]
        await until(lambda: tiers.is_working_on_both(tiers.strict), "the strict one has a request on each")
        flights = [caller.begin(token_ids, 4) for token_ids in prompts]
        await asyncio.gather(until_arriving(tiers.decode), until_arriving(tiers.strict))
        assert not any(task.done() for _, task in (*flights, *strict_flights))
        os.kill(victim, signal.SIGKILL)

        async def is_retried() -> bool:
            return await tiers.num_retries(tiers.decode) > before

        await until(is_retried, "an attempt on the other node")
        answers: list[Answer] = await asyncio.gather(*(asyncio.wait_for(task, 60) for _, task in flights))
        strict_answers: list[Answer] = await asyncio.gather(*(asyncio.wait_for(task, 60) for _, task in strict_flights))
    for token_ids, answer in zip(prompts, answers, strict=True):
        reference.check(token_ids, answer)
    retried = [answer.done for answer in answers if answer.done is not None and answer.done.retries]
    assert retried and {done.prefill_node for done in retried} == {survivor.address}
    assert sum(done.retries for done in retried) == await tiers.num_retries(tiers.decode) - before

    (lost,) = [answer for answer in strict_answers if answer.code is not grpc.StatusCode.OK]
    assert lost.code is grpc.StatusCode.UNAVAILABLE and lost.tokens == [], lost.details
    (whole,) = [(token_ids, one) for token_ids, one in zip(strict_prompts, strict_answers, strict=True) if one is not lost]
    reference.check(*whole)
    assert await tiers.num_retries(tiers.strict) == 0

    await until_idle(tiers.decode, tiers.strict, survivor)


async def test_a_frozen_prefill_rank(tiers: Tiers, reference: Reference) -> None:
    """Its requests are tried elsewhere in time, others go where the healthy node is, and it is used again once it wakes."""
    decode, (frozen, healthy) = tiers.decode, tiers.prefills
    pids, incarnation = frozen.rank_pids, frozen.incarnation
    before = await tiers.num_retries(decode)
    async with Caller(decode.address) as caller, Caller(tiers.strict.address) as strict:
        prompts = [prompt(LONG, variant) for variant in range(2)]
        strict_flights = [strict.begin(prompt(LESS, variant), 4)[1] for variant in range(2)]
        await until(lambda: tiers.is_working_on_both(tiers.strict), "the strict one has a request on each")
        flights = [caller.begin(token_ids, 4)[1] for token_ids in prompts]
        await asyncio.gather(until_arriving(decode), until_arriving(tiers.strict))
        os.kill(pids[0], signal.SIGSTOP)
        try:

            async def is_retried() -> bool:
                return await tiers.is_left(frozen) and await tiers.num_retries(decode) > before

            await until(is_retried, "the frozen rank's node is left, and its request tried elsewhere")
            for number in range(3):  # few: a rank that says nothing for ten seconds is taken for hanging, and started anew
                answer = await caller.ask(prompt(60, number))
                reference.check(prompt(60, number), answer)
                assert answer.done is not None and answer.done.prefill_node == healthy.address
        finally:
            os.kill(pids[0], signal.SIGCONT)
        answers = await asyncio.gather(*(asyncio.wait_for(flight, 60) for flight in flights))
        for token_ids, answer in zip(prompts, answers, strict=True):
            reference.check(token_ids, answer)
        assert sorted(answer.done.retries for answer in answers if answer.done) == [0, 1]
        assert {answer.done.prefill_node for answer in answers if answer.done} == {healthy.address}
        strict_answers = await asyncio.gather(*(asyncio.wait_for(flight, 60) for flight in strict_flights))
        (lost,) = [answer for answer in strict_answers if answer.code is grpc.StatusCode.UNAVAILABLE]
        assert "silent" in lost.details, lost.details
    await comes_back(tiers, frozen, reference)
    assert (frozen.rank_pids, frozen.incarnation) == (pids, incarnation), "the same life goes on"


async def test_a_killed_prefill_rank(tiers: Tiers, reference: Reference) -> None:
    killed = tiers.prefills[0]
    await kill_in_mid_transfer(tiers, reference, killed.rank_pids[0])
    await comes_back(tiers, killed, reference)


async def test_a_killed_prefill_leader(tiers: Tiers, reference: Reference) -> None:
    killed, survivor = tiers.prefills
    await kill_in_mid_transfer(tiers, reference, killed.pid)
    killed.reap(10)
    async with Caller(tiers.strict.address) as caller:
        answer = await caller.ask(prompt(60))
    reference.check(prompt(60), answer)
    assert answer.done is not None and (answer.done.prefill_node, answer.done.retries) == (survivor.address, 0)


async def test_what_a_stopped_prefill_node_cuts_off_goes_on_elsewhere(tiers: Tiers, reference: Reference) -> None:
    stopped, survivor = reversed(tiers.prefills)
    address = stopped.address
    prompts = [prompt(LONG, variant) for variant in range(2)]
    async with Caller(tiers.decode.address) as caller:
        flights = [caller.begin(token_ids, 4)[1] for token_ids in prompts]
        await until_arriving(tiers.decode)
        stopped.terminate()

        async def is_draining() -> bool:
            return (await tiers.peer(address)).state != "joined"

        await until(is_draining, "the decode node knows that it drains")
        assert not any(flight.done() for flight in flights)
        stopped.terminate()  # the second signal ends the wait
        answers = await asyncio.gather(*(asyncio.wait_for(flight, 60) for flight in flights))
    for token_ids, answer in zip(prompts, answers, strict=True):
        reference.check(token_ids, answer)
    assert sorted(answer.done.retries for answer in answers if answer.done) == [0, 1]
    assert {answer.done.prefill_node for answer in answers if answer.done} == {survivor.address}
    stopped.reap(30)
    assert stopped.exit_code == exit_codes.NOT_DRAINED
    assert (await tiers.peer(address)).breaker == "closed", "it said that it would go, and failed nobody"
