"""Metrics of ranks and leaders, and the page that shows them.

`transfer.metrics.table` declares every one, and docs/metrics.md is made of it.

Ranks are processes of their own: each keeps a `RankMetrics` and reports `snapshot()`s, which are
plain values, to its leader; the leader's `NodeMetrics.render()` shows its own series and the ranks' newest ones together, each
with the label ``rank``.
"""

from transfer.metrics.node import NodeMetrics, abort_reason, outcome_of
from transfer.metrics.page import MetricFamily, exposition
from transfer.metrics.rank import MAX_REASONS, RankMetrics
from transfer.metrics.series import Series
from transfer.metrics.specs import ABORT_REASONS, BREAKER_STATES, TOKEN_BUCKETS_S, MetricSpec
from transfer.metrics.store import StoreMetrics
from transfer.metrics.table import LOOP_METRICS, NODE_METRICS, RANK_METRICS, STORE_METRICS

__all__ = [
    "ABORT_REASONS",
    "BREAKER_STATES",
    "LOOP_METRICS",
    "MAX_REASONS",
    "NODE_METRICS",
    "RANK_METRICS",
    "STORE_METRICS",
    "TOKEN_BUCKETS_S",
    "MetricFamily",
    "MetricSpec",
    "NodeMetrics",
    "RankMetrics",
    "Series",
    "StoreMetrics",
    "abort_reason",
    "exposition",
    "outcome_of",
]
