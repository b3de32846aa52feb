"""What only a network does: connections that break, peers that freeze, garbage on the port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from transfer.control.base import MAX_PAYLOAD_BYTES, QUEUE_PAYLOADS, WATCH_BATCH, Received
from transfer.control.zmq_channel import HEARTBEAT_INTERVAL_MS, ZmqControlClient, ZmqControlServer
from transfer.errors import ConfigError

DEADLINE_S = 8.0


class Proxy:
    """A TCP relay that a test can cut."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.num_connections = 0
        self.is_silent = False
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
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                while self.is_silent:
                    time.sleep(0.01)
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

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
    server = ZmqControlServer("tcp://127.0.0.1:0")
    server.allow(7)
    yield server
    server.close()


def port_of(server: ZmqControlServer) -> int:
    return int(server.address.rpartition(":")[2])


def wait_for(server: ZmqControlServer, client: ZmqControlClient, payload: bytes) -> float:
    """Seconds until a payload that is sent again and again, as the protocol does, has come through and back."""
    begin = time.monotonic()
    while time.monotonic() - begin < DEADLINE_S:
        client.send(payload)
        time.sleep(0.02)
        while (received := server.receive()) is not None:
            if received == Received(peer=7, payload=payload) and server.send(7, b"back:" + payload):
                time.sleep(0.02)
        while (answer := client.receive()) is not None:
            if answer == b"back:" + payload:
                return time.monotonic() - begin
    raise AssertionError(f"{payload!r} did not get through within {DEADLINE_S} s")


def test_a_session_survives_a_broken_connection(server: ZmqControlServer) -> None:
    proxy = Proxy(port_of(server))
    client = ZmqControlClient(proxy.address, session_id=7)
    wait_for(server, client, b"one")
    proxy.cut()
    wait_for(server, client, b"two")
    assert proxy.num_connections == 2
    client.close()
    proxy.close()


def test_a_session_survives_a_silent_network(server: ZmqControlServer) -> None:
    """Neither end hears of the break: both heartbeats time out, and the new connection must not meet the old id still alive."""
    proxy = Proxy(port_of(server))
    client = ZmqControlClient(proxy.address, session_id=7)
    wait_for(server, client, b"one")
    proxy.is_silent = True
    time.sleep(1.2)
    proxy.cut()
    proxy.is_silent = False
    wait_for(server, client, b"two")
    client.close()
    proxy.close()


def test_a_frozen_peer_is_noticed(server: ZmqControlServer) -> None:
    code = (
        "import sys, time\n"
        "from transfer.control.zmq_channel import ZmqControlClient\n"
        "client = ZmqControlClient(sys.argv[1], session_id=7)\n"
        "client.send(b'here')\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, server.address])
    try:
        begin = time.monotonic()
        while server.receive() is None:
            assert time.monotonic() - begin < DEADLINE_S
            time.sleep(0.01)
        assert server.send(7, b"alive")
        time.sleep(5 * HEARTBEAT_INTERVAL_MS / 1000)  # its first beat tells the server when to give it up
        os.kill(child.pid, signal.SIGSTOP)
        begin = time.monotonic()
        while server.send(7, b"?"):
            assert time.monotonic() - begin < 2.0, "a frozen peer was not noticed within 2 s"
            time.sleep(0.05)
    finally:
        child.kill()
        child.wait()


def test_garbage_on_the_port_hurts_nobody(server: ZmqControlServer) -> None:
    client = ZmqControlClient(server.address, session_id=7)
    wait_for(server, client, b"before")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(10_000), b"\xff" + bytes(8) + b"\x7f" + b"\x03" * 500, os.urandom(4096)):
        with socket.create_connection(("127.0.0.1", port_of(server))) as stranger:
            stranger.sendall(garbage)
            stranger.settimeout(0.05)
            with contextlib.suppress(OSError):
                stranger.recv(100)
    wait_for(server, client, b"after")
    client.close()


def test_payloads_of_more_than_one_part_are_dropped_and_counted(server: ZmqControlServer) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as odd:
        odd.setsockopt(zmq.ROUTING_ID, b"\x01" + (7).to_bytes(8, "big"))
        odd.connect(server.address)
        odd.send_multipart([b"two", b"parts"])
        odd.send(b"whole")
        begin = time.monotonic()
        while (received := server.receive()) is None and time.monotonic() - begin < DEADLINE_S:
            time.sleep(0.01)
        odd.setsockopt(zmq.LINGER, 0)
    assert received == Received(peer=7, payload=b"whole")
    assert server.num_dropped == 1


def test_a_payload_above_the_limit_cuts_the_sender_off(server: ZmqControlServer) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as odd:
        odd.setsockopt(zmq.LINGER, 0)
        odd.setsockopt(zmq.ROUTING_ID, b"\x01" + (7).to_bytes(8, "big"))
        odd.connect(server.address)
        odd.send(bytes(MAX_PAYLOAD_BYTES + 1))
        time.sleep(0.3)
        assert server.receive() is None


def test_an_address_in_use_is_named(server: ZmqControlServer) -> None:
    with pytest.raises(ConfigError, match=f"{server.address}.*in use"):
        ZmqControlServer(server.address)


def test_a_wildcard_needs_a_host_to_advertise() -> None:
    with pytest.raises(ConfigError, match="advertise"):
        ZmqControlServer("tcp://0.0.0.0:0")
    server = ZmqControlServer("tcp://0.0.0.0:0", advertise_host="127.0.0.1")
    server.allow(7)
    client = ZmqControlClient(server.address, session_id=7)
    wait_for(server, client, b"hello")
    client.close()
    server.close()


def test_ipv6_is_served() -> None:
    server = ZmqControlServer("tcp://[::1]:0")
    server.allow(7)
    assert server.address.startswith("tcp://[::1]:")
    client = ZmqControlClient(server.address, session_id=7)
    wait_for(server, client, b"hello")
    client.close()
    server.close()


def test_a_message_of_endless_parts_is_dropped_in_steps(server: ZmqControlServer) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as odd:
        odd.setsockopt(zmq.LINGER, 0)
        odd.setsockopt(zmq.ROUTING_ID, b"\x01" + (7).to_bytes(8, "big"))
        odd.connect(server.address)
        odd.send_multipart([b"part"] * (2 * WATCH_BATCH + 10))
        odd.send(b"whole")
        begin = time.monotonic()
        while not server.has_pending():
            assert time.monotonic() - begin < DEADLINE_S
            time.sleep(0.01)
        found = [server.receive() for _ in range(3)]
    assert found == [None, None, Received(peer=7, payload=b"whole")]
    assert server.num_dropped == 1


PEER_THAT_FLOODS_AND_BREAKS_OFF = """
import socket, struct, time

GREETING = bytes([255]) + bytes(8) + bytes([0x7F, 3, 1]) + b"NULL".ljust(20, bytes(1)) + bytes(32)
PING = bytes([4, 7, 4]) + b"PING" + bytes([0, 6])

def take(connection, size):
    seen = b""
    while len(seen) < size:
        part = connection.recv(size - len(seen))
        assert part, "hung up on"
        seen += part
    return seen

def flood(connection, kind):
    'ZMTP 3.1 of a `kind` socket: many frames, and beats among them, more than a queue of thousands takes; then a reset.'
    connection.sendall(GREETING)
    take(connection, len(GREETING))
    ready = bytes([5]) + b"READY" + bytes([11]) + b"Socket-Type" + struct.pack(">I", len(kind)) + kind
    connection.sendall(bytes([4, len(ready)]) + ready)
    take(connection, take(connection, 2)[1])  # frames before the other end has sent its READY would break the handshake
    connection.settimeout(1.0)
    try:
        for _ in range(500):
            connection.sendall((bytes([0, 1]) + b"x") * 200 + PING)
    except TimeoutError:
        pass  # nobody takes more
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    time.sleep(1.0)  # several beats, with nobody reading
"""

FLOODED_SERVER = """
from transfer.control.zmq_channel import ZmqControlServer
server = ZmqControlServer("tcp://127.0.0.1:0")
flood(socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))), b"DEALER")
while server.has_pending():
    server.receive()
print("lives", server.num_dropped)
"""

FLOODED_CLIENT = """
from transfer.control.zmq_channel import ZmqControlClient
listener = socket.create_server(("127.0.0.1", 0))
client = ZmqControlClient(f"tcp://127.0.0.1:{listener.getsockname()[1]}", session_id=7)
flood(listener.accept()[0], b"ROUTER")
print("lives", client.drain(lambda payload: None))
"""


@pytest.mark.parametrize("flooded", [FLOODED_SERVER, FLOODED_CLIENT], ids=["server", "client"])
def test_a_flood_that_breaks_off_does_not_abort_the_process(flooded: str) -> None:
    """libzmq 4.3.5 aborts where a connection breaks whose receive queue was full; so there is no such queue."""
    code = PEER_THAT_FLOODS_AND_BREAKS_OFF + flooded
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout.split()[1]) > 2 * QUEUE_PAYLOADS


def test_what_cannot_be_sent_is_not_yet_and_bounded(server: ZmqControlServer) -> None:
    """The other end's network takes nothing more: a listener that never answers, a client whose process is stopped."""
    payload = bytes(16384)  # more than any socket buffer swallows, long before the bound
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = ZmqControlClient(f"tcp://127.0.0.1:{deaf.getsockname()[1]}", session_id=7)
        taken = 0
        while taken < 2 * QUEUE_PAYLOADS and client.send(payload):
            taken += 1
        assert QUEUE_PAYLOADS // 2 <= taken < 2 * QUEUE_PAYLOADS and client.num_unsent == 1
        client.close()
    proxy = Proxy(port_of(server))
    client = ZmqControlClient(proxy.address, session_id=7)
    wait_for(server, client, b"hello")
    proxy.is_silent = True
    taken = 0
    while taken < 4 * QUEUE_PAYLOADS and server.send(7, payload):
        taken += 1
    assert QUEUE_PAYLOADS // 2 <= taken < 4 * QUEUE_PAYLOADS and server.num_unsent >= 1
    proxy.is_silent = False
    client.close()
    proxy.close()
