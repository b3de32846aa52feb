"""What the leader and the ranks of a hosted decode side say to each other; see `decode_node.target_rank`.

A *name* is the engine's own for a prompt, a *transfer* is one try to receive its KV.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.chunk import ChunkPlan

# Leader -> rank. `decode_node.rank_messages.ForgetPrefill` is one more.


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectTransfer:
    """Let the writers of a prompt ask for grants; answer `TransferExpected`.

    Args:
        tables: Its page table in each group of layers, from token 0 on; what lies before `start_token` is not touched.
    """

    transfer_id: str
    name: str
    prefill_incarnation: int
    num_tokens: int
    start_token: int
    plan: ChunkPlan
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTransfer:
    """Give it up, wherever it stands; answer `TransferDrained`."""

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


# Rank -> leader. `decode_node.rank_messages.PrefillRankLost` and `LinkProbed` are two more.


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


TARGET_MESSAGES = (
    ExpectTransfer,
    CancelTransfer,
    SettlePrompt,
    TransferExpected,
    TransferWhole,
    TransferBroken,
    TransferDrained,
)
