"""Counters, gauges and histograms of one process: numbers that one thread owns.

A number is a plain attribute without a lock, so counting in a hot path costs little. A process reports all numbers a few times a
second. `transfer.metrics.page` gives them to `prometheus_client`, which writes the text
(docs/adr/0035-metrics-of-our-own.md).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import Final, NamedTuple, Protocol, TypeVar

from transfer.metrics.specs import MetricSpec

_PREFIX: Final = "kvferry_"

_Labels = tuple[str, ...]


class MetricFamily(NamedTuple):
    """Series of one metric that one process counts.

    Args:
        spec: The metric.
        labels: Labels that all series of the process have.
        keys: For each series, one after another, the values of the metric's own labels.
        numbers: For each series, one after another, `MetricSpec.num_samples` numbers. Those of a histogram are the cumulative
            counts of its buckets, the count and the sum.
    """

    spec: MetricSpec
    labels: Mapping[str, str]
    keys: Sequence[str]
    numbers: Sequence[float]


class CountedTurns(Protocol):
    """Turns of a loop, counted by the buckets of `TURN_BUCKETS_S`, and their sum in seconds."""

    @property
    def counts(self) -> Sequence[int]: ...
    @property
    def total_s(self) -> float: ...


class Counter:
    """A number that only increases."""

    __slots__ = ("value",)

    def __init__(self, spec: MetricSpec) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add `amount`.

        Raises:
            ValueError: `amount` is negative.
        """
        if amount < 0:
            raise ValueError(f"a counter was to grow by {amount}; it never goes back")
        self.value += amount

    def reach(self, total: float) -> None:
        """Increase to a total that another object counts. A lower total changes nothing."""
        self.value = max(self.value, float(total))

    def numbers(self) -> Sequence[float]:
        return (self.value,)


class Gauge:
    """A current value. A value that is not finite is not shown."""

    __slots__ = ("value",)

    def __init__(self, spec: MetricSpec) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = float(value)

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def numbers(self) -> Sequence[float]:
        return (self.value,) if math.isfinite(self.value) else ()


class Histogram:
    """Numbers of values in buckets, and the sum of the values."""

    __slots__ = ("_bounds", "_counts", "_followed", "_sum")

    def __init__(self, spec: MetricSpec) -> None:
        self._bounds = spec.buckets
        self._counts = [0] * (len(spec.buckets) + 1)
        self._sum = 0.0
        self._followed: CountedTurns | None = None

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def follow(self, turns: CountedTurns) -> None:
        """Show values that another object counts, instead of observed values."""
        self._followed = turns

    def numbers(self) -> Sequence[float]:
        followed = self._followed
        counts = list(accumulate(self._counts if followed is None else followed.counts))
        return (*counts, counts[-1], self._sum if followed is None else followed.total_s)


_Cell = Counter | Gauge | Histogram
_CellT = TypeVar("_CellT", Counter, Gauge, Histogram)
_KINDS: Final[Mapping[str, type[_Cell]]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class Series:
    """The series of one process. Owned by one thread.

    `counter`, `gauge` and `histogram` return a series, which is shown from then on. They raise KeyError for a metric that is
    not declared, is of another kind, or has other labels.

    Args:
        specs: Metrics of the process.
        labels: Labels of every series besides its own.
        prefix: Beginning of all names, which calls leave out.
    """

    def __init__(self, specs: Sequence[MetricSpec], *, labels: Mapping[str, str], prefix: str = _PREFIX) -> None:
        self._prefix = prefix
        self._specs = {spec.name.removeprefix(prefix): spec for spec in specs}
        self.labels = dict(labels)
        self._cells: dict[str, dict[_Labels, _Cell]] = {name: {} for name in self._specs}

    def counter(self, name: str, **labels: str) -> Counter:
        return self._cell(Counter, name, labels)

    def gauge(self, name: str, **labels: str) -> Gauge:
        return self._cell(Gauge, name, labels)

    def histogram(self, name: str, **labels: str) -> Histogram:
        return self._cell(Histogram, name, labels)

    def show_zeros(self, specs: Iterable[MetricSpec], role: str, **values: tuple[str, ...]) -> None:
        """Show counters and histograms from the start, if the values of their labels are known.

        Args:
            specs: Metrics. Those that nodes of `role` serve are shown.
            role: "prefill" or "decode".
            values: By name of the metric, the values of its one label for `role`.
        """
        for spec in specs:
            name = spec.name.removeprefix(self._prefix)
            of_labels = [values[name]] if name in values else spec.values
            if role in spec.roles and spec.kind != "gauge" and not any(isinstance(one, str) for one in of_labels):
                for key in product(*of_labels):
                    self._cells[name].setdefault(key, _KINDS[spec.kind](spec))

    def remove(self, name: str, **labels: str) -> None:
        """Stop showing one series."""
        del self._cells[name][tuple([labels[label] for label in self._specs[name].labels])]

    def families(self) -> Iterator[MetricFamily]:
        """Return the metrics that have series, in the order of their declarations."""
        for name, cells in self._cells.items():
            keys: list[str] = []
            numbers: list[float] = []
            for key, cell in cells.items():
                if shown := cell.numbers():
                    keys += key
                    numbers += shown
            if numbers:
                yield MetricFamily(self._specs[name], self.labels, keys, numbers)

    def _cell(self, kind: type[_CellT], name: str, labels: dict[str, str]) -> _CellT:
        cells = self._cells[name]
        key = tuple(labels.values())
        cell = cells.get(key)
        if cell is None or len(key) > 1:  # several labels can be given in another order
            spec = self._specs[name]
            if labels.keys() != set(spec.labels):
                raise KeyError(f"{spec.name} has the labels {', '.join(spec.labels)}, and not {', '.join(labels)}")
            key = tuple([labels[label] for label in spec.labels])
            cell = cells.get(key)
            if cell is None:
                cell = cells[key] = _KINDS[spec.kind](spec)
        if not isinstance(cell, kind):
            raise KeyError(f"{self._specs[name].name} is a {self._specs[name].kind}")
        return cell
