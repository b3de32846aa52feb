"""Real clusters with KV offload; what the cluster tests share, they share with these."""

from __future__ import annotations

from tests.cluster.conftest import model, reference, start

__all__ = ["model", "reference", "start"]
