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

_STARTED_AT_S: Final = time.time()  # of the process, also after restarts of ranks and changes of role

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
    """Return one of `ABORT_REASONS`."""
    if isinstance(error, TransferAborted):
        return "operator" if error.is_by_operator else "caller"
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "other")


def outcome_of(error: TransferError) -> str:
    """Return the outcome of a queued request that ended with `error`: "aborted", "refused" or "failed"."""
    if isinstance(error, TransferAborted | Preempted):  # wanted by a caller or an operator, or ordinary in an engine
        return "aborted"
    is_no_room = isinstance(error, ResourceExhausted) and not isinstance(error, ChunkTooLarge)
    return "refused" if is_no_room else "failed"


class NodeMetrics(Series):
    """The series of a node's leader. Owned by the leader's loop."""

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
        """Count a request by outcome. Raise ConfigError for an outcome that this role does not have."""
        if outcome not in self._outcomes:
            raise ConfigError(f"outcome is {outcome}; it must be one of {', '.join(self._outcomes)}")
        self.counter("requests", outcome=outcome).inc()

    def request_given_up(self, error: TransferError) -> None:
        """Count the reason of a request that ended with `error`, besides its outcome."""
        self.counter("aborts", reason=abort_reason(error)).inc()

    def draft_tokens(self, proposed: int, accepted: int) -> None:
        """Count the draft tokens of a request in a step."""
        self.counter("spec_decode_draft_tokens").inc(proposed)
        self.counter("spec_decode_accepted_tokens").inc(accepted)

    def breakers(self, states: Mapping[str, int]) -> None:
        """Show the number of prefill nodes by the state of their circuit breaker."""
        for name in BREAKER_STATES:
            self.gauge("breakers", state=name).set(states.get(name, 0))

    def discovery(
        self, *, addresses: int, age_s: float | None, interval_s: float, failures: int, refused: Mapping[str, int]
    ) -> None:
        """Show the state of discovery, or of a prefill node's own entry, with the failures since the node's start.

        Args:
            age_s: Seconds since its addresses were last confirmed; None means that there is no result yet.
            interval_s: Seconds between two looks; 0 means that it does not look again.
        """
        self.gauge("discovery_interval_seconds").set(interval_s)
        self.gauge("discovery_addresses").set(addresses)
        self.gauge("discovery_age_seconds").set(-1 if age_s is None else age_s)
        self.counter("discovery_failures").reach(failures)
        for reason, number in refused.items():
            self.counter("discovery_refused_entries", reason=reason).reach(number)

    def certificate(self, *, not_after_s: float, is_stale: bool) -> None:
        """Show when the certificate expires, in seconds since 1970, and whether newer files cannot be used."""
        self.gauge("certificate_expiry_timestamp_seconds").set(not_after_s)
        self.gauge("certificate_stale").set(is_stale)

    def limits(self, *, max_queued: int, max_running: int) -> None:
        """Show the most requests that may wait and run. Before this call, neither is shown."""
        self.gauge("max_queued_requests").set(max_queued)
        self.gauge("max_running_requests").set(max_running)

    def node_state(self, *, state: str, queued: int, running: int, peers: Mapping[str, int], restarts: int) -> None:
        """Show the node's state, and the number of peers by their state."""
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
