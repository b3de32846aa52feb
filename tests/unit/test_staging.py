from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transfer.errors import ChunkTooLarge, ConfigError, LocalProtocolError, MemoryPlanError
from transfer.staging import ALIGNMENT_BYTES, NOT_YET, StagingBuffer, StagingSlot, StagingSlots, zeroed_bytes


def slots(num_slots: int = 3, slot_bytes: int = 5000) -> StagingSlots:
    buffer = StagingBuffer(StagingSlots.required_bytes(num_slots, slot_bytes))
    return StagingSlots(buffer, num_slots=num_slots, slot_bytes=slot_bytes)


def acquired(of: StagingSlots) -> StagingSlot:
    slot = of.acquire()
    assert slot is not NOT_YET
    return slot


def test_a_buffer_is_aligned_zero_and_really_there() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    buffer = StagingBuffer(64 << 20)
    assert resident_bytes() - before >= 60 << 20
    assert buffer.tensor.data_ptr() % ALIGNMENT_BYTES == 0 and buffer.num_bytes == 64 << 20
    assert not buffer.tensor.any() and buffer.device == torch.device("cpu")
    buffer.part(8, 16).fill_(1)
    assert int(buffer.tensor.sum()) == 8


def test_parts_stay_inside() -> None:
    buffer = StagingBuffer(100)
    assert buffer.part(100, 100).numel() == 0
    for begin, end in ((-1, 5), (5, 4), (0, 101)):
        with pytest.raises(LocalProtocolError, match=rf"\[{begin}, {end}\) leaves the buffer of 100"):
            buffer.part(begin, end)


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_bytes is 0"):
        StagingBuffer(0)
    with pytest.raises(MemoryPlanError, match="refused"):
        zeroed_bytes(1 << 60)
    for num_slots, slot_bytes in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="both must be at least 1"):
            StagingSlots.required_bytes(num_slots, slot_bytes)
    with pytest.raises(ConfigError, match="too small: 2 x 5000 take 16384"):
        StagingSlots(StagingBuffer(16383), num_slots=2, slot_bytes=5000)


def test_slots_are_aligned_and_apart() -> None:
    all_of_them = slots()
    held = [acquired(all_of_them) for _ in range(3)]
    assert all_of_them.acquire() is NOT_YET and all_of_them.num_free == 0
    for slot in held:
        slot.tensor.fill_(slot.index + 1)
        assert slot.tensor.data_ptr() % ALIGNMENT_BYTES == 0
        assert slot.tensor.data_ptr() == all_of_them.buffer.tensor.data_ptr() + slot.begin
    assert all(bool((slot.tensor == slot.index + 1).all()) for slot in held)


def test_a_slot_is_released_once() -> None:
    some = slots(num_slots=1)
    slot = acquired(some)
    some.release(slot)
    with pytest.raises(LocalProtocolError, match="slot 0 is not held"):
        some.release(slot)
    again = acquired(some)  # the same index: the stale value must still not release it
    with pytest.raises(LocalProtocolError):
        some.release(slot)
    with pytest.raises(LocalProtocolError):
        slots().release(again)
    some.release(again)
    assert some.num_free == 1


def test_a_payload_fits_its_slot() -> None:
    slot = acquired(slots())
    assert slot.payload(5000).numel() == 5000 and slot.payload(0).numel() == 0
    with pytest.raises(ChunkTooLarge, match="chunk of 5001 bytes does not fit a staging slot of 5000"):
        slot.payload(5001)


@given(actions=st.lists(st.integers(0, 5), max_size=40))
def test_invariants_hold_in_any_order(actions: list[int]) -> None:
    under_test, held = slots(slot_bytes=8), []
    for action in actions:
        if action < 3:
            slot = under_test.acquire()
            assert (slot is NOT_YET) is (len(held) == 3)
            if slot is not NOT_YET:
                held.append(slot)
        elif held:
            under_test.release(held.pop(action % len(held)))
        under_test.check_invariants()
        assert under_test.num_free == 3 - len(held)


def test_check_invariants_notices() -> None:
    lost = slots()
    lost._free.pop()
    with pytest.raises(LocalProtocolError, match="of 3"):
        lost.check_invariants()
