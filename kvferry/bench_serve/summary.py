"""Records of requests as the client saw them, and the arithmetic over those of one rate: percentiles, goodput, shares.

Times are seconds from the run's start, of one monotonic clock.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

FEW_FAILED = 0.01
"""Share of requests. If more fail, a 99th percentile of the served ones says little about all."""
ATTAINED = 0.9
"""Share of requests that must meet their objectives for a sustained rate, as in DistServe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Statistics of the samples of one quantity; all are 0 without samples."""

    samples: int = 0
    mean: float = 0.0
    std: float = 0.0
    least: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    most: float = 0.0

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        ordered = sorted(samples)
        if not ordered:
            return cls()
        return cls(
            samples=len(ordered),
            mean=statistics.fmean(ordered),
            std=statistics.pstdev(ordered),
            least=ordered[0],
            p50=percentile(ordered, 0.5),
            p90=percentile(ordered, 0.9),
            p99=percentile(ordered, 0.99),
            most=ordered[-1],
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of ascending samples, interpolated linearly as numpy's default."""
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    if below == len(ordered) - 1:
        return ordered[-1]
    return ordered[below] + (ordered[below + 1] - ordered[below]) * (at - below)


class Timed(Protocol):
    """A request and its times, measured or simulated. Only a served request has times."""

    @property
    def is_served(self) -> bool: ...

    @property
    def ttft_s(self) -> float: ...

    @property
    def tpot_s(self) -> float | None: ...

    @property
    def end_to_end_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The node's report about the transfer of a request that succeeded.

    Args:
        node_ttft_s: Time from the node's acceptance to the first token.
        transfer_s: Time from the first gather to the last release.
        exposed_s: Its part after the last chunk was computed.
        num_bytes, writes, resends: Sums over the ranks.
        prefill_node: Address.
        retries: Attempts on other prefill nodes.
        cached_tokens: Tokens of the prompt that were not moved, because their KV was there.
    """

    node_ttft_s: float
    transfer_s: float
    exposed_s: float
    num_bytes: int
    writes: int
    resends: int
    prefill_node: str
    retries: int
    cached_tokens: int


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. It succeeded if `moved` is set, failed if `failure` is set, and otherwise was cut off by the run's end.

    Attributes:
        due_s: When it was due.
        token_s: When each message with tokens came.
        failure: Name of the gRPC status.
        reason: The status in words.
    """

    index: int
    target: str
    due_s: float
    prompt_tokens: int
    is_warm_up: bool = False
    sent_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    ended_s: float | None = None
    failure: str | None = None
    reason: str = ""
    moved: Moved | None = None

    @property
    def is_served(self) -> bool:
        return self.moved is not None

    @property
    def lateness_s(self) -> float:
        """Return the delay of the generator."""
        return 0.0 if self.sent_s is None else self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """Return the time from when it was due, so that the delay of the generator counts. It needs a token."""
        return self.token_s[0] - self.due_s

    @property
    def end_to_end_s(self) -> float:
        """Return the time from when it was due to the last token."""
        return self.token_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time of a token after the first; None if there is only one."""
        return None if self.num_tokens < 2 else (self.token_s[-1] - self.token_s[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Return the times between messages with tokens: inter-token latencies."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Objectives of a good request: time to first token, and mean time per output token after it. None means no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def are_met_by(self, request: Timed) -> bool:
        """Return True if the request is good. With one token, it meets any time per output token."""
        if not request.is_served:
            return False
        if self.ttft_s is not None and request.ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or request.tpot_s is None or request.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Delays of the generator.

    Args:
        sends_s: Delays of requests.
        loop_s: Delays of ticks of the generator's loop, which bound the error of measured times.
        cpu_share: Share of one core that the generator used.
        limit_s: Highest 99th percentile of either delay.
    """

    sends_s: Spread
    loop_s: Spread
    cpu_share: float
    limit_s: float

    @property
    def is_late(self) -> bool:
        return max(self.sends_s.p99, self.loop_s.p99) > self.limit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """Outcome of one offered load, measured or simulated, without the warm-up's requests.

    Args:
        offered_rate: Requests a second of the drawn arrivals.
        requests: Requests to send. `served` and `failed` count some of them; the end of the run cut off the rest.
        failures: Number of failed requests by kind. For requests that were sent, the kind is the name of a gRPC status.
        good: Requests served within the objectives.
        goodput: Good requests a second of the window.
        ttft_s, tpot_s, end_to_end_s: Of served requests; see docs/scaling.md.
        exposed_share: Part of a request's time to first token that was transfer after the last chunk had been computed.
    """

    offered_rate: float
    requests: int
    served: int
    failed: int
    failures: Mapping[str, int]
    good: int
    goodput: float
    ttft_s: Spread
    tpot_s: Spread
    end_to_end_s: Spread
    exposed_share: Spread

    @property
    def is_of_survivors(self) -> bool:
        """Return True if so many failed that the times, which are of served requests, do not represent the load."""
        return self.failed > FEW_FAILED * self.requests

    @property
    def attainment(self) -> float:
        """Return the share of good requests."""
        return self.good / self.requests if self.requests else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"attainment": self.attainment, "is_of_survivors": self.is_of_survivors}


def figures_of(requests: Sequence[Timed], *, window_s: float, objectives: Objectives) -> dict[str, Any]:
    """Return the fields of a `LoadSummary` that follow from the times of its requests.

    Args:
        window_s: Seconds of arrivals that count; above 0.
    """
    served = [request for request in requests if request.is_served]
    good = sum(objectives.are_met_by(request) for request in requests)
    return {
        "offered_rate": len(requests) / window_s,
        "requests": len(requests),
        "served": len(served),
        "good": good,
        "goodput": good / window_s,
        "ttft_s": Spread.of(request.ttft_s for request in served),
        "tpot_s": Spread.of(request.tpot_s for request in served if request.tpot_s is not None),
        "end_to_end_s": Spread.of(request.end_to_end_s for request in served),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSummary(LoadSummary):
    """Outcome of one offered load that was sent. Only `lateness` and `failed_warm_up` include the warm-up's requests.

    Args:
        rate: Requests a second that were asked for.
        window_s: Seconds of arrivals that count.
        reasons: One text for each of `failures`.
        failed_warm_up: Requests of the warm-up that failed; `warm_up_reason` is why one of them did.
        throughput, output_tokens_per_s: Served requests and their tokens a second, from the first arrival to the last token.
        itl_s: Inter-token latencies of served requests; see docs/scaling.md.
        node_ttft_s: Time to first token that the decode node reports.
        transfer_share: Duration of the whole transfer over the time to first token. Most of the transfer overlaps with computing.
        exposed_share_of_all: Sum of the exposed seconds over the sum of the times to first token.
        bytes_moved, writes, resends, retries, cached_tokens, prompt_tokens: Sums over served requests.
        prefill_nodes, decode_nodes: Served requests by node.
        most_in_flight: Requests at once.
        is_partial: The run was interrupted.
    """

    rate: float
    window_s: float
    reasons: Mapping[str, str]
    throughput: float
    output_tokens_per_s: float
    itl_s: Spread
    node_ttft_s: Spread
    transfer_share: Spread
    exposed_share_of_all: float
    bytes_moved: int
    writes: int
    resends: int
    retries: int
    cached_tokens: int
    prompt_tokens: int
    prefill_nodes: Mapping[str, int]
    decode_nodes: Mapping[str, int]
    most_in_flight: int
    lateness: Lateness
    failed_warm_up: int = 0
    warm_up_reason: str = ""
    is_partial: bool = False

    @property
    def cached_share(self) -> float:
        """Return the share of the served prompts' tokens that did not move, because their KV was there."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        return LoadSummary.to_json(self) | {"is_late": self.lateness.is_late, "cached_share": self.cached_share}


def summarise(
    records: Sequence[Record],
    *,
    rate: float,
    window_s: float,
    objectives: Objectives,
    lateness: Lateness,
    is_partial: bool = False,
) -> RateSummary:
    """Summarise the records of one rate.

    Args:
        window_s: Seconds from the end of the warm-up to the last arrival; above 0.
    """
    counted = [record for record in records if not record.is_warm_up]
    served = [record for record in counted if record.is_served]
    failed = [record for record in counted if record.failure is not None]
    cold = [record for record in records if record.is_warm_up and record.failure is not None]
    moved = [record.moved for record in served if record.moved is not None]
    span_s = max((record.token_s[-1] for record in served), default=0.0) - min((record.due_s for record in counted), default=0.0)
    ttft_sum_s = sum(record.ttft_s for record in served)
    return RateSummary(
        **figures_of(counted, window_s=window_s, objectives=objectives),
        rate=rate,
        window_s=window_s,
        failed=len(failed),
        failures=dict(Counter(str(record.failure) for record in failed).most_common()),
        reasons={str(record.failure): record.reason for record in reversed(failed)},
        throughput=len(served) / span_s if span_s > 0 else 0.0,
        output_tokens_per_s=sum(record.num_tokens for record in served) / span_s if span_s > 0 else 0.0,
        itl_s=Spread.of(gap_s for record in served for gap_s in record.gaps_s),
        node_ttft_s=Spread.of(one.node_ttft_s for one in moved),
        exposed_share=Spread.of(record.moved.exposed_s / record.ttft_s for record in served if record.moved is not None),
        transfer_share=Spread.of(record.moved.transfer_s / record.ttft_s for record in served if record.moved is not None),
        exposed_share_of_all=sum(one.exposed_s for one in moved) / ttft_sum_s if ttft_sum_s > 0 else 0.0,
        bytes_moved=sum(one.num_bytes for one in moved),
        writes=sum(one.writes for one in moved),
        resends=sum(one.resends for one in moved),
        retries=sum(one.retries for one in moved),
        cached_tokens=sum(one.cached_tokens for one in moved),
        prompt_tokens=sum(record.prompt_tokens for record in served),
        prefill_nodes=dict(Counter(one.prefill_node for one in moved).most_common()),
        decode_nodes=dict(Counter(record.target for record in served).most_common()),
        most_in_flight=most_at_once(records),
        lateness=lateness,
        failed_warm_up=len(cold),
        warm_up_reason=cold[0].reason if cold else "",
        is_partial=is_partial,
    )


def most_at_once(records: Iterable[Record]) -> int:
    """Return the highest number of requests at once; a request without an end lasts."""
    edges = [(record.sent_s, 1) for record in records if record.sent_s is not None]
    edges += [(record.ended_s, -1) for record in records if record.sent_s is not None and record.ended_s is not None]
    running = most = 0
    for _, step in sorted(edges):
        running += step
        most = max(most, running)
    return most


def sustained_rate(summaries: Iterable[RateSummary], *, attained: float = ATTAINED) -> float | None:
    """Return the highest offered load of which at least `attained` met the objectives; None if there is none."""
    return max((one.offered_rate for one in summaries if one.attainment >= attained and not one.is_partial), default=None)
