"""A real cluster to be traced; what the cluster tests share, they share with these."""

from __future__ import annotations

from tests.cluster.conftest import model, start

__all__ = ["model", "start"]
