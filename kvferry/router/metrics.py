"""Every metric of the router, declared once: name, kind, labels, unit and meaning. No client or server ever is a label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from transfer.metrics import TOKEN_BUCKETS_S, MetricFamily, MetricSpec, Series

ENDPOINTS: Final = ("completions", "chat")
OUTCOMES: Final = ("done", "client_error", "failed", "disconnected", "refused")
FAILURES: Final = ("unreachable", "status", "broken", "lost", "stale")
ALONE: Final = ("several_prompts", "several_choices", "prompt_logprobs", "truncation")


def _spec(kind: str, name: str, help_text: str, *labels: str, buckets: tuple[float, ...] = ()) -> MetricSpec:
    return MetricSpec(name=f"kvferry_router_{name}", kind=kind, help=help_text, labels=labels, buckets=buckets)


ROUTER_METRICS: Final = (
    _spec("counter", "requests", "Requests to generate that ended, by endpoint and outcome.", "endpoint", "outcome"),
    _spec("gauge", "running_requests", "Requests to generate that are under way."),
    _spec("counter", "retries", "Attempts of requests after their first, all before the first token."),
    _spec("counter", "flows",
          "Attempts by flow: concurrent, sequential, fetched (prefill nodes), alone (no prefill), node (decode nodes).",
          "flow"),
    _spec("counter", "decode_alone", "Requests whose prompt the decode server computed, by why it had to.", "reason"),
    _spec("counter", "prefills_without_kv", "Prompts that a prefill server computed without saying where their KV is."),
    _spec("histogram", "prefill_seconds", "Seconds until a prefill server had answered.", buckets=TOKEN_BUCKETS_S),
    _spec("histogram", "time_to_first_token_seconds", "Seconds from a request's arrival to the first part of its answer.",
          buckets=TOKEN_BUCKETS_S),
    _spec("gauge", "servers", "Servers by tier and state: healthy, open (left out for a while), unhealthy, unfit.",
          "tier", "state"),
    _spec("counter", "server_failures", "Attempts that a server failed, by tier and reason.", "tier", "reason"),
    _spec("counter", "breaker_openings", "Times that a server's circuit breaker opened.", "tier"),
)  # fmt: skip


class RouterMetrics:
    """What the router counts. Owned by its loop."""

    def __init__(self) -> None:
        self._series = Series(ROUTER_METRICS, labels={}, prefix="kvferry_router_")
        for name in ("retries", "prefills_without_kv"):
            self._series.counter(name)
        for name in ("prefill_seconds", "time_to_first_token_seconds"):
            self._series.histogram(name)
        self._series.gauge("running_requests")
        for endpoint in ENDPOINTS:
            for outcome in OUTCOMES:
                self._series.counter("requests", endpoint=endpoint, outcome=outcome)

    def request_began(self) -> None:
        self._series.gauge("running_requests").inc()

    def request_ended(self, endpoint: str, outcome: str) -> None:
        """A request that had begun is over."""
        self._series.gauge("running_requests").inc(-1)
        self._series.counter("requests", endpoint=endpoint, outcome=outcome).inc()

    def request_refused(self, endpoint: str) -> None:
        """There was no room for a request, or the router is draining."""
        self._series.counter("requests", endpoint=endpoint, outcome="refused").inc()

    def first_part(self, seconds: float) -> None:
        """This long after its arrival the first part of a request's answer is there."""
        self._series.histogram("time_to_first_token_seconds").observe(seconds)

    def retried(self) -> None:
        self._series.counter("retries").inc()

    def attempt_began(self, flow: str) -> None:
        """An attempt begins: "concurrent", "sequential", "alone" or "node"."""
        self._series.counter("flows", flow=flow).inc()

    def decode_alone(self, reason: str) -> None:
        self._series.counter("decode_alone", reason=reason).inc()

    def prefill_answered(self, seconds: float, *, has_kv: bool) -> None:
        """A prefill server has answered; `has_kv`: and said where the KV is."""
        self._series.histogram("prefill_seconds").observe(seconds)
        if not has_kv:
            self._series.counter("prefills_without_kv").inc()

    def server_failed(self, tier: str, reason: str) -> None:
        self._series.counter("server_failures", tier=tier, reason=reason).inc()

    def breaker_opened(self, tier: str) -> None:
        self._series.counter("breaker_openings", tier=tier).inc()

    def collect(self, servers: Mapping[tuple[str, str], int]) -> list[MetricFamily]:
        """Return all metrics, also those that have no series yet.

        Args:
            servers: How many there are, by tier and state.
        """
        for (tier, state), number in servers.items():
            self._series.gauge("servers", tier=tier, state=state).set(number)
        return [*(MetricFamily(spec, {}, (), ()) for spec in ROUTER_METRICS), *self._series.families()]
