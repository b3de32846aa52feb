"""The declared metrics of one process, as the Prometheus client keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from transfer.errors import ConfigError
from transfer.metrics.specs import OUTCOMES, MetricSpec

_KINDS: Final = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}

CREATED = "_created"  # series of the Prometheus client that double a page and that no dashboard reads


class Series:
    """The declared metrics of one process, in a registry of their own."""

    def __init__(self, specs: Sequence[MetricSpec], *, role: str) -> None:
        if role not in OUTCOMES:
            raise ConfigError(f"role is {role}; it must be one of {', '.join(OUTCOMES)}")
        self._role = role
        self.registry = CollectorRegistry()
        self._by_name: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Any] = {}  # by name and values; the client's own look-up takes several times longer
        self._labels = {spec.name.removeprefix("kvferry_"): spec.labels for spec in specs}
        for spec in specs:
            options: dict[str, Any] = {"buckets": spec.buckets} if spec.buckets else {}
            self._by_name[spec.name.removeprefix("kvferry_")] = _KINDS[spec.kind](
                spec.name, spec.help, ("role", *spec.labels), registry=self.registry, **options
            )

    def __call__(self, name: str, **labels: str) -> Any:
        key = (name, *[labels[label] for label in self._labels[name]]) if labels else (name,)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._by_name[name].labels(role=self._role, **labels)
        return child

    def remove(self, name: str, **labels: str) -> None:
        """Show one series no more."""
        values = [labels[label] for label in self._labels[name]]
        self._children.pop((name, *values), None)
        self._by_name[name].remove(self._role, *values)
