"""Whether a node takes new work, and why not, for those to wait for who have to tell of it."""

from __future__ import annotations

import asyncio
from enum import StrEnum


class DrainReason(StrEnum):
    """Who wants it. Each withdraws what is its own: a change of role ends its own drain, and an operator's goes on after it."""

    OPERATOR = "operator"  # or the signal that ends the node
    SWITCH = "switch"  # a change of role


class Draining:
    """On for as long as there is a reason. Owned by the leader's loop."""

    def __init__(self) -> None:
        self._reasons: set[DrainReason] = set()
        self._on, self._off = asyncio.Event(), asyncio.Event()
        self._off.set()

    @property
    def is_on(self) -> bool:
        return self._on.is_set()

    def is_for(self, reason: DrainReason) -> bool:
        return reason in self._reasons

    def begin(self, reason: DrainReason = DrainReason.OPERATOR) -> None:
        self._reasons.add(reason)
        self._on.set()
        self._off.clear()

    def end(self, *reasons: DrainReason) -> None:
        """Withdraw these; without any: all."""
        self._reasons.difference_update(reasons or DrainReason)
        if not self._reasons:
            self._off.set()
            self._on.clear()

    async def until(self, is_on: bool) -> None:
        """Wait until the node drains, or until it does not."""
        await (self._on if is_on else self._off).wait()
