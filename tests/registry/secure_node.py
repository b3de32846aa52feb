"""A server with every service of kvferry behind mutual TLS, and calls of any of its methods."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor

from tests.authority import Authority, Files
from transfer.errors import PeerUnreachable
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.certificates import CertificateFiles
from transfer.registry.guard import Refusal
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import MutualTls
from transfer.registry.server import RegistryServer, serve

NODE, PEER, CLIENT = "node.example", "peer.example", "client.example"
SPIFFE = "spiffe://cluster.example/node"
STATUS = "/kvferry.v1.DecodeControl/Status"
CALL_S = 60.0


def tls_of(files: Files, *, peers: tuple[str, ...], clients: tuple[str, ...] = ()) -> MutualTls:
    return MutualTls(files=CertificateFiles(files.tls(), is_server=True), peer_names=peers, client_names=clients)


class Everything(
    pb_grpc.NodeControlServicer,
    pb_grpc.PrefillControlServicer,
    pb_grpc.DecodeControlServicer,
    pb_grpc.TransferControlServicer,
    pb_grpc.RankControlServicer,
):
    """Implement every method: record its name in `reached` and return an empty message. `Join` goes on until it is cancelled."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def Join(self, request: Any, context: Any) -> AsyncIterator[pb.JoinEvent]:
        self.reached.append("Join")
        while True:
            yield pb.JoinEvent(beat=pb.Beat())
            await asyncio.sleep(0.02)


def _implementation(method: MethodDescriptor) -> Any:
    answer = message_factory.GetMessageClass(method.output_type)

    async def unary(self: Everything, request: Any, context: Any) -> Any:
        self.reached.append(method.name)
        return answer()

    async def streaming(self: Everything, request: Any, context: Any) -> AsyncIterator[Any]:
        self.reached.append(method.name)
        yield answer()

    return streaming if method.server_streaming else unary


for _service in pb.DESCRIPTOR.services_by_name.values():
    for _method in _service.methods:
        if _method.name not in vars(Everything):
            setattr(Everything, _method.name, _implementation(_method))


class Node:
    """A server with everything."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.services = Everything()  # type: ignore[abstract]
        self.refused: list[Refusal] = []
        self.server: RegistryServer

    @property
    def address(self) -> str:
        return self.server.address

    async def open(self, *, peers: tuple[str, ...] = (PEER,), clients: tuple[str, ...] = (CLIENT,), port: int = 0) -> None:
        self.server = await serve(
            "127.0.0.1",
            port,
            prefill_control=self.services,
            decode_control=self.services,
            node_control=self.services,
            transfer_control=self.services,
            rank_control=self.services,
            security=tls_of(self.files, peers=peers, clients=clients),
            on_refused=self.refused.append,
        )


@contextlib.asynccontextmanager
async def opened(authority: Authority, folder: Path, *names: str, **how: Any) -> AsyncIterator[Node]:
    """A node that serves; `how` is passed to `Authority.files`."""
    node = Node(authority.files(folder, *names, **how))
    await node.open()
    try:
        yield node
    finally:
        await node.server.close()


@contextlib.asynccontextmanager
async def calling(node: Node, files: Files, *, names: tuple[str, ...] = (NODE,)) -> AsyncIterator[PeerChannel]:
    channel = PeerChannel(node.address, tls_of(files, peers=names))
    try:
        yield channel
    finally:
        await channel.close()


async def call(channel: grpc.aio.Channel, path: str) -> tuple[grpc.StatusCode, str]:
    """Call a method with an empty message; return status and details. A stream that answers once is OK."""
    service, _, name = path.removeprefix("/").partition("/")
    method = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    try:
        if method.client_streaming or method.server_streaming:
            # Not stream_stream: it loses the status of a server that ends the call before the message is sent.
            stream = channel.unary_stream(path)(b"", timeout=CALL_S)
            if await stream.read() is grpc.aio.EOF:
                return await stream.code(), await stream.details() or ""
            stream.cancel()
        else:
            await channel.unary_unary(path)(b"", timeout=CALL_S)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def refusal(node: Node, files: Files, *, names: tuple[str, ...] = (NODE,)) -> str:
    """Why no channel to the node can be opened, without its address."""
    async with calling(node, files, names=names) as peer:
        with pytest.raises(PeerUnreachable) as caught:
            await peer.ready()
    text = str(caught.value)
    assert text.startswith(f"{node.address}: ") and "\n" not in text
    return text.removeprefix(f"{node.address}: ")


def client_context(caller: Files) -> ssl.SSLContext:
    """A client with that certificate, which accepts a node of the same authority whatever its name is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(caller.ca)
    context.load_cert_chain(caller.cert, caller.key)
    context.set_alpn_protocols(["h2"])
    return context


def resumer(node: Node, caller: Files, version: str) -> Callable[[ssl.SSLSession | None], tuple[bool, ssl.SSLSession]]:
    """Return a function that connects, with a ticket if it gets one; it returns whether the ticket was good, and the next one."""
    context = client_context(caller)
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    host, port = node.address.split(":")

    def connect(session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession]:
        with context.wrap_socket(socket.create_connection((host, int(port)), timeout=60), session=session) as connection:
            assert connection.recv(1)  # a ticket comes with it
            ticket = connection.session
            assert ticket is not None and ticket.has_ticket
            return bool(connection.session_reused), ticket

    return connect
