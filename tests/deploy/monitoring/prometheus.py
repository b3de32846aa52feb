"""The programs of Prometheus that the tests need."""

from __future__ import annotations

import shutil

import pytest

from kvferry.local_prometheus import HOW_TO_GET_IT


def program(name: str) -> str:
    """Where "prometheus" or "promtool" is; without, the test is skipped, and says how to get it."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; {HOW_TO_GET_IT}")
    return path
