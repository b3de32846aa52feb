"""When the last joined prefill node goes, gRPC connects to the others at once, too. Real gRPC servers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from decode_node import peers as peers_module
from tests.decode.local_nodes import tier
from tests.prefill.join_server import JoinServer
from tests.runtime.instances import until
from transfer.registry import peer_channel
from transfer.registry.options import CHANNEL_OPTIONS
from transfer.registry.server import serve

PAUSE_S = 600.0
AT_ONCE_S = 60.0  # ends a wait that would otherwise last for a pause


@contextmanager
def held_port() -> Iterator[int]:
    """A port where nobody listens until somebody is asked to."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


async def test_a_node_that_did_not_answer_is_connected_to_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by gRPC, which fails calls by itself while it waits to connect again."""
    for name in ("FIRST_BACKOFF_S", "MAX_BACKOFF_S"):
        monkeypatch.setattr(peers_module, name, PAUSE_S)
    slow = {"grpc.initial_reconnect_backoff_ms": 600_000, "grpc.max_reconnect_backoff_ms": 600_000}
    monkeypatch.setattr(peer_channel, "CHANNEL_OPTIONS", tuple((dict(CHANNEL_OPTIONS) | slow).items()))
    first, second = JoinServer(11), JoinServer(12)
    server = await serve("127.0.0.1", 0, prefill_control=first)
    with held_port() as port:
        async with tier(f"127.0.0.1:{server.port}", f"127.0.0.1:{port}", heartbeat_s=1.0) as one:
            other = one.peers.peers[1]
            await until(lambda: one.peers.pick() is not None and other.state == "lost", within_s=AT_ONCE_S)
            late = await serve("127.0.0.1", port, prefill_control=second)
            first.draining.begin()
            await until(lambda: other.state == "joined", within_s=AT_ONCE_S)
            assert second.num_joins == 1
    await late.close()
    await server.close()
