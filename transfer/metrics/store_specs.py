"""Metrics of every process with a store: ranks, and the leader, whose series have no label ``rank``."""

from __future__ import annotations

from typing import Final

from transfer.metrics.specs import BREAKER_STATES, STAGE_BUCKETS_S, Label, declare

OPS: Final = ("exists", "get", "put", "delete")
STORE_OUTCOMES: Final = ("ok", "missing", "corrupt", "foreign", "failed", "timeout", "refused", "circuit_open")

_OP: Final[Label] = ("op", OPS)

STORE_METRICS: Final = (
    declare(
        "counter",
        "store_operations",
        "Pages that the store was asked about, by what became of them.",
        _OP,
        ("outcome", STORE_OUTCOMES),
        advice="missing is ordinary; anything else that is not ok is the store, its network, or its settings (docs/offload.md).",
    ),
    declare(
        "counter",
        "store_bytes",
        "Bytes of pages that were put into the store, or got from it.",
        _OP,
        advice="Its rate is the store's share of the network or disk.",
    ),
    declare(
        "histogram",
        "store_seconds",
        "Seconds until a call of the store was answered.",
        _OP,
        buckets=STAGE_BUCKETS_S,
        advice="Compare get with what the same pages take to compute.",
    ),
    declare(
        "gauge",
        "store_queue_depth",
        "Pages that wait for the store, or for its answer.",
        advice="Growing: the store is slower than what is written.",
    ),
    declare(
        "gauge",
        "store_circuit",
        "1 for the state of the circuit breaker of reads or writes.",
        ("direction", ("read", "write")),
        ("state", BREAKER_STATES),
        advice="Open: the store is left alone for a while; requests go on without it.",
    ),
)
