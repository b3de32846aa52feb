"""Events and actions that the state machines of both ends share."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.messages import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageArrived:
    session: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed. Due a few times a second while anything is in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    session: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """Close the session's transport, then report that the session is lost."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDropped:
    """A message of the peer does not fit the state here. It is counted, and never fatal (rule 14)."""

    session: int
    reason: str
