"""Types for the declarations in `transfer.metrics.table`: metric types, buckets, and values of labels.

Labels have bounded sets of values. No request, session or peer is ever one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

_US: Final = 1e-6
STAGE_BUCKETS_S: Final = (
    *(value * _US for value in (20, 50, 100, 200, 500)),
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0),
)
"""From the gather of a small chunk to a request that waited a minute."""

TOKEN_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TURN_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Ordinary turns take less than the first bound. ``bench.loop`` fails above 0.05, the warning and the alert come above 0.25."""

RATIO_BUCKETS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

ROLES: Final = ("prefill", "decode")
PREFILL: Final = ("prefill",)
DECODE: Final = ("decode",)

RANK_STAGES: Final = {
    "prefill": ("credit_wait", "gather", "write", "ack", "exposed", "total"),
    "decode": ("scatter",),
}
OUTCOMES: Final = {
    "prefill": ("sent", "failed", "aborted", "refused"),
    "decode": ("done", "failed", "aborted", "refused"),
}
ABORT_REASONS: Final = ("caller", "operator", "no_room", "lost", "engine", "data_loss", "misfit", "other")
NODE_STATES: Final = ("starting", "ready", "draining")
PEER_STATES: Final = ("joining", "joined", "draining", "lost", "alias")
REFUSED_ENTRIES: Final = ("malformed", "too_many", "plain_text")
BREAKER_STATES: Final = ("closed", "open", "half-open")
STORE_OPS: Final = ("exists", "get", "put", "delete")
STORE_OUTCOMES: Final = ("ok", "missing", "corrupt", "foreign", "failed", "timeout", "refused", "circuit_open")

Label = tuple[str, tuple[str, ...] | str]
"""A label's name, and its values or, if they cannot be listed here, a text about their bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """A metric.

    Args:
        name: Its name in Prometheus, without a counter's ``_total``.
        kind: "counter", "gauge" or "histogram".
        help: Unit and meaning.
        labels: Its labels besides ``role`` and, for a rank's metric, ``rank``.
        buckets: Upper bounds of a histogram's buckets.
        values: Values of each label.
        roles: Nodes that serve it.
        advice: How operators use it.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    values: tuple[tuple[str, ...] | str, ...] = ()
    roles: tuple[str, ...] = ROLES
    advice: str = ""

    @property
    def shown_name(self) -> str:
        """Its name in Prometheus."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def num_samples(self) -> int:
        """Samples of one series: one, or the buckets, count and sum of a histogram."""
        return len(self.buckets) + 3 if self.kind == "histogram" else 1

    @property
    def unit(self) -> str:
        """Base unit in its name; empty for a number of things."""
        words = self.name.split("_")
        if self.name.endswith("_bytes_per_second"):
            return "bytes per second"
        return words[-1] if words[-1] in ("bytes", "seconds", "ratio") else ""


def _declare(
    kind: str,
    name: str,
    meaning: str,
    *labels: Label,
    advice: str,
    roles: tuple[str, ...] = ROLES,
    buckets: tuple[float, ...] = (),
) -> MetricSpec:
    return MetricSpec(
        name=f"kvferry_{name}",
        kind=kind,
        help=meaning,
        labels=tuple(label for label, _ in labels),
        buckets=buckets,
        values=tuple(values for _, values in labels),
        roles=roles,
        advice=advice,
    )


counter = partial(_declare, "counter")  # named ``kvferry_NAME_total``
gauge = partial(_declare, "gauge")
histogram = partial(_declare, "histogram")


def served_by(roles: tuple[str, ...], *specs: MetricSpec) -> tuple[MetricSpec, ...]:
    """Declare metrics that only nodes of these roles serve."""
    return tuple(replace(spec, roles=roles) for spec in specs)
