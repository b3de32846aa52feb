"""Decide whether a failed attempt is retried, and whether it counts against the prefill node."""

from __future__ import annotations

from transfer.breaker import Verdict
from transfer.errors import EngineError, IntegrityError, TransferError, TransportError


def is_retried(error: TransferError) -> bool:
    """Whether what ended an attempt can go better on another prefill node: only what the first, or the way to it, is to blame
    for.

    The table of docs/protocol.md, "Another try", says it of every error.
    """
    return isinstance(error, TransportError)


def verdict_of(error: TransferError) -> Verdict:
    """What a failed attempt says of the prefill node; in the same table."""
    return Verdict.FAILURE if isinstance(error, TransportError | IntegrityError | EngineError) else Verdict.NOTHING
