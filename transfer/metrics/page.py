"""The page that Prometheus reads: the series of a process, and the newest ones of its ranks beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest

from transfer.metrics.series import CREATED
from transfer.metrics.specs import RANK_METRICS

MetricFamily = Metric
"""What `exposition` renders: a metric with its samples."""


def merge(snapshots: Iterable[Mapping[str, Any] | None]) -> list[Metric]:
    """The ranks' metrics as declared, each sample with its ``rank``; what is not declared, or not finite, is left out."""
    known = [snapshot for snapshot in snapshots if snapshot is not None]
    merged: list[Metric] = []
    for spec in RANK_METRICS:
        metric = Metric(spec.name, spec.help, spec.kind)
        for snapshot in sorted(known, key=lambda one: int(one["rank"])):
            for name, labels, value in snapshot["families"].get(spec.name, ()):
                if not math.isnan(value):
                    metric.add_sample(name, {**labels, "rank": str(snapshot["rank"])}, value)
        if metric.samples:
            merged.append(metric)
    return merged


def exposition(families: Iterable[Metric]) -> bytes:
    """Metrics as text, those of one name together, without the client's own series of when each began."""
    shown: dict[str, Metric] = {}
    for family in families:
        samples = [sample for sample in family.samples if not sample.name.endswith(CREATED)]
        before = shown.setdefault(family.name, family)
        before.samples = samples if before is family else [*before.samples, *samples]
    page: bytes = generate_latest(_Snapshots(list(shown.values())))
    return page


class _Snapshots(CollectorRegistry):
    """Metrics that lie ready, as something that can be rendered."""

    def __init__(self, metrics: list[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
