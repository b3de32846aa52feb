"""Strangers and hostile peers at a running cluster, and load from `kvferry bench serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import zmq

from kvferry.local_cluster.cluster import LocalCluster
from kvferry.local_cluster.spec import child_environment
from tests.cluster.calls import (
    Caller,
    Reference,
    prompt,
    status_of,
    until,
    until_idle,
)
from transfer import messages
from transfer.chunk import ChunkPlan
from transfer.control.base import KeyPair
from transfer.control.zmq_authenticator import new_key_pair
from transfer.control.zmq_channel import ZmqControlClient
from transfer.errors import TransportError
from transfer.instance import AttachRequest, AttachResponse, Instance
from transfer.registry.client import TransferControlClient
from transfer.registry.convert import instance_from_proto
from transfer.transport.base import Offer
from transfer.transport.ucx import UcxTransport

pytestmark = pytest.mark.timeout(180)

VOCABULARY = 768


async def control_ports(cluster: LocalCluster) -> list[int]:
    """Ports that the decode ranks listen on; one of each rank's is its ZeroMQ socket."""
    inodes: dict[str, int] = {}
    loopback = ("0100007F:", "00000000:", "0000000000000000FFFF00000100007F:", f"{0:032X}:")
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):  # gRPC listens on IPv4 addresses through IPv6 sockets
        with open(table) as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[1].startswith(loopback):  # listening
                    inodes[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    found: list[int] = []
    for pid in cluster.decode.rank_pids:
        for number in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{number}")
            except FileNotFoundError:  # closed meanwhile; a listening socket stays
                continue
            if target.startswith("socket:["):
                port = inodes.get(target[8:-1])
                if port is not None:
                    found.append(port)
    return sorted(set(found))


def hostile_payloads(incarnation: int) -> list[bytes]:
    """Random bytes, cut messages, messages of other kinds, and right messages of a life and a request that are none."""
    ghost = messages.GrantRequest(
        incarnation=incarnation, request_id="ghost", route=0, chunks=(messages.ChunkSize(chunk=0, num_bytes=4096),)
    )
    right = messages.encode(ghost)
    return [
        b"",
        b"\x00",
        secrets.token_bytes(200),
        b"\xff" * 60_000,
        msgpack.packb({"type": "grant_request", "version": 99}),
        msgpack.packb([1, 2, 3]),
        right,
        right[:-3],
        messages.encode(messages.WriterDrained(incarnation=incarnation, request_id="ghost", route=1 << 40)),
        messages.encode(messages.AbortTransfer(incarnation=incarnation, request_id="ghost", route=0, reason="no reason")),
    ]


async def num_refused(cluster: LocalCluster) -> int:
    status = await status_of(cluster.decode)
    assert status is not None
    return sum(rank.refused_connections for rank in status.ranks)


async def num_dropped(cluster: LocalCluster) -> int:
    status = await status_of(cluster.decode)
    assert status is not None
    return sum(rank.dropped_messages for rank in status.ranks)


async def test_strangers_on_every_port_change_nothing(steady: LocalCluster, reference: Reference) -> None:
    """Garbage on every port of the decode ranks and of both leaders, while requests run."""
    ports = await control_ports(steady)
    assert len(ports) >= 2 * len(steady.decode.rank_pids), "each rank listens on gRPC and on ZeroMQ"
    leaders = [int(address.rpartition(":")[2]) for node in steady.nodes for address in (node.address, node.http_address)]
    pids = steady.decode.rank_pids + steady.prefill.rank_pids
    before, dropped = await num_refused(steady), await num_dropped(steady)
    prompts = [prompt(300, 70 + variant) for variant in range(3)]
    async with Caller(steady.decode.address) as caller:
        flights = [caller.begin(token_ids, 60)[1] for token_ids in prompts]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            for port in ports:
                for identity in (b"\x01" + secrets.token_bytes(8), b"stranger", secrets.token_bytes(255)):
                    dealer = context.socket(zmq.DEALER)
                    dealer.setsockopt(zmq.LINGER, 200)
                    dealer.setsockopt(zmq.IDENTITY, identity)
                    dealer.connect(f"tcp://127.0.0.1:{port}")
                    for payload in hostile_payloads(steady.prefill.incarnation):
                        with contextlib.suppress(zmq.Again):  # a port of another protocol has hung up
                            dealer.send(payload, zmq.DONTWAIT)
                            dealer.send_multipart([payload, b"second part"], zmq.DONTWAIT)
                    await asyncio.sleep(0.05)
                    dealer.close()
            for port in (*ports, *leaders):
                with socket.create_connection(("127.0.0.1", port), timeout=2) as stranger:
                    stranger.sendall(secrets.token_bytes(4096))
                with socket.create_connection(("127.0.0.1", port), timeout=2) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        finally:
            context.destroy(linger=200)
        for token_ids, task in zip(prompts, flights, strict=True):
            reference.check(token_ids, await task)
    assert steady.decode.rank_pids + steady.prefill.rank_pids == pids
    await until_idle(steady.prefill, steady.decode)
    assert await num_dropped(steady) == dropped, "a stranger was heard"

    async def are_counted() -> bool:
        return await num_refused(steady) >= before + 3 * len(steady.decode.rank_pids)

    await until(are_counted, "the strangers refused and counted")


async def test_hundreds_of_connections_that_say_nothing_on_every_port(steady: LocalCluster, reference: Reference) -> None:
    """They take files of the process that listens, which has enough of them, and nothing else."""
    pids = steady.decode.rank_pids + steady.prefill.rank_pids
    ports = await control_ports(steady) + [int(node.address.rpartition(":")[2]) for node in steady.nodes]
    for port in ports:
        crowd = [socket.socket() for _ in range(600)]
        for one in crowd:
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(("127.0.0.1", port))
        await asyncio.sleep(0.5)
        for node in steady.nodes:
            assert await node.http("/healthz") == (200, "ok\n")
        for one in crowd:
            one.close()
    async with Caller(steady.decode.address) as caller:
        reference.check(prompt(150, 5), await caller.ask(prompt(150, 5)))
    await until_idle(steady.prefill, steady.decode)
    assert steady.decode.rank_pids + steady.prefill.rank_pids == pids


def attach_request(prefill: Instance, rank: int, offer: Offer, keys: KeyPair) -> AttachRequest:
    return AttachRequest(
        prefill=prefill,
        prefill_rank=rank,
        offer=offer.blob,
        chunk_plan=ChunkPlan(chunk_tokens=128),
        probe_bytes=4096,
        control_key=keys.public,
    )


async def test_writer_with_a_session_of_its_own_that_breaks_every_rule(steady: LocalCluster, reference: Reference) -> None:
    """It attaches like a prefill rank. Then it sends garbage and another incarnation, and asks for grants of unknown requests."""
    status = await status_of(steady.prefill)
    assert status is not None
    rogue = replace(instance_from_proto(status.instance), incarnation=secrets.randbits(62) + 1)
    transport = UcxTransport(lane="auto")
    offer = transport.offer()
    keys = new_key_pair()
    request = attach_request(rogue, 0, offer, keys)
    before = await num_dropped(steady)
    token_ids = prompt(300, 90)
    async with Caller(steady.decode.address) as caller:
        client, answer = await attach_somewhere(await control_ports(steady), request)
        try:
            session = offer.complete(answer.answer)
            control = ZmqControlClient(
                answer.control_address, session_id=answer.session_id, keys=keys, server_key=answer.control_key
            )
            flight = caller.begin(token_ids, 60)[1]
            payloads = hostile_payloads(rogue.incarnation) + hostile_payloads(steady.prefill.incarnation)
            for payload in payloads:
                if payload:
                    control.send(payload)
            reference.check(token_ids, await flight)
            await until(lambda: has_dropped(steady, before + 6), "lies and garbage dropped and counted")
            control.close()
            session.close()
        finally:
            await client.close()
    transport.close()

    async def is_gone() -> bool:
        status = await status_of(steady.decode)
        return status is not None and [rank.sessions for rank in status.ranks] == [1, 1]

    await until(is_gone, "the rogue's session ended: it has sent no heartbeat")
    await until_idle(steady.prefill, steady.decode)


async def test_a_silent_stranger_in_the_nodes_own_name_breaks_no_join(steady: LocalCluster, reference: Reference) -> None:
    """It claims the life of the real prefill node, which anybody can see, and a rank that this node does not have."""
    status = await status_of(steady.prefill)
    assert status is not None
    real = instance_from_proto(status.instance)
    stranger = replace(real, shard=replace(real.shard, tp_size=4))
    transport = UcxTransport(lane="auto")
    offer = transport.offer()
    keys = new_key_pair()
    request = attach_request(stranger, 3, offer, keys)
    ports = await control_ports(steady)

    async with Caller(steady.decode.address) as caller:
        reference.check(prompt(30, 5), await caller.ask(prompt(30, 5), 4))  # its tokens take longer the first time
        client, answer = await attach_somewhere(ports, request)
        session = offer.complete(answer.answer)

        async def are_open(number: int) -> bool:
            """Meanwhile the join holds, and requests are served."""
            status = await status_of(steady.decode)
            assert status is not None
            assert [peer.state for peer in status.peers] == ["joined"]
            reference.check(prompt(30, 5), await caller.ask(prompt(30, 5), 4))
            return sum(rank.sessions for rank in status.ranks) == number

        try:
            await until(lambda: are_open(3), "the stranger's session")
            await until(lambda: are_open(2), "the end of the stranger, who sends no heartbeat")
            for _ in range(5):
                assert await are_open(2)
                await asyncio.sleep(0.1)
        finally:
            await client.close()
            session.close()
            transport.close()


async def has_dropped(cluster: LocalCluster, number: int) -> bool:
    return await num_dropped(cluster) >= number


async def attach_somewhere(ports: list[int], request: AttachRequest) -> tuple[TransferControlClient, AttachResponse]:
    """Attach at the first of the ports that serves TransferControl."""
    refusals: list[str] = []
    for port in ports:
        client = TransferControlClient(f"127.0.0.1:{port}")
        try:
            return client, await client.attach(request, timeout_s=5.0)
        except TransportError as error:
            refusals.append(str(error))
            await client.close()
    raise AssertionError(f"none of the ports serves TransferControl: {refusals}")


async def bench_serve(cluster: LocalCluster, *arguments: str) -> asyncio.subprocess.Process:
    """`kvferry bench serve` on the cluster, as a process."""
    command = (sys.executable, "-m", "kvferry", "bench", "serve", "--insecure", "--target", cluster.decode.address)
    return await asyncio.create_subprocess_exec(
        *command, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=child_environment()
    )


async def test_load_that_is_put_on_it_is_reported_whole(steady: LocalCluster, tmp_path: Path) -> None:
    """Two rates of requests with known lengths: all are served, and the moved bytes are those of their prompts."""
    report, picture = tmp_path / "report.json", tmp_path / "load.png"
    process = await bench_serve(
        steady, "--rate", "10,20", "--requests", "12", "--warmup", "2", "--prompt-tokens", "100",
        "--output-tokens", "uniform:2:6", "--slo-ttft", "60", "--slo-tpot", "30", "--max-lateness", "30",
        "--json", str(report), "--plot", str(picture),
    )  # fmt: skip
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert b"goodput" in output
    content = json.loads(report.read_text())
    assert [one["rate"] for one in content["rates"]] == [10.0, 20.0]
    per_token = 8 * 12 * 2 * 32 * 4  # layers, KV heads, K and V, elements, float32
    for one in content["rates"]:
        assert (one["requests"], one["served"], one["good"], one["failures"]) == (12, 12, 12, {})
        assert one["bytes_moved"] == 12 * 100 * per_token
        assert one["writes"] == 12 * 2  # a chunk each, on two routes
        assert one["prefill_nodes"] == {steady.prefill.address: 12}
        assert one["goodput"] == pytest.approx(12 / one["window_s"])
        # The node's clock begins when it accepts, and what is exposed of a transfer is a part of it.
        assert 0 < one["node_ttft_s"]["p50"] <= one["ttft_s"]["p50"] <= one["end_to_end_s"]["p50"]
        assert 0 < one["exposed_share"]["p50"] < 1
        assert one["tpot_s"]["samples"] == 12
    assert content["nodes"][0]["vocab_size"] == str(VOCABULARY)
    assert picture.read_bytes().startswith(b"\x89PNG")
    await until_idle(steady.prefill, steady.decode)
