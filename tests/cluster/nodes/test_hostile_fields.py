"""Fields that no honest peer sends, and HTTP that is none, at a running cluster: a sample of what is tried in one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import socket
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest

from kvferry.local_cluster import LocalCluster
from node_runtime.open_files import MAX_OPEN_FILES
from tests.cluster.calls import Caller, Reference, prompt, until_idle
from tests.cluster.nodes.test_hostile_peers import control_ports
from tests.registry.hostile_messages import hostile_messages
from tests.registry.test_hostile_fields import PLAN, RPCS, told
from transfer.instance import AttachRequest
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import attach_request_to_proto

pytestmark = pytest.mark.timeout(180)

Code = grpc.StatusCode
CLEAR = {Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED, Code.NOT_FOUND, Code.UNAVAILABLE}
NOT_SERVED = {Code.UNIMPLEMENTED, Code.DEADLINE_EXCEEDED}
CALL_S = 20.0
GREETING_S = 5.0
HTTP2_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # an empty frame: length, type, flags, stream
HTTP_CONNECTIONS = 400


async def outcome(channel: grpc.aio.Channel, method: str, payload: bytes) -> tuple[grpc.StatusCode, str]:
    service, _, name = method.partition(".")
    found = pb.DESCRIPTOR.services_by_name[service].methods_by_name[name]
    path = f"/{found.containing_service.full_name}/{name}"
    try:
        if found.client_streaming:
            call = channel.stream_stream(path)(iter([payload]), timeout=CALL_S)
            await call.read()
        elif found.server_streaming:
            call = channel.unary_stream(path)(payload, timeout=CALL_S)
            await call.read()
        else:
            await channel.unary_unary(path)(payload, timeout=CALL_S)
            return Code.OK, ""
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    code = await call.code() if call.done() else Code.OK
    call.cancel()
    return code, ""


def speaks_grpc(port: int) -> bool:
    """Whether what listens there answers as HTTP/2 does; ZeroMQ and UCX would have a call wait for its whole deadline."""
    with socket.create_connection(("127.0.0.1", port), timeout=CALL_S) as one:
        one.settimeout(GREETING_S)
        try:
            one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS)
            return one.recv(9)[3:4] == HTTP2_SETTINGS[3:4]
        except OSError:
            return False


async def serves(cluster: LocalCluster, reference: Reference) -> None:
    async with Caller(cluster.decode.address) as caller:
        reference.check(prompt(150, 5), await caller.ask(prompt(150, 5)))
    await until_idle(cluster.prefill, cluster.decode)


def attach() -> pb.AttachRequest:
    return attach_request_to_proto(
        AttachRequest(prefill=told(44), prefill_rank=0, offer=b"none", chunk_plan=PLAN, probe_bytes=4096, control_key=bytes(32))
    )


LEADER_CALLS = [(name, rpc) for name, rpc in RPCS.items() if not name.endswith("Drain") and not rpc.method.startswith("Transfer")]


async def test_fields_that_no_honest_peer_sends(steady: LocalCluster, reference: Reference) -> None:
    pids = steady.decode.rank_pids + steady.prefill.rank_pids
    count = 0
    for _, rpc in LEADER_CALLS:
        node = steady.prefill if rpc.method.startswith("Prefill") else steady.decode
        async with grpc.aio.insecure_channel(node.address) as channel:
            for hostile in hostile_messages(cast(Callable[[Any], Any], rpc.request)(None)):
                code, details = await outcome(channel, rpc.method, hostile.payload)
                assert code in CLEAR, f"{rpc.method} {hostile}: {code}: {details}"
                assert len(details.splitlines()) <= 1, f"{rpc.method} {hostile}: {details!r}"
                if code is Code.OK:  # it was served and given up: its id is free once nothing of it is left
                    await until_idle(steady.prefill, steady.decode)
                count += 1
    num_attach = 0
    ports = await control_ports(steady)
    speak = await asyncio.gather(*(asyncio.to_thread(speaks_grpc, port) for port in ports))
    for port in (port for port, is_grpc in zip(ports, speak, strict=True) if is_grpc):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            code, _ = await outcome(channel, "TransferControl.Attach", b"")
            assert code is Code.INVALID_ARGUMENT, code
            num_attach += 1
            for hostile in hostile_messages(attach()):
                code, details = await outcome(channel, "TransferControl.Attach", hostile.payload)
                assert code in CLEAR - {Code.OK}, f"Attach {hostile}: {code}: {details}"
                count += 1
    assert count > 300 and num_attach == len(steady.decode.rank_pids)
    assert steady.decode.rank_pids + steady.prefill.rank_pids == pids
    await serves(steady, reference)


async def test_http_that_is_none(steady: LocalCluster, reference: Reference) -> None:
    """Garbage and half requests on hundreds of connections at once, which all stay open."""
    for node in steady.nodes:
        host, _, port = node.http_address.rpartition(":")
        writers: list[asyncio.StreamWriter] = []
        for number in range(HTTP_CONNECTIONS):
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), CALL_S)
                writer.write(
                    (b"GET /met", secrets.token_bytes(100), b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 9000, b"")[number % 4]
                )
                writers.append(writer)
        assert await node.http("/healthz") == (200, "ok\n")
        assert (await node.http("/metrics"))[0] == 200
        files = len(os.listdir(f"/proc/{node.pid}/fd"))
        assert files < 300, f"{files} open files of the {node.role} leader, with {HTTP_CONNECTIONS} strangers at its door"
        for writer in writers:
            writer.close()
    await serves(steady, reference)


async def test_hundreds_of_connections_that_say_nothing_on_every_port(steady: LocalCluster, reference: Reference) -> None:
    """They take files of the process that listens, which has enough of them, and nothing else."""
    pids = steady.decode.rank_pids + steady.prefill.rank_pids
    ports = await control_ports(steady) + [int(node.address.rpartition(":")[2]) for node in steady.nodes]
    for node in steady.nodes:
        soft, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        assert soft == min(hard, MAX_OPEN_FILES)
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
    await serves(steady, reference)
    assert steady.decode.rank_pids + steady.prefill.rank_pids == pids
