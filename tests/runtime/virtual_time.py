"""An event loop that never sleeps: where nothing is ready, its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`num_turns` counts the turns of the loop, which are many where a task waits in a busy loop."""

    def __init__(self) -> None:
        self.now_s, self.num_turns = 0.0, 0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now_s


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.num_turns += 1
        events = super().select(0)
        assert events or timeout is not None, "nothing is ready, and no timer runs: the test would wait for ever"
        if not events and timeout is not None:
            self._loop.now_s += timeout
        return events


def run_in_virtual_time(
    main: Callable[[VirtualTimeLoop], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch, *modules: ModuleType
) -> None:
    """Run `main` to its end; `modules` read the loop's clock where they call `time.monotonic`."""
    loop = VirtualTimeLoop()
    for module in modules:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main(loop))


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on a `VirtualTimeLoop`: `asyncio.sleep` and timeouts take no time, and always end in the same order."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
