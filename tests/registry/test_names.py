"""Nodes that are named, not given by address: whatever happens to the name server, and to which address the name has."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.registry.test_tls import call
from transfer.errors import PeerUnreachable
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry import connecting
from transfer.registry.connecting import addresses_of, connected
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import PlainText
from transfer.registry.server import RegistryServer, serve

NAME = "prefill-0.example"
STATUS = "/grpc.health.v1.Health/Check"
ANYWHERE = PlainText(insecure=2)


class NameServer:
    """What this process's resolver says of `NAME`: addresses, an error, or nothing for as long as `hangs` is clear."""

    def __init__(self, resolve: Callable[..., Any]) -> None:
        self._resolve = resolve
        self.says: list[str] | OSError = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.asked = 0

    def __call__(self, host: str | None, port: object, *args: Any, **kwargs: Any) -> Any:
        if host != NAME:
            return self._resolve(host, port, *args, **kwargs)
        self.asked += 1
        says = self.says
        self.goes_on.wait(20)
        if isinstance(says, OSError):
            raise says
        return [info for address in says for info in self._resolve(address, port, *args, **kwargs)]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer(socket.getaddrinfo)
    monkeypatch.setattr(connecting.socket, "getaddrinfo", server)
    yield server
    server.goes_on.set()


class Control(pb_grpc.PrefillControlServicer):
    pass


@asynccontextmanager
async def node(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[RegistryServer]:
    server = await serve(host, port, prefill_control=Control())  # type: ignore[abstract]
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def channel(port: int, name: str = NAME) -> AsyncIterator[PeerChannel]:
    peer = PeerChannel(f"{name}:{port}", ANYWHERE)
    try:
        yield peer
    finally:
        await peer.close()


async def test_a_name_is_known_again_as_soon_as_the_name_server_is_back(names: NameServer) -> None:
    """gRPC, once its own lookup has failed, asks again after pauses that grow to two minutes, and no option bounds them."""
    async with node() as server, channel(server.port) as peer:
        for tries in range(1, 6):
            with pytest.raises(PeerUnreachable, match=rf"^{NAME}:\d+: Temporary failure in name resolution$"):
                await peer.ready()
            assert names.asked == tries, "each try asks anew"
        names.says = ["127.0.0.1"]
        code, _ = await call(await peer.ready(), STATUS)
        assert code is grpc.StatusCode.OK
        asked = names.asked
        assert (await call(await peer.ready(), STATUS))[0] is grpc.StatusCode.OK
        assert names.asked == asked, "a connection that stands needs no name"


async def test_a_name_that_moves_is_followed(names: NameServer) -> None:
    async with node() as first, channel(first.port) as peer:
        names.says = ["127.0.0.1"]
        before = await peer.ready()
        assert (await call(before, STATUS))[0] is grpc.StatusCode.OK
        async with node("127.0.0.2", first.port):
            names.says = ["127.0.0.2"]
            await first.close()
            deadline_s = time.monotonic() + 5
            while (await peer.ready()) is before:
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.02)
            assert (await call(await peer.ready(), STATUS))[0] is grpc.StatusCode.OK


async def test_a_node_that_comes_back_at_its_address_keeps_its_channel(names: NameServer) -> None:
    """So that whoever tries again and again leaves no channels behind."""
    names.says = ["127.0.0.1"]
    async with node() as first:
        port = first.port
        async with channel(port) as peer:
            before = await peer.ready()
            assert (await call(before, STATUS))[0] is grpc.StatusCode.OK
            await first.close()
            with pytest.raises(PeerUnreachable, match="Connection refused"):
                for _ in range(50):
                    await peer.ready()
                    await asyncio.sleep(0.02)
            async with node(port=port):
                assert await peer.ready() is before
                assert (await call(before, STATUS))[0] is grpc.StatusCode.OK


async def test_whoever_is_in_a_hurry_has_another_channel(names: NameServer) -> None:
    """Also while the name is being looked up: the one that failed must not be given to that caller, closed."""
    names.says = ["127.0.0.1"]
    async with node() as first:
        port = first.port
        async with channel(port) as peer:
            before = await peer.ready()
            await first.close()
            while before.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                assert (await call(before, STATUS))[0] is grpc.StatusCode.UNAVAILABLE
            async with node(port=port):
                names.goes_on.clear()
                looking = asyncio.ensure_future(peer.ready())
                await asyncio.sleep(0.05)
                peer.connect_anew()
                names.goes_on.set()
                after = await looking
                assert after is not before and (await call(after, STATUS))[0] is grpc.StatusCode.OK


async def test_the_first_address_that_takes_connections_is_used(names: NameServer) -> None:
    names.says = ["::1", "127.0.0.3", "127.0.0.1"]  # as localhost has, where a server listens on one of them only
    async with node() as server, channel(server.port) as peer:
        assert (await call(await peer.ready(), STATUS))[0] is grpc.StatusCode.OK


async def test_a_name_server_that_says_nothing_holds_up_nobody_else(names: NameServer) -> None:
    """A thread for each lookup: as many as an executor has would be taken by the first few names."""
    names.goes_on.clear()
    async with node() as server:
        peers = [PeerChannel(f"{NAME}:{server.port}", ANYWHERE) for _ in range(64)]
        began_s = time.monotonic()
        tries = [asyncio.ensure_future(peer.ready(timeout_s=0.5)) for peer in peers]
        async with channel(server.port, "localhost") as other:
            assert (await call(await other.ready(), STATUS))[0] is grpc.StatusCode.OK
        ends = await asyncio.gather(*tries, return_exceptions=True)
        assert time.monotonic() - began_s < 10
        assert {str(end) for end in ends} == {f"{NAME}:{server.port}: no answer within 0.5 s"}
        names.goes_on.set()
        names.says = ["127.0.0.1"]
        assert (await call(await peers[0].ready(), STATUS))[0] is grpc.StatusCode.OK
        for peer in peers:
            await peer.close()


@pytest.mark.parametrize("address", ["host", "host:", "host:0", "host:65536", "host:x", "unix:/tmp/x", "", "a\0b:1", ":1"])
async def test_what_is_no_address_is_an_error_of_the_peer(address: str) -> None:
    """A peer says which addresses its ranks have, and can say anything."""
    with pytest.raises(OSError, match=r"must be host:port|host is no name|not known|No address"):
        (await connected(address)).close()
    peer = PeerChannel(address, ANYWHERE)
    with pytest.raises(PeerUnreachable):
        await peer.ready()
    await peer.close()


async def test_an_address_is_looked_up_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting.socket, "getaddrinfo", lambda *_, **__: pytest.fail("it needs no lookup"))
    assert await addresses_of("10.0.0.1") == ("10.0.0.1",) and await addresses_of("fe80::1") == ("fe80::1",)
