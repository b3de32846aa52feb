"""Metrics of ranks and leaders, and the page that shows them.

`transfer.metrics.table` declares all of them, and is the source of docs/metrics.md.

A rank is a separate process. It keeps a `RankMetrics` and reports its `snapshot()`, plain values, to its leader. The leader
joins its `NodeMetrics` with the newest snapshots, which have the label ``rank``. A `MetricsPage` writes the result as text.
"""

from transfer.metrics.node import NodeMetrics, abort_reason, outcome_of
from transfer.metrics.page import FamilyCollector, MetricsPage
from transfer.metrics.rank import MAX_REASONS, RankMetrics
from transfer.metrics.series import MetricFamily, Series
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
    "FamilyCollector",
    "MetricFamily",
    "MetricSpec",
    "MetricsPage",
    "NodeMetrics",
    "RankMetrics",
    "Series",
    "StoreMetrics",
    "abort_reason",
    "outcome_of",
]
