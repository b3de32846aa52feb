"""All metrics of the router. No client or server is a label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from transfer.metrics import TOKEN_BUCKETS_S, MetricFamily, MetricSpec, Series

ENDPOINTS: Final = ("completions", "chat")
OUTCOMES: Final = ("done", "client_error", "failed", "disconnected", "refused")
_PREFIX: Final = "kvferry_router_"


def _spec(kind: str, name: str, help_text: str, *labels: str, buckets: tuple[float, ...] = ()) -> MetricSpec:
    return MetricSpec(name=_PREFIX + name, kind=kind, help=help_text, labels=labels, buckets=buckets)


ROUTER_METRICS: Final = (
    _spec("counter", "requests", "Requests that ended.", "endpoint", "outcome"),
    _spec("gauge", "running_requests", "Requests in flight."),
    _spec("counter", "retries", "Further attempts of requests, all before the first token."),
    _spec("counter", "flows",
          "Attempts: concurrent, sequential, fetched (prefill nodes), alone (no prefill), node (decode nodes).",
          "flow"),
    _spec("counter", "decode_alone", "Requests whose prompt the decode server computed.", "reason"),
    _spec("counter", "prefills_without_kv", "Prompts of prefill servers that did not return the place of their KV."),
    _spec("histogram", "prefill_seconds", "Time until a prefill server answers.", buckets=TOKEN_BUCKETS_S),
    _spec("histogram", "time_to_first_token_seconds", "Time until the first part of an answer.",
          buckets=TOKEN_BUCKETS_S),
    _spec("gauge", "servers", "Servers: healthy, open (left out for a while), unhealthy, unfit.",
          "tier", "state"),
    _spec("counter", "server_failures", "Attempts that failed at a server.", "tier", "reason"),
    _spec("counter", "breaker_openings", "Openings of servers' circuit breakers.", "tier"),
)  # fmt: skip


class RouterMetrics(Series):
    """The router's series. Owned by its loop."""

    def __init__(self) -> None:
        super().__init__(ROUTER_METRICS, labels={}, prefix=_PREFIX)
        for name in ("retries", "prefills_without_kv"):
            self.counter(name)
        for name in ("prefill_seconds", "time_to_first_token_seconds"):
            self.histogram(name)
        self.gauge("running_requests")
        for endpoint in ENDPOINTS:
            for outcome in OUTCOMES:
                self.counter("requests", endpoint=endpoint, outcome=outcome)

    def collect(self, servers: Mapping[tuple[str, str], int]) -> list[MetricFamily]:
        """Return all metrics, including those without series.

        Args:
            servers: Number of servers, by tier and state.
        """
        for (tier, state), number in servers.items():
            self.gauge("servers", tier=tier, state=state).set(number)
        return [*(MetricFamily(spec, {}, (), ()) for spec in ROUTER_METRICS), *self.families()]
