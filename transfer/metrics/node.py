"""What a node's leader counts, and the page that it serves."""

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
from transfer.metrics.page import MetricFamily, exposition, merge
from transfer.metrics.rank import CountedTurns
from transfer.metrics.series import Series
from transfer.metrics.specs import ABORT_REASONS, BREAKER_STATES, NODE_STATES, OUTCOMES, PEER_STATES
from transfer.metrics.store import StoreMetrics
from transfer.metrics.table import NODE_METRICS
from transfer.metrics.tiers import TierMetrics

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


class NodeMetrics:
    """What a node's leader counts, and the page that it serves. Owned by the leader's loop.

    Args:
        role: "prefill" or "decode".
    """

    def __init__(self, *, role: str) -> None:
        if role not in OUTCOMES:
            raise ConfigError(f"role is {role}; it must be one of {', '.join(OUTCOMES)}")
        self._series = Series(NODE_METRICS, labels={"role": role})
        self._totals: dict[tuple[str, ...], int] = {}
        self._turns: CountedTurns | None = None
        self.store = StoreMetrics(self._series)
        self._outcomes = OUTCOMES[role]
        for outcome in self._outcomes:
            self._series("requests", outcome=outcome)
        for reason in ABORT_REASONS:
            self._series("aborts", reason=reason)
        for name in ("queue_seconds", "prompt_tokens", "out_of_memory_steps", "requests_waiting_for_pages"):
            self._series(name)
        self.tiers = TierMetrics(self._series, is_shown=role == "decode")
        if role == "decode":
            self._series("time_to_first_token_seconds")
            self._series("time_per_output_token_seconds")
            self._series("retries")
            self._series("breaker_openings")
            self._series("join_faults")
            self._series("generated_tokens")
            self.breakers({})
        self._series("start_time_seconds").set(_STARTED_AT_S)
        self._series("build_info", version=transfer.__version__, python=platform.python_version()).set(1)
        if role == "prefill":
            self._series("loaded_prompt_tokens")
        self.node_state(state="starting", queued=0, running=0, peers={}, restarts=0)

    def request_ended(self, outcome: str) -> None:
        """A request is over.

        Raises:
            ConfigError: `outcome` is none of this role's.
        """
        if outcome not in self._outcomes:
            raise ConfigError(f"outcome is {outcome}; it must be one of {', '.join(self._outcomes)}")
        self._series("requests", outcome=outcome).inc()

    def request_given_up(self, error: TransferError) -> None:
        """A request has ended with `error`; besides its outcome."""
        self._series("aborts", reason=abort_reason(error)).inc()

    def prompt_accepted(self, num_tokens: int) -> None:
        """A prompt of so many tokens was accepted."""
        self._series("prompt_tokens").inc(num_tokens)

    def tokens_generated(self, num_tokens: int) -> None:
        """So many tokens are on their way to their caller."""
        self._series("generated_tokens").inc(num_tokens)

    def step_out_of_memory(self) -> None:
        """Count a step that failed because memory ran out."""
        self._series("out_of_memory_steps").inc()

    def waiting_for_pages(self, num_requests: int) -> None:
        """Set the number of requests that wait for pages of this node's KV pool."""
        self._series("requests_waiting_for_pages").set(num_requests)

    def request_retried(self) -> None:
        """A request is tried on another prefill node."""
        self._series("retries").inc()

    def tokens_loaded(self, num_tokens: int) -> None:
        """So many tokens of a prompt were taken from the store; 0 when it was looked for there and not found."""
        self._series("loaded_prompt_tokens").inc(num_tokens)

    def breaker_opened(self) -> None:
        """A prefill node is left out for a while."""
        self._series("breaker_openings").inc()

    def join_broke(self) -> None:
        """An error that nobody expected has ended a join."""
        self._series("join_faults").inc()

    def breakers(self, states: Mapping[str, int]) -> None:
        """How many prefill nodes have a circuit breaker in which state now."""
        for name in BREAKER_STATES:
            self._series("breakers", state=name).set(states.get(name, 0))

    def discovery(
        self, *, addresses: int, age_s: float | None, interval_s: float, failures: int, refused: Mapping[str, int]
    ) -> None:
        """What discovery knows now, and how often it has failed since the node started; of a prefill node: its own entry.

        Args:
            age_s: Since what it knows was last known to hold; None: it has heard nothing yet.
            interval_s: Between two looks; 0: it does not look again.
        """
        self._series("discovery_interval_seconds").set(interval_s)
        self._series("discovery_addresses").set(addresses)
        self._series("discovery_age_seconds").set(-1 if age_s is None else age_s)
        self._reach("discovery_failures", failures)
        for reason, number in refused.items():
            self._reach("discovery_refused_entries", number, reason=reason)

    def _reach(self, name: str, total: int, **labels: str) -> None:
        """Have a counter show a total that somebody else counts."""
        key = (name, *labels.values())
        self._series(name, **labels).inc(total - self._totals.get(key, 0))
        self._totals[key] = total

    def call_refused(self, method: str) -> None:
        """Somebody called whose certificate does not allow it; `method` is one that the server has."""
        self._series("refused_calls", method=method).inc()

    def certificate(self, *, not_after_s: float, is_stale: bool) -> None:
        """This node's certificate: when it expires, in seconds since 1970, and whether newer files cannot be used."""
        self._series("certificate_expiry_timestamp_seconds").set(not_after_s)
        self._series("certificate_stale").set(is_stale)

    def queue_seconds(self, seconds: float) -> None:
        """A request got room after it had waited this long."""
        self._series("queue_seconds").observe(seconds)

    def time_to_first_token(self, seconds: float) -> None:
        """A request's first token came this long after its acceptance."""
        self._series("time_to_first_token_seconds").observe(seconds)

    def time_per_output_token(self, seconds: float) -> None:
        """A token came this long after the one before."""
        self._series("time_per_output_token_seconds").observe(seconds)

    def largest_piece(self, num_bytes: int) -> None:
        """As requests are cut now, no part of a chunk that one rank sends to another is larger; 0: nothing is joined."""
        self._series("largest_piece_bytes").set(num_bytes)

    def limits(self, *, max_queued: int, max_running: int) -> None:
        """How many requests may wait, and how many may run; until then neither is shown."""
        self._series("max_queued_requests").set(max_queued)
        self._series("max_running_requests").set(max_running)

    def node_state(self, *, state: str, queued: int, running: int, peers: Mapping[str, int], restarts: int) -> None:
        """The node's state now; peers by their state."""
        for name in NODE_STATES:
            self._series("node_state", state=name).set(name == state)
        for name in PEER_STATES:
            self._series("peers", state=name).set(peers.get(name, 0))
        self._series("queued_requests").set(queued)
        self._series("running_requests").set(running)
        self._series("rank_restarts").set(restarts)

    def watch_loop(self, turns: CountedTurns) -> None:
        """Show the turns of the process's loop from now on."""
        self._turns = turns

    def collect(self, snapshots: Iterable[Mapping[str, Any] | None]) -> list[MetricFamily]:
        """This node's series and those of the ranks, for `exposition`.

        Args:
            snapshots: The newest `RankMetrics.snapshot()` of each rank; None where a rank has not reported.
        """
        if self._turns is not None:
            self._series("loop_turn_seconds").show(self._turns.counts, self._turns.total_s)
        return [*(MetricFamily(spec, text) for spec, text in self._series.texts()), *merge(snapshots)]

    def render(self, snapshots: Iterable[Mapping[str, Any] | None]) -> bytes:
        """The exposition text of `collect`."""
        return exposition(self.collect(snapshots))
