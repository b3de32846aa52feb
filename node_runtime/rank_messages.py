"""Messages between leader and rank that both roles share."""

from __future__ import annotations

from dataclasses import dataclass

from node_runtime.rank_link import RankAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLogLevel:
    """What the rank writes to its log from now on; one of `transfer.logs.LEVELS`."""

    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShutdown:
    """End: close the engine, the sessions and the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSwitch:
    """Become a rank of the other role: end the worker, keep the engine, and say hello on another link.

    Args:
        role: "prefill" or "decode".
        incarnation, address, rendezvous: As `node_runtime.rank_worker.RankSpec` has them, of the life that begins.
    """

    role: str
    incarnation: int
    address: RankAddress
    rendezvous: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """The engine failed; `is_fatal`: it is of no more use. `is_out_of_memory`: there was no memory for the step."""

    step: int
    request_ids: tuple[str, ...]
    reason: str
    is_fatal: bool
    is_out_of_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesReleased:
    """The request's pages are back in this rank's pool."""

    request_id: str
