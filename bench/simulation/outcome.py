"""What a simulated load came to: times, goodput, what was in use, and what bounds the cluster."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.simulation.cluster import Cluster, largest_piece_bytes
from bench.simulation.decode import DecodeNode
from bench.simulation.request import Request
from bench.simulation.settings import ClusterSettings
from bench.simulation.stage_times import StageTimes
from kvferry.bench_serve.summary import LoadSummary, Objectives, Spread, figures_of
from kvferry.bench_serve.workload import Planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Of one kind of room, over all nodes that have it.

    Args:
        capacity: Of each node.
        most: The most that any node had in use.
        mean: The busiest node's mean over time.
    """

    capacity: int
    most: int
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(LoadSummary):
    """Results of one load on one cluster. Only `uses` and `busy` include requests of the warm-up.

    Args:
        exposed_s: Transfer after the last chunk had been computed.
        credit_wait_s: Wait of a granted and computed piece for bytes to write to and for a staging slot.
        uses: By name: ring, staging slots, pools, requests of a node.
        busy: By name: the part of the time in which the busiest node's stage was busy. For decode steps: the tokens made,
            relative to steps with the maximum number of running requests.
        imbalance: Prompt tokens of the busiest prefill node over the mean.
        batch: Requests of a decode step, on average.
        simulated_s, took_s, num_events: Of the simulation.
    """

    exposed_s: Spread
    credit_wait_s: float
    uses: Mapping[str, Use]
    busy: Mapping[str, float]
    imbalance: float
    batch: float
    simulated_s: float
    took_s: float
    num_events: int

    @property
    def bottleneck(self) -> str:
        """The stage that is busy for the largest part of the time."""
        return max(self.busy, key=lambda name: self.busy[name])

    def to_json(self) -> dict[str, Any]:
        return LoadSummary.to_json(self) | {"bottleneck": self.bottleneck}


def simulate(
    times: StageTimes, settings: ClusterSettings, planned: Sequence[Planned], *, objectives: Objectives | None = None
) -> Outcome:
    """Put the load on such a cluster.

    Raises:
        ValueError: A piece does not fit the ring.
    """
    began_s = time.perf_counter()
    cluster = Cluster(times, settings)
    requests = cluster.run(planned)
    return outcome_of(cluster, requests, planned, objectives or Objectives(), took_s=time.perf_counter() - began_s)


def outcome_of(
    cluster: Cluster, requests: Sequence[Request], planned: Sequence[Planned], objectives: Objectives, *, took_s: float
) -> Outcome:
    counted = [request for request, one in zip(requests, planned, strict=True) if not one.is_warm_up]
    served = [request for request in counted if request.is_served]
    begin_s = max((one.at_s for one in planned if one.is_warm_up), default=0.0)
    window_s = max(planned[-1].at_s - begin_s, 1e-9)
    tokens = Counter[int]()
    for request in served:
        tokens[request.prefill] += request.prompt_tokens
    mean_tokens = sum(tokens.values()) / cluster.settings.num_prefill
    pieces = sum(len(request.pieces) for request in requests)
    steps = sum(node.num_steps for node in cluster.decode)
    return Outcome(
        **figures_of(counted, window_s=window_s, objectives=objectives),
        failed=len(counted) - len(served),
        failures=dict(Counter(request.failure for request in counted if request.failure).most_common()),
        exposed_s=Spread.of(request.exposed_s for request in served),
        exposed_share=Spread.of(request.exposed_s / request.ttft_s for request in served),
        credit_wait_s=sum(node.credit_wait_s for node in cluster.prefill) / pieces if pieces else 0.0,
        uses=_uses(cluster),
        busy=_busy(cluster),
        imbalance=max(tokens.values()) / mean_tokens if tokens else 0.0,
        batch=sum(node.batch_area for node in cluster.decode) / steps if steps else 0.0,
        simulated_s=cluster.clock.now_s,
        took_s=took_s,
        num_events=cluster.clock.num_events,
    )


def _uses(cluster: Cluster) -> dict[str, Use]:
    settings, prefill, decode = cluster.settings, cluster.prefill, cluster.decode
    gauges = {
        "ring bytes": (settings.ring_bytes, [node.ring_used for node in decode]),
        "ring bytes granted": (settings.ring_bytes, [node.ring_granted for node in decode]),
        "staging slots": (settings.staging_slots, [node.slots for node in prefill]),
        "staging slots wanted": (settings.staging_slots, [node.slots_wanted for node in prefill]),
        "prefill pool tokens": (settings.prefill_pool_tokens, [node.pool for node in prefill]),
        "decode pool tokens": (settings.decode_pool_tokens, [node.pool for node in decode]),
        "decode requests": (settings.decode_running, [node.held for node in decode]),
    }
    return {
        name: Use(capacity=capacity, most=max(one.most for one in of_nodes), mean=max(one.mean() for one in of_nodes))
        for name, (capacity, of_nodes) in gauges.items()
    }


def _busy(cluster: Cluster) -> dict[str, float]:
    now_s = max(cluster.clock.now_s, 1e-9)
    prefill, decode = cluster.prefill, cluster.decode
    busy_s = {
        "prefill steps": max(node.step_lane.work_s for node in prefill),
        "gather": max(node.gather_lane.work_s for node in prefill),
        "prefill link": max(node.port.busy_s for node in prefill),
        "decode link": max(node.port.busy_s for node in decode),
        "scatter": max(node.scatter_lane.work_s for node in decode),
        "decode steps": max(now_s * _decode_share(cluster, node) for node in decode),
    }
    if cluster.shared_cpu is not None:
        busy_s["shared cores"] = cluster.shared_cpu.busy_core_s / cluster.times.cores
    return {name: seconds / now_s for name, seconds in busy_s.items()}


def _decode_share(cluster: Cluster, node: DecodeNode) -> float:
    """Tokens that the node generated, of those that it could have with as many requests in each step as it may run.

    A batch has steps all the time, however small it is: that it is never idle says nothing.
    """
    if not node.batch_area:
        return 0.0
    most, context = cluster.settings.decode_running, node.context_area / node.batch_area
    tokens_per_s = most / cluster.times.decode_seconds(most, most * context)
    return node.batch_area / cluster.clock.now_s / tokens_per_s


def staging_bytes(times: StageTimes, settings: ClusterSettings) -> int:
    """Of a prefill rank: its slots, each as large as the largest piece."""
    return settings.staging_slots * largest_piece_bytes(times, settings)
