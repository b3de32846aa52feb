"""A prefill node of the simulation: its queue, its steps, and a sender with staging slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from bench.simulation.clock import Clock, Cpu, Lane, Link, Port
from bench.simulation.decode import DecodeNode
from bench.simulation.gauge import Gauge
from bench.simulation.request import Piece, Request
from bench.simulation.settings import ClusterSettings
from bench.simulation.stage_times import StageTimes
from prefill_node.scheduler import STEPS_AHEAD

LOOKED_AT = 256
"""Waiting requests that are looked at for one to start; the real scheduler looks at all of them."""


class PrefillNode:
    """See the module's docstring.

    Args:
        nodes: The decode nodes, by index.
        outstanding: Of each prefill node, the prompt tokens that it has been given and not sent, by any decode node.
        on_failed: Called with each request that gets no room, and why.
    """

    def __init__(
        self,
        index: int,
        clock: Clock,
        cpu: Cpu,
        link: Link,
        times: StageTimes,
        settings: ClusterSettings,
        *,
        nodes: list[DecodeNode],
        outstanding: list[int],
        on_failed: Callable[[Request, str], None],
    ) -> None:
        self.index = index
        self._clock = clock
        self._cpu = cpu
        self._link = link
        self._times = times
        self._settings = settings
        self._nodes = nodes
        self._outstanding = outstanding
        self._on_failed = on_failed
        self.others: list[PrefillNode] = []
        self.port = Port()
        self.step_lane = Lane(cpu)
        self.gather_lane = Lane(cpu)
        self.pool = Gauge(clock, capacity=settings.prefill_pool_tokens, what=f"prefill pool {index}")
        self.slots = Gauge(clock, capacity=settings.staging_slots, what=f"staging slots {index}")
        self.slots_wanted = Gauge(clock, what=f"staging slots {index}, wanted")
        self.num_running = 0
        self.num_steps = 0
        self.num_without_slot = 0  # decode nodes with granted pieces and no slot
        self.credit_wait_s = 0.0
        self._waiting: deque[Request] = deque()
        self._accepted: deque[Request] = deque()
        self._computing: deque[Request] = deque()
        self._steps_ahead = 0
        self._is_timer_set = False
        self._ready: dict[int, deque[Piece]] = {}  # by decode node: writable, computed, without a slot; in turns
        self._granted: dict[int, int] = {}  # by decode node: pieces granted and not acknowledged
        self._slots_of: dict[int, int] = {}

    # The queue

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        self._ask_for_room()

    def _ask_for_room(self) -> None:
        """Ask the decode nodes about the oldest requests that fit here; those of one decode node in order."""
        settings, now_s = self._settings, self._clock.now_s
        free = settings.prefill_pool_tokens - self.pool.value - sum(one.prompt_tokens for one in self._accepted)
        slots = settings.prefill_running - self.num_running - len(self._accepted)
        while self._waiting and self._waiting[0].deadline_s < now_s and not self._waiting[0].is_asking:
            self._expire(self._waiting.popleft())
        if slots <= 0:
            return
        left: dict[int, tuple[int, int]] = {}
        is_blocked = False
        for position, request in enumerate(self._waiting):
            if position >= LOOKED_AT:
                break
            tokens, num = left.get(request.decode, (free, slots))
            if request.prompt_tokens > tokens or num <= 0:
                left[request.decode] = (0, 0)
                continue
            left[request.decode] = (tokens - request.prompt_tokens, num - 1)
            if not request.is_asking:
                if request.next_ask_s > now_s:
                    is_blocked = True
                    continue
                request.is_asking = True
                self._cpu.run(self._times.reserve_s, lambda request=request: self._on_answer(request))  # type: ignore[misc]
        if is_blocked:
            self._set_timer()

    def _set_timer(self) -> None:
        if not self._is_timer_set:
            self._is_timer_set = True
            self._clock.after(self._settings.retry_s, self._on_timer)

    def _on_timer(self) -> None:
        self._is_timer_set = False
        self._ask_for_room()

    def _on_answer(self, request: Request) -> None:
        request.is_asking = False
        if request.deadline_s < self._clock.now_s:
            self._waiting.remove(request)
            self._expire(request)
        elif self._nodes[request.decode].reserve(request):
            self._waiting.remove(request)
            self._accepted.append(request)
            self._start_accepted()
        else:
            request.next_ask_s = self._clock.now_s + self._settings.retry_s
            self._set_timer()
            return
        self._ask_for_room()

    def _expire(self, request: Request) -> None:
        self._nodes[request.decode].num_waiting -= 1
        self._on_failed(request, "no room in time")

    def _start_accepted(self) -> None:
        settings = self._settings
        while self._accepted:
            request = self._accepted[0]
            if (
                self.pool.value + request.prompt_tokens > settings.prefill_pool_tokens
                or self.num_running >= settings.prefill_running
            ):
                break
            self._accepted.popleft()
            self.pool.add(request.prompt_tokens)
            self.num_running += 1
            request.started_s = self._clock.now_s
            self._computing.append(request)
            self._cut(request)
            self._ask_for_grants(request, settings.grants_ahead)
        self._send_steps()

    def _cut(self, request: Request) -> None:
        groups, chunk = self._settings.layer_groups, self._settings.chunk_tokens
        for begin in range(0, request.prompt_tokens, chunk):
            num_bytes = min(chunk, request.prompt_tokens - begin) * self._times.bytes_per_token
            request.pieces += [Piece(request, max(1, num_bytes // groups)) for _ in range(groups)]

    # Steps

    def _send_steps(self) -> None:
        """As many steps as may be under way: one computes, the next one is fixed and waits."""
        while self._steps_ahead < STEPS_AHEAD and self._computing:
            parts: list[tuple[Request, int, int]] = []
            budget, chunk = self._settings.max_step_tokens, self._settings.chunk_tokens
            for request in list(self._computing):
                begin = request.computed
                end = min(request.prompt_tokens, (begin // chunk + 1) * chunk)
                if parts and end - begin > budget:
                    break
                budget -= end - begin
                request.computed = end
                parts.append((request, begin, end))
                if end == request.prompt_tokens:
                    self._computing.remove(request)
            self._steps_ahead += 1
            self.num_steps += 1
            seconds = self._times.prefill_seconds([(end - begin, begin) for _, begin, end in parts])
            groups = self._settings.layer_groups
            for group in range(groups):
                is_last = group == groups - 1
                self.step_lane.submit(
                    seconds / groups,
                    lambda group=group, parts=parts, is_last=is_last: self._on_layers(parts, group, is_last=is_last),  # type: ignore[misc]
                )

    def _on_layers(self, parts: list[tuple[Request, int, int]], group: int, *, is_last: bool) -> None:
        """The step's KV of a group of layers is in the pool."""
        settings = self._settings
        for request, begin, end in parts:
            piece = request.pieces[begin // settings.chunk_tokens * settings.layer_groups + group]
            piece.is_computed = True
            if piece.grant is not None:
                self._mark_ready(piece)
            if is_last and end == request.prompt_tokens:
                request.computed_s = self._clock.now_s
                self._cpu.run(self._times.request_s / 2, lambda request=request: self._on_first_token(request))  # type: ignore[misc]
        if is_last:
            self._steps_ahead -= 1
            self._send_steps()
        self._pump()

    def _on_first_token(self, request: Request) -> None:
        request.is_first_token_known = True
        self._begin_if_whole(request)

    def _begin_if_whole(self, request: Request) -> None:
        if request.is_first_token_known and request.whole_s >= 0 and request.first_token_s < 0:
            request.first_token_s = self._clock.now_s
            self._nodes[request.decode].begin(request)

    # Sending

    def _ask_for_grants(self, request: Request, number: int) -> None:
        asked = request.pieces[request.num_asked : request.num_asked + number]
        request.num_asked += len(asked)
        if asked:
            self._cpu.run(self._times.grant_s, lambda: self._on_granted(asked))

    def _on_granted(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            decode = piece.request.decode
            self._nodes[decode].grant(piece)
            if not self._granted.get(decode) and not self._slots_of.get(decode):
                self.num_without_slot += 1
            self._granted[decode] = self._granted.get(decode, 0) + 1
            if piece.is_computed:
                self._mark_ready(piece)
        self._pump()

    def _mark_ready(self, piece: Piece) -> None:
        piece.ready_s = self._clock.now_s
        self.slots_wanted.add(1)
        assert piece.grant is not None
        node = self._nodes[piece.request.decode]
        node.waiting.add(piece.grant, piece)
        self.take_writable(node)

    def take_writable(self, node: DecodeNode) -> None:
        """Give the node's pieces whose bytes are free to their prefill nodes, which may be others."""
        woken = set()
        while node.waiting.has_free:
            piece = node.waiting.pop()
            owner = self.others[piece.request.prefill]
            owner._ready.setdefault(node.index, deque()).append(piece)
            woken.add(owner)
        for owner in sorted(woken, key=lambda one: one.index):
            if owner is not self:
                owner._pump()

    def _pump(self) -> None:
        """Begin pieces as slots allow, the decode nodes by turns; who had a slot last comes last."""
        while self._ready and self.slots.value < self._settings.staging_slots:
            decode = self._next_ready()
            if decode is None:
                return
            queue = self._ready.pop(decode)
            self._begin(queue.popleft())
            if queue:
                self._ready[decode] = queue

    def _next_ready(self) -> int | None:
        """Whose turn it is. The last slot is kept for a decode node that has grants and no slot."""
        if self._settings.staging_slots - self.slots.value > 1 or not self.num_without_slot:
            return next(iter(self._ready))
        return next((decode for decode in self._ready if not self._slots_of.get(decode)), None)

    def _begin(self, piece: Piece) -> None:
        assert piece.grant is not None
        request, times = piece.request, self._times
        node = self._nodes[request.decode]
        wait_s = self._clock.now_s - piece.ready_s
        request.credit_wait_s += wait_s
        self.credit_wait_s += wait_s
        self.slots.add(1)
        if not self._slots_of.get(request.decode):
            self.num_without_slot -= 1
        self._slots_of[request.decode] = self._slots_of.get(request.decode, 0) + 1
        node.ring_used.add(piece.grant.end - piece.grant.begin)
        self.gather_lane.submit(times.hand_s + times.gather_seconds(piece.num_bytes), lambda: self._on_gathered(piece, node))

    def _on_gathered(self, piece: Piece, node: DecodeNode) -> None:
        self._link.send(self.port, node.port, piece.num_bytes, lambda: self._on_written(piece, node))

    def _on_written(self, piece: Piece, node: DecodeNode) -> None:
        """The slot is free. The grant is held until the ack."""
        self.slots.add(-1)
        self.slots_wanted.add(-1)
        self._slots_of[node.index] -= 1
        if not self._slots_of[node.index]:
            self.num_without_slot += 1
        self._pump()
        times = self._times
        node.scatter_lane.submit(times.hand_s + times.scatter_seconds(piece.num_bytes), lambda: self._on_scattered(piece, node))

    def _on_scattered(self, piece: Piece, node: DecodeNode) -> None:
        node.release(piece)
        request = piece.request
        request.num_released += 1
        if request.num_released == len(request.pieces):
            request.whole_s = self._clock.now_s
            self._begin_if_whole(request)
        self._cpu.run(self._times.ack_s, lambda: self._on_ack(piece, node))

    def _on_ack(self, piece: Piece, node: DecodeNode) -> None:
        """The watermark has come: the bytes are free for requests that wait for them, and after the last one the pages."""
        assert piece.grant is not None
        request = piece.request
        self._granted[node.index] -= 1
        if not self._granted[node.index]:
            self.num_without_slot -= 1
        request.num_acked += 1
        if request.num_acked == len(request.pieces):
            request.acked_s = self._clock.now_s
            node.outstanding[self.index] -= request.prompt_tokens
            self._outstanding[self.index] -= request.prompt_tokens
            self.pool.add(-request.prompt_tokens)
            self.num_running -= 1
            self._start_accepted()
            self._ask_for_room()
        else:
            self._ask_for_grants(request, 1)
        node.waiting.wake(piece.grant.begin, piece.grant.end)
        self.take_writable(node)
        self._pump()
