"""Metrics of ranks and leaders, and the page that shows them.

`specs` declares every one. Ranks are processes of their own: each keeps a `RankMetrics` and reports `snapshot()`s, which are
plain values, to its leader; the leader's `NodeMetrics.render()` shows its own series and the ranks' newest ones together, each
with the label ``rank``.
"""

from transfer.metrics.node import NodeMetrics
from transfer.metrics.page import MetricFamily, exposition
from transfer.metrics.rank import MAX_REASONS, RankMetrics
from transfer.metrics.specs import BREAKER_STATES, NODE_METRICS, RANK_METRICS, STORE_METRICS, TOKEN_BUCKETS_S, MetricSpec
from transfer.metrics.store import StoreMetrics

__all__ = [
    "BREAKER_STATES",
    "MAX_REASONS",
    "NODE_METRICS",
    "RANK_METRICS",
    "STORE_METRICS",
    "TOKEN_BUCKETS_S",
    "MetricFamily",
    "MetricSpec",
    "NodeMetrics",
    "RankMetrics",
    "StoreMetrics",
    "exposition",
]
