"""Decide which request a prefill node starts next, and which tokens its next step computes. Pure: no clock, no I/O.

Theory of operation. A request passes through five states:

1. Waiting: it holds nothing, on either side.
2. Accepted: the decode instance that it is for has reserved room.
3. Computing: this node's pool has pages for the whole prompt. Each step computes a chunk, after the prefix that a store has.
4. Sending: every token was given to a step. Ranks still gather its pages.
5. Released: every rank has released its pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.errors import LocalProtocolError
from transfer.layer_groups import PREFILL_STEPS_IN_FLIGHT, LayerGroup, PageCounts, PageNeeds

STEPS_AHEAD = PREFILL_STEPS_IN_FLIGHT - 1
"""One step computes while the next one waits in the ranks, so that no round trip to the leader separates them."""

ASKED_AT_ONCE = 8
"""Number of the oldest requests of a destination that ask for room at a time.

A decode node keeps room for the oldest waiting request, so it would answer "not yet" for the others. Several requests ask, so
that the requests of a burst that all have room do not wait for one answer after the other.
"""


def page_needs(groups: tuple[LayerGroup, ...], page_size: int, *, chunk_tokens: int) -> PageNeeds:
    """Return the rule for the pages that a request needs in the pool of a prefill rank."""
    return PageNeeds(groups=groups, page_size=page_size, tokens_in_flight=PREFILL_STEPS_IN_FLIGHT * chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """Tokens [begin, end) of one request, computed in one step. They are within one chunk."""

    request_id: str
    begin: int
    end: int
    is_last: bool


@dataclass(slots=True, kw_only=True)
class _Request:
    num_tokens: int
    pages: PageCounts
    destination: int
    order: int  # order of submission
    is_overtaken: bool = False  # a younger request, for another destination, was started first
    computed: int = 0
    is_held: bool = False  # its prefix is being loaded

    @property
    def is_in_host(self) -> bool:
        return self.pages.by_group[-1] > 0


@dataclass(slots=True, kw_only=True)
class _Room:
    """Room left on this node after the requests that already ask for one destination; `slots` is how many more can ask."""

    pages: PageCounts
    slots: int
    has_named: bool = False
    is_closed: bool = False


class PrefillScheduler:
    """See the module's docstring.

    Args:
        pool_pages: Pages of every rank's pool.
        needs: Pages that requests need.
        chunk_tokens: Tokens of a chunk. A step computes a request up to the next multiple of it.
        max_step_tokens: Maximum tokens of a step, which has at least one chunk.
        max_running: Maximum number of requests between start and release.
        host_pages: Pages for full attention in the host memory of every rank, for requests that the pool cannot hold.
    """

    def __init__(
        self,
        *,
        pool_pages: PageCounts,
        needs: PageNeeds,
        chunk_tokens: int,
        max_step_tokens: int,
        max_running: int,
        host_pages: int = 0,
    ) -> None:
        self._needs = needs
        self._device_pages = pool_pages
        self._host_pages = host_pages
        pool_pages = PageCounts((*pool_pages.by_group, host_pages))  # host pages count as one more group
        self._chunk_tokens = chunk_tokens
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._free_pages = pool_pages
        self._pool_pages = pool_pages
        self._began_in_host = False  # whether the last step began with a request in host memory
        self._num_submitted = 0
        self._waiting: dict[str, _Request] = {}
        self._accepted: dict[str, _Request] = {}
        self._computing: dict[str, _Request] = {}
        self._sending: dict[str, _Request] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that are not started, accepted or not."""
        return len(self._waiting) + len(self._accepted)

    @property
    def free_pages(self) -> PageCounts:
        """Pages of the pool that no started request holds."""
        return PageCounts(self._free_pages.by_group[:-1])

    @property
    def num_running(self) -> int:
        return len(self._computing) + len(self._sending)

    @property
    def all_pages(self) -> str:
        """Device and host pages of this node, as text."""
        return self._shown(self._pool_pages)

    def pages_for(self, num_tokens: int) -> str:
        """Return the pages that a request of `num_tokens` needs, as text."""
        return self._shown(self._pages_of(num_tokens))

    def can_ever_hold(self, num_tokens: int) -> bool:
        return self._pages_of(num_tokens).fit(self._pool_pages)

    def is_in_host(self, request_id: str) -> bool:
        """Return whether a started request's KV of full attention lies in host memory."""
        return self._computing[request_id].is_in_host

    def _pages_of(self, num_tokens: int) -> PageCounts:
        """Return the pages that a request needs in each group of layers. The last number counts host pages."""
        peak = self._needs.peak(num_tokens)
        if peak.fit(self._device_pages) or not self._host_pages:
            return PageCounts((*peak.by_group, 0))
        full, *others = peak.by_group
        return PageCounts((0, *others, full))

    def _shown(self, pages: PageCounts) -> str:
        *device, host = pages.by_group
        shown = self._needs.shown(PageCounts(tuple(device)))
        return f"{shown} device and {host} host" if host else shown

    def submit(self, request_id: str, num_tokens: int, *, destination: int) -> None:
        """Put a request at the end of the queue.

        Args:
            destination: Number of its decode instance. Each instance has its own room.
        """
        if any(request_id in known for known in (self._waiting, self._accepted, self._computing, self._sending)):
            raise LocalProtocolError(f"request {request_id} submitted twice")
        self._num_submitted += 1
        self._waiting[request_id] = _Request(
            num_tokens=num_tokens, pages=self._pages_of(num_tokens), destination=destination, order=self._num_submitted
        )

    def startable(self) -> list[str]:
        """Return the waiting requests that should ask the decode side for room, the oldest first.

        This node must have room for them, counted for each destination alone: a destination without room must not use up the room
        of the others. Likewise, requests in host memory are counted apart from those on the device. Among the requests that are
        counted together, a younger one asks only if the older ones fit, too. Once others have overtaken the oldest of them, it
        asks even if it does not fit. When it is accepted, it gets the next free pages.
        """
        pages = self._free_pages
        for request in self._accepted.values():
            pages -= request.pages
        slots = self._max_running - self.num_running - len(self._accepted)
        rooms: dict[tuple[int, bool], _Room] = {}
        names = []
        for request_id, request in self._waiting.items():
            key = request.destination, request.is_in_host
            room = rooms.get(key)
            if room is None:
                room = rooms[key] = _Room(pages=pages, slots=min(slots, ASKED_AT_ONCE))
            if room.is_closed:
                continue
            room.is_closed = not request.pages.fit(room.pages) or room.slots <= 0
            if not room.is_closed:
                room.pages, room.slots, room.has_named = room.pages - request.pages, room.slots - 1, True
                names.append(request_id)
            elif request.is_overtaken and not room.has_named and not self._accepted:
                names.append(request_id)
        return names

    def short_of_pages(self) -> list[str]:
        """Return the waiting requests if the oldest of them finds too few pages on this node, or an empty list."""
        waiting = {**self._accepted, **self._waiting}
        oldest = next(iter(waiting.values()), None)
        if oldest is None or self.num_running >= self._max_running or oldest.pages.fit(self._free_pages):
            return []
        return list(waiting)

    def accept(self, request_id: str) -> None:
        """Record that the decode side has reserved room. Requests start in the order in which they are accepted."""
        self._accepted[request_id] = self._waiting.pop(request_id)

    def start_accepted(self) -> list[str]:
        """Start accepted requests in their order while there are pages; return the started ones.

        Destinations are asked at the same time, so together they can accept more than this node has room for. The rest waits for
        the pages of running requests, which need nothing more to complete.
        """
        started = []
        for request_id, request in list(self._accepted.items()):
            if not request.pages.fit(self._free_pages) or self.num_running >= self._max_running:
                break
            self._free_pages -= request.pages
            self._computing[request_id] = self._accepted.pop(request_id)
            self._note_overtaken(request)
            started.append(request_id)
        return started

    def hold(self, request_id: str) -> None:
        """Compute no token of a request that was just started until `begin_at`: its prefix is being loaded."""
        self._computing[request_id].is_held = True

    def begin_at(self, request_id: str, num_loaded: int) -> None:
        """Compute a held request without its first `num_loaded` tokens.

        Raises:
            LocalProtocolError: It is not held, or no token would be computed.
        """
        request = self._computing.get(request_id)
        if request is None or not request.is_held:
            raise LocalProtocolError(f"request {request_id} is not held; what was loaded of it comes too late")
        if not 0 <= num_loaded < request.num_tokens:
            raise LocalProtocolError(f"{num_loaded} tokens of {request_id} were loaded, of {request.num_tokens}; one is computed")
        request.is_held, request.computed = False, num_loaded

    def _note_overtaken(self, started: _Request) -> None:
        """Mark the older waiting requests of other destinations."""
        for request in self._waiting.values():
            if request.order > started.order:
                break
            request.is_overtaken = request.is_overtaken or request.destination != started.destination

    def next_step(self) -> tuple[StepItem, ...]:
        """Return the items of the next step, the oldest requests first, and count them as computed. Empty if there are none.

        A prompt in host memory can have hundreds of chunks. After a step that began with such a prompt, prompts on the device
        come first.
        """
        items: list[StepItem] = []
        budget = self._max_step_tokens
        ready = [(request_id, request) for request_id, request in self._computing.items() if not request.is_held]
        if self._began_in_host:
            ready.sort(key=lambda entry: entry[1].is_in_host)
        self._began_in_host = bool(ready) and ready[0][1].is_in_host
        for request_id, request in ready:
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

    def num_computed(self, request_id: str) -> int:
        """Return the tokens of a started request that were loaded or given to a step; 0 for any other."""
        request = self._computing.get(request_id) or self._sending.get(request_id)
        return 0 if request is None else request.computed

    def withdraw(self, request_id: str) -> bool:
        """Compute no more of a request; return True if it was not started, so that it holds nothing here."""
        if self._waiting.pop(request_id, None) is not None or self._accepted.pop(request_id, None) is not None:
            return True
        if request_id in self._computing:
            self._sending[request_id] = self._computing.pop(request_id)
        return False

    def release(self, request_id: str) -> None:
        """Release the pages of a request, which every rank has released."""
        request = self._sending.pop(request_id, None) or self._computing.pop(request_id)
        self._free_pages += request.pages

    def check_idle(self) -> None:
        """Raise LocalProtocolError if nothing is in flight, but pages are missing."""
        if not self._computing and not self._sending and self._free_pages != self._pool_pages:
            missing = self._shown(self._pool_pages - self._free_pages)
            raise LocalProtocolError(f"{missing} pages are missing in an idle scheduler")
