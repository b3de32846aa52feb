"""A channel between a leader and its ranks on other hosts loses no payload, although connections break."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.control.zmq_ends import KEYS, SERVER_KEYS, open_ears
from transfer.control.base import QUEUE_PAYLOADS, Received
from transfer.control.repeating_channel import (
    HEADER_BYTES,
    REPEAT_S,
    STUCK_S,
    TICK_S,
    NumberedPayloads,
    RepeatingClient,
    RepeatingServer,
)
from transfer.control.zmq_channel import ZmqControlClient, ZmqControlServer
from transfer.errors import LocalProtocolError


class Way:
    """Frames from one end to the other, in order; some are lost."""

    def __init__(self, source: NumberedPayloads, target: NumberedPayloads, is_lost: Callable[[], bool]) -> None:
        self.source, self.target = source, target
        self.taken: list[bytes] = []
        self._is_lost = is_lost

    def carry(self, frame: bytes, now_s: float) -> None:
        if not self._is_lost() and (payload := self.target.take(frame, now_s)) is not None:
            self.taken.append(payload)


@given(st.integers(0, 2**32), st.floats(0.0, 0.9), st.integers(0, 40), st.integers(0, 40))
def test_whatever_is_lost_each_payload_arrives_once_and_in_order(seed: int, loss: float, there: int, back: int) -> None:
    dice = random.Random(seed)
    is_bad = True

    def is_lost() -> bool:
        return is_bad and dice.random() < loss

    ends = NumberedPayloads(), NumberedPayloads()
    ways = Way(ends[0], ends[1], is_lost), Way(ends[1], ends[0], is_lost)
    sent: tuple[list[bytes], list[bytes]] = ([], [])
    now_s = 0.0
    for turn in range(80):
        now_s += TICK_S
        for way, count, payloads in zip(ways, (there, back), sent, strict=True):
            if turn < count:
                payloads.append(f"{turn}".encode())
                way.carry(way.source.frame(payloads[-1], now_s), now_s)
            for frame in way.source.due(now_s):
                way.carry(frame, now_s)
    is_bad = False
    for _ in range(2 * round(REPEAT_S / TICK_S) + 2):
        now_s += TICK_S
        for way in ways:
            for frame in way.source.due(now_s):
                way.carry(frame, now_s)
    assert [way.taken for way in ways] == list(sent)
    assert all(not end.due(now_s + REPEAT_S) for end in ends), "everything is acknowledged, and nothing more is sent"


def test_a_payload_without_an_acknowledgement_is_sent_again_and_then_ends_the_link() -> None:
    end = NumberedPayloads()
    first = end.frame(b"one", 0.0)
    end.frame(b"two", 1.0)
    assert end.due(REPEAT_S - 0.1) == []
    assert end.due(REPEAT_S) == [first, end.due(2 * REPEAT_S)[1]]
    assert not end.is_stuck(STUCK_S - 0.1) and end.is_stuck(STUCK_S)
    other = NumberedPayloads()
    assert other.take(first, 0.0) == b"one"
    [acknowledgement] = other.due(0.0)
    assert end.take(acknowledgement, STUCK_S) is None
    assert not end.is_stuck(STUCK_S + 1), "the peer lives: it has taken one"


def test_payloads_that_wait_are_bounded() -> None:
    end = NumberedPayloads()
    for _ in range(QUEUE_PAYLOADS):
        assert not end.is_stuck(0.0)
        end.frame(b"", 0.0)
    assert end.is_stuck(0.0)


@pytest.mark.parametrize(
    ("frame", "problem"),
    [(b"short", f"must have at least {HEADER_BYTES}"), (bytes(8) + b"\x01" + bytes(7), "acknowledges payload 1; 0 were sent")],
)
def test_a_frame_that_no_peer_sends_is_an_error(frame: bytes, problem: str) -> None:
    with pytest.raises(LocalProtocolError, match=problem):
        NumberedPayloads().take(frame, 0.0)


class LossyServer(ZmqControlServer):
    """Loses what `lost` counts down, as a connection that breaks."""

    lost = 0

    def send(self, peer: int, payload: bytes) -> bool:
        if self.lost:
            self.lost -= 1
            return False
        return super().send(peer, payload)


def test_real_ends_repair_a_loss_and_forget_strangers() -> None:
    """Removing the timer, or the repetition, leaves the second payload lost."""
    now_s = [0.0]
    with open_ears() as ears:
        inner = LossyServer("tcp://127.0.0.1:0", keys=SERVER_KEYS)
        server = RepeatingServer(inner, clock=lambda: now_s[0])
        assert (server.address, server.public_key) == (inner.address, SERVER_KEYS.public)
        heard = ears.hear(server)
        assert not server.send(7, b"nobody"), "it is not allowed"
        server.allow(7, KEYS.public)
        client = RepeatingClient(
            ZmqControlClient(server.address, session_id=7, keys=KEYS, server_key=server.public_key), clock=lambda: now_s[0]
        )
        told = ears.hear(client)
        assert client.send(b"hello")
        ears.until(lambda: heard == [Received(peer=7, payload=b"hello")], "hello")
        assert server.send(7, b"one")
        ears.until(lambda: told == [b"one"], "one")
        inner.lost = 1
        assert server.send(7, b"two") and server.send(7, b"three")
        now_s[0] += REPEAT_S
        ears.until(lambda: told == [b"one", b"two", b"three"], "the rest, in order")
        server.forget(7)
        assert not server.send(7, b"gone")
        assert (server.num_refused, server.num_dropped) == (0, 0)
        client.close()
        now_s[0] += 2 * STUCK_S
        server.close()


def test_a_client_whose_server_is_gone_says_so() -> None:
    now_s = [0.0]
    loop = asyncio.new_event_loop()
    server = ZmqControlServer("tcp://127.0.0.1:0", keys=SERVER_KEYS)
    client = RepeatingClient(
        ZmqControlClient(server.address, session_id=7, keys=KEYS, server_key=server.public_key), clock=lambda: now_s[0]
    )
    server.close()
    assert client.send(b"one")
    now_s[0] = STUCK_S
    assert not client.send(b"two")
    client.close()
    loop.close()
