"""The page of metrics, which `prometheus_client` writes.

`FamilyCollector` gives our numbers to a `CollectorRegistry`. The client's encoders write a registry as Prometheus or OpenMetrics
text. They check and escape the name and labels of each line, which takes most of the time of a page. The result changes only when
a series is added or removed. So `MetricsPage` lets an encoder write the lines of a metric once, and then replaces the numbers
alone. docs/adr/0035-metrics-of-our-own.md has the times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from transfer.metrics.series import MetricFamily
from transfer.metrics.table import RANK_METRICS

_OPEN_METRICS: Final = "application/openmetrics-text;version=1.0.0"

_PLACE: Final = " NaN\n"
"""End of a line whose number is NaN. No other line ends so: names and labels end otherwise, and help texts are our own."""


def reported_families(snapshots: Iterable[Mapping[str, Any] | None]) -> list[MetricFamily]:
    """Return the metrics in snapshots of ranks, by declaration and then by rank.

    A metric that is not declared, or has other buckets, is left out, because it is of another release.

    Args:
        snapshots: The newest `RankMetrics.snapshot()` of each rank. None means that the rank has not reported yet.
    """
    known = sorted((one for one in snapshots if one is not None), key=lambda one: int(one["labels"]["rank"]))
    found = []
    for spec in RANK_METRICS:
        for snapshot in known:
            keys, numbers = snapshot["families"].get(spec.name, ((), ()))
            num_series = len(keys) // len(spec.labels) if spec.labels else 1
            if numbers and len(numbers) == num_series * spec.num_samples:
                found.append(MetricFamily(spec, snapshot["labels"], keys, numbers))
    return found


class FamilyCollector(Collector):
    """Give metrics to a `CollectorRegistry`. Metrics of one name become one family."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        by_name: dict[str, Metric] = {}
        for family in self._families:
            metric = _metric_of(family)
            by_name.setdefault(metric.name, metric)
            if by_name[metric.name] is not metric:
                by_name[metric.name].samples += metric.samples
        return iter(by_name.values())


def _metric_of(family: MetricFamily) -> Metric:
    spec = family.spec
    names, values = (*spec.labels, *family.labels), tuple(family.labels.values())
    key_size, size = len(spec.labels), spec.num_samples
    rows = [
        ((*family.keys[nth * key_size : (nth + 1) * key_size], *values), family.numbers[nth * size : (nth + 1) * size])
        for nth in range(len(family.numbers) // size)
    ]
    if spec.kind == "histogram":
        histogram = HistogramMetricFamily(spec.name, spec.help, labels=names)
        bounds = [*map(floatToGoString, spec.buckets), "+Inf"]
        for labels, numbers in rows:
            histogram.add_metric(labels, list(zip(bounds, numbers, strict=False)), sum_value=numbers[-1])
        return histogram
    single = (CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily)(spec.name, spec.help, labels=names)
    for labels, (number,) in rows:
        single.add_metric(labels, number)
    return single


class MetricsPage:
    """Text of a process's metrics in the format that a scraper asks for. Owned by one thread."""

    def __init__(self) -> None:
        self._formats: dict[str, _Format] = {}  # by content type

    def render(self, families: Iterable[MetricFamily], accept: str = "") -> tuple[bytes, str]:
        """Return the text and its content type.

        Args:
            families: Metrics to show.
            accept: Value of the request's header Accept.
        """
        encoder, content_type = _encoder_for(accept)
        if content_type not in self._formats:
            self._formats[content_type] = _Format(encoder)
        return self._formats[content_type].text(families).encode(), content_type


class _Format:
    """Lines of metrics as one encoder writes them, without their numbers."""

    def __init__(self, encoder: Callable[[Any], bytes]) -> None:
        self._encoder = encoder
        self._end = encoder(CollectorRegistry()).decode()
        self._lines: dict[str, tuple[_SeriesKeys, list[str]]] = {}  # by name

    def text(self, families: Iterable[MetricFamily]) -> str:
        by_name: dict[str, list[MetricFamily]] = {}
        for family in families:
            by_name.setdefault(family.spec.name, []).append(family)
        parts: list[str] = []
        for name, same in by_name.items():
            series = [(family.labels, family.keys) for family in same]
            known = self._lines.get(name)
            if known is None or known[0] != series:
                known = self._lines[name] = (series, self._encoded(same))
            lines = known[1]
            numbers = [_number_text(number) for family in same for number in family.numbers]
            woven = [""] * (len(lines) + len(numbers))
            woven[::2], woven[1::2] = lines, numbers
            parts += woven
        return "".join([*parts, self._end])

    def _encoded(self, families: Sequence[MetricFamily]) -> list[str]:
        registry = CollectorRegistry()
        registry.register(FamilyCollector([one._replace(numbers=[math.nan] * len(one.numbers)) for one in families]))
        return self._encoder(registry).decode().removesuffix(self._end).split(_PLACE)


_SeriesKeys = list[tuple[Mapping[str, str], Sequence[str]]]


@lru_cache(maxsize=1 << 15)  # most numbers of a page are counts, often equal to other numbers or to their last value
def _number_text(number: float) -> str:
    return f" {floatToGoString(number)}\n"


def _encoder_for(accept: str) -> tuple[Callable[[Any], bytes], str]:
    """Return the encoder of one of two formats: a scraper names any version, and each format has its own lines here."""
    try:
        is_open = choose_encoder(accept)[1].startswith("application/openmetrics-text")
    except (TypeError, ValueError):  # a version in it is no number
        is_open = False
    return choose_encoder(_OPEN_METRICS if is_open else "")
