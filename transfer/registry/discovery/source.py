"""What a way to learn addresses has to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Where a source says what it has seen.

    Args:
        saw: All that is named now, in any order, checked by nobody yet. Whatever was named before and is not now is gone.
        failed: Nothing could be seen, and why, in one line; what was seen last goes on to count.
        same: What was seen last still holds.
    """

    saw: Callable[[Sequence[str]], None]
    failed: Callable[[str], None]
    same: Callable[[], None]


class Source(Protocol):
    """One way to learn the addresses of prefill nodes."""

    @property
    def where(self) -> str:
        """Where it looks, with the name of the setting; for people."""
        ...

    async def follow(self, looks: Looks) -> None:
        """Look, and go on looking until cancelled; returns where nothing there can ever change.

        Raises nothing that anybody could foresee.
        """
        ...
