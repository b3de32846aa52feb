"""Decide which request a prefill node starts next, and which tokens its next step computes. Pure: no clock, no I/O.

Theory of operation. A request passes through five states:

1. Waiting: it holds nothing, on either side.
2. Accepted: the decode instance that it is for has reserved room.
3. Computing: this node's pool has pages for the whole prompt. Each step computes a chunk, after the prefix that a store has.
4. Sending: every token was given to a step. Ranks still gather its pages.
5. Released: every rank has released its pages.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

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
    is_asking: bool = False
    computed: int = 0
    is_held: bool = False  # its prefix is being loaded

    @property
    def is_in_host(self) -> bool:
        return self.pages.by_group[-1] > 0

    @property
    def queue(self) -> tuple[int, bool]:
        return self.destination, self.is_in_host


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
        self._waiting: OrderedDict[str, _Request] = OrderedDict()
        # The same requests by destination, and whether they are in host memory. No queue is empty.
        self._queues: dict[tuple[int, bool], OrderedDict[str, _Request]] = {}
        self._changed: set[tuple[int, bool]] = set()  # queues that changed since they were looked at
        # Other queues whose next request lacks room, by the number of older requests, which all ask.
        self._lacking: list[set[tuple[int, bool]]] = [set() for _ in range(ASKED_AT_ONCE)]
        self._has_more_room = False  # since `_lacking` was looked at
        self._accepted: OrderedDict[str, _Request] = OrderedDict()
        self._accepted_pages = PageCounts((0,) * len(pool_pages.by_group))
        # The youngest started request, and the youngest one of the other destinations: (order, destination) each.
        self._youngest_started = (0, 0)
        self._youngest_of_others = (0, 0)
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
        request = _Request(
            num_tokens=num_tokens, pages=self._pages_of(num_tokens), destination=destination, order=self._num_submitted
        )
        self._waiting[request_id] = request
        self._queues.setdefault(request.queue, OrderedDict())[request_id] = request
        self._changed.add(request.queue)

    def next_to_ask(self) -> list[str]:
        """Return the waiting requests that begin to ask the decode side for room now, the oldest first.

        Each asks until `accept`, `not_yet` or `withdraw`. Thousands of requests can wait. So this looks only at queues that
        changed, and after a release at queues whose next request lacks room.

        This node must have room for them, counted for each destination alone: a destination without room must not use up the room
        of the others. Likewise, requests in host memory are counted apart from those on the device. Among the requests that are
        counted together, a younger one asks only if the older ones fit, too. Once others have overtaken the oldest of them, it
        asks even if it does not fit. When it is accepted, it gets the next free pages.
        """
        pages = self._free_pages - self._accepted_pages
        slots = self._max_running - self.num_running - len(self._accepted)
        if self._has_more_room:
            for lacking in self._lacking[: max(slots, 1)]:  # without a slot, one that others have overtaken can ask
                self._changed |= lacking
                lacking.clear()
        self._has_more_room = False
        found: list[tuple[int, str]] = []
        for key in self._changed & self._queues.keys():
            left, num_left, num_asking = pages, min(slots, ASKED_AT_ONCE), 0
            for request_id, request in islice(self._queues[key].items(), ASKED_AT_ONCE):
                has_room = num_left > 0 and request.pages.fit(left)
                if has_room or (num_asking == 0 and not self._accepted and self._is_overtaken(request)):
                    if not request.is_asking:
                        request.is_asking = True
                        found.append((request.order, request_id))
                elif not request.is_asking:
                    self._lacking[num_asking].add(key)
                    break
                left, num_left, num_asking = left - request.pages, num_left - 1, num_asking + 1
        self._changed.clear()
        return [request_id for _, request_id in sorted(found)]

    def not_yet(self, request_id: str) -> None:
        """Record that the decode side has no room for a request now. Ignore a request that does not wait any more."""
        if (request := self._waiting.get(request_id)) is not None:
            request.is_asking = False
            self._changed.add(request.queue)

    def _is_overtaken(self, request: _Request) -> bool:
        """Return whether a younger request, for another destination, was started first."""
        others = self._youngest_started if self._youngest_started[1] != request.destination else self._youngest_of_others
        return others[0] > request.order

    @property
    def num_short_of_pages(self) -> int:
        """Number of waiting requests if the oldest of them finds too few pages on this node; otherwise 0."""
        oldest = next(iter((self._accepted or self._waiting).values()), None)
        if oldest is None or self.num_running >= self._max_running or oldest.pages.fit(self._free_pages):
            return 0
        return self.num_waiting

    def accept(self, request_id: str) -> None:
        """Record that the decode side has reserved room. Requests start in the order in which they are accepted."""
        request = self._accepted[request_id] = self._take_waiting(request_id)
        self._accepted_pages += request.pages

    def _take_waiting(self, request_id: str) -> _Request:
        request = self._waiting.pop(request_id)
        self._changed.add(request.queue)
        del self._queues[request.queue][request_id]
        if not self._queues[request.queue]:
            del self._queues[request.queue]
            for lacking in self._lacking:
                lacking.discard(request.queue)
        return request

    def _take_accepted(self, request_id: str) -> _Request:
        request = self._accepted.pop(request_id)
        self._accepted_pages -= request.pages
        self._has_more_room = True  # of a request that is withdrawn; one that is started has overtaken others
        return request

    def start_accepted(self) -> list[str]:
        """Start accepted requests in their order while there are pages; return the started ones.

        Destinations are asked at the same time, so together they can accept more than this node has room for. The rest waits for
        the pages of running requests, which need nothing more to complete.
        """
        started = []
        while self._accepted and self.num_running < self._max_running:
            request_id, request = next(iter(self._accepted.items()))
            if not request.pages.fit(self._free_pages):
                break
            self._free_pages -= request.pages
            self._computing[request_id] = self._take_accepted(request_id)
            self._note_started(request)
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
            raise LocalProtocolError(f"request {request_id} has ended; its loaded pages arrived too late")
        if not 0 <= num_loaded < request.num_tokens:
            raise LocalProtocolError(f"{num_loaded} tokens of {request_id} were loaded, of {request.num_tokens}; one is computed")
        request.is_held, request.computed = False, num_loaded

    def _note_started(self, request: _Request) -> None:
        started = request.order, request.destination
        if started > self._youngest_started:
            if request.destination != self._youngest_started[1]:
                self._youngest_of_others = self._youngest_started
            self._youngest_started = started
        elif request.destination != self._youngest_started[1]:
            self._youngest_of_others = max(self._youngest_of_others, started)

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
        if request_id in self._waiting:
            self._take_waiting(request_id)
            return True
        if request_id in self._accepted:
            self._take_accepted(request_id)
            return True
        if request_id in self._computing:
            self._sending[request_id] = self._computing.pop(request_id)
        return False

    def release(self, request_id: str) -> None:
        """Release the pages of a request, which every rank has released."""
        request = self._sending.pop(request_id, None) or self._computing.pop(request_id)
        self._free_pages += request.pages
        self._has_more_room = True

    def check_idle(self) -> None:
        """Raise LocalProtocolError if nothing is in flight, but pages are missing."""
        if not self._computing and not self._sending and self._free_pages != self._pool_pages:
            missing = self._shown(self._pool_pages - self._free_pages)
            raise LocalProtocolError(f"{missing} pages are missing in an idle scheduler")
