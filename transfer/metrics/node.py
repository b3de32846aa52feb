"""The series of a node's leader, and the names of request outcomes."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import transfer
from transfer.errors import (
    ChunkTooLarge,
    ConfigError,
    EngineError,
    IntegrityError,
    LayoutError,
    Preempted,
    ProtocolError,
    ResourceExhausted,
    TransferAborted,
    TransferError,
    TransportError,
)
from transfer.metrics.page import reported_families
from transfer.metrics.series import MetricFamily, Series
from transfer.metrics.specs import BREAKER_STATES, NODE_STATES, OUTCOMES, PEER_STATES
from transfer.metrics.store import StoreMetrics
from transfer.metrics.table import NODE_METRICS, OFFLOAD_METRICS, REQUEST_METRICS

_STARTED_AT_S: Final = time.time()  # of the process, whatever becomes of its ranks and of its role

_REASONS: Final = (
    (ResourceExhausted, "no_room"),
    (TransportError, "lost"),
    (EngineError, "engine"),
    (IntegrityError, "data_loss"),
    (LayoutError, "misfit"),
    (ProtocolError, "misfit"),
    (ConfigError, "misfit"),
)


def abort_reason(error: TransferError) -> str:
    """One of `ABORT_REASONS`."""
    if isinstance(error, TransferAborted):
        return "operator" if error.is_by_operator else "caller"
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "other")


def outcome_of(error: TransferError) -> str:
    """Of a request that was queued and has ended with `error`: "aborted", "refused" or "failed"."""
    if isinstance(error, TransferAborted | Preempted):  # somebody's wish, or an engine's ordinary way
        return "aborted"
    is_no_room = isinstance(error, ResourceExhausted) and not isinstance(error, ChunkTooLarge)
    return "refused" if is_no_room else "failed"


class NodeMetrics(Series):
    """The series of a node's leader. Owned by the leader's loop.

    Args:
        role: "prefill" or "decode".
    """

    def __init__(self, *, role: str) -> None:
        if role not in OUTCOMES:
            raise ConfigError(f"role is {role}; it must be one of {', '.join(OUTCOMES)}")
        super().__init__(NODE_METRICS, labels={"role": role})
        self.store = StoreMetrics(self)
        self._outcomes = OUTCOMES[role]
        self.show_zeros((*REQUEST_METRICS, *OFFLOAD_METRICS), role, requests=self._outcomes)
        self.gauge("requests_waiting_for_pages")
        if role == "decode":
            self.counter("breaker_openings")
            self.counter("join_faults")
            self.breakers({})
        self.gauge("start_time_seconds").set(_STARTED_AT_S)
        self.gauge("build_info", version=transfer.__version__, python=platform.python_version()).set(1)
        self.node_state(state="starting", queued=0, running=0, peers={}, restarts=0)

    def request_ended(self, outcome: str) -> None:
        """A request is over.

        Raises:
            ConfigError: `outcome` is none of this role's.
        """
        if outcome not in self._outcomes:
            raise ConfigError(f"outcome is {outcome}; it must be one of {', '.join(self._outcomes)}")
        self.counter("requests", outcome=outcome).inc()

    def request_given_up(self, error: TransferError) -> None:
        """A request has ended with `error`; besides its outcome."""
        self.counter("aborts", reason=abort_reason(error)).inc()

    def breakers(self, states: Mapping[str, int]) -> None:
        """How many prefill nodes have a circuit breaker in which state now."""
        for name in BREAKER_STATES:
            self.gauge("breakers", state=name).set(states.get(name, 0))

    def discovery(
        self, *, addresses: int, age_s: float | None, interval_s: float, failures: int, refused: Mapping[str, int]
    ) -> None:
        """What discovery knows now, and how often it has failed since the node started; of a prefill node: its own entry.

        Args:
            age_s: Since what it knows was last known to hold; None: it has heard nothing yet.
            interval_s: Between two looks; 0: it does not look again.
        """
        self.gauge("discovery_interval_seconds").set(interval_s)
        self.gauge("discovery_addresses").set(addresses)
        self.gauge("discovery_age_seconds").set(-1 if age_s is None else age_s)
        self.counter("discovery_failures").reach(failures)
        for reason, number in refused.items():
            self.counter("discovery_refused_entries", reason=reason).reach(number)

    def certificate(self, *, not_after_s: float, is_stale: bool) -> None:
        """This node's certificate: when it expires, in seconds since 1970, and whether newer files cannot be used."""
        self.gauge("certificate_expiry_timestamp_seconds").set(not_after_s)
        self.gauge("certificate_stale").set(is_stale)

    def limits(self, *, max_queued: int, max_running: int) -> None:
        """How many requests may wait, and how many may run; until then neither is shown."""
        self.gauge("max_queued_requests").set(max_queued)
        self.gauge("max_running_requests").set(max_running)

    def node_state(self, *, state: str, queued: int, running: int, peers: Mapping[str, int], restarts: int) -> None:
        """The node's state now; peers by their state."""
        for name in NODE_STATES:
            self.gauge("node_state", state=name).set(name == state)
        for name in PEER_STATES:
            self.gauge("peers", state=name).set(peers.get(name, 0))
        self.gauge("queued_requests").set(queued)
        self.gauge("running_requests").set(running)
        self.gauge("rank_restarts").set(restarts)

    def collect(self, snapshots: Iterable[Mapping[str, Any] | None]) -> list[MetricFamily]:
        """Return this node's metrics and those of its ranks, for a `MetricsPage`.

        Args:
            snapshots: The newest `RankMetrics.snapshot()` of each rank. None means that the rank has not reported yet.
        """
        return [*self.families(), *reported_families(snapshots)]
