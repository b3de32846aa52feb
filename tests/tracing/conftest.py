"""A real cluster to be traced; what the cluster tests share, they share with these."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import model, start

__all__ = ["model", "start"]


@pytest.fixture(autouse=True)
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that is there has everything once a tracer of this process is closed, on a loaded machine too."""
    monkeypatch.setattr("node_runtime.tracing_client.CLOSE_S", 30.0)
