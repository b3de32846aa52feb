"""One conformance suite for every control channel: what an owner may rely on, whichever it runs on."""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.control.zmq_ends import DEADLINE_S, KEYS, SERVER_KEYS, Ears, open_ears
from transfer.control.base import (
    MAX_PAYLOAD_BYTES,
    WATCH_BATCH,
    WATCH_S,
    ControlClient,
    ControlServer,
    KeyPair,
    Received,
    Waker,
)
from transfer.control.unix_channel import RECONNECT_S, UnixControlClient, UnixControlServer
from transfer.control.zmq_authenticator import new_key_pair
from transfer.control.zmq_channel import ZmqControlClient, ZmqControlServer, _events
from transfer.errors import LocalProtocolError, PeerUnreachable, TransportClosed

OTHER_KEYS = new_key_pair()
"""Of one more client."""


@dataclass
class Clock:
    """Of the module `time`: what `monkeypatch` puts in its place."""

    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Channels:
    """Create ends of one kind of channel, close them, and record the payloads of each end.

    Args:
        has_keys: Whether ends prove who they are.
    """

    def __init__(self, ears: Ears, folder: Path, *, has_keys: bool) -> None:
        self.ears = ears
        self.key = KEYS.public if has_keys else b""
        self.opened: list[Any] = []
        self._addresses = (f"unix://{folder}/{number}" for number in itertools.count())
        self._has_keys = has_keys
        self._heard: dict[int, list[Any]] = {}

    def open_server(self) -> ControlServer:
        by_tcp = self._has_keys
        self.opened.append(
            ZmqControlServer("tcp://127.0.0.1:0", keys=SERVER_KEYS) if by_tcp else UnixControlServer(next(self._addresses))
        )
        return self._watched()

    def open_client(
        self, address: str, session_id: int, keys: KeyPair = KEYS, server_key: bytes = SERVER_KEYS.public
    ) -> ControlClient:
        self.opened.append(
            ZmqControlClient(address, session_id=session_id, keys=keys, server_key=server_key)
            if self._has_keys
            else UnixControlClient(address, session_id=session_id)
        )
        return self._watched()

    def _watched(self) -> Any:
        end = self.opened[-1]
        self._heard[id(end)] = self.ears.hear(end)
        return end

    def heard_by(self, end: ControlServer | ControlClient, count: int = 0) -> list[Any]:
        """Return the payloads since the last call, as soon as there are `count`."""
        heard = self._heard[id(end)]
        self.ears.until(lambda: len(heard) >= count, f"{count} payloads")
        found = list(heard)
        heard.clear()
        return found

    def until(self, holds: Callable[[], bool], what: str) -> None:
        self.ears.until(holds, what)


def channels_of(kind: str, folder: Path) -> Iterator[Channels]:
    with open_ears() as ears:
        channels = Channels(ears, folder, has_keys=kind == "zmq-tcp")
        yield channels
        for end in reversed(channels.opened):
            end.close()


@pytest.fixture(params=["zmq-tcp", "unix"])
def channels(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Channels]:
    yield from channels_of(request.param, tmp_path)


@pytest.fixture
def with_keys(tmp_path: Path) -> Iterator[Channels]:
    yield from channels_of("zmq-tcp", tmp_path)


async def become(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.001)


def join(channels: Channels, server: ControlServer, session_id: int) -> ControlClient:
    server.allow(session_id, channels.key)
    client = channels.open_client(server.address, session_id)
    assert client.send(b"hello")
    assert channels.heard_by(server, 1) == [Received(peer=session_id, payload=b"hello")]
    return client


def joined(channels: Channels) -> tuple[ControlServer, ControlClient]:
    server = channels.open_server()
    return server, join(channels, server, 7)


def test_payloads_go_both_ways_whole_and_in_order(channels: Channels) -> None:
    server, client = joined(channels)
    sent = [index.to_bytes(4, "big") * (index % 50 + 1) for index in range(500)]
    for payload in sent:
        assert client.send(payload)
    assert [received.payload for received in channels.heard_by(server, len(sent))] == sent
    for payload in sent:
        assert server.send(7, payload)
    assert channels.heard_by(client, len(sent)) == sent
    assert server.num_dropped == 0


def test_every_session_id_and_every_payload_size_is_carried(channels: Channels) -> None:
    server = channels.open_server()
    for session_id in (1, 255, 2**63, 2**64 - 1):
        server.allow(session_id, channels.key)
        client = channels.open_client(server.address, session_id)
        for payload in (b"", b"\x00", bytes(MAX_PAYLOAD_BYTES)):
            assert client.send(payload)
            assert channels.heard_by(server, 1) == [Received(peer=session_id, payload=payload)]
            assert server.send(session_id, payload)
            assert channels.heard_by(client, 1) == [payload]


def test_a_peer_that_is_not_allowed_is_dropped_and_counted(channels: Channels) -> None:
    """It has come in with the key of another session, and says that it is one that nobody has heard of."""
    server = channels.open_server()
    server.allow(7, channels.key)
    stranger = channels.open_client(server.address, 9)
    assert stranger.send(b"let me in")
    channels.until(lambda: server.num_dropped == 1, "one drop")
    assert not channels.heard_by(server)
    assert not server.send(9, b"no")


def test_a_forgotten_peer_is_dropped_and_others_go_on(channels: Channels) -> None:
    server, client = joined(channels)
    server.allow(8, channels.key)
    other = channels.open_client(server.address, 8)
    assert other.send(b"one")
    channels.heard_by(server, 1)
    server.forget(7)
    server.forget(7)
    server.forget(12345)
    assert client.send(b"late")
    channels.until(lambda: server.num_dropped == 1, "one drop")
    assert not server.send(7, b"gone")
    assert other.send(b"two")
    assert channels.heard_by(server, 1) == [Received(peer=8, payload=b"two")]


def test_a_send_to_an_absent_peer_returns_false(channels: Channels) -> None:
    server = channels.open_server()
    server.allow(7, channels.key)
    assert not server.send(7, b"anyone?")


def test_a_closed_peer_is_detected_and_does_not_affect_others(channels: Channels) -> None:
    server, client = joined(channels)
    client.close()
    client.close()

    def is_refused() -> bool:
        return not server.send(7, b"x" * 1000)

    # Over a socket the first ones may still be taken before the end of the connection is seen.
    channels.until(is_refused, "a refusal")
    again = join(channels, server, 8)
    assert server.send(8, b"still here")
    assert channels.heard_by(again, 1) == [b"still here"]


def test_a_second_claim_of_a_live_session_takes_nothing_over(channels: Channels) -> None:
    server, client = joined(channels)
    thief = channels.open_client(server.address, 7)
    for _ in range(3):
        thief.send(b"mine now")
    join(channels, server, 8)  # nothing but its payload has come
    assert server.send(7, b"for the first one")
    assert channels.heard_by(client, 1) == [b"for the first one"]
    assert client.send(b"still me")
    assert channels.heard_by(server, 1) == [Received(peer=7, payload=b"still me")]
    assert not channels.heard_by(thief)


def test_a_payload_that_was_accepted_survives_the_end_of_a_full_peer(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        client = UnixControlClient(f"unix://{path}", session_id=7)
        taken, _ = listener.accept()
    while client.send(b"x" * 1000):
        pass
    taken.close()
    assert client.send(b"last")
    with open_ears() as ears:
        server = UnixControlServer(f"unix://{path}")
        server.allow(7)
        heard = ears.hear(server)
        ears.hear(client)
        ears.until(lambda: Received(peer=7, payload=b"last") in heard, "the last payload")
        for end in (client, server):
            end.close()


async def test_a_client_that_could_not_connect_for_want_of_a_socket_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"unix://{tmp_path}/a"
    client = UnixControlClient(address, session_id=7)  # no server yet
    client.watch(asyncio.get_running_loop(), lambda payload: None)
    assert client.send(b"hello")
    has_failed = asyncio.Event()

    def no_socket(*_: object) -> None:
        has_failed.set()
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", no_socket)
        await asyncio.wait_for(has_failed.wait(), DEADLINE_S)
    server = UnixControlServer(address)
    server.allow(7)
    heard: list[Received] = []
    server.watch(asyncio.get_running_loop(), heard.append)
    await become(lambda: bool(heard))
    assert heard == [Received(peer=7, payload=b"hello")]
    client.close()
    server.close()


def test_a_process_without_descriptors_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_tried = 0
    accept = socket.socket.accept

    def fail(_: socket.socket) -> tuple[socket.socket, Any]:
        nonlocal num_tried
        num_tried += 1
        raise OSError(errno.EMFILE, "Too many open files")

    for channels in channels_of("unix", tmp_path):
        server, client = joined(channels)
        server.allow(8)
        began_s = time.monotonic()
        monkeypatch.setattr(socket.socket, "accept", fail)
        late = channels.open_client(server.address, 8)
        late.send(b"late")
        channels.until(lambda: num_tried > 0, "a connection that cannot be accepted")
        for _ in range(100):
            assert client.send(b"x") and channels.heard_by(server, 1)
        assert num_tried <= 1 + (time.monotonic() - began_s) / RECONNECT_S
        monkeypatch.setattr(socket.socket, "accept", accept)
        assert channels.heard_by(server, 1) == [Received(peer=8, payload=b"late")]


def test_use_after_close_is_refused(channels: Channels) -> None:
    server, client = joined(channels)
    client.close()
    server.close()
    server.close()
    uses: list[Callable[[], object]] = [lambda: client.send(b"x"), lambda: server.send(7, b"x")]
    for use in uses:
        with pytest.raises(TransportClosed):
            use()


def test_too_large_a_payload_is_refused(channels: Channels) -> None:
    server, client = joined(channels)
    for send in (lambda: client.send(bytes(MAX_PAYLOAD_BYTES + 1)), lambda: server.send(7, bytes(MAX_PAYLOAD_BYTES + 1))):
        with pytest.raises(LocalProtocolError, match=str(MAX_PAYLOAD_BYTES + 1)):
            send()


def test_a_bad_address_is_unreachable(channels: Channels) -> None:
    with pytest.raises(PeerUnreachable, match="nonsense"):
        channels.open_client("nonsense", 1)


def test_watch_loses_no_wake_up_under_ping_pong(channels: Channels) -> None:
    """Both ends send from inside their callbacks, which is where an edge-triggered descriptor loses its edge."""
    rounds = 1000
    server, client = joined(channels)

    async def play() -> tuple[int, list[bytes]]:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        echoed: list[bytes] = []

        def on_received(received: Received) -> None:
            assert server.send(received.peer, received.payload)
            assert server.send(received.peer, received.payload + b"!")

        def on_payload(payload: bytes) -> None:
            echoed.append(payload)
            if len(echoed) == 2 * rounds:
                done.set_result(None)
            elif not payload.endswith(b"!") and int(payload) < rounds:
                client.send(b"%d" % (int(payload) + 1))

        server.watch(loop, on_received)
        client.watch(loop, on_payload)
        client.send(b"1")
        await asyncio.wait_for(done, DEADLINE_S)
        return len(echoed), echoed

    count, echoed = asyncio.run(play())
    assert count == 2 * rounds
    assert echoed == [text for number in range(1, rounds + 1) for text in (b"%d" % number, b"%d!" % number)]


def test_watch_delivers_earlier_payloads_and_goes_on_after_an_exception(channels: Channels) -> None:
    server, client = joined(channels)

    async def collect() -> tuple[list[bytes], list[str]]:
        loop = asyncio.get_running_loop()
        found: list[bytes] = []
        complaints: list[str] = []
        loop.set_exception_handler(lambda _, context: complaints.append(str(context.get("exception"))))

        def on_received(received: Received) -> None:
            if received.payload == b"bad":
                raise RuntimeError("the owner's bug")
            found.append(received.payload)

        for payload in (b"one", b"bad", b"two"):
            client.send(payload)
        deadline_s = time.monotonic() + DEADLINE_S
        # No public call tells that a payload arrived. This one also consumes the edge of the descriptor.
        while isinstance(server, ZmqControlServer) and not _events(server._socket) & zmq.POLLIN:  # noqa: SLF001
            assert time.monotonic() < deadline_s
            time.sleep(0.0005)
        server.watch(loop, on_received)
        await become(lambda: len(found) >= 2)
        server.close()
        return found, complaints

    assert asyncio.run(collect()) == ([b"one", b"two"], ["the owner's bug"])


def count_batches(monkeypatch: pytest.MonkeyPatch, num_taken: Callable[[], int]) -> list[int]:
    """Return a list that grows by the payloads of each batch that a watched end takes."""
    batches: list[int] = []
    run = Waker.take_batch

    def counted(waker: Waker) -> None:
        before = num_taken()
        run(waker)
        batches.append(num_taken() - before)

    monkeypatch.setattr(Waker, "take_batch", counted)
    return batches


@pytest.mark.parametrize("is_stranger", [False, True], ids=["a peer", "a stranger"])
def test_a_flood_of_messages_does_not_block_the_loop(
    channels: Channels, is_stranger: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each payload that is dropped counts like one that is handed over.

    A batch that finds the socket empty can be followed by another one in the same turn of the loop, so a turn takes fewer than
    two batches.
    """
    server = channels.open_server()
    server.allow(7, channels.key)
    client = channels.open_client(server.address, 9 if is_stranger else 7)
    heard: list[Received] = []
    batches = count_batches(monkeypatch, lambda: server.num_dropped + len(heard))

    async def run() -> tuple[int, int]:
        server.watch(asyncio.get_running_loop(), heard.append)
        client.watch(asyncio.get_running_loop(), lambda payload: None)  # its loop sends what the socket did not take at once
        num_sent = num_taken = most = 0
        async with asyncio.timeout(DEADLINE_S):
            while WATCH_BATCH not in batches or num_taken < num_sent:  # until a batch was full
                if WATCH_BATCH not in batches and num_sent - num_taken < 4 * WATCH_BATCH:
                    num_sent += sum(client.send(b"x") for _ in range(4 * WATCH_BATCH))
                await asyncio.sleep(0)
                before, num_taken = num_taken, server.num_dropped + len(heard)
                most = max(most, num_taken - before)
        server.close()
        client.close()
        return num_sent, most

    num_sent, most = asyncio.run(run())
    assert max(batches) == WATCH_BATCH and most < 2 * WATCH_BATCH
    assert server.num_dropped == (num_sent if is_stranger else 0)


def test_payloads_that_take_long_leave_the_loop_its_turns(channels: Channels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is bounded by time, too: a peer decides how long each of its payloads takes."""
    server, client = joined(channels)
    clock = Clock()
    monkeypatch.setattr("transfer.control.base.time", clock)
    heard: list[int] = []
    batches = count_batches(monkeypatch, lambda: len(heard))

    async def run() -> None:
        turns = 0

        def on_received(received: Received) -> None:
            heard.append(turns)
            clock.now_s += 0.6 * WATCH_S

        for _ in range(40):
            assert client.send(b"x")
        server.watch(asyncio.get_running_loop(), on_received)
        async with asyncio.timeout(DEADLINE_S):
            while len(heard) < 40:
                turns += 1
                await asyncio.sleep(0)
        server.close()

    asyncio.run(run())
    assert max(batches) == 2 and all(heard.count(turn) <= 3 for turn in heard), "one payload, an empty socket, and two"


# What only channels with keys do


def test_a_key_that_is_not_allowed_does_not_come_in(with_keys: Channels) -> None:
    server, client = joined(with_keys)
    stranger = with_keys.open_client(server.address, 7 + 1, OTHER_KEYS)
    for _ in range(100):
        stranger.send(b"let me in")
    with_keys.until(lambda: server.num_refused == 1, "one refusal")
    assert server.public_key == SERVER_KEYS.public
    assert not with_keys.heard_by(server) and server.num_dropped == 0, "what it said was kept"
    assert client.send(b"me")
    assert with_keys.heard_by(server, 1) == [Received(peer=7, payload=b"me")]


def test_a_session_is_heard_only_from_the_key_that_attached_it(with_keys: Channels) -> None:
    """Both keys are allowed; the one claims the other's session, whose own writer has not come yet."""
    server = with_keys.open_server()
    server.allow(7, KEYS.public)
    server.allow(8, OTHER_KEYS.public)
    liar = with_keys.open_client(server.address, 7, OTHER_KEYS)
    assert liar.send(b"I am 7")
    with_keys.until(lambda: server.num_dropped == 1, "one drop")
    honest = with_keys.open_client(server.address, 8, OTHER_KEYS)
    assert honest.send(b"I am 8")
    assert with_keys.heard_by(server, 1) == [Received(peer=8, payload=b"I am 8")]
    assert server.num_refused == 0 and server.num_dropped == 1


def test_a_withdrawn_key_is_not_heard_and_does_not_come_in_again(with_keys: Channels) -> None:
    server, client = joined(with_keys)
    server.forget(7)
    assert client.send(b"still me")
    with_keys.until(lambda: server.num_dropped == 1, "one drop")
    again = with_keys.open_client(server.address, 7)
    again.send(b"me again")
    with_keys.until(lambda: server.num_refused == 1, "one refusal")
    assert not with_keys.heard_by(server)


def test_a_key_stays_for_as_long_as_one_of_its_sessions(with_keys: Channels) -> None:
    server, _ = joined(with_keys)
    server.allow(8, KEYS.public)
    server.forget(7)
    other = with_keys.open_client(server.address, 8)
    assert other.send(b"second session")
    assert with_keys.heard_by(server, 1) == [Received(peer=8, payload=b"second session")]


def test_a_client_speaks_only_to_the_server_that_it_was_told_of(with_keys: Channels) -> None:
    server, _ = joined(with_keys)
    server.allow(8, KEYS.public)
    mistaken = with_keys.open_client(server.address, 8, KEYS, OTHER_KEYS.public)
    mistaken.send(b"a secret for somebody else")
    join(with_keys, server, 9)  # nothing but its payload has come
    assert not with_keys.heard_by(server) and not server.send(8, b"an answer") and not with_keys.heard_by(mistaken)


def test_a_secret_key_is_never_shown() -> None:
    assert new_key_pair() != new_key_pair()
    shown = f"{KEYS} {KEYS!r}"
    assert repr(KEYS.public) in shown
    assert repr(KEYS.secret) not in shown and "secret" not in shown
