"""The ZeroMQ channel over loopback: its addresses, messages of several parts, its clients' timers and its count of strangers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from node_runtime.process_setup import raise_open_files
from tests.control.zmq_ends import DEADLINE_S, Ears, odd_peer, open_client, open_ears, open_server, wait_for
from transfer.control.base import WATCH_BATCH, Received
from transfer.control.zmq_channel import ZmqControlServer
from transfer.errors import ConfigError
from transfer.registry.options import MAX_SESSIONS


@pytest.fixture
def server() -> Iterator[ZmqControlServer]:
    server = open_server()
    yield server
    server.close()


@pytest.fixture
def ears() -> Iterator[Ears]:
    with open_ears() as ears:
        yield ears


def test_an_address_in_use_is_named(server: ZmqControlServer) -> None:
    with pytest.raises(ConfigError, match=f"{server.address}.*in use"):
        open_server(server.address)


@pytest.mark.parametrize(("bind", "host"), [("0.0.0.0", "127.0.0.1"), ("[::1]", None)])
def test_the_reported_address_is_served(ears: Ears, bind: str, host: str | None) -> None:
    server = open_server(f"tcp://{bind}:0", advertise_host=host)
    assert server.address.startswith(f"tcp://{host or bind}:")
    client = open_client(server.address)
    wait_for(ears, server, client, b"hello")
    client.close()
    server.close()


def test_a_wildcard_needs_a_host_to_advertise() -> None:
    with pytest.raises(ConfigError, match="advertise"):
        open_server("tcp://0.0.0.0:0")


@pytest.mark.parametrize("num_parts", [2, 2 * WATCH_BATCH + 10], ids=["two parts", "endless parts"])
def test_payloads_of_more_than_one_part_are_dropped_in_steps_and_counted(
    server: ZmqControlServer, ears: Ears, num_parts: int
) -> None:
    heard = ears.hear(server)

    async def play() -> int:
        num_turns, dropped_at = 0, None
        async with asyncio.timeout(DEADLINE_S):
            while not heard:
                await asyncio.sleep(0)
                num_turns += 1
                if dropped_at is None and server.num_dropped:  # counted with the first of its parts
                    dropped_at = num_turns
        assert dropped_at is not None
        return num_turns - dropped_at

    with odd_peer(server.address) as odd:
        odd.send_multipart([b"part"] * num_parts)
        odd.send(b"whole")
        num_turns = ears.loop.run_until_complete(play())
    assert heard == [Received(peer=7, payload=b"whole")]
    assert server.num_dropped == 1 and num_turns >= num_parts // WATCH_BATCH - 1


def test_a_closed_client_does_not_connect_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        loop, timers, faults = asyncio.get_running_loop(), list[asyncio.TimerHandle](), list[Any]()
        loop.set_exception_handler(lambda loop, context: faults.append(context))
        call_later = loop.call_later
        monkeypatch.setattr(loop, "call_later", lambda *args: timers.append(call_later(*args)) or timers[-1])
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))  # a port at which nobody listens
            client = open_client(f"tcp://127.0.0.1:{deaf.getsockname()[1]}")
            client.watch(loop, lambda payload: None)
            while client.send(b"x"):  # until the queue is full, which parts it
                pass
            client.close()
        assert timers and all(timer.cancelled() for timer in timers) and not faults

    asyncio.run(play())


def test_a_process_has_a_client_for_each_of_a_thousand_sessions() -> None:
    """ZeroMQ itself would stop at 1,023, also where there are descriptors."""
    raise_open_files()
    with socket.socket() as deaf, contextlib.ExitStack() as clients:
        deaf.bind(("127.0.0.1", 0))  # a port at which nobody listens
        for _ in range(MAX_SESSIONS + 1):
            clients.callback(open_client(f"tcp://127.0.0.1:{deaf.getsockname()[1]}").close)
