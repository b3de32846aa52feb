"""A decode node of the simulation: room, ring, scatter, and steps over a batch that changes between them."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from bench.simulation.clock import Clock, Cpu, Lane, Port
from bench.simulation.gauge import Gauge
from bench.simulation.request import Piece, Request
from bench.simulation.settings import ClusterSettings
from bench.simulation.stage_times import StageTimes
from transfer.connector.prefill_routing import Candidate
from transfer.ring import Grant, StagingAllocator
from transfer.ring_index import WaitingGrants


class DecodeNode:
    """Its ring is the real one (`transfer.ring.StagingAllocator`), and the grants wait in the real index.

    Args:
        on_free: Called with the node when room became free.
        on_over: Called with each request that has generated its last token.
    """

    def __init__(
        self,
        index: int,
        clock: Clock,
        cpu: Cpu,
        times: StageTimes,
        settings: ClusterSettings,
        *,
        on_over: Callable[[Request], None],
    ) -> None:
        self.index = index
        self._clock = clock
        self._times = times
        self._settings = settings
        self._has_own_cpu = not cpu.is_shared
        self._on_over = on_over
        self.port = Port()
        self.scatter_lane = Lane(cpu)
        self.step_lane = Lane(cpu)
        self.other_lane = Lane(cpu)
        self.ring = StagingAllocator(settings.ring_bytes)
        self.waiting: WaitingGrants[Grant, Piece] = WaitingGrants(self.ring.blocker_of)
        self.ring_used = Gauge(clock, capacity=settings.ring_bytes, what=f"ring {index}")
        self.ring_granted = Gauge(clock, what=f"ring {index}, granted")
        self.pool = Gauge(clock, capacity=settings.decode_pool_tokens, what=f"decode pool {index}")
        self.held = Gauge(clock, capacity=settings.decode_running, what=f"decode node {index}")
        self.num_waiting = 0
        self.num_placed = 0
        self.outstanding: list[int] = [0] * settings.num_prefill
        self.told: list[int | None] = [None] * settings.num_prefill
        self.life = 0
        self.candidates: list[Candidate] = []
        self.group: list[int] = []  # those of them that it has joined
        self.num_steps = 0
        self.busy_s = 0.0
        self.batch_area = 0
        self.context_area = 0.0
        self._joining: list[Request] = []
        self._finishing: list[tuple[int, int, Request]] = []  # by the step that makes the last token
        self._context = 0
        self._begun_s = 0.0
        self._step_s = 0.0
        self._steps_planned = 0
        self._version = 0
        self._is_stepping = False

    # Room

    def reserve(self, request: Request) -> bool:
        """All of it or nothing."""
        needed = request.prompt_tokens + request.output_tokens
        if self.held.value >= self._settings.decode_running or self.pool.value + needed > self._settings.decode_pool_tokens:
            return False
        self.held.add(1)
        self.pool.add(needed)
        self.num_waiting -= 1
        return True

    # Transfer

    def grant(self, piece: Piece) -> None:
        piece.grant = self.ring.assign(piece.num_bytes)
        self.ring_granted.add(piece.grant.end - piece.grant.begin)

    def release(self, piece: Piece) -> None:
        assert piece.grant is not None
        size = piece.grant.end - piece.grant.begin
        self.ring.release(piece.grant)
        self.ring_used.add(-size)
        self.ring_granted.add(-size)

    # Generation

    def begin(self, request: Request) -> None:
        """Its KV is whole and its first token is known: it generates the rest."""
        if request.output_tokens == 1:
            self._finish(request)
            return
        self._joining.append(request)
        if not self._is_stepping:
            self._next_steps()
        elif self._has_own_cpu:
            self._cut_short()

    def _next_steps(self) -> None:
        """Begin as many steps as will be alike; with shared cores one, for its end is not known."""
        for request in self._joining:
            heapq.heappush(self._finishing, (self.num_steps + request.output_tokens - 1, request.index, request))
            self._context += request.prompt_tokens + 1
        self._joining.clear()
        self._is_stepping = bool(self._finishing)
        if not self._is_stepping:
            return
        batch = len(self._finishing)
        self._steps_planned = self._finishing[0][0] - self.num_steps if self._has_own_cpu else 1
        self._begun_s = self._clock.now_s
        self._step_s = self._times.decode_seconds(batch, self._context + batch * (self._steps_planned - 1) / 2)
        self._version += 1
        version = self._version
        if self._has_own_cpu:
            self._clock.at(self._begun_s + self._step_s * self._steps_planned, lambda: self._on_steps_over(version))
        else:
            self.step_lane.submit(self._step_s, lambda: self._on_steps_over(version))

    def _cut_short(self) -> None:
        """Somebody joins: at the end of the step that is under way."""
        done = int((self._clock.now_s - self._begun_s) / self._step_s) + 1
        if done < self._steps_planned:
            self._steps_planned = done
            self._version += 1
            version = self._version
            self._clock.at(self._begun_s + self._step_s * done, lambda: self._on_steps_over(version))

    def _on_steps_over(self, version: int) -> None:
        if version != self._version:
            return
        batch, steps = len(self._finishing), self._steps_planned
        self.num_steps += steps
        self.busy_s += self._step_s * steps
        self.batch_area += batch * steps
        self.context_area += steps * (self._context + batch * (steps - 1) / 2)
        self._context += batch * steps
        if self._times.other_token_s:
            self.other_lane.submit(self._times.other_token_s * batch * steps, _nothing)
        while self._finishing and self._finishing[0][0] <= self.num_steps:
            request = heapq.heappop(self._finishing)[2]
            self._context -= request.prompt_tokens + request.output_tokens
            self._finish(request)
        self._next_steps()

    def _finish(self, request: Request) -> None:
        request.ended_s = self._clock.now_s
        self.held.add(-1)
        self.pool.add(-(request.prompt_tokens + request.output_tokens))
        self._on_over(request)


def _nothing() -> None:
    pass
