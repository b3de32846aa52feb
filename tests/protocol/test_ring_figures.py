"""What a rank tells of its ring means what the metrics' help says."""

from __future__ import annotations

from tests.protocol.machines import CELL, ReceiverHand
from transfer.metrics import RANK_METRICS

HELP = {spec.name: spec.help for spec in RANK_METRICS}


def test_grants_that_wait_for_room_are_live_and_the_peak_is_a_full_ring() -> None:
    receiver = ReceiverHand(ring_cells=4)
    receiver.expect(num_tokens=12)
    receiver.ask(0)
    assert (receiver.ring.live_bytes, receiver.machine.ring_peak_bytes) == (2 * CELL, 2 * CELL)
    receiver.ask(1, 2)
    assert (receiver.ring.live_bytes, receiver.machine.ring_peak_bytes) == (6 * CELL, 4 * CELL)
    assert HELP["kvferry_ring_live_bytes"].endswith("those that wait for room too; may be above the capacity.")
    assert HELP["kvferry_ring_peak_bytes"].endswith("at most the capacity.")
