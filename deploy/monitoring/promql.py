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


def number(metric: str, *by: str, where: str = "") -> str:
    """How many series of a gauge there are, by labels."""
    return f"count{_by(by)} ({selector(metric, where)})"


def highest(metric: str, *by: str, where: str = "") -> str:
    """Highest value of a gauge, by labels."""
    return f"max{_by(by)} ({selector(metric, where)})"


def lowest(metric: str, *by: str, where: str = "") -> str:
    """Lowest value of a gauge, by labels."""
    return f"min{_by(by)} ({selector(metric, where)})"


def mean_per_second(metric: str, *by: str, where: str = "") -> str:
    """Growth of a counter in a second, mean of the series that have these labels."""
    return f"avg{_by(by)} (rate({selector(metric, where)}[$__rate_interval]))"


def change(metric: str, *by: str, where: str = "") -> str:
    """Growth of a gauge in a second, summed by labels."""
    return f"sum{_by(by)} (deriv({selector(metric, where)}[$__rate_interval]))"


def over(part: str, whole: str) -> str:
    """One expression as a share of another one that has the same labels."""
    return f"{part} / {whole}"


def mean(histogram: str, *by: str, where: str = "") -> str:
    """Mean of what a histogram has observed lately, by labels; nothing where it has observed nothing.

    Args:
        histogram: Without ``_sum``.
    """
    return over(per_second(f"{histogram}_sum", *by, where=where), per_second(f"{histogram}_count", *by, where=where))


def quantile(fraction: float, histogram: str, *by: str, where: str = "") -> str:
    """Below it is that fraction of what a histogram has observed lately, by labels; nothing where it has observed nothing.

    Args:
        fraction: 0.5 is the median.
        histogram: Without ``_bucket``.
    """
    return f"histogram_quantile({fraction:g}, {per_second(f'{histogram}_bucket', 'le', *by, where=where)})"


def share(part: str, label: str, whole: str) -> str:
    """Part of a whole, for each value of a label that the part has, and the whole has not."""
    return f"{part} / ignoring ({label}) group_left () {whole}"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
