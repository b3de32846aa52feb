"""Reserve room on the decode node: by count, all or nothing, for the whole life of a request. Pure.

All ranks have pools of the same number of pages, so one count serves them all. A request takes room when its prefill is about to
start. The room covers prompt and new tokens, so that generation never runs out of pages half way. If pages can leave the device
early (`decode_node.offload`), it covers the minimum that a request needs there, and host memory is promised for the rest.

A request that finds too little room waits, and its prefill node asks again. Room is set aside for the oldest request that waits.
Younger requests can take only the free room beyond it. Without this rule, an endless stream of short requests starves a long
one.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from transfer.errors import LocalProtocolError
from transfer.layer_groups import LayerGroup, PageCounts, PageNeeds

WAITS_S: Final = 1.0
"""Seconds for which room is set aside for a waiting request after the last question about it.

A prefill node asks about the oldest requests of its queue every 50 to 60 ms, as long as it has room for them itself.
"""


def page_needs(groups: tuple[LayerGroup, ...], page_size: int, *, slack_tokens: int = 0) -> PageNeeds:
    """Return the rule for the pages that requests need: the last window of a prompt arrives, and each step computes one token.

    Args:
        slack_tokens: Tokens of a window that are kept a little longer, while they are copied, and draft tokens of a step.
    """
    return PageNeeds(groups=groups, page_size=page_size, tokens_in_flight=1 + slack_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Room for a request.

    Args:
        pages: Device pages of each group of layers, on every rank.
        host_pages: Pages in host memory; 0 without host memory.
    """

    pages: PageCounts
    host_pages: int = 0


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A request that found too little room: its place in the order of age, its need, and the time of the last question."""

    place: tuple[float, str]
    needed: Room
    asked_s: float


class Admission:
    """Count the pages that requests hold, and set room aside for the oldest request that waits.

    Args:
        pool_pages: Pages of every rank's pool.
        needs: Rule for the pages that requests need.
        max_running: Requests that may hold room at once.
        now_s: Returns monotonic seconds.
        on_freed: Called when there may be room for a request that found too little.
    """

    def __init__(
        self,
        *,
        pool_pages: PageCounts,
        needs: PageNeeds,
        max_running: int,
        now_s: Callable[[], float] = time.monotonic,
        on_freed: Callable[[], None] = lambda: None,
    ) -> None:
        self.pool_pages = pool_pages
        self.needs = needs
        self._max_running = max_running
        self._now_s = now_s
        self._on_freed = on_freed
        self._held: dict[str, PageCounts] = {}
        self._free_pages = pool_pages
        self._waiting: dict[str, _Waiting] = {}
        self._by_age: list[tuple[float, str]] = []  # the places of those that wait, the oldest first
        self._nothing = Room(pages=PageCounts((0,) * len(pool_pages.by_group)))

    @property
    def num_running(self) -> int:
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room, including those that have stopped asking."""
        return len(self._waiting)

    @property
    def free_pages(self) -> PageCounts:
        return self._free_pages

    def reserve(self, request_id: str, pages: PageCounts, *, accepted_s: float) -> bool:
        """Take room for a request, but not the room set aside for an older one. False means "not yet".

        Args:
            accepted_s: Time of the request's acceptance, which defines its age. All attempts of a request have the same.
        """
        if request_id in self._held:
            raise LocalProtocolError(f"request {request_id} has room already")
        free_slots, free_pages = self._max_running - len(self._held), self._free_pages
        older = self._older(request_id, accepted_s)
        if older is not None:
            free_slots, free_pages = free_slots - 1, free_pages - older.needed.pages
        if free_slots < 1 or not pages.fit(free_pages):
            return False
        self.stop_waiting(request_id)
        self._held[request_id] = pages
        self._free_pages -= pages
        return True

    def wait(self, request_id: str, needed: Room, *, accepted_s: float) -> None:
        """Remember a request that found too little room, unless the pool can never hold it.

        Args:
            needed: The least room with which it can start.
            accepted_s: As of `reserve`.
        """
        if not needed.pages.fit(self.pool_pages):
            return
        place = (accepted_s, request_id)
        if request_id not in self._waiting:
            insort(self._by_age, place)
        self._waiting[request_id] = _Waiting(place=place, needed=needed, asked_s=self._now_s())

    def stop_waiting(self, request_id: str) -> None:
        """Stop setting room aside for a request. Ignore a request that does not wait."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            del self._by_age[bisect_left(self._by_age, waiting.place)]
            self._on_freed()

    def set_aside(self, request_id: str, *, accepted_s: float) -> Room:
        """Return the room that a request may not take, because an older request waits for it."""
        older = self._older(request_id, accepted_s)
        return self._nothing if older is None else older.needed

    @property
    def wanted(self) -> Room:
        """Room that the oldest waiting request needs; empty if no request waits."""
        oldest = self._oldest()
        return self._nothing if oldest is None else oldest.needed

    def _older(self, request_id: str, accepted_s: float) -> _Waiting | None:
        """Return the oldest waiting request if it is older than this one."""
        oldest = self._oldest()
        return oldest if oldest is not None and oldest.place < (accepted_s, request_id) else None

    def _oldest(self) -> _Waiting | None:
        now_s = self._now_s()
        while self._by_age:
            oldest = self._waiting[self._by_age[0][1]]
            if now_s - oldest.asked_s <= WAITS_S:
                return oldest
            self.stop_waiting(oldest.place[1])
        return None

    def resize(self, request_id: str, group: int, count: int) -> bool:
        """Give a request `count` more pages of a group; a negative count takes them back. False means "not yet"."""
        change = PageCounts(tuple(count if index == group else 0 for index in range(len(self.pool_pages.by_group))))
        if not change.fit(self._free_pages):
            return False
        self._held[request_id] += change
        self._free_pages -= change
        if count < 0:
            self._on_freed()
        return True

    def release(self, request_id: str) -> None:
        """Release the room of a request whose pages every rank has given back."""
        self._free_pages += self._held.pop(request_id)
        self._on_freed()

    def holds(self, request_id: str) -> bool:
        return request_id in self._held
