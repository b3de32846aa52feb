"""Messages about sessions and prompts between a leader and its ranks.

A *name* is the engine's own for a prompt. A *transfer* is one attempt to move its KV.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.chunk import ChunkPlan
from transfer.instance import Instance, Link
from transfer.send.events import SentStats

# Prefill side: sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachDecode:
    """Open a session with every decode rank that this rank has a route to; answer `DecodeAttached` or `DecodeLost`.

    Args:
        join: Number of this attempt; the answers name it, so that none of an earlier one is taken for it.
        instance: The decode instance.
        rank_addresses: host:port of each decode rank's TransferControl, in rank order.
    """

    join: int
    instance: Instance
    rank_addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachDecode:
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttached:
    """Every session is open. `ring_bytes`: the smallest ring among them; 0 where the rank has no route to the instance."""

    join: int
    incarnation: int
    links: tuple[Link, ...]
    ring_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLost:
    """A session with the decode instance could not be opened, or has ended. `is_refused`: it can never fit."""

    join: int
    incarnation: int
    reason: str
    is_refused: bool = False


# Prefill side: prompts. Leader -> rank


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWanted:
    """A decode side has asked for the prompt, from `start_token` on."""

    name: str
    start_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTransfer:
    """Begin to send the KV of a prompt; answer `TransferSent` or `TransferNotSent`.

    Subclasses add the fields that one kind of engine needs.

    Args:
        start_token: First token whose KV is sent.
        plan: How the prompt is divided.
        traceparent: Parent span of the sending; empty means that it is not traced.
    """

    transfer_id: str
    decode_incarnation: int
    num_tokens: int
    start_token: int
    plan: ChunkPlan
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOffered(StartTransfer):
    """Send a prompt that the engine schedules itself.

    Args:
        name: The engine's name of the prompt.
    """

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelOutgoing:
    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePrompt:
    """Nothing of the prompt will be sent any more; answer `PromptIdle` once nothing reads it.

    Args:
        reason: Why it was given up; empty where it was sent.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FreePrompt:
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
class PromptIdle:
    """Nothing on this rank reads the prompt's pages, and nothing will."""

    name: str


OUTGOING_MESSAGES = (
    PromptWanted,
    StartOffered,
    CancelOutgoing,
    ClosePrompt,
    FreePrompt,
    TransferSent,
    TransferNotSent,
    PromptIdle,
)


# Decode side: sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetPrefill:
    """The prefill instance is gone: end its sessions."""

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbed:
    """A writer told what its probe measured."""

    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRankLost:
    """The session with a rank of that prefill instance is closed, so no request can come from there whole.

    The prefill leader may know nothing of it: a rank that is frozen tells nobody.
    """

    incarnation: int
    prefill_rank: int
    reason: str


# Decode side: prompts. Leader -> rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectTransfer:
    """Let the writers of a prompt ask for grants; answer `TransferExpected`.

    Subclasses add the fields that one kind of engine needs.

    Args:
        start_token: First token that comes from prefill.
        plan: How the prompt is divided, as the prefill side said.
        traceparent: Span in which its arrival lies; empty if it is not traced.
    """

    transfer_id: str
    prefill_incarnation: int
    num_tokens: int
    start_token: int
    plan: ChunkPlan
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectBound(ExpectTransfer):
    """Receive a prompt into pages that the engine has chosen.

    Args:
        tables: Its page table in each group of layers, from token 0 on; what lies before `start_token` is not touched.
    """

    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelIncoming:
    """Cancel a transfer at any stage. Answer `TransferDrained`; a daemon answers `PagesReleased` when the pages are free."""

    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettlePrompt:
    """What has become of a prompt on all ranks, for their engine.

    Args:
        failure: Why its KV did not come; empty where all of it is in the pools of all ranks.
        note: What the prefill side's engine has to tell.
    """

    name: str
    failure: str
    note: bytes = b""


# Rank -> leader


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferExpected:
    """Grants may be asked for. `reason` is empty, or says why it cannot be received here."""

    transfer_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferWhole:
    """This rank's part of the KV is in its pool."""

    transfer_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferBroken:
    transfer_id: str
    reason: str
    is_data_loss: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferDrained:
    """Nothing of it touches, or will touch, the prompt's pages on this rank."""

    transfer_id: str


INCOMING_MESSAGES = (
    ExpectBound,
    CancelIncoming,
    SettlePrompt,
    TransferExpected,
    TransferWhole,
    TransferBroken,
    TransferDrained,
)
