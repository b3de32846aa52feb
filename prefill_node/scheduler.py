"""Which request a prefill node starts next, and which tokens its next step computes. Pure: no clock, no I/O.

A request waits (pinning nothing), is started once this node's pool and the decode node have room for all of it, is computed
chunk by chunk, and gives its pages back when every rank has gathered them.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.errors import LocalProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """Tokens [begin, end) of one request, computed in one step; they lie within one cell of the chunk grid."""

    request_id: str
    begin: int
    end: int
    is_last: bool


@dataclass(slots=True, kw_only=True)
class _Request:
    num_tokens: int
    num_pages: int
    computed: int = 0


class PrefillScheduler:
    """See the module's docstring.

    Args:
        pool_pages: Pages of every rank's pool.
        page_size: Tokens per page.
        chunk_tokens: Grid of the chunks: a step computes a request up to the next multiple of it.
        max_step_tokens: Tokens that one step computes at most; at least one chunk is always taken.
        max_running: Requests that may be between start and release.
    """

    def __init__(self, *, pool_pages: int, page_size: int, chunk_tokens: int, max_step_tokens: int, max_running: int) -> None:
        self._page_size = page_size
        self._chunk_tokens = chunk_tokens
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._free_pages = pool_pages
        self._pool_pages = pool_pages
        self._waiting: dict[str, _Request] = {}
        self._computing: dict[str, _Request] = {}
        self._sending: dict[str, _Request] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._computing) + len(self._sending)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def can_ever_hold(self, num_tokens: int) -> bool:
        return self.pages_for(num_tokens) <= self._pool_pages

    def submit(self, request_id: str, num_tokens: int) -> None:
        """Put a request at the queue's end."""
        if request_id in self._waiting or request_id in self._computing or request_id in self._sending:
            raise LocalProtocolError(f"request {request_id} submitted twice")
        self._waiting[request_id] = _Request(num_tokens=num_tokens, num_pages=self.pages_for(num_tokens))

    def startable(self) -> list[str]:
        """Waiting requests that this node has room for, the oldest first.

        A younger one is named only while the older ones before it fit as well: what waits for pages is not overtaken here. (One
        that the decode side has no room for is: that side's room depends on where the request goes.)
        """
        room, slots, names = self._free_pages, self._max_running - self.num_running, []
        for request_id, request in self._waiting.items():
            if request.num_pages > room or slots == 0:
                break
            room, slots = room - request.num_pages, slots - 1
            names.append(request_id)
        return names

    def start(self, request_id: str) -> None:
        """The decode side has reserved its room: take this side's pages."""
        request = self._waiting.pop(request_id)
        self._free_pages -= request.num_pages
        self._computing[request_id] = request

    def next_step(self) -> tuple[StepItem, ...]:
        """The next step's items, the oldest requests first; marks them as computed. Empty when there is nothing to compute."""
        items: list[StepItem] = []
        budget = self._max_step_tokens
        for request_id, request in list(self._computing.items()):
            begin = request.computed
            end = min(request.num_tokens, (begin // self._chunk_tokens + 1) * self._chunk_tokens)
            if items and end - begin > budget:
                break
            budget -= end - begin
            request.computed = end
            is_last = end == request.num_tokens
            items.append(StepItem(request_id=request_id, begin=begin, end=end, is_last=is_last))
            if is_last:
                self._sending[request_id] = self._computing.pop(request_id)
        return tuple(items)

    def withdraw(self, request_id: str) -> bool:
        """Compute no more of the request; True when it was still waiting and nothing is left of it."""
        if self._waiting.pop(request_id, None) is not None:
            return True
        if request_id in self._computing:
            self._sending[request_id] = self._computing.pop(request_id)
        return False

    def release(self, request_id: str) -> None:
        """Every rank has given the request's pages back."""
        request = self._sending.pop(request_id, None) or self._computing.pop(request_id)
        self._free_pages += request.num_pages

    def check_idle(self) -> None:
        """Raises LocalProtocolError when nothing is in flight and yet pages are missing."""
        if not self._computing and not self._sending and self._free_pages != self._pool_pages:
            raise LocalProtocolError(f"{self._pool_pages - self._free_pages} pages are missing in an idle scheduler")
