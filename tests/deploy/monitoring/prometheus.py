"""Find the programs of Prometheus."""

from __future__ import annotations

import shutil

import pytest

from kvferry.local_cluster.prometheus import HOW_TO_GET_IT


def program(name: str) -> str:
    """Return the path of "prometheus" or "promtool"; skip the test with instructions if it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; {HOW_TO_GET_IT}")
    return path
