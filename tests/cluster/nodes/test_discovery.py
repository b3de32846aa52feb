"""A decode node that knows of no prefill node finds them in a real etcd, while they come, drain, are killed, and etcd dies; or
behind a name, while the name server is away."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvferry.local_cluster.cluster import ClusterNode
from node_runtime import exit_codes
from tests.cluster.calls import Caller, Reference, frozen, prompt, status_of, until, until_idle
from tests.cluster.conftest import POOL_TOKENS
from tests.cluster.links.etcd_server import EtcdServer, etcd_server
from tests.cluster.open_nodes import Nodes, open_nodes

pytestmark = pytest.mark.timeout(240)

PREFIX = "clusters/demo/"
LEASE_S = 2
GRACE_S = 1.0
LONG = 800  # half a second of a core


async def states(decode: ClusterNode) -> dict[str, str]:
    status = await status_of(decode)
    return {peer.address: peer.state for peer in status.peers} if status is not None else {}


async def metric(node: ClusterNode, name: str) -> float:
    _, page = await node.http("/metrics")
    (value,) = re.findall(rf"^kvferry_{name}\{{[^}}]*\}} (\S+)$", page, re.MULTILINE)
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Two prefill nodes that register themselves, the addresses that they keep, and a decode node that finds them."""

    etcd: EtcdServer
    nodes: Nodes
    prefills: tuple[ClusterNode, ClusterNode]
    addresses: tuple[str, str]
    decode: ClusterNode

    async def are_joined(self, *addresses: str) -> bool:
        """Whether the decode node knows just these, and has joined them."""
        return await states(self.decode) == dict.fromkeys(addresses, "joined")


@contextmanager
def launched(folder: Path, model: Path) -> Iterator[Tiers]:
    """Launch all nodes before etcd runs; this does not keep them from starting."""
    with etcd_server(folder / "etcd") as etcd, open_nodes(folder) as nodes:
        settings = {
            "model": model,
            "pool.num_tokens": 2 * POOL_TOKENS,
            "heartbeat.interval_s": 1.0,
            "discovery.kind": "etcd",
            "discovery.etcd_endpoints": etcd.endpoint,
            "discovery.etcd_prefix": PREFIX,
            "discovery.lease_s": LEASE_S,
        }
        ports = nodes.hold_ports(2)
        first, second = (nodes.launch("prefill", settings | {"server.port": port}) for port in ports)
        decode = nodes.launch("decode", settings | {"discovery.grace_s": GRACE_S, "discovery.interval_s": 0.5})
        one, two = (f"127.0.0.1:{port}" for port in ports)
        yield Tiers(etcd=etcd, nodes=nodes, prefills=(first, second), addresses=(one, two), decode=decode)


async def test_prefill_nodes_come_and_go(tmp_path: Path, model: Path, reference: Reference) -> None:
    with launched(tmp_path, model) as tiers:
        (first, second), (one, two), decode = tiers.prefills, tiers.addresses, tiers.decode
        await tiers.nodes.until_started(first, second, decode)
        ready = await decode.readiness()
        assert not ready.is_ready
        assert f"no prefill node is known: etcd {tiers.etcd.endpoint} under {PREFIX}" in ready.reason
        assert "looking failed: etcd http://127.0.0.1" in ready.reason and await metric(decode, "discovery_age_seconds") == -1

        async def has_failed() -> bool:
            return await metric(first, "discovery_failures_total") > 0

        await until(has_failed, "the prefill node notices that there is no etcd")
        assert await metric(first, "discovery_addresses") == 0

        await tiers.etcd.start()
        await until(lambda: tiers.are_joined(one, two), "both are found and joined")
        assert (await decode.readiness()).is_ready and await metric(decode, "discovery_addresses") == 2
        assert await metric(first, "discovery_addresses") == 1

        async with Caller(decode.address) as caller:
            # Drain a node that has work: every request succeeds. Its rank is frozen until then, so that it cannot finish early.
            prompts = [prompt(LONG, variant) for variant in range(4)]
            status = await status_of(first)
            assert status is not None
            with frozen(status.ranks[0].pid):
                flights = [caller.begin(token_ids, 4)[1] for token_ids in prompts]

                async def has_its_two() -> bool:
                    """Ask the node itself: a request on its way to a draining node goes to the other one."""
                    status = await status_of(first)
                    return status is not None and status.queued_requests + status.running_requests == 2

                await until(has_its_two, "two requests on the node that is to drain")
                first.terminate()

            async def is_no_longer_named() -> bool:
                status = await status_of(decode)
                return status is not None and list(status.discovery.addresses) == [two]

            await until(is_no_longer_named, "who drains is named no longer")
            answers = await asyncio.gather(*flights)
            for token_ids, answer in zip(prompts, answers, strict=True):
                assert answer.code is grpc.StatusCode.OK, answer.details
                reference.check(token_ids, answer)
            served = Counter(answer.done.prefill_node for answer in answers if answer.done is not None)
            assert served == {one: 2, two: 2} and not any(answer.done.retries for answer in answers if answer.done)
            first.reap(30)
            assert first.exit_code == exit_codes.OK
            await until(lambda: tiers.are_joined(two), "who has gone is left")
        await until_idle(decode, second)


RESOLVER = """
import json, os, socket
system = socket.getaddrinfo
def getaddrinfo(host, *args, **kwargs):
    if host != "kvferry-prefill":
        return system(host, *args, **kwargs)
    with open(os.environ["TEST_NAMES"]) as file:
        addresses = json.load(file)
    if not addresses:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    return [info for address in addresses for info in system(address, *args, **kwargs)]
socket.getaddrinfo = getaddrinfo
"""
"""Of the decode node's processes; the machine's own can be changed by root alone. Python imports a module of this name first."""


@contextmanager
def silent(host: str, port: int) -> Iterator[None]:
    """Accept connections at that address, and send nothing."""
    with socket.socket() as listening:
        listening.bind((host, port))
        listening.listen(64)
        yield


async def test_a_name_with_two_addresses_one_of_which_hangs(tmp_path: Path, model: Path, reference: Reference) -> None:
    resolver = tmp_path / "resolver"
    resolver.mkdir()
    (resolver / "sitecustomize.py").write_text(RESOLVER)

    def say(*addresses: str) -> None:
        (resolver / "new").write_text(json.dumps(addresses))
        os.replace(resolver / "new", resolver / "names")

    say("127.0.0.2", "127.0.0.1")
    with open_nodes(tmp_path) as nodes:
        settings = {"model": model, "pool.num_tokens": 2 * POOL_TOKENS}
        (port,) = nodes.hold_ports(1)
        good, hanging = f"127.0.0.1:{port}", f"127.0.0.2:{port}"
        name = {"discovery.kind": "dns", "discovery.dns_name": f"kvferry-prefill:{port}", "discovery.interval_s": 0.2}
        with silent("127.0.0.2", port):
            prefill = nodes.launch("prefill", settings | {"server.port": port})
            environment = {
                "PYTHONPATH": os.pathsep.join([str(resolver), nodes.environment()["PYTHONPATH"]]),
                "TEST_NAMES": str(resolver / "names"),
            }
            decode = nodes.launch("decode", settings | name, environment=environment)
            await nodes.until_started(prefill, decode)

            async def is_found() -> bool:
                return await states(decode) == {good: "joined"}

            await until(is_found, "the one that answers is joined")
            status = await status_of(decode)
            assert status is not None and list(status.discovery.addresses) == [good]
            (waits,) = status.discovery.waiting
            assert waits.startswith(hanging) and (await decode.readiness()).is_ready

            say()

            async def is_away() -> bool:
                return await metric(decode, "discovery_failures_total") > 0

            await until(is_away, "the name server's absence is noticed")
            async with Caller(decode.address) as caller:
                reference.check(prompt(60), await caller.ask(prompt(60)))
            status = await status_of(decode)
            assert status is not None and list(status.discovery.addresses) == [good]
            assert "kvferry-prefill: Temporary failure in name resolution" in status.discovery.problem

            say("127.0.0.1")

            async def is_all_well() -> bool:
                status = await status_of(decode)
                return status is not None and not status.discovery.waiting and not status.discovery.problem

            await until(is_all_well, "who is named no longer is not waited for")
            assert await is_found()
        await until_idle(decode, prefill)


async def test_etcd_dies_and_a_node_is_killed(tmp_path: Path, model: Path, reference: Reference) -> None:
    with launched(tmp_path, model) as tiers:
        (first, second), (one, two), decode = tiers.prefills, tiers.addresses, tiers.decode
        await tiers.etcd.start()
        await tiers.nodes.until_started(first, second, decode)
        await until(lambda: tiers.are_joined(one, two), "both are found and joined")
        async with Caller(decode.address) as caller:
            # What was known goes on to be used, and is told to be old.
            failures = await metric(decode, "discovery_failures_total")
            tiers.etcd.kill()

            async def is_away() -> bool:
                return await metric(decode, "discovery_failures_total") > failures

            await until(is_away, "etcd's absence is noticed")
            reference.check(prompt(60), await caller.ask(prompt(60)))
            assert (await decode.readiness()).is_ready and await metric(decode, "discovery_age_seconds") > 0
            await tiers.etcd.start()

            os.kill(second.pid, signal.SIGKILL)
            await until(lambda: tiers.are_joined(one), "whose lease is over is left")
            reference.check(prompt(70), await caller.ask(prompt(70)))
            tiers.nodes.relaunch(second)
            await until(lambda: tiers.are_joined(one, two), "a node that was started again is joined", within_s=60)
        await until_idle(decode, first)
