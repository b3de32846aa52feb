"""What only a network does: connections that break, peers that freeze, garbage on the port."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.control.zmq_ends import DEADLINE_S, Ears, odd_peer, open_client, open_ears, open_server, wait_for
from transfer.control import zmq_channel
from transfer.control.base import MAX_PAYLOAD_BYTES, QUEUE_PAYLOADS
from transfer.control.zmq_authenticator import new_key_pair
from transfer.control.zmq_channel import HANDSHAKE_MS, ZmqControlServer
from transfer.messages import MAX_MESSAGE_BYTES

FRAME_BYTES = 36  # of a payload of one byte on the way, encrypted


class Proxy:
    """A TCP relay that a test can cut."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.num_connections = 0
        self.seen = bytearray()
        self.seen_on = {"up": bytearray(), "down": bytearray()}
        self.is_silent = False
        self._num_lost = 0  # of the first connections: their bytes get lost, and neither end is notified
        self.spoils: str | None = None  # "up" or "down": the next bytes on that way have a bit changed
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target_port))
            self._pairs.append((near, far))
            self.num_connections += 1
            for source, sink, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._relay, args=(source, sink, way, self.num_connections), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, way: str, number: int) -> None:
        try:
            while data := source.recv(65536):
                self.seen += data
                self.seen_on[way] += data
                if self.spoils == way:
                    self.spoils = None
                    data = data[:-1] + bytes([data[-1] ^ 1])
                while self.is_silent:
                    time.sleep(0.01)
                if number > self._num_lost:
                    sink.sendall(data)
        except OSError:
            pass
        if number <= self._num_lost:
            return
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def lose(self) -> None:
        """Break all present connections silently."""
        self._num_lost = self.num_connections

    def reset(self) -> None:
        """As a peer that crashes: the other end is told that all is over, in the midst of what it was sent."""
        pairs = list(self._pairs)
        self.cut()
        for _, far in pairs:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            far.close()

    def cut(self) -> None:
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()


@pytest.fixture
def server() -> Iterator[ZmqControlServer]:
    server = open_server()
    yield server
    server.close()


@pytest.fixture
def ears() -> Iterator[Ears]:
    with open_ears() as ears:
        yield ears


def port_of(server: ZmqControlServer) -> int:
    return int(server.address.rpartition(":")[2])


def test_a_session_survives_a_silent_break(server: ZmqControlServer, ears: Ears) -> None:
    """Neither end is notified: both detect it by their heartbeats, the server before the client's next connection.

    Otherwise the server ignores that connection for ever, because it has the same id.
    """
    proxy = Proxy(port_of(server))
    client = open_client(proxy.address)
    wait_for(ears, server, client, b"one")
    proxy.lose()
    wait_for(ears, server, client, b"two")
    assert proxy.num_connections == 2
    server_detects_ms = zmq_channel.SERVER_HEARTBEAT_MS + zmq_channel.HEARTBEAT_TIMEOUT_MS
    assert server_detects_ms < zmq_channel.RECONNECT_MS, "a client that is notified of the break connects too early"
    client.close()
    proxy.close()


def test_a_payload_above_the_limit_cuts_the_sender_off(server: ZmqControlServer, ears: Ears) -> None:
    with odd_peer(server.address) as odd:
        odd.send(bytes(MAX_PAYLOAD_BYTES + 1))
        heard = ears.hear(server)
        ears.run(0.3)
        assert not heard and server.num_dropped == 0


def test_payloads_that_cannot_be_sent_are_rejected_and_bounded(server: ZmqControlServer, ears: Ears) -> None:
    """The other end's network takes nothing more: a listener that never answers, a client whose process is stopped."""
    payload = bytes(16384)  # more than any socket buffer swallows, long before the bound
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = open_client(f"tcp://127.0.0.1:{deaf.getsockname()[1]}")
        taken = 0
        while taken < 2 * QUEUE_PAYLOADS and client.send(payload):
            taken += 1
        assert QUEUE_PAYLOADS // 2 <= taken < 2 * QUEUE_PAYLOADS
        client.close()
    proxy = Proxy(port_of(server))
    client = open_client(proxy.address)
    wait_for(ears, server, client, b"hello")
    proxy.is_silent = True
    taken = 0
    while taken < 4 * QUEUE_PAYLOADS and server.send(7, payload):
        taken += 1
    assert QUEUE_PAYLOADS // 2 <= taken < 4 * QUEUE_PAYLOADS
    proxy.is_silent = False
    client.close()
    proxy.close()


# Strangers


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\x00") + bytes(32)


def test_strangers_are_rejected_do_not_grow_memory_and_are_counted(server: ZmqControlServer, ears: Ears) -> None:
    """No key, a key that nobody attached with, what is no ZeroMQ, an older ZeroMQ: each with all that it can send."""
    client = open_client(server.address)
    wait_for(ears, server, client, b"before")
    before = resident_bytes()
    heard = ears.hear(server)
    keyless, unknown = odd_peer(server.address, None), odd_peer(server.address, new_key_pair())
    with keyless as one, unknown as two:
        for odd in (one, two):
            for _ in range(40):
                with contextlib.suppress(zmq.Again):  # it has been refused already
                    odd.send_multipart([bytes(500_000)] * 2, zmq.DONTWAIT)  # 40 MB each, in messages of several parts
        raw = [socket.create_connection(("127.0.0.1", port_of(server))) for _ in range(20)]
        hellos = (greeting(b"NULL"), greeting(b"CURVE"), b"GET / HTTP/1.1\r\n", b"\xff" + bytes(8) + b"\x7f\x01\x05")
        for stranger, hello in zip(raw, itertools.cycle(hellos), strict=False):
            with contextlib.suppress(OSError):  # hung up on
                stranger.sendall(hello + b"\x04\x05\x04PING")
                stranger.sendall(b"\x03" + (MAX_PAYLOAD_BYTES).to_bytes(8, "big") + bytes(100_000))
        ears.run(1.0)
        growth = resident_bytes() - before - 2 * 40_000_000  # theirs waits in their own queues, in this process
        assert {received.payload for received in heard} <= {b"before"} and server.num_dropped == 0
        assert growth < 30 << 20, f"the server keeps {growth} bytes of strangers"
    wait_for(ears, server, client, b"after")
    begin = time.monotonic()
    while server.num_refused < len(raw) + 2:
        assert time.monotonic() - begin < DEADLINE_S, f"{server.num_refused} refusals were counted"
        time.sleep(0.1)
    for stranger in raw:  # only now: a server that was not run meanwhile has no connection of one that is gone again
        stranger.close()
    client.close()


def test_a_stranger_who_says_nothing_is_hung_up_on(server: ZmqControlServer) -> None:
    with socket.create_connection(("127.0.0.1", port_of(server))) as silent:
        silent.settimeout(DEADLINE_S)
        seen = b"?"
        while seen:
            seen = silent.recv(1000)  # a greeting, and then the end


def test_a_frame_above_the_limit_is_not_read_before_the_handshake(server: ZmqControlServer) -> None:
    """The length of a frame is looked at before memory is taken for it."""
    with socket.create_connection(("127.0.0.1", port_of(server))) as stranger:
        stranger.settimeout(0.9 * HANDSHAKE_MS / 1000)  # it is not the handshake's time that ends it
        stranger.sendall(greeting(b"CURVE") + b"\x06" + (MAX_PAYLOAD_BYTES + 34).to_bytes(8, "big"))
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass


def test_a_connection_without_a_key_costs_little_memory() -> None:
    """The most that it can make libzmq keep: one message that is almost as long as one may be, and never ends."""
    server = open_server(max_payload_bytes=MAX_MESSAGE_BYTES)
    before = resident_bytes()
    strangers = [socket.create_connection(("127.0.0.1", port_of(server))) for _ in range(200)]
    for stranger in strangers:
        stranger.sendall(greeting(b"CURVE") + b"\x06" + (MAX_MESSAGE_BYTES + 33).to_bytes(8, "big") + bytes(MAX_MESSAGE_BYTES))
    time.sleep(1.0)
    growth = resident_bytes() - before
    for stranger in strangers:
        stranger.close()
    server.close()
    assert growth < len(strangers) * 200 * 1024, f"{growth // len(strangers)} bytes for each"


def test_nothing_is_readable_on_the_way(server: ZmqControlServer, ears: Ears) -> None:
    """Neither payloads nor the session's id, which is the client's routing id."""
    proxy = Proxy(port_of(server))
    client = open_client(proxy.address)
    wait_for(ears, server, client, b"a name that nobody else may read")
    client.close()
    proxy.close()
    assert len(proxy.seen) > 500
    assert b"nobody else" not in proxy.seen and (7).to_bytes(8, "big") not in proxy.seen


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_session_survives_a_byte_that_was_changed_on_the_way(server: ZmqControlServer, ears: Ears, way: str) -> None:
    proxy = Proxy(port_of(server))
    client = open_client(proxy.address)
    wait_for(ears, server, client, b"one")
    proxy.spoils = way
    wait_for(ears, server, client, b"two")
    assert proxy.spoils is None and proxy.num_connections == 2
    client.close()
    proxy.close()


@pytest.fixture
def quick_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_channel, "RECONNECT_MS", 800)  # longer than a server needs to notice that a connection ended


async def hear_again(server: ZmqControlServer, heard: list[bytes]) -> None:
    """Have the server repeat a message until the watching client hears it."""
    server.watch(asyncio.get_running_loop(), lambda received: None)
    async with asyncio.timeout(DEADLINE_S):
        while b"abort" not in heard:
            server.send(7, b"abort")
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("case", ["refused, then watched", "watched, then refused", "idle"])
def test_a_watched_client_connects_again_though_it_sends_nothing(
    server: ZmqControlServer, ears: Ears, quick_reconnect: None, case: str
) -> None:
    """Nobody else would: the decode rank repeats itself, and a sender without requests has nothing to say."""
    proxy = Proxy(port_of(server))
    client = open_client(proxy.address)
    wait_for(ears, server, client, b"one")

    async def play() -> None:
        loop, heard = asyncio.get_running_loop(), list[bytes]()
        if case != "refused, then watched":
            client.watch(loop, heard.append)
        proxy.spoils = "down"
        async with asyncio.timeout(DEADLINE_S):
            while proxy.spoils is not None:
                server.send(7, b"spoilt")
                await asyncio.sleep(0.005)
            while case != "idle" and client.send(b"drained"):
                await asyncio.sleep(0.005)
        if case == "refused, then watched":
            client.watch(loop, heard.append)
        await hear_again(server, heard)
        client.close()

    asyncio.run(play())
    assert proxy.num_connections == 2
    proxy.close()


def test_a_flood_of_an_attached_peer_that_breaks_off_does_not_abort(server: ZmqControlServer, ears: Ears) -> None:
    """With keys too: heartbeats among thousands of messages that nobody has taken, and then a reset."""
    proxy = Proxy(port_of(server))
    with odd_peer(proxy.address, heartbeats=True) as odd:
        begin = time.monotonic()
        while time.monotonic() - begin < 1.0 or len(proxy.seen_on["up"]) < 3 * QUEUE_PAYLOADS * FRAME_BYTES:
            for _ in range(200):
                with contextlib.suppress(zmq.Again):
                    odd.send(b"x", zmq.DONTWAIT)
            time.sleep(0.01)
        proxy.reset()
        time.sleep(1.0)
    found = ears.hear(server)
    num_found = -1
    while num_found < len(found):  # its session id is free again once all of it is taken
        num_found = len(found)
        ears.run(0.1)
    assert len(found) > 2 * QUEUE_PAYLOADS
    proxy.close()
    client = open_client(server.address)
    wait_for(ears, server, client, b"hello")
    client.close()


def spoilt(said: bytes, chance: random.Random) -> bytes:
    """A handshake as it was said once, with a few bytes changed, left out, said twice or made up."""
    changed = bytearray(said)
    for _ in range(chance.randint(0, 4)):
        at = chance.randrange(len(changed))
        match chance.randrange(4):
            case 0:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                del changed[at : at + chance.randint(1, 40)]
            case 2:
                changed[at:at] = changed[at : at + chance.randint(1, 300)]
            case 3:
                changed[at:at] = chance.randbytes(chance.randint(1, 40))
    return bytes(changed[: chance.randint(1, len(changed))] if chance.random() < 0.3 else changed)


def test_broken_handshakes_harm_neither_end(server: ZmqControlServer, ears: Ears) -> None:
    """What both ends once said, said again and spoilt, to a server and to a client."""
    chance = random.Random(7)
    proxy = Proxy(port_of(server))
    client = open_client(proxy.address)
    wait_for(ears, server, client, b"hello")
    client.close()
    proxy.close()
    heard = ears.hear(server)
    for _ in range(300):
        with socket.create_connection(("127.0.0.1", port_of(server))) as stranger:
            stranger.sendall(spoilt(bytes(proxy.seen_on["up"]), chance))
            if chance.random() < 0.5:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with socket.create_server(("127.0.0.1", 0)) as pretender:
        address = f"tcp://127.0.0.1:{pretender.getsockname()[1]}"
        for _ in range(60):
            client = open_client(address)
            heard_by_client = ears.hear(client)
            with pretender.accept()[0] as connection:
                connection.sendall(spoilt(bytes(proxy.seen_on["down"]), chance))
                ears.run(0.002)
            client.send(b"to nobody")
            ears.run(0)
            assert not heard_by_client
            client.close()
    assert {received.payload for received in heard} <= {b"hello"} and server.num_dropped == 0
    client = open_client(server.address)
    wait_for(ears, server, client, b"still here")
    client.close()


def test_a_server_that_is_closed_leaves_no_thread_and_no_descriptor() -> None:
    names = {thread.name for thread in threading.enumerate()}
    open_server().close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        open_server().close()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert {thread.name for thread in threading.enumerate()} <= names
