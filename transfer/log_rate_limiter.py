"""When to say the same thing again: a peer may be away, or not fit, for days, and is heard of every other second."""

from __future__ import annotations

import time
from collections.abc import Hashable

REMINDER_S = 60.0
_MAX_KEPT = 1024  # callers can make up news


class LogRateLimiter:
    """Says which news are due: each at once, and again a minute after it was last said."""

    def __init__(self) -> None:
        self._said_s: dict[Hashable, float] = {}

    def is_due(self, news: Hashable) -> bool:
        """Whether to say it now; it counts as said then."""
        now_s = time.monotonic()
        self._said_s = {one: said_s for one, said_s in self._said_s.items() if now_s - said_s < REMINDER_S}
        if news in self._said_s or len(self._said_s) >= _MAX_KEPT:
            return False
        self._said_s[news] = now_s
        return True

    def clear(self) -> None:
        """Everything is news again."""
        self._said_s.clear()
