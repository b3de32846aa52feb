"""The in-process twin misbehaves on request, and always in the same way for the same seed."""

from __future__ import annotations

import pytest

from transfer.control.base import QUEUE_PAYLOADS
from transfer.control.inproc import Faults, InprocControlClient, InprocControlServer

SENT = [b"%d" % number for number in range(200)]


def delivered(faults: Faults, seed: int, *, num_ticks: int = 0) -> list[bytes]:
    server = InprocControlServer(faults=faults, seed=seed)
    server.allow(1)
    client = InprocControlClient(server.address, session_id=1)
    found: list[bytes] = []
    try:
        for payload in SENT:
            assert client.send(payload)
        server.drain(lambda received: found.append(received.payload))
        for _ in range(num_ticks):
            server.advance()
            server.drain(lambda received: found.append(received.payload))
    finally:
        client.close()
        server.close()
    return found


@pytest.mark.parametrize(
    ("faults", "fewest", "most"),
    [
        (Faults(loss=0.3), 100, 180),
        (Faults(duplication=0.3), 220, 300),
        (Faults(reordering=0.3), 200, 200),
        (Faults(max_delay_ticks=3), 200, 200),
    ],
    ids=["loss", "duplication", "reordering", "delay"],
)
def test_each_fault_happens_and_does_nothing_else(faults: Faults, fewest: int, most: int) -> None:
    found = delivered(faults, 2, num_ticks=3)
    assert found == delivered(faults, 2, num_ticks=3)
    assert fewest <= len(found) <= most and found != SENT
    assert set(found) == set(SENT) or faults.loss
    assert faults.reordering or faults.max_delay_ticks or sorted(found, key=SENT.index) == found


def test_a_full_queue_is_not_yet_in_both_directions() -> None:
    server = InprocControlServer()
    server.allow(1)
    client = InprocControlClient(server.address, session_id=1)
    taken = 0
    while taken < 2 * QUEUE_PAYLOADS and server.send(1, b"down"):
        taken += 1
    assert taken == QUEUE_PAYLOADS and server.num_unsent == 1
    assert client.drain(lambda _: None) == taken
    assert server.send(1, b"room again")
    taken = 0
    while taken < 2 * QUEUE_PAYLOADS and client.send(b"up"):
        taken += 1
    assert taken == QUEUE_PAYLOADS and client.num_unsent == 1
    assert server.drain(lambda _: None) == taken
    assert client.send(b"room again")
    client.close()
    server.close()
