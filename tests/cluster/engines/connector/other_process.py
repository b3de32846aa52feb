"""An instance in a process of its own, which can be killed and frozen; told what to do over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvferry.engines.connector import Sides
from tests.connector.instances import Instance

CALL_S = 180.0


def _serve(pipe: Any, sides: int, said: dict[str, Any]) -> None:
    instance = Instance(Sides(sides), **said)
    pipe.send(instance.leader.address)
    while True:
        path, args, named = pipe.recv()
        part: Any = instance
        for name in path.split("."):
            part = part[int(name)] if name.isdigit() else getattr(part, name)
        try:
            pipe.send((True, part(*args, **named) if callable(part) else part))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


class OtherProcess:
    """Of `Instance`, called by paths: ``call("leader.begin", "a")``."""

    def __init__(self, sides: Sides, **said: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, sides.value, said), daemon=True)
        self._process.start()
        there.close()
        try:
            assert self._pipe.poll(CALL_S), "the other process has not begun in time"
            self.address: str = self._pipe.recv()
        except BaseException:
            self.kill()
            raise

    def call(self, path: str, *args: Any, **named: Any) -> Any:
        self._pipe.send((path, args, named))
        assert self._pipe.poll(CALL_S), f"{path} has not returned in time"
        is_done, found = self._pipe.recv()
        assert is_done, found
        return found

    def kill(self) -> None:
        """By signal 9."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(10)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)
