"""Messages about sessions and prompts between a leader and its ranks.

A *name* is the engine's own name of a prompt. A *transfer* is one attempt to move its KV.
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
        join: Number of the join. Answers contain it, so that an answer to an earlier join is recognised.
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
    """Every session is open.

    Args:
        ring_bytes: Size of the smallest ring; 0 if the rank has no route to the instance.
        slot_bytes: Size of the rank's staging slots; 0 if no piece for the instance goes through one.
    """

    join: int
    incarnation: int
    links: tuple[Link, ...]
    ring_bytes: int = 0
    slot_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLost:
    """A session could not be opened, or has ended. `is_refused` means that the two instances never fit."""

    join: int
    incarnation: int
    reason: str
    is_refused: bool = False


# Prefill side: prompts, leader -> rank


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWanted:
    """A decode side has asked for the prompt, from `start_token` on."""

    name: str
    start_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTransfer:
    """Begin to send the KV of a prompt; answer `TransferSent` or `TransferNotSent`. Subclasses add fields for one kind of engine.

    Args:
        start_token: First token whose KV is sent.
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
    """Send a prompt that the engine schedules itself."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelOutgoing:
    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePrompt:
    """Nothing of the prompt will be sent any more; answer `PromptIdle` once nothing reads it.

    Args:
        reason: Why the prompt was given up; empty if it was sent.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FreePrompt:
    """No rank reads the prompt any more, so the engine may be notified that its pages are free."""

    name: str


# Prefill side: prompts, rank -> leader


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSent:
    """Every grant of this rank's part was released."""

    transfer_id: str
    stats: SentStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferNotSent:
    """This rank's part is over without success, and nothing of it is in flight.

    Args:
        is_passing: The prompt still exists, so another attempt can succeed.
        is_preempted: The engine has taken the prompt's pages back and computes it again, so another attempt will succeed.
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
    """End the sessions of a prefill instance that is gone."""

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbed:
    """A prefill rank reported the result of its probe."""

    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRankLost:
    """The session with a rank of that prefill instance is closed, so no prompt can arrive complete from there.

    The prefill leader may not know it, because a frozen rank sends no report.
    """

    incarnation: int
    prefill_rank: int
    reason: str


# Decode side: prompts, leader -> rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectTransfer:
    """Let the writers of a prompt ask for grants; answer `TransferExpected`. Subclasses add fields for one kind of engine.

    Args:
        start_token: First token that comes from prefill.
        traceparent: Parent span of the receiving; empty means that it is not traced.
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
        tables: Page table of the prompt in each group of layers, from token 0 on. Pages before `start_token` are not touched.
    """

    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelIncoming:
    """Cancel a transfer at any stage. Answer `PagesReleased`."""

    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettlePrompt:
    """The outcome of a prompt on all ranks, for their engine.

    Args:
        failure: Why its KV did not arrive; empty if all of it is in the pools of all ranks.
        note: Note of the prefill side's engine.
    """

    name: str
    failure: str
    note: bytes = b""


# Decode side: prompts, rank -> leader


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferExpected:
    """Grants may be asked for. A `reason` means that the transfer cannot be received here."""

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


# Both sides, rank -> leader


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesReleased:
    """Nothing of the transfer touches its pages on this rank, and nothing will. The pages of a daemon are in its pool again."""

    transfer_id: str


INCOMING_MESSAGES = (
    ExpectBound,
    CancelIncoming,
    SettlePrompt,
    TransferExpected,
    TransferWhole,
    TransferBroken,
    PagesReleased,
)
