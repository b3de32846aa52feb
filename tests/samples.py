"""Samples of a page of metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def sample(page: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels; 0 if there are none."""
    return sum(
        found.value
        for family in text_string_to_metric_families(page)
        for found in family.samples
        if found.name == name and labels.items() <= found.labels.items()
    )
