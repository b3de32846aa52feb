"""Divide the staging memory of a prefill rank among the pieces under way. Pure; decided in docs/adr/0067.

The memory is divided into *slots* of equal size, as many as fit. A slot has room for the largest piece that a session can have.
So a join whose plan has smaller pieces makes more slots of the same memory. A piece takes a *place* in a slot. While a slot has a
place, it belongs to the session of that place, and only pieces of this session share it. So a session whose writes hang holds its
own slots only. Free memory is not fragmented: each free slot has room for any piece.

A session can hold thousands of slots. So the arena sorts the slots of each session that have room by that room. Full slots are
not listed.

If the size of slots changes, the places stay where they are. A new slot is used when the places of other sessions that reach into
it are released.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, KeysView
from dataclasses import dataclass, field
from heapq import heappop, heappush

from transfer.errors import LocalProtocolError
from transfer.transport.base import REGION_ALIGNMENT_BYTES


def aligned(num_bytes: int) -> int:
    """Return the next multiple of `REGION_ALIGNMENT_BYTES`, on which every place begins."""
    return -(-num_bytes // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, order=True)
class _Place:
    begin: int
    end: int
    session: int


@dataclass(slots=True, eq=False)
class _Slot:
    begin: int
    end: int
    places: list[_Place] = field(default_factory=list)  # that reach into the slot, in ascending order
    has_released: bool = False  # since it was free
    room: int = 0  # size of the largest gap that the slot is listed with; 0 if it is not listed

    def largest_gap(self) -> int:
        """Return the size of the largest gap; 0 if the slot is free, full, or has places of several sessions."""
        if not self.places or any(place.session != self.places[0].session for place in self.places):
            return 0
        begins = [self.begin, *(aligned(place.end) for place in self.places)]
        ends = [*(place.begin for place in self.places), self.end]
        return max(0, *(end - begin for begin, end in zip(begins, ends, strict=True)))

    def first_gap(self, num_bytes: int) -> int:
        """Return the begin of the first gap of that size. `room` is not smaller."""
        begin = self.begin
        for place in self.places:
            if begin + num_bytes <= place.begin:
                break
            begin = aligned(place.end)
        return begin


class StagingArena:
    """See the module's docstring.

    Invariants (`check_invariants`): places lie in the memory and do not overlap. A slot is free if no place reaches into it, and
    only then.

    Args:
        num_bytes: Size of the staging memory.
        slot_bytes: Size of a slot, at most `num_bytes`.
    """

    def __init__(self, num_bytes: int, slot_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._places: dict[int, _Place] = {}  # by begin
        self._num_of: Counter[int] = Counter()  # places by session; no session has none
        self._draining: set[int] = set()  # begins of the places that lay in a slot with `has_released` at a `divide`
        self._slots: list[_Slot] = []
        self._slot_bytes = 0
        self.divide(slot_bytes)

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        """Slots without a place."""
        return len(self._free)

    def divide(self, slot_bytes: int) -> None:
        """Divide the memory into slots with room for `slot_bytes` each."""
        size = min(aligned(slot_bytes), self.num_bytes)
        if size == self._slot_bytes:
            return
        self._draining.update(place.begin for slot in self._slots if slot.has_released for place in slot.places)
        self._slot_bytes = size
        self._slots = [_Slot(number * size, (number + 1) * size) for number in range(self.num_bytes // size)]
        for place in self._places.values():
            for number in self._reach(place):
                insort(self._slots[number].places, place)
                self._slots[number].has_released |= place.begin in self._draining
        self._free = [number for number, slot in enumerate(self._slots) if not slot.places]  # a heap
        # By session and `has_released`: room and number of the slots with room whose places are all of the session.
        self._rooms: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for number in range(len(self._slots)):
            self._enlist(number)

    def take(self, session: int, num_bytes: int, *, may_open: bool, may_refill: bool) -> int | None:
        """Take a place of `num_bytes`, at most `slot_bytes`. Return its begin, or None if there is no room now.

        Args:
            may_open: Whether the piece may take a free slot.
            may_refill: Whether the piece may take a place in a slot of the session that pieces have left already.
        """
        if num_bytes > self._slot_bytes:
            raise LocalProtocolError(f"a piece has {num_bytes} bytes; a staging slot has {self._slot_bytes}")
        begin = self._gap_of(session, num_bytes, may_refill=may_refill)
        if begin is None and may_open and self._free:
            begin = self._slots[heappop(self._free)].begin
        if begin is not None:
            place = self._places[begin] = _Place(begin, begin + num_bytes, session)
            self._num_of[session] += 1
            for number in self._reach(place):
                self._strike(number)
                insort(self._slots[number].places, place)
                self._enlist(number)
        return begin

    def release(self, begin: int) -> None:
        """Release the place at `begin`."""
        place = self._places.pop(begin)
        self._draining.discard(begin)
        for number in self._reach(place):
            self._strike(number)
            slot = self._slots[number]
            slot.places.remove(place)
            slot.has_released = bool(slot.places)
            if not slot.places:
                heappush(self._free, number)
            self._enlist(number)
        self._num_of[place.session] -= 1
        if not self._num_of[place.session]:
            del self._num_of[place.session]

    def has_one(self, session: int) -> bool:
        """Return whether the session has a place."""
        return session in self._num_of

    @property
    def sessions(self) -> KeysView[int]:
        """Sessions that have a place."""
        return self._num_of.keys()

    def begins(self) -> list[int]:
        """Return the begins of all places, in ascending order."""
        return sorted(self._places)

    def check_invariants(self) -> None:
        """Raise LocalProtocolError if places overlap, or a slot does not know the places that reach into it."""
        end = 0
        for place in sorted(self._places.values()):
            if place.begin < end or place.end > self.num_bytes:
                raise LocalProtocolError(f"invariant broken: {place} overlaps another, or leaves {self.num_bytes} bytes")
            end = place.end
        found = [[p for p in sorted(self._places.values()) if p.begin < slot.end and slot.begin < p.end] for slot in self._slots]
        if found != [slot.places for slot in self._slots]:
            raise LocalProtocolError("invariant broken: staging slots and the places that reach into them differ")
        if sorted(self._free) != [number for number, places in enumerate(found) if not places]:
            raise LocalProtocolError(f"invariant broken: staging slots {sorted(self._free)} are not those without a place")
        rooms = sorted((slot.largest_gap(), number) for number, slot in enumerate(self._slots) if slot.largest_gap())
        if rooms != sorted(room for listed in self._rooms.values() for room in listed):
            raise LocalProtocolError(f"invariant broken: the staging slots with room are {rooms}; {self._rooms} are listed")

    def _gap_of(self, session: int, num_bytes: int, *, may_refill: bool) -> int | None:
        """Return the begin of room in one of the session's own slots, the fullest one that has it."""
        for has_released in (False, True)[: 1 + may_refill]:
            rooms = self._rooms.get((session, has_released), ())
            at = bisect_left(rooms, (num_bytes, 0))
            if at < len(rooms):
                return self._slots[rooms[at][1]].first_gap(num_bytes)
        return None

    def _reach(self, place: _Place) -> Iterator[int]:
        """Return the numbers of the slots that the place reaches into. Bytes behind the last slot are in none."""
        first, last = place.begin // self._slot_bytes, (place.end - 1) // self._slot_bytes
        return iter(range(first, min(last + 1, len(self._slots))))

    def _strike(self, number: int) -> None:
        """Remove a slot that is about to change from the slots with room."""
        slot = self._slots[number]
        if slot.room:
            rooms = self._rooms[slot.places[0].session, slot.has_released]
            del rooms[bisect_left(rooms, (slot.room, number))]
            if not rooms:
                del self._rooms[slot.places[0].session, slot.has_released]

    def _enlist(self, number: int) -> None:
        """Add a slot that was changed to the slots with room."""
        slot = self._slots[number]
        slot.room = slot.largest_gap()
        if slot.room:
            insort(self._rooms.setdefault((slot.places[0].session, slot.has_released), []), (slot.room, number))
