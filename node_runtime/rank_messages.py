"""Messages between leader and rank that both roles use."""

from __future__ import annotations

from dataclasses import dataclass, field

from node_runtime.rank_link import RankAddress, RankCodec
from transfer.connector.messages import PagesReleased
from transfer.connector.rank_report import RankReady, RankReport, RankStartFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLogLevel:
    """Set the rank's log level, one of `transfer.logs.LEVELS`."""

    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShutdown:
    """Close the sessions and the engine, and end the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSwitch:
    """Become a rank of the other role: end the worker, keep the engine, and say hello on another link.

    Args:
        role: "prefill" or "decode".
        incarnation, address, rendezvous: See `node_runtime.rank_worker.RankSpec`, for the next life.
    """

    role: str
    incarnation: int
    address: RankAddress
    rendezvous: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A step of the engine ran.

    Args:
        tokens: Request -> its next token; on rank 0 only.
        accepted: Request -> the draft tokens before that token, which the model itself chose; only requests that have some.
        compute_s: Seconds that the step took.
        faults: Request -> why it cannot continue. Other requests of the step are not affected.
    """

    step: int
    tokens: dict[str, int]
    compute_s: float
    faults: dict[str, str] = field(default_factory=dict)
    accepted: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """A step of the engine failed, for all its requests.

    Args:
        reason: One line for operators.
        is_fatal: Whether the engine can run no further step.
        is_out_of_memory: Whether the step found no memory.
    """

    step: int
    request_ids: tuple[str, ...]
    reason: str
    is_fatal: bool
    is_out_of_memory: bool = False


def role_codec(*types: type) -> RankCodec:
    """Return the codec of a role: its own messages, and those that both roles use."""
    shared = (RankReady, RankStartFailed, RankReport, RankLogLevel, RankShutdown, RankSwitch, StepDone, StepFailed, PagesReleased)
    return RankCodec(*types, *shared)
