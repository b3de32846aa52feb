"""Find the programs of Prometheus, and query its server."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from kvferry.local_cluster.prometheus import HOW_TO_GET_IT, Prometheus
from transfer.errors import ConfigError


def program(name: str) -> str:
    """Return the path of "prometheus" or "promtool"; skip the test with instructions if it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; {HOW_TO_GET_IT}")
    return path


class Series(NamedTuple):
    """Labels and values of one series."""

    labels: Mapping[str, str]
    values: tuple[float, ...]


def over(server: Prometheus, expr: str, begin_s: float, end_s: float) -> list[Series]:
    """Return the values of each series of an expression, one a second from one Unix time to another.

    Raises:
        ConfigError: Prometheus refuses the expression; the message says why.
    """
    query = urllib.parse.urlencode({"query": expr, "start": begin_s, "end": end_s, "step": 1})
    try:
        found: dict[str, Any] = server.asked(f"query_range?{query}")
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{expr}: {error.read().decode()}") from error
    return [Series(series["metric"], tuple(float(value) for _, value in series["values"])) for series in found["result"]]
