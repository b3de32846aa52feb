"""When the last joined prefill node goes, those that are tried again after a pause are tried at once. Real gRPC servers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from decode_node import peers as peers_module
from tests.decode.test_peers import PrefillNode, Tier
from tests.runtime.instances import until
from transfer.registry import peer_channel
from transfer.registry.options import CHANNEL_OPTIONS
from transfer.registry.server import RegistryServer, serve

PAUSE_S = 120.0
AT_ONCE_S = 20.0  # of a loaded machine; a pause is six times as long


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "FIRST_BACKOFF_S", PAUSE_S)
    monkeypatch.setattr(peers_module, "MAX_BACKOFF_S", PAUSE_S)


@asynccontextmanager
async def serving(mood: str, port: int = 0) -> AsyncIterator[tuple[PrefillNode, RegistryServer]]:
    node = PrefillNode()  # type: ignore[abstract]  # the other calls are answered UNIMPLEMENTED
    node.mood = mood
    server = await serve("127.0.0.1", port, prefill_control=node)
    try:
        yield node, server
    finally:
        await server.close()


@asynccontextmanager
async def joining(first: PrefillNode, *addresses: str) -> AsyncIterator[tuple[Tier, list[str]]]:
    """The decode side's view of nodes, the first of which is joined; and what it was told of changes: who could be picked."""
    one = Tier(list(addresses), first)
    changes: list[str] = []

    def note() -> None:
        peer = one.peers.pick()
        changes.append("" if peer is None else peer.address)

    one.peers._on_change = note
    one.peers.start()
    try:
        await one.until("joined")
        yield one, changes
    finally:
        await one.peers.close()


@contextmanager
def held_port() -> Iterator[int]:
    """A port where nobody listens until somebody is asked to."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def address_of(server: RegistryServer) -> str:
    return f"127.0.0.1:{server.port}"


async def soon(is_true: Callable[[], bool]) -> None:
    await until(is_true, within_s=AT_ONCE_S)


@pytest.mark.parametrize("mood", ["drains", "ends"])
async def test_when_the_last_node_goes_the_others_are_joined_at_once(mood: str) -> None:
    async with (
        serving("joined") as (first, server),
        serving("busy") as (other, second),
        joining(first, address_of(server), address_of(second)) as (one, changes),
    ):
        await soon(lambda: one.peers.peers[1].state == "lost")
        assert other.num_joins == 1
        other.mood = "joined"
        first.mood = mood
        await soon(lambda: one.peers.peers[1].state == "joined")
        assert other.num_joins == 2 and one.peers.pick() is one.peers.peers[1]
        assert address_of(second) in changes, "requests that wait are told"


async def test_a_node_that_did_not_answer_is_connected_to_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by gRPC, which fails calls by itself while it waits to connect again."""
    slow = {"grpc.initial_reconnect_backoff_ms": 120_000, "grpc.max_reconnect_backoff_ms": 120_000}
    monkeypatch.setattr(peer_channel, "CHANNEL_OPTIONS", tuple((dict(CHANNEL_OPTIONS) | slow).items()))
    with held_port() as port:
        async with (
            serving("joined") as (first, server),
            joining(first, address_of(server), f"127.0.0.1:{port}") as (one, _),
        ):
            other = one.peers.peers[1]
            await soon(lambda: other.state == "lost")
            async with serving("joined", port) as (node, _):
                first.mood = "drains"
                await soon(lambda: other.state == "joined")
                assert node.num_joins == 1


async def test_once_for_each_that_goes_and_not_as_long_as_another_is_there() -> None:
    async with (
        serving("joined") as (first, server),
        serving("busy") as (other, second),
        serving("joined") as (third, last),
        joining(first, address_of(server), address_of(second), address_of(last)) as (one, _),
    ):
        await soon(lambda: [peer.state for peer in one.peers.peers] == ["joined", "lost", "joined"])
        first.mood = "drains"
        await soon(lambda: one.peer.state == "draining")
        await asyncio.sleep(0.2)
        assert other.num_joins == 1, "the third one takes the requests"
        third.mood = "ends"
        await soon(lambda: other.num_joins == 2)
        await asyncio.sleep(0.2)
        assert (other.num_joins, third.num_joins) == (2, 1), "and its own pause is not cut short"


async def test_which_nodes_may_come() -> None:
    async with (
        serving("joined") as (first, server),
        serving("busy") as (_, second),
        serving("refuses") as (_, last),
        joining(first, address_of(server), address_of(second), address_of(last)) as (one, changes),
    ):
        peers = one.peers.peers
        await soon(lambda: [peer.state for peer in peers] == ["joined", "lost", "lost"] and peers[2].unfit.is_set())
        assert one.peers.may_come() and not one.peers.may_come(tried=peers[:2]), "what refuses does not fit"
        assert not one.peers.may_come(tried=peers[1:]), "who is joined is there already"
        first.mood = "drains"
        await soon(lambda: peers[0].state == "draining")
        assert one.peers.may_come(tried=peers[1:])
        assert address_of(server) in changes
