"""The simulated cluster: nodes, placement, and a load that is put on it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.simulation.clock import Clock, Cpu, Lane, Link, OwnCpu, SharedCpu
from bench.simulation.decode import DecodeNode
from bench.simulation.prefill import PrefillNode
from bench.simulation.request import Request
from bench.simulation.settings import ClusterSettings, Placement
from bench.simulation.stage_times import StageTimes
from kvferry.bench_serve.workload import Planned
from transfer.connector.prefill_routing import Candidate, group_of, place


class Cluster:
    """Simulates one load; use it once.

    Args:
        times: Of its stages.
        settings: Of its nodes.

    Raises:
        ValueError: A piece does not fit the ring.
    """

    def __init__(self, times: StageTimes, settings: ClusterSettings) -> None:
        piece_bytes = largest_piece_bytes(times, settings)
        if piece_bytes > settings.ring_bytes:
            raise ValueError(f"ring_bytes is {settings.ring_bytes}; a piece of {piece_bytes} bytes does not fit it")
        self.times = times
        self.settings = settings
        self.clock = Clock()
        self.shared_cpu = SharedCpu(self.clock, times.cores) if times.cores else None
        cpu: Cpu = OwnCpu(self.clock) if self.shared_cpu is None else self.shared_cpu
        link = Link(self.clock, cpu, bytes_per_s=times.link_bytes_per_s, latency_s=times.link_latency_s)
        self.decode = [
            DecodeNode(index, self.clock, cpu, times, settings, on_over=self._on_over) for index in range(settings.num_decode)
        ]
        self._all_outstanding = [0] * settings.num_prefill
        self.prefill = [
            PrefillNode(
                index,
                self.clock,
                cpu,
                link,
                times,
                settings,
                nodes=self.decode,
                outstanding=self._all_outstanding,
                on_failed=self._fail,
            )
            for index in range(settings.num_prefill)
        ]
        for node in self.prefill:
            node.others = self.prefill
        self.requests: list[Request] = []
        self._cpu = cpu
        self._other = Lane(cpu)
        self._num_over = 0
        chance, indexes = random.Random(0), range(settings.num_prefill)
        has_orders = settings.placement is Placement.ORDER
        self._orders = [chance.sample(indexes, len(indexes)) for _ in self.decode] if has_orders else []
        self._last_arrival_s = 0.0
        self._chance = random.Random(0)
        if settings.placement.is_told:
            lives = [self._chance.getrandbits(64) for _ in self.prefill]
            for decode in self.decode:
                decode.life = self._chance.getrandbits(64)
                decode.candidates = [self._new_candidate(life) for life in lives]
                every = [str(index) for index in indexes]
                decode.group = [int(name) for name in group_of(every, chooser=f"decode {decode.index}", size=settings.group_size)]

    def run(self, planned: Sequence[Planned]) -> list[Request]:
        """Put the load on it and go on until every request is over.

        Raises:
            AssertionError: The simulation contradicts itself: something was never given back, or a request never ended.
        """
        for index, one in enumerate(planned):
            request = Request(index=index, arrived_s=one.at_s, prompt_tokens=one.prompt_tokens, output_tokens=one.output_tokens)
            self.requests.append(request)
            self.clock.at(one.at_s, lambda request=request: self._on_arrival(request))  # type: ignore[misc]
        self._last_arrival_s = planned[-1].at_s
        if self.settings.placement.is_told:
            for node in self.decode:
                for prefill in range(self.settings.num_prefill):
                    first_s = self._chance.random() * self.settings.heartbeat_s
                    self.clock.at(first_s, lambda node=node, prefill=prefill: self._beat(node, prefill))  # type: ignore[misc]
        self.clock.run()
        self._check_end()
        return self.requests

    def _on_arrival(self, request: Request) -> None:
        settings = self.settings
        request.decode = request.index % settings.num_decode
        node = self.decode[request.decode]
        too_long = request.prompt_tokens + request.output_tokens > settings.decode_pool_tokens
        if too_long or request.prompt_tokens > settings.prefill_pool_tokens:
            self._fail(request, "longer than a pool")
            return
        if node.num_waiting >= settings.max_queued:
            self._fail(request, "queue full")
            return
        request.prefill = self._place(node)
        node.num_waiting += 1
        node.outstanding[request.prefill] += request.prompt_tokens
        self._all_outstanding[request.prefill] += request.prompt_tokens
        request.deadline_s = self.clock.now_s + settings.queue_timeout_s
        if self.times.other_request_s:
            self._other.submit(self.times.other_request_s, _nothing)
        self._cpu.run(self.times.request_s / 2, lambda: self.prefill[request.prefill].submit(request))

    def _new_candidate(self, life: int) -> Candidate:
        """A prefill node, as a decode node sees it over a link of its own."""
        bandwidth = 1.0 if self.settings.placement is Placement.ALIKE else self._chance.random()
        return Candidate(incarnation=life, outstanding_tokens=0, others_tokens=None, bandwidth_bytes_per_s=bandwidth)

    def _candidates(self, node: DecodeNode) -> list[Candidate]:
        """As the node knows them now."""
        for index, (one, own, others) in enumerate(zip(node.candidates, node.outstanding, node.told, strict=True)):
            if one.outstanding_tokens != own or one.others_tokens != others:
                node.candidates[index] = Candidate(
                    incarnation=one.incarnation,
                    outstanding_tokens=own,
                    others_tokens=others,
                    bandwidth_bytes_per_s=one.bandwidth_bytes_per_s,
                )
        return node.candidates

    def _beat(self, node: DecodeNode, prefill: int) -> None:
        """A prefill node tells a decode node what the others have given it; after the last arrival nobody needs to know."""
        node.told[prefill] = self._all_outstanding[prefill] - node.outstanding[prefill]
        if (next_s := self.clock.now_s + self.settings.heartbeat_s) < self._last_arrival_s:
            self.clock.at(next_s, lambda: self._beat(node, prefill))

    def _place(self, node: DecodeNode) -> int:
        if node.candidates:
            every = self._candidates(node)
            joined = [every[index] for index in node.group]
            return node.group[place(joined, chooser=node.life, held_tokens={}, prefix_tokens=0)]
        known = self._all_outstanding if self.settings.placement is Placement.INFORMED else node.outstanding
        least = min(known)
        if self.settings.placement is Placement.FIRST:
            return known.index(least)
        if self.settings.placement is Placement.ORDER:
            return next(one for one in self._orders[node.index] if known[one] == least)
        # Each decode node goes round by itself, from a place of its own: nobody keeps turns for all of them.
        start = (node.index * 7919 + node.num_placed) % len(known)
        node.num_placed += 1
        try:
            return known.index(least, start)
        except ValueError:
            return known.index(least)

    def _on_over(self, request: Request) -> None:
        self._num_over += 1

    def _fail(self, request: Request, why: str) -> None:
        request.failure = why
        request.ended_s = self.clock.now_s
        if request.prefill >= 0:
            self.decode[request.decode].outstanding[request.prefill] -= request.prompt_tokens
            self._all_outstanding[request.prefill] -= request.prompt_tokens
        self._num_over += 1

    def _check_end(self) -> None:
        assert self._num_over == len(self.requests), f"{len(self.requests) - self._num_over} requests never ended"
        for prefill in self.prefill:
            left = (prefill.pool.value, prefill.slots.value, prefill.num_running, prefill.num_without_slot)
            assert not any(left), f"prefill node {prefill.index} kept {left}"
        for decode in self.decode:
            decode.ring.check_invariants()
            kept = (decode.pool.value, decode.held.value, decode.ring_used.value, decode.ring.num_live_grants, decode.num_waiting)
            assert not any(kept), f"decode node {decode.index} kept {kept}"
            assert not any(decode.outstanding), f"decode node {decode.index} still counts prompt tokens"


def largest_piece_bytes(times: StageTimes, settings: ClusterSettings) -> int:
    """Of a whole chunk's layers of one group."""
    return settings.chunk_tokens * times.bytes_per_token // settings.layer_groups


def _nothing() -> None:
    pass
