"""Limit repeated log lines: a peer may be away, or not fit, for days, and is noticed every other second."""

from __future__ import annotations

import time
from collections.abc import Hashable

REMINDER_S = 60.0
_MAX_KEPT = 1024  # callers can invent news


class LogRateLimiter:
    """Decides which news to log: each at once, and again a minute after its last line."""

    def __init__(self) -> None:
        self._said_s: dict[Hashable, float] = {}

    def is_due(self, news: Hashable) -> bool:
        """Return whether to log it now. It then counts as logged."""
        now_s = time.monotonic()
        self._said_s = {one: said_s for one, said_s in self._said_s.items() if now_s - said_s < REMINDER_S}
        if news in self._said_s or len(self._said_s) >= _MAX_KEPT:
            return False
        self._said_s[news] = now_s
        return True

    def clear(self) -> None:
        """Forget all news."""
        self._said_s.clear()
