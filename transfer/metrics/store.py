"""What a process counts of its store."""

from __future__ import annotations

from collections.abc import Sequence

from transfer.metrics.series import Series
from transfer.metrics.specs import BREAKER_STATES


class StoreMetrics:
    """What one process sees of its store; a `transfer.storage.base.StoreObserver`. Shows nothing before it is told anything.

    Args:
        series: Of the process.
    """

    def __init__(self, series: Series) -> None:
        self._series = series

    def operation_finished(self, op: str, outcomes: Sequence[str], *, num_bytes: int, seconds: float) -> None:
        """A call of the store is answered, each of its pages with an outcome."""
        for outcome in outcomes:
            self._series.counter("store_operations", op=op, outcome=str(outcome)).inc()
        self._series.counter("store_bytes", op=op).inc(num_bytes)
        self._series.histogram("store_seconds", op=op).observe(seconds)

    def queue_changed(self, num_pages: int) -> None:
        """So many pages wait for the store, or for its answer."""
        self._series.gauge("store_queue_depth").set(num_pages)

    def circuits_changed(self, *, read: str, write: str) -> None:
        """States of the circuit breakers of reads and of writes."""
        for direction, state in (("read", read), ("write", write)):
            for name in BREAKER_STATES:
                self._series.gauge("store_circuit", direction=direction, state=name).set(name == state)
