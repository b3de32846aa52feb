"""Work that every rank does, and that counts once the last rank has done it.

Each rank answers each job with one message. The leader uses the minimum over the ranks, so no collective is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from transfer.errors import LocalProtocolError

OnDone = Callable[[frozenset[int]], None]
"""Called with the places, in the job's list of pages, at which any rank failed."""


@dataclass(slots=True, kw_only=True)
class _Job:
    waiting: set[int]
    on_done: OnDone
    failed: set[int] = field(default_factory=set)


class Jobs:
    """Jobs in flight, each of which all ranks get."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._jobs: dict[int, _Job] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, on_done: OnDone) -> int:
        """Return the number of a new job."""
        self._last += 1
        self._jobs[self._last] = _Job(waiting=set(range(self._num_ranks)), on_done=on_done)
        return self._last

    def done(self, rank: int, number: int, failed: Iterable[int] = ()) -> None:
        """Record that a rank has done its part.

        Raises:
            LocalProtocolError: The rank does not have that job, or has done it before.
        """
        job = self._jobs.get(number)
        if job is None or rank not in job.waiting:
            raise LocalProtocolError(f"rank {rank} has done job {number}, which it does not have")
        job.waiting.remove(rank)
        job.failed.update(failed)
        if not job.waiting:
            del self._jobs[number]
            job.on_done(frozenset(job.failed))
