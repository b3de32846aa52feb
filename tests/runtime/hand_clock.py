"""A clock that only the test moves: of the running loop, and of modules that call `time.monotonic`."""

from __future__ import annotations

import asyncio
from types import ModuleType, SimpleNamespace

import pytest


class HandClock:
    """The running loop's clock. `now_s` does not change by itself, so `asyncio.sleep` and timeouts end in `advance` only.

    Args:
        modules: They read this clock where they call `time.monotonic`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        loop = asyncio.get_running_loop()
        self.now_s = loop.time()
        monkeypatch.setattr(loop, "time", self._time)
        for module in modules:
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self._time))

    def _time(self) -> float:
        return self.now_s

    async def advance(self, seconds: float, *, steps: int = 1) -> None:
        """Move the clock, and let the loop call the timers that are due. A timer that sets the next one needs several steps."""
        for _ in range(steps):
            self.now_s += seconds / steps
            for _ in range(12):
                await asyncio.sleep(0)
