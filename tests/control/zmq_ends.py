"""Servers and clients of the ZeroMQ channel with keys, a loop that watches them, and peers that break the protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import zmq
from zmq.utils import z85

from transfer.control.base import KeyPair, Received
from transfer.control.zmq_authenticator import new_key_pair
from transfer.control.zmq_channel import ZmqControlClient, ZmqControlServer

DEADLINE_S = 30.0  # ends a wait that would never end
SERVER_KEYS = new_key_pair()
KEYS = new_key_pair()


class Ears:
    """A loop that delivers payloads only while a test waits."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def hear(self, end: Any) -> list[Any]:
        """Watch an end from now on; the list grows with each payload."""
        heard: list[Any] = []
        end.watch(self.loop, heard.append)
        return heard

    def until(self, holds: Callable[[], bool], what: str) -> None:
        async def wait() -> None:
            async with asyncio.timeout(DEADLINE_S):
                while not holds():
                    await asyncio.sleep(0.0005)

        try:
            self.loop.run_until_complete(wait())
        except TimeoutError:
            raise AssertionError(f"{what} did not happen within {DEADLINE_S} s") from None

    def run(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))


@contextlib.contextmanager
def open_ears() -> Iterator[Ears]:
    ears = Ears()
    yield ears
    ears.loop.close()


def open_server(bind: str = "tcp://127.0.0.1:0", **options: Any) -> ZmqControlServer:
    server = ZmqControlServer(bind, keys=SERVER_KEYS, **options)
    server.allow(7, KEYS.public)
    return server


def open_client(address: str) -> ZmqControlClient:
    return ZmqControlClient(address, session_id=7, keys=KEYS, server_key=SERVER_KEYS.public)


@contextlib.contextmanager
def odd_peer(address: str, keys: KeyPair | None = KEYS, *, heartbeats: bool = False) -> Iterator[zmq.Socket[bytes]]:
    """A DEALER that says what no client says; with the keys of one, or with none."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as odd:
        odd.setsockopt(zmq.LINGER, 0)
        odd.setsockopt(zmq.ROUTING_ID, b"\x01" + (7).to_bytes(8, "big"))
        if keys is not None:
            odd.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(keys.public))
            odd.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(keys.secret))
            odd.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(SERVER_KEYS.public))
        if heartbeats:
            odd.setsockopt(zmq.HEARTBEAT_IVL, 20)
            odd.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
            odd.setsockopt(zmq.HEARTBEAT_TTL, 30_000)
        odd.connect(address)
        yield odd


def wait_for(ears: Ears, server: ZmqControlServer, client: ZmqControlClient, payload: bytes) -> None:
    """Send a payload again and again, as the protocol does, until it has come through and back."""
    answered, heard = ears.hear(client), ears.hear(server)

    async def repeat() -> None:
        async with asyncio.timeout(DEADLINE_S):
            while b"back:" + payload not in answered:
                client.send(payload)
                await asyncio.sleep(0.02)
                if Received(peer=7, payload=payload) in heard:
                    server.send(7, b"back:" + payload)
                    await asyncio.sleep(0.02)

    ears.loop.run_until_complete(repeat())
