"""The page that Prometheus reads: the series of a process, and the newest ones of its ranks beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from transfer.metrics.specs import MetricSpec
from transfer.metrics.table import RANK_METRICS


class MetricFamily(NamedTuple):
    """A metric, and lines of it."""

    spec: MetricSpec
    text: str


def merge(snapshots: Iterable[Mapping[str, Any] | None]) -> list[MetricFamily]:
    """The ranks' metrics as declared, in the order of the ranks; what is not declared is left out."""
    known = sorted((snapshot for snapshot in snapshots if snapshot is not None), key=lambda one: int(one["rank"]))
    merged = [
        MetricFamily(spec, "".join([snapshot["families"].get(spec.name, "") for snapshot in known])) for spec in RANK_METRICS
    ]
    return [family for family in merged if family.text]


def exposition(families: Iterable[MetricFamily]) -> bytes:
    """Metrics as text, those of one name together."""
    by_name: dict[str, tuple[MetricSpec, list[str]]] = {}
    for spec, text in families:
        by_name.setdefault(spec.name, (spec, []))[1].append(text)
    return "".join([f"{_head(spec)}{''.join(texts)}" for spec, texts in by_name.values()]).encode()


def _head(spec: MetricSpec) -> str:
    meaning = spec.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {spec.shown_name} {meaning}\n# TYPE {spec.shown_name} {spec.kind}\n"
