"""Count a process's use of its store."""

from __future__ import annotations

from collections.abc import Sequence

from transfer.metrics.series import Series
from transfer.metrics.specs import BREAKER_STATES


class StoreMetrics:
    """Series of a `transfer.storage.client.StoreClient`, which calls all methods. Shows nothing before the first call."""

    def __init__(self, series: Series) -> None:
        self._series = series

    def operation_finished(self, op: str, outcomes: Sequence[str], *, num_bytes: int, seconds: float) -> None:
        """Count an answered call.

        Args:
            op: "put", "get", "exists" or "delete".
            outcomes: `Outcome` of each page.
            num_bytes: Bytes of the pages that were put or read.
            seconds: Time from the call to its answer.
        """
        for outcome in outcomes:
            self._series.counter("store_operations", op=op, outcome=str(outcome)).inc()
        self._series.counter("store_bytes", op=op).inc(num_bytes)
        self._series.histogram("store_seconds", op=op).observe(seconds)

    def queue_changed(self, num_pages: int) -> None:
        """Show the pages that wait for the store or for its answer."""
        self._series.gauge("store_queue_depth").set(num_pages)

    def circuits_changed(self, *, read: str, write: str) -> None:
        """Show the states of the circuit breakers: "closed", "open" or "half-open"."""
        for direction, state in (("read", read), ("write", write)):
            for name in BREAKER_STATES:
                self._series.gauge("store_circuit", direction=direction, state=name).set(name == state)
