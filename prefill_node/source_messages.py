"""What the leader and the ranks of a hosted prefill side say to each other; see `prefill_node.source_rank`.

A *name* is the engine's own for a prompt, a *transfer* is one attempt to move its KV. `AttachDecode` and its answers are those of
`prefill_node.rank_messages`.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.chunk import ChunkPlan
from transfer.send.events import SentStats

# Leader -> rank


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceWanted:
    """A decode side has asked for the prompt, from `start_token` on."""

    name: str
    start_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTransfer:
    """Begin to send the KV of a prompt; answer `TransferSent` or `TransferNotSent`."""

    transfer_id: str
    name: str
    decode_incarnation: int
    num_tokens: int
    start_token: int
    plan: ChunkPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelOutgoing:
    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSource:
    """Nothing of the prompt will be sent any more; answer `SourceIdle` once nothing reads it.

    Args:
        reason: Why it was given up; empty where it was sent.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSource:
    """No rank reads the prompt any more: the engine may be told that its pages are free."""

    name: str


# Rank -> leader


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSent:
    """Every grant of this rank's part came back released."""

    transfer_id: str
    stats: SentStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferNotSent:
    """This rank's part is over and nothing of it is under way.

    Args:
        is_passing: The prompt is still there: another attempt can succeed.
        is_preempted: The engine has taken the prompt's pages back, and computes it again: another attempt will succeed.
    """

    transfer_id: str
    reason: str
    is_passing: bool = False
    is_preempted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIdle:
    """Nothing on this rank reads the prompt's pages, and nothing will."""

    name: str


SOURCE_MESSAGES = (
    SourceWanted,
    StartTransfer,
    CancelOutgoing,
    CloseSource,
    FreeSource,
    TransferSent,
    TransferNotSent,
    SourceIdle,
)
