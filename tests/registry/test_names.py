"""Nodes that are named, not given by address: whatever happens to the name server, and to which address the name has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.registry.attaches import serving
from tests.registry.secure_node import call
from tests.runtime.instances import until
from transfer.errors import PeerUnreachable
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry import connecting, peer_channel
from transfer.registry.connecting import Lookups, addresses_of, connected
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import PlainText
from transfer.registry.server import RegistryServer

DOMAIN = ".example"
NAME = f"prefill-0{DOMAIN}"
STATUS = "/grpc.health.v1.Health/Check"
ANYWHERE = PlainText(insecure=2)
WITHIN_S = 60.0  # only ends a wait that would never end


class NameServer:
    """What this process's resolver says of names under `DOMAIN`: addresses, an error, or nothing while `goes_on` is clear."""

    def __init__(self, resolve: Callable[..., Any]) -> None:
        self._resolve = resolve
        self.says: list[str] | OSError = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.asked = 0

    def __call__(self, host: str | None, port: object, *args: Any, **kwargs: Any) -> Any:
        if host is None or not host.endswith(DOMAIN):
            return self._resolve(host, port, *args, **kwargs)
        self.asked += 1
        self.goes_on.wait(120)
        says = self.says
        if isinstance(says, OSError):
            raise says
        return [info for address in says for info in self._resolve(address, port, *args, **kwargs)]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer(socket.getaddrinfo)
    monkeypatch.setattr(connecting.socket, "getaddrinfo", server)
    yield server
    server.goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "resolve":  # the next test begins without lookups
            thread.join(60)


class Control(pb_grpc.PrefillControlServicer):
    pass


def node(host: str = "127.0.0.1", port: int = 0) -> AbstractAsyncContextManager[RegistryServer]:
    return serving(host, port, prefill_control=Control())  # type: ignore[abstract]


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
        for attempts in range(1, 6):
            with pytest.raises(PeerUnreachable, match=rf"^{NAME}:\d+: Temporary failure in name resolution$"):
                await peer.ready()
            assert names.asked == attempts, "each attempt resolves the name again"
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
            async with asyncio.timeout(WITHIN_S):
                while (await peer.ready()) is before:
                    await asyncio.sleep(0.02)
            assert (await call(await peer.ready(), STATUS))[0] is grpc.StatusCode.OK


async def test_a_node_that_comes_back_at_its_address_keeps_its_channel(names: NameServer) -> None:
    """So that anyone who tries again and again leaves no channels behind."""
    names.says = ["127.0.0.1"]
    async with node() as first:
        port = first.port
        async with channel(port) as peer:
            before = await peer.ready()
            assert (await call(before, STATUS))[0] is grpc.StatusCode.OK
            await first.close()
            with pytest.raises(PeerUnreachable, match="Connection refused"):
                async with asyncio.timeout(WITHIN_S):
                    while True:
                        await peer.ready()
                        await asyncio.sleep(0.02)
            async with node(port=port):
                assert await peer.ready() is before
                assert (await call(before, STATUS))[0] is grpc.StatusCode.OK


async def test_reconnecting_gives_another_channel(names: NameServer) -> None:
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
                asked, looking = names.asked, asyncio.ensure_future(peer.ready())
                await until(lambda: names.asked > asked)
                peer.connect_anew()
                names.goes_on.set()
                after = await looking
                assert after is not before and (await call(after, STATUS))[0] is grpc.StatusCode.OK


@contextlib.contextmanager
def black_hole(host: str, port: int) -> Iterator[None]:
    """An address that drops anyone who connects, as a firewall does, or a route that leads nowhere."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        full.bind((host, port))
        full.listen(0)
        for _ in range(4):  # more than its queue holds
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        yield


async def test_an_address_that_drops_connections_does_not_hide_the_others(names: NameServer) -> None:
    names.says = ["127.0.0.2", "127.0.0.3", "127.0.0.1"]
    async with node() as server, channel(server.port) as peer:
        with black_hole("127.0.0.2", server.port), black_hole("127.0.0.3", server.port):
            assert (await call(await peer.ready(), STATUS))[0] is grpc.StatusCode.OK


async def test_attempts_that_were_slower_are_ended(names: NameServer) -> None:
    def sockets() -> set[str]:
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
        return {one for one in found if one.startswith("socket:")}

    names.says = ["127.0.0.2", "127.0.0.1"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with black_hole("127.0.0.2", port):
            before = sockets()
            with await connected(f"{NAME}:{port}") as made:
                assert made.getpeername() == ("127.0.0.1", port)
            await until(lambda: sockets() <= before)
            names.says = ["127.0.0.2"]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await connected(f"{NAME}:{port}")
            await until(lambda: sockets() <= before)


async def test_an_address_that_is_silent_to_grpc_comes_last_the_next_time(
    names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a connection, so nothing else than gRPC's own failure tells; and gRPC knows of no other address."""
    monkeypatch.setattr(peer_channel, "SILENT_S", 0.2)
    names.says = ["127.0.0.2", "127.0.0.3", "127.0.0.1"]
    async with node() as server, channel(server.port) as peer:
        with socket.create_server(("127.0.0.2", server.port)), socket.create_server(("127.0.0.3", server.port)):
            code = None
            async with asyncio.timeout(WITHIN_S):
                while code is not grpc.StatusCode.OK:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.5):
                            code, _ = await call(await peer.ready(), STATUS)
            asked = names.asked
            assert (await call(await peer.ready(), STATUS))[0] is grpc.StatusCode.OK and names.asked == asked


async def test_a_silent_name_server_does_not_delay_other_names(names: NameServer) -> None:
    """As many threads as an executor has would be taken by the first few names."""
    names.goes_on.clear()
    async with node() as server:
        own = [f"prefill-{index}{DOMAIN}:{server.port}" for index in range(48)]
        peers = [PeerChannel(address, ANYWHERE) for address in own]
        attempts = [asyncio.ensure_future(peer.ready(timeout_s=0.5)) for peer in peers]
        async with channel(server.port, "localhost") as other:
            assert (await call(await other.ready(), STATUS))[0] is grpc.StatusCode.OK
        ends = await asyncio.gather(*attempts, return_exceptions=True)
        assert [str(end) for end in ends] == [f"{address}: no answer within 0.5 s" for address in own]
        names.says = ["127.0.0.1"]
        names.goes_on.set()
        assert (await call(await peers[0].ready(), STATUS))[0] is grpc.StatusCode.OK
        for peer in peers:
            await peer.close()


async def test_callers_share_one_lookup_of_a_name(names: NameServer) -> None:
    """A resolver can hang for minutes, and every caller tries again after seconds."""
    names.goes_on.clear()
    attempts = [asyncio.ensure_future(addresses_of(NAME)) for _ in range(8)]
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await addresses_of(NAME)
    assert names.asked == 1
    attempts[0].cancel()
    names.says = ["127.0.0.1"]
    names.goes_on.set()
    assert await asyncio.gather(*attempts[1:]) == [("127.0.0.1",)] * 7
    assert await addresses_of(NAME) == ("127.0.0.1",) and names.asked == 2, "an answer is nobody's who asks later"


async def test_lookups_take_a_bounded_number_of_threads(names: NameServer) -> None:
    names.goes_on.clear()
    lookups = Lookups(max_threads=2)
    attempts = [asyncio.ensure_future(lookups.ask(f"prefill-{index}{DOMAIN}")) for index in range(6)]
    await until(lambda: names.asked == 2)
    attempts[5].cancel()
    await asyncio.sleep(0)
    names.says = ["127.0.0.1"]
    names.goes_on.set()
    assert await asyncio.gather(*attempts[:5]) == [("127.0.0.1",)] * 5
    assert names.asked == 5, "nobody waits for the last one any more"
    assert await lookups.ask(f"prefill-5{DOMAIN}") == ("127.0.0.1",)


@pytest.mark.parametrize("address", ["host", "host:", "host:0", "host:65536", "host:x", "unix:/tmp/x", "", "a\0b:1", ":1"])
async def test_an_invalid_address_is_an_error_of_the_peer(address: str) -> None:
    """A peer says which addresses its ranks have, and can say anything."""
    with pytest.raises(OSError, match=r"must be host:port|host is no name|not known|No address"):
        (await connected(address)).close()
    peer = PeerChannel(address, ANYWHERE)
    with pytest.raises(PeerUnreachable):
        await peer.ready()
    await peer.close()


async def test_a_connection_that_is_reset_at_once_is_a_peer_that_is_unreachable(
    names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy takes connections for a node that is away; anyone who asks tries again, and does not fall over."""
    names.says = ["127.0.0.1"]

    async def reset(address: str, *, last: object = ()) -> socket.socket:
        return socket.socket()  # of no connection, as one is that has been reset since

    monkeypatch.setattr(peer_channel, "connected", reset)
    channel = PeerChannel(f"{NAME}:7000", ANYWHERE)
    with pytest.raises(PeerUnreachable, match=f"^{NAME}:7000: "):
        await channel.ready(timeout_s=2)
    await channel.close()
