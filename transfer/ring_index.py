"""Indexes of positions among thousands: sorted positions, grants that wait for bytes, and covered bytes.

The questions of a ring, its writers and its receiver must cost as much with thousands of live grants as with ten. Pure.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from typing import Final, Generic, Protocol, TypeVar

BLOCK_POSITIONS: Final = 512
"""Positions of a block before it is split: few enough that moving them costs less than finding one."""

_T = TypeVar("_T")


LOOK_STEPS: Final = 1 << 14
"""Rounds of the ring that the looks of one turn go back, some 5 ms. One look goes back once for each released range at most."""


class SortedPositions:
    """A set of positions in ascending order, in blocks: adding or removing one moves at most a block.

    Source: the list of lists of the Python package sortedcontainers.
    """

    def __init__(self, block_positions: int = BLOCK_POSITIONS) -> None:
        self._most = block_positions
        self._blocks: list[list[int]] = []  # none of them empty
        self._firsts: list[int] = []  # the first position of each block

    def __len__(self) -> int:
        return sum(self.block_sizes)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._blocks)

    @property
    def block_sizes(self) -> list[int]:
        """Number of positions in each block: the most that one step can move."""
        return list(map(len, self._blocks))

    def add(self, position: int) -> None:
        """Add a new position."""
        at = bisect_right(self._firsts, position) - 1
        if at < 0:
            if not self._blocks:
                self._blocks.append([position])
                self._firsts.append(position)
                return
            at, self._firsts[0] = 0, position
        block = self._blocks[at]
        insort(block, position)
        if len(block) > self._most:
            half = self._most // 2
            self._blocks.insert(at + 1, block[half:])
            self._firsts.insert(at + 1, block[half])
            del block[half:]

    def remove(self, position: int) -> None:
        """Remove a position of the set."""
        at = bisect_right(self._firsts, position) - 1
        block = self._blocks[at]
        if len(block) == 1:
            del self._blocks[at], self._firsts[at]
            return
        del block[bisect_left(block, position)]
        self._firsts[at] = block[0]

    def below(self, position: int) -> int | None:
        """Return the highest position below `position`, or None."""
        at = bisect_left(self._firsts, position) - 1
        if at < 0:
            return None
        block = self._blocks[at]
        return block[bisect_left(block, position) - 1]

    def cycle_from(self, position: int, count: int) -> list[int]:
        """Return the first `count` positions from `position` on, and from the lowest after the highest; each once at most."""
        at = max(bisect_right(self._firsts, position) - 1, 0)
        upper = itertools.dropwhile(lambda one: one < position, itertools.chain.from_iterable(self._blocks[at:]))
        lower = itertools.takewhile(lambda one: one < position, self)
        return list(itertools.islice(itertools.chain(upper, lower), count))

    def take(self, begin: int, end: int) -> list[int]:
        """Remove and return the positions in [begin, end)."""
        taken: list[int] = []
        at = max(bisect_right(self._firsts, begin) - 1, 0)
        while at < len(self._blocks) and self._firsts[at] < end:
            block = self._blocks[at]
            low = bisect_left(block, begin)
            high = bisect_left(block, end, low)
            taken += block[low:high]
            del block[low:high]
            if block:
                self._firsts[at] = block[0]
                at += 1
            else:
                del self._blocks[at], self._firsts[at]
        return taken


class PositionIndex(Generic[_T]):
    """Things by position, any number at one, removed by ranges of positions."""

    def __init__(self) -> None:
        self._positions = SortedPositions()
        self._things: dict[int, list[_T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._things.values()))

    @property
    def num_positions(self) -> int:
        """Positions that take memory: those with things."""
        return len(self._things)

    def add(self, position: int, thing: _T) -> None:
        things = self._things.setdefault(position, [])
        if not things:
            self._positions.add(position)
        things.append(thing)

    def remove(self, position: int, thing: _T) -> None:
        """Remove a thing that was added there."""
        things = self._things[position]
        things.remove(thing)
        if not things:
            del self._things[position]
            self._positions.remove(position)

    def take(self, begin: int, end: int) -> list[_T]:
        """Remove and return the things at positions [begin, end), in their order."""
        return [thing for position in self._positions.take(begin, end) for thing in self._things.pop(position)]


class RingRange(Protocol):
    """Positions [begin, end) of a ring: a grant. No two begin at one position."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...


_S = TypeVar("_S", bound=RingRange)


class WaitingGrants(Generic[_S, _T]):
    """Grants that wait until nothing older is on their bytes, oldest first.

    Each waits for one position, the highest in its way, and is looked at again only when that one is released. The grants ahead
    of it usually must go first anyway. So each grant is looked at once or twice, however many wait.

    A peer can make looks expensive, and cause a look at all grants at once. So a turn looks only until its steps are used up, and
    the next turns look at the rest.

    Args:
        blocker_of: Return the highest unreleased position in a grant's way, or None: `RingView.blocker_of` or its allocator's.
        num_steps: Return the steps of all looks so far: the ring's `num_steps`. Without it, a turn has no bound.
    """

    def __init__(self, blocker_of: Callable[[_S], int | None], num_steps: Callable[[], int] = lambda: 0) -> None:
        self._blocker_of = blocker_of
        self._num_steps = num_steps
        self._last_step: int | None = None  # of this turn; None before its first look
        self._later: dict[int, None] = {}  # those that no turn has had the steps for, in order
        self._items: dict[int, tuple[_S, _T]] = {}  # by grant.begin, as everything here
        self._blockers: dict[int, int] = {}  # of those that wait
        self._blocked: PositionIndex[int] = PositionIndex()  # the reverse
        # A heap of grants that may begin. Some are gone, and a peer can place another grant, which waits, at their position.
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def has_free(self) -> bool:
        """Whether `pop()` would return a grant."""
        while self._free and not self._is_free(self._free[0]):
            heapq.heappop(self._free)
        return bool(self._free)

    @property
    def has_later(self) -> bool:
        """Whether grants are left for `begin_turn()` to look at."""
        return bool(self._later)

    def begin_turn(self) -> None:
        """Begin another turn with looks at the grants that earlier turns left."""
        self._last_step = None
        while self._later and self._may_look():
            name = next(iter(self._later))
            del self._later[name]
            self._look(self._items[name][0])

    def add(self, grant: _S, item: _T) -> None:
        """Add a new grant."""
        self._items[grant.begin] = grant, item
        self._look(grant)

    def discard(self, grant: _S) -> None:
        """Remove a grant. No-op if it does not wait."""
        if self._items.pop(grant.begin, None) is None:
            return
        self._later.pop(grant.begin, None)
        if grant.begin in self._blockers:
            self._blocked.remove(self._blockers.pop(grant.begin), grant.begin)

    def wake(self, begin: int, end: int) -> None:
        """Positions [begin, end) are released."""
        if not self._blockers:
            return
        for name in self._blocked.take(begin, end):
            del self._blockers[name]
            self._look(self._items[name][0])

    def first(self) -> _T:
        """Return the oldest grant that may go. Raise IndexError if all must wait: see `has_free`."""
        if not self.has_free:
            raise IndexError(f"{len(self)} grants wait, and none may go")
        return self._items[self._free[0]][1]

    def pop(self) -> _T:
        """Remove and return the oldest grant that may go. Raise IndexError if all must wait: see `has_free`."""
        item = self.first()
        del self._items[heapq.heappop(self._free)]
        return item

    def _is_free(self, name: int) -> bool:
        return name in self._items and name not in self._blockers and name not in self._later

    def _may_look(self) -> bool:
        """Whether this turn has steps left."""
        if self._last_step is None:
            self._last_step = self._num_steps() + LOOK_STEPS
        return self._num_steps() < self._last_step

    def _look(self, grant: _S) -> None:
        if not self._may_look():
            self._later[grant.begin] = None
            return
        blocker = self._blocker_of(grant)
        if blocker is None:
            heapq.heappush(self._free, grant.begin)
        else:
            self._blockers[grant.begin] = blocker
            self._blocked.add(blocker, grant.begin)


class CoveredOffsets:
    """The offsets of a ring that intervals cover, and the gaps between them.

    Intervals may overlap: an offset is covered until every interval on it is removed. Offsets are kept as runs, and the same
    number of intervals covers each offset of a run. The cost of an operation is proportional to the runs that it passes.

    Args:
        capacity_bytes: Size of the ring. Intervals lie within [0, capacity_bytes).
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._edges: list[int] = [0, capacity_bytes]  # run i is [edges[i], edges[i + 1])
        self._counts: list[int] = [0]  # intervals on each run; neighbours differ
        self._no_gap_bytes = capacity_bytes + 1  # the smallest size for which a search found no gap

    def add(self, begin: int, end: int) -> None:
        """Cover [begin, end) once more."""
        self._count(begin, end, 1)

    def remove(self, begin: int, end: int) -> None:
        """Remove an interval that was added."""
        self._count(begin, end, -1)
        self._no_gap_bytes = self._edges[-1] + 1

    def first_gap(self, offset: int, size: int) -> int | None:
        """Return the begin of the first `size` uncovered bytes, or None if no gap has that size.

        The search begins at `offset` and continues at 0 after the end of the ring; a gap does not cross that end.
        """
        if size >= self._no_gap_bytes:
            return None
        edges, counts = self._edges, self._counts
        first = bisect_right(edges, offset) - 1
        if not counts[first] and offset + size <= edges[first + 1]:
            return offset
        for run in itertools.chain(range(first + 1, len(counts)), range(first + 1)):
            if not counts[run] and edges[run] + size <= edges[run + 1]:
                return edges[run]
        self._no_gap_bytes = size
        return None

    def runs(self) -> list[tuple[int, int]]:
        """Return the begin of each run and the number of intervals that cover it, in ascending order."""
        return list(zip(self._edges, self._counts, strict=False))

    def _count(self, begin: int, end: int, step: int) -> None:
        """Add `step` to the number of intervals on [begin, end)."""
        first, behind = self._cut(begin), self._cut(end)
        for run in range(first, behind):
            self._counts[run] += step
        for run in (behind, first):  # only here can neighbours have become equal; the upper one first, which moves no index
            if 0 < run < len(self._counts) and self._counts[run] == self._counts[run - 1]:
                del self._edges[run], self._counts[run]

    def _cut(self, offset: int) -> int:
        """Make `offset` an edge and return its index."""
        at = bisect_left(self._edges, offset)
        if self._edges[at] != offset:
            self._edges.insert(at, offset)
            self._counts.insert(at, self._counts[at - 1])
        return at
