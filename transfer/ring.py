"""The ring: who may write where, and when those bytes are free again.

One monotone byte position names every byte ever granted; ``offset = position % capacity``. The decode rank has a
`StagingAllocator`, which assigns and releases grants. Each writer has a `RingView`, fed by `Watermark`s, and asks it whether a
grant may be written. Both answer with the same function. They differ only by watermarks that the writer has not received, which
delays it and never misleads it.

Rules, each with a test of its number (tests/protocol/test_ring_rules.py): R1 no two unreleased grants that may both be written
share a byte; R2 the watermark never moves back; R3 a grant is published whole and never changes; R4 a grant is released exactly
once; R5 after the last release the ring is empty. (The receiver has R6: a remote write lands in the ring and never in the KV
pool.)
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transfer.errors import ChunkTooLarge, ConfigError, LocalProtocolError, RemoteProtocolError
from transfer.ring_index import CoveredOffsets, SortedPositions

ALIGNMENT_BYTES = 256  # widest vector access of a GPU warp, and a multiple of every element size
MAX_PUBLISHED_RANGES = 64  # a watermark stays under 2 KB; more ranges take turns in laps
MAX_KEPT_RANGES = 16 * MAX_PUBLISHED_RANGES  # limits the memory that a peer can make a writer use
MAX_ATTEMPTS = 2  # a broken chunk is sent again once; a second mismatch is no accident of the wire


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to write positions [begin, end) of a ring. `begin` names it, because no two grants begin at one position.

    Args:
        begin: First position, a multiple of `ALIGNMENT_BYTES`.
        end: One past the last position. The payload may be shorter by less than `ALIGNMENT_BYTES`.
    """

    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end:
            raise LocalProtocolError(f"grant [{self.begin}, {self.end}) is empty or negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """The absolute state of a ring, complete in itself: a lost, repeated or late watermark does no harm.

    Args:
        incarnation: Life of the decode process that has the ring.
        sequence: Number of the watermark in that life. Older ones are ignored.
        position: Everything below it is released.
        released: Released ranges above `position`, ascending, disjoint and apart; perhaps not all.
    """

    incarnation: int
    sequence: int
    position: int
    released: tuple[Grant, ...] = ()

    def __post_init__(self) -> None:
        edge = self.position
        if edge < 0 or self.sequence < 0:
            raise RemoteProtocolError(f"watermark position {self.position}, sequence {self.sequence}: neither can be negative")
        for span in self.released:
            if span.begin <= edge:
                raise RemoteProtocolError(
                    f"watermark range [{span.begin}, {span.end}) overlaps or touches the range below it ({edge})"
                )
            edge = span.end


def _blocker_of(grant: Grant, *, position: int, capacity_bytes: int, unreleased_edge: Callable[[int], int]) -> int | None:
    """Return the highest unreleased position before `grant` that shares a byte with it; None if the grant may be written.

    Looks only at the positions of the grant's bytes in earlier rounds of the ring, and skips the rounds that a released range
    covers. Nothing unreleased is a whole round older than a grant that ends within a round of the watermark.

    Args:
        position: Watermark position.
        unreleased_edge: Given a position above the watermark's, returns one past the highest unreleased position below it.
    """
    size = grant.end - grant.begin
    window = grant.begin - capacity_bytes
    while window + size > position:
        edge = unreleased_edge(window + size)
        if edge > window:
            return edge - 1
        window = edge - 1 - (edge - 1 - grant.begin) % capacity_bytes
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RingAccounts:
    """Everything that a `StagingAllocator` records about its ring, at one moment.

    Args:
        head: Position at which the next grant would begin.
        position: Position of the watermark.
        live: End of each unreleased grant, by its begin.
        live_bytes: Their size, counted with each grant and release.
        quarantined: Live grants whose writer may still write.
        quarantined_bytes: Their size, counted like `live_bytes`.
        suspect_runs: Offsets that new grants avoid, as `CoveredOffsets.runs` returns them.
        range_begins: Begins of the released ranges above the watermark, ascending.
        end_of: End of each of these ranges, by its begin.
        begin_of: Begin of each of these ranges, by its end.
    """

    capacity_bytes: int
    head: int
    position: int
    live: Mapping[int, int]
    live_bytes: int
    quarantined: Sequence[Grant]
    quarantined_bytes: int
    suspect_runs: Sequence[tuple[int, int]]
    range_begins: Sequence[int]
    end_of: Mapping[int, int]
    begin_of: Mapping[int, int]

    def check(self) -> None:
        """Check the rules. Raise LocalProtocolError if one is broken; the message names it."""
        _require(bool(self.live) or self.position == self.head, f"R5: no live grant, watermark {self.position}, head {self.head}")
        edge = self.position
        ranges = [(begin, self.end_of.get(begin, begin)) for begin in self.range_begins]
        for begin, end in ranges:
            _require(edge < begin < end <= self.head, f"released ranges are ascending and apart: [{begin}, {end}) after {edge}")
            edge = end
        _require(
            dict(ranges) == self.end_of and {end: begin for begin, end in ranges} == self.begin_of,
            "released ranges are found by either end",
        )
        unreleased = self.head - self.position - sum(end - begin for begin, end in ranges)
        _require(unreleased == self.live_bytes, f"R4: {unreleased} bytes are unreleased, live grants hold {self.live_bytes}")
        _require(self.live_bytes == sum(end - begin for begin, end in self.live.items()), "live bytes are counted right")
        _require(all(self.live.get(grant.begin) == grant.end for grant in self.quarantined), "a quarantined grant is live")
        _require(
            self.quarantined_bytes == sum(grant.end - grant.begin for grant in self.quarantined),
            "quarantined bytes are counted right",
        )
        suspect = CoveredOffsets(self.capacity_bytes)
        for grant in self.quarantined:
            suspect.add(grant.begin % self.capacity_bytes, _end_offset(grant, self.capacity_bytes))
        _require(suspect.runs() == list(self.suspect_runs), "new grants step around the quarantined bytes")
        live = (Grant(begin, end) for begin, end in self.live.items())
        writable = sorted((grant.begin % self.capacity_bytes, grant.begin, grant) for grant in live if self._is_writable(grant))
        for (_, _, first), (offset, _, second) in itertools.pairwise(writable):
            _require(_end_offset(first, self.capacity_bytes) <= offset, f"R1: writable grants {first} and {second} share a byte")

    def _is_writable(self, grant: Grant) -> bool:
        edge_of = self._unreleased_edge
        return _blocker_of(grant, position=self.position, capacity_bytes=self.capacity_bytes, unreleased_edge=edge_of) is None

    def _unreleased_edge(self, position: int) -> int:
        at = bisect_left(self.range_begins, position) - 1
        return position if at < 0 or self.end_of[self.range_begins[at]] < position else self.range_begins[at]


class StagingAllocator:
    """Assigns a ring's bytes, and knows which of them are in use. Owned by one thread of a decode rank.

    The ring overcommits: a grant that fits the ring at all always succeeds. Whether it may be *written* depends on the watermark.
    Grants may be released in any order. The grant of a writer that may still write (aborted, expired, disconnected) goes into
    quarantine: it stays unreleased, and new grants avoid its bytes if they can.

    Args:
        capacity_bytes: Size of the ring, a positive multiple of `ALIGNMENT_BYTES`.
        incarnation: Life of this process, for every watermark.
    """

    def __init__(self, capacity_bytes: int, *, incarnation: int = 0) -> None:
        if capacity_bytes <= 0 or capacity_bytes % ALIGNMENT_BYTES:
            raise ConfigError(f"ring.capacity_bytes is {capacity_bytes}; it must be a positive multiple of {ALIGNMENT_BYTES}")
        self.capacity_bytes = capacity_bytes
        self.incarnation = incarnation
        self._head = 0
        self._position = 0
        self._live: dict[int, int] = {}  # begin -> end; less to touch than grants, with thousands of them
        self._quarantined: dict[int, Grant] = {}
        self._suspect = CoveredOffsets(capacity_bytes)  # covered by quarantined grants
        # Released ranges above the watermark, apart: found by either end, so that a release joins its neighbours at once.
        self._end_of: dict[int, int] = {}
        self._begin_of: dict[int, int] = {}
        self._range_begins = SortedPositions()
        # When a watermark has no room for all ranges, it names the newest ones, and a lap of watermarks names each of the others.
        self._newest: dict[int, None] = {}  # begins of the ranges that changed last, in that order
        self._lap_begin = 0
        self._next_range = 0  # where the next watermark of the lap goes on
        self._has_wrapped = False  # the lap goes on at the lowest range
        self._chance = incarnation
        self._sequence = 0
        self._live_bytes = 0
        self._quarantined_bytes = 0
        self.num_steps = 0  # that looks for blockers have taken, in all

    @property
    def head(self) -> int:
        """Position at which the next grant would begin, padding aside."""
        return self._head

    @property
    def position(self) -> int:
        """The watermark's position."""
        return self._position

    @property
    def num_live_grants(self) -> int:
        return len(self._live)

    @property
    def oldest_open(self) -> int | None:
        """Begin of the oldest live grant that is not in quarantine; None without one."""
        return next((begin for begin in self._live if begin not in self._quarantined), None)  # granted in order

    @property
    def live_bytes(self) -> int:
        """Bytes of all unreleased grants; above `capacity_bytes` if overcommitted."""
        return self._live_bytes

    @property
    def quarantined_bytes(self) -> int:
        return self._quarantined_bytes

    @property
    def num_ranges(self) -> int:
        """Released ranges above the watermark's position. A watermark names `MAX_PUBLISHED_RANGES` of them."""
        return len(self._end_of)

    def assign(self, num_bytes: int) -> Grant:
        """Return the next grant, of `num_bytes` rounded up to `ALIGNMENT_BYTES`. It never wraps around the ring's end.

        Raise ChunkTooLarge if the ring is smaller than `num_bytes`: it can never be granted.
        """
        size = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if size <= 0:
            raise LocalProtocolError(f"grant of {num_bytes} bytes; it must be positive")
        if size > self.capacity_bytes:
            raise ChunkTooLarge(f"chunk of {num_bytes} bytes does not fit the ring of {self.capacity_bytes} bytes")
        begin = self._place(size)
        if begin != self._head:
            self._add_released(self._head, begin)  # padding: consumed, and free at once
        self._head = begin + size
        grant = Grant(begin, self._head)
        self._live[begin] = grant.end
        self._live_bytes += size
        return grant

    def _place(self, size: int) -> int:
        """Return the begin of a grant of `size`: never across the end of the ring, and around quarantined bytes if possible."""
        capacity = self.capacity_bytes
        offset = self._head % capacity
        gap = self._suspect.first_gap(offset, size) if self._quarantined else None
        if gap is not None:
            return self._head + (gap - offset) % capacity
        # If no gap is large enough, the grant waits until the quarantine ends, as any overcommitted grant does.
        return self._head if offset + size <= capacity else self._head + capacity - offset

    def release(self, grant: Grant) -> None:
        """Release the grant's bytes; the watermark moves as far as it can. Raise LocalProtocolError for a grant that is not live
        (R4)."""
        if self._live.get(grant.begin) != grant.end:
            raise LocalProtocolError(
                f"release of grant [{grant.begin}, {grant.end}), which is not live (R4: released exactly once)"
            )
        del self._live[grant.begin]
        size = grant.end - grant.begin
        self._live_bytes -= size
        if self._quarantined.pop(grant.begin, None) is not None:
            self._quarantined_bytes -= size
            self._suspect.remove(grant.begin % self.capacity_bytes, _end_offset(grant, self.capacity_bytes))
        self._add_released(grant.begin, grant.end)

    def quarantine(self, grant: Grant) -> None:
        """Mark a live grant whose writer may still write. Only `release()` ends it, on proof and never by elapsed time."""
        if self._live.get(grant.begin) != grant.end:
            raise LocalProtocolError(f"quarantine of grant [{grant.begin}, {grant.end}), which is not live")
        if grant.begin not in self._quarantined:
            self._quarantined[grant.begin] = grant
            self._quarantined_bytes += grant.end - grant.begin
            self._suspect.add(grant.begin % self.capacity_bytes, _end_offset(grant, self.capacity_bytes))

    def is_writable(self, grant: Grant) -> bool:
        """Return whether the grant's bytes are free of every earlier grant, as a writer with perfect knowledge would see it."""
        return self.blocker_of(grant) is None

    def blocker_of(self, grant: Grant) -> int | None:
        """Return the highest unreleased position in the grant's way; None if its bytes are free of every earlier grant."""
        return _blocker_of(
            grant, position=self._position, capacity_bytes=self.capacity_bytes, unreleased_edge=self._unreleased_edge
        )

    def name_next(self, grant: Grant) -> None:
        """Name the released ranges that contain the grant's bytes as if they had changed last. Call it for a writable grant."""
        size = grant.end - grant.begin
        window = grant.begin - self.capacity_bytes
        for _ in range(MAX_PUBLISHED_RANGES // 2):  # the others have to take turns
            begin = self._unreleased_edge(window + size)
            if window + size <= self._position or begin not in self._end_of:
                return
            self._make_newest(begin)
            window = begin - 1 - (begin - 1 - grant.begin) % self.capacity_bytes

    def watermark(self) -> Watermark:
        """Return the state to publish, under the next sequence number.

        If a watermark has no room for all released ranges, half of it names the ranges that changed last, because writers wait
        for those. The other ranges take turns in the rest of the watermark, so that each writer receives each range. A range that
        its writer does not receive keeps pages of the writer in use, and blocks the grants that reuse its bytes, until all older
        grants are released.
        """
        self._sequence += 1
        is_cut = len(self._end_of) > MAX_PUBLISHED_RANGES
        named = self._newest_and_next() if is_cut else list(self._range_begins)
        return Watermark(
            incarnation=self.incarnation,
            sequence=self._sequence,
            position=self._position,
            released=tuple([Grant(begin, self._end_of[begin]) for begin in sorted(named)]),
        )

    def _newest_and_next(self) -> set[int]:
        """Return the begins of the ranges for a watermark that has no room for all."""
        return {*self._newest, *self._next_turn(MAX_PUBLISHED_RANGES - len(self._newest))}

    def _next_turn(self, number: int) -> list[int]:
        """Return the begins of the next ranges of the lap: those behind the last ones, until the lap has named each range.

        Each lap begins at a random range. Watermarks are states, and a stream skips some. A stream that delivers every second
        watermark would deliver the same ranges for ever if each lap of two watermarks began at the same range.
        """
        named = self._range_begins.cycle_from(self._next_range, number)
        self._has_wrapped = self._has_wrapped or named[0] < self._next_range
        if self._has_wrapped and named[0] >= self._lap_begin:
            self._chance = (self._chance * 6364136223846793005 + 1442695040888963407) % (1 << 64)  # Source: Knuth's MMIX
            first = (self._chance >> 32) % len(self._end_of)
            self._lap_begin = next(itertools.islice(self._range_begins, first, None))
            named = self._range_begins.cycle_from(self._lap_begin, number)
            self._has_wrapped = False
        self._has_wrapped = self._has_wrapped or named[-1] < named[0]
        self._next_range = named[-1] + 1
        return named

    def accounts(self) -> RingAccounts:
        """Return a copy of the present state; O(live grants and released ranges)."""
        return RingAccounts(
            capacity_bytes=self.capacity_bytes,
            head=self._head,
            position=self._position,
            live=dict(self._live),
            live_bytes=self._live_bytes,
            quarantined=tuple(self._quarantined.values()),
            quarantined_bytes=self._quarantined_bytes,
            suspect_runs=tuple(self._suspect.runs()),
            range_begins=tuple(self._range_begins),
            end_of=dict(self._end_of),
            begin_of=dict(self._begin_of),
        )

    def check_invariants(self) -> None:
        """Check the rules on the present state; for tests, and for an idle node. See `RingAccounts.check`."""
        self.accounts().check()

    def _add_released(self, begin: int, end: int) -> None:
        above = self._end_of.pop(end, None)  # the range that begins where this one ends
        if above is not None:
            del self._begin_of[above]
            self._range_begins.remove(end)
            self._newest.pop(end, None)
            end = above
        if begin == self._position:
            self._position = end
            return
        below = self._begin_of.pop(begin, None)
        if below is None:
            self._range_begins.add(begin)
        else:
            begin = below
        self._end_of[begin] = end
        self._begin_of[end] = begin
        self._make_newest(begin)

    def _make_newest(self, begin: int) -> None:
        self._newest.pop(begin, None)
        self._newest[begin] = None
        if len(self._newest) > MAX_PUBLISHED_RANGES // 2:
            del self._newest[next(iter(self._newest))]

    def _unreleased_edge(self, position: int) -> int:
        self.num_steps += 1
        begin = self._range_begins.below(position)
        return position if begin is None or self._end_of[begin] < position else begin


class RingView:
    """A writer's knowledge of a peer's ring: never more than is true, so "writable" is always safe.

    A range that was once released stays released, even if a later watermark has no room to repeat it. Only the lowest
    `MAX_KEPT_RANGES` ranges are kept. Forgetting only delays. A declined grant that is issued once more may be declined once
    more.

    Args:
        incarnation: Life of the peer's process. Watermarks of another life are ignored.
    """

    def __init__(self, capacity_bytes: int, *, incarnation: int = 0) -> None:
        if capacity_bytes <= 0:
            raise RemoteProtocolError(f"peer's ring of {capacity_bytes} bytes; it must be positive")
        self.capacity_bytes = capacity_bytes
        self.incarnation = incarnation
        self._watermark = Watermark(incarnation=incarnation, sequence=0, position=0)
        # All known released ranges above the watermark.
        self._begins: list[int] = []
        self._ends: list[int] = []
        self.num_steps = 0  # that looks for blockers have taken, in all

    @property
    def watermark(self) -> Watermark:
        """The newest watermark that was received."""
        return self._watermark

    def update(self, watermark: Watermark) -> bool:
        """Take in a watermark. Return False if it was ignored: an older or repeated one, or of another life.

        Raise RemoteProtocolError if a newer watermark moves back (R2).
        """
        if watermark.incarnation != self.incarnation or watermark.sequence <= self._watermark.sequence:
            return False
        if watermark.position < self._watermark.position:
            raise RemoteProtocolError(
                f"watermark of {self.incarnation:#x} moved back from {self._watermark.position} to {watermark.position} (R2)"
            )
        self._watermark = watermark
        # A watermark has limited room. Positions are never used again, so earlier ranges are still released.
        below = bisect_right(self._begins, watermark.position)
        begins, ends = self._begins[below:], self._ends[below:]
        for span in watermark.released:
            first, behind = bisect_left(ends, span.begin), bisect_right(begins, span.end)  # of those that touch it
            if first == behind:
                begins.insert(first, span.begin)
                ends.insert(first, span.end)
            else:
                begins[first:behind] = [min(span.begin, begins[first])]
                ends[first:behind] = [max(span.end, ends[behind - 1])]
        self._begins, self._ends = begins[:MAX_KEPT_RANGES], ends[:MAX_KEPT_RANGES]
        return True

    def is_writable(self, grant: Grant) -> bool:
        """Return whether the grant may be written now; "not yet" is False, never an error."""
        return self.blocker_of(grant) is None

    def blocker_of(self, grant: Grant) -> int | None:
        """Return the highest position in the grant's way that is not known as released; None if the grant may be written."""
        return _blocker_of(
            grant,
            position=self._watermark.position,
            capacity_bytes=self.capacity_bytes,
            unreleased_edge=self._unreleased_edge,
        )

    def _unreleased_edge(self, position: int) -> int:
        self.num_steps += 1
        at = bisect_left(self._begins, position) - 1
        return position if at < 0 or self._ends[at] < position else self._begins[at]

    def can_hold(self, grant: Grant, num_bytes: int) -> bool:
        """Return whether this ring can have issued the grant for `num_bytes`: aligned, large enough, not across its end."""
        return (
            grant.begin % ALIGNMENT_BYTES == 0
            and num_bytes <= grant.end - grant.begin
            and _end_offset(grant, self.capacity_bytes) <= self.capacity_bytes
        )

    def is_released(self, grant: Grant) -> bool:
        """Return whether the peer has released the grant, so that the source bytes are no longer needed."""
        if grant.end <= self._watermark.position:
            return True
        at = bisect_right(self._begins, grant.begin) - 1
        return at >= 0 and grant.end <= self._ends[at]


def _end_offset(grant: Grant, capacity_bytes: int) -> int:
    """Return the offset one past the grant's last byte, in (0, capacity]; a grant never wraps."""
    return grant.begin % capacity_bytes + grant.end - grant.begin


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise LocalProtocolError(f"invariant broken: {what}")


def grant_key(begin: int, attempt: int) -> int:
    """Return the data plane's name for one write into the grant at `begin`, unique in one ring's life; `attempt` is below
    `MAX_ATTEMPTS`."""
    return begin // ALIGNMENT_BYTES * MAX_ATTEMPTS + attempt
