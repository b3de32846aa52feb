"""The part of an instance on one host, in a process in that host's network namespace; told what to do over a socket file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from kvferry.engines.connector import PREFILL, Sides
from tests.connector.instances import PROMPT, Instance

CALL_S = 120.0
ROOT = Path(__file__).resolve().parents[4]


class Part(Instance):
    """What a test calls here, beside the methods of `Instance`; a host may have only ranks."""

    def finish_ranks(self, name: str) -> None:
        for rank in self.ranks:
            rank.finish(name)

    def fetches_from(self, name: str, transfer_id: str, address: str, pages: Sequence[int]) -> None:
        self.leader.want(name, transfer_id, address, PROMPT)
        self.leader.bind(name, [list(pages)])

    def num_joined(self) -> int:
        return self.leader.num_joined


def serve(path: str) -> None:
    """Make the part, and call its methods until the test ends."""
    with Client(path) as connection:
        part: Any = None
        while True:
            try:
                name, args, named = connection.recv()
            except (EOFError, ConnectionResetError):
                os._exit(0)  # at once: the test is over
            try:
                if part is None:
                    part = Part(*args, **named)
                    found = getattr(part, "leader", None) and part.leader.address
                else:
                    target: Any = part
                    for attribute in name.split("."):
                        target = getattr(target, attribute)
                    found = target(*args, **named)
                connection.send((True, found))
            except Exception as error:
                connection.send((False, f"{type(error).__name__}: {error}"))


class HostProcess:
    """Of `Part`, in another process. `begin()` and `end()` of several can overlap."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def begin(self, name: str, /, *args: Any, **named: Any) -> None:
        self._connection.send((name, args, named))

    def end(self) -> Any:
        assert self._connection.poll(CALL_S), "no answer in time"
        is_done, found = self._connection.recv()
        assert is_done, found
        return found

    def call(self, name: str, /, *args: Any, **named: Any) -> Any:
        self.begin(name, *args, **named)
        return self.end()


@contextmanager
def host_process(folder: Path, prefix: Sequence[str], environment: dict[str, str]) -> Iterator[HostProcess]:
    """Start a process on a host, and kill it at the end."""
    path = str(folder / f"calls-{len(list(folder.iterdir()))}")
    with Listener(path, "AF_UNIX") as listener:
        command = (*prefix, sys.executable, "-m", "tests.cluster.engines.connector.host_process", path)
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment)
        try:
            with listener.accept() as connection:
                yield HostProcess(connection)
        finally:
            process.kill()
            process.wait()


def side_name(sides: Sides) -> str:
    return "prefill" if sides == PREFILL else "decode"


if __name__ == "__main__":
    serve(sys.argv[1])
