"""The declared metrics of one process, and the text that Prometheus reads of them.

Written for what ranks do with them: count in hot paths, and say all of it a few times a second. A line but for its number never
changes, so it is made once, with the series. (docs/adr/0035-metrics-of-our-own.md has what that spares.)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from transfer.metrics.specs import MetricSpec

_PREFIX: Final = "kvferry_"


class _Counter:
    """Only grows."""

    __slots__ = ("_line", "value")

    def __init__(self, spec: MetricSpec, labels: Mapping[str, str]) -> None:
        self._line = f"{spec.name}_total{_labels_text(labels)} "
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Raises ValueError when it would go back."""
        if amount < 0:
            raise ValueError(f"a counter was to grow by {amount}; it never goes back")
        self.value += amount

    def text(self) -> str:
        return f"{self._line}{float(self.value)!r}\n"


class _Gauge:
    """A value now; one that is not finite is not shown."""

    __slots__ = ("_line", "value")

    def __init__(self, spec: MetricSpec, labels: Mapping[str, str]) -> None:
        self._line = f"{spec.name}{_labels_text(labels)} "
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = float(value)

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def text(self) -> str:
        return f"{self._line}{self.value!r}\n" if math.isfinite(self.value) else ""


class _Histogram:
    """How many values were at most each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "_lines", "_sum", "_sum_line")

    def __init__(self, spec: MetricSpec, labels: Mapping[str, str]) -> None:
        self._bounds = spec.buckets
        self._counts = [0] * (len(spec.buckets) + 1)
        self._sum = 0.0
        bounds = [*map(repr, map(float, spec.buckets)), "+Inf"]
        self._lines = [f"{spec.name}_bucket{_labels_text({**labels, 'le': bound})} " for bound in bounds]
        self._lines.append(f"{spec.name}_count{_labels_text(labels)} ")
        self._sum_line = f"{spec.name}_sum{_labels_text(labels)} "

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def show(self, counts: Sequence[int], total: float) -> None:
        """Show values that another object counted by the same bounds.

        Args:
            counts: Number of values in each bucket, then the number above the highest bound.
            total: Sum of all values.
        """
        self._counts[:] = counts
        self._sum = total

    def text(self) -> str:
        total, parts = 0, []
        for line, count in zip(self._lines, self._counts, strict=False):
            total += count
            parts.append(f"{line}{total}.0\n")
        return f"{''.join(parts)}{self._lines[-1]}{total}.0\n{self._sum_line}{float(self._sum)!r}\n"


_KINDS: Final = {"counter": _Counter, "gauge": _Gauge, "histogram": _Histogram}


class Series:
    """The declared metrics of one process. Owned by one thread.

    Args:
        specs: What is declared.
        labels: Of every series besides its own.
        prefix: What names begin with, and calls leave out.
    """

    def __init__(self, specs: Sequence[MetricSpec], *, labels: Mapping[str, str], prefix: str = _PREFIX) -> None:
        self._specs = {spec.name.removeprefix(prefix): spec for spec in specs}
        self._fixed = dict(labels)
        self._children: dict[str, dict[tuple[str, ...], Any]] = {name: {} for name in self._specs}

    def __call__(self, name: str, **labels: str) -> Any:
        """The series, which is there from now on.

        Raises:
            KeyError: It is not declared, or has other labels.
        """
        children = self._children[name]
        key = tuple(labels.values())
        child = children.get(key)
        if child is None or len(key) > 1:  # several labels may be given in another order
            spec = self._specs[name]
            if labels.keys() != set(spec.labels):
                raise KeyError(f"{spec.name} has the labels {', '.join(spec.labels)}, and not {', '.join(labels)}")
            key = tuple([labels[label] for label in spec.labels])
            child = children.get(key)
            if child is None:
                child = children[key] = _KINDS[spec.kind](spec, {**self._fixed, **labels})
        return child

    def remove(self, name: str, **labels: str) -> None:
        """Show one series no more."""
        del self._children[name][tuple([labels[label] for label in self._specs[name].labels])]

    def texts(self) -> Iterator[tuple[MetricSpec, str]]:
        """Of each metric that has series, their lines."""
        for name, children in self._children.items():
            text = "".join([child.text() for child in children.values()])
            if text:
                yield self._specs[name], text


def _labels_text(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    parts = [f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())]
    return f"{{{','.join(parts)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
