"""PromQL that every chart is made of. Names of metrics are spelt out at the charts, so that they can be searched for.

Every selector follows the dashboard's variables: ``job`` and ``instance`` come from the scrape, ``role`` from kvferry. Rates
are over ``$__rate_interval``, which Grafana makes as long as the scrape interval needs.
"""

from __future__ import annotations

from typing import Final

VARIABLES: Final = ("job", "role", "instance")
"""Labels that a dashboard can be narrowed down by, the wider ones first."""

_FOLLOWS_THE_VARIABLES: Final = ", ".join(f'{name}=~"${name}"' for name in VARIABLES)


def selector(metric: str, where: str = "") -> str:
    """The metric's series on the nodes that are looked at; `where` are further matchers."""
    return f"{metric}{{{', '.join(part for part in (_FOLLOWS_THE_VARIABLES, where) if part)}}}"


def summed(metric: str, *by: str, where: str = "") -> str:
    """Sum of a gauge by labels; without any, over all that is looked at."""
    return f"sum{_by(by)} ({selector(metric, where)})"


def per_second(metric: str, *by: str, where: str = "") -> str:
    """Growth of a counter in a second, summed by labels."""
    return f"sum{_by(by)} (rate({selector(metric, where)}[$__rate_interval]))"


def quantile(fraction: float, histogram: str, *by: str) -> str:
    """Below it is that fraction of what a histogram has observed lately, by labels; nothing where it has observed nothing.

    Args:
        fraction: 0.5 is the median.
        histogram: Without ``_bucket``.
    """
    return f"histogram_quantile({fraction:g}, {per_second(f'{histogram}_bucket', 'le', *by)})"


def share(part: str, label: str, whole: str) -> str:
    """Part of a whole, for each value of a label that the part has, and the whole has not."""
    return f"{part} / ignoring ({label}) group_left () {whole}"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
