"""A `tests.transport.peer_process`, started, told what to do and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class RemotePeer:
    """Handle on a `tests.transport.peer_process`."""

    def __init__(
        self, lane: str, role: str, num_bytes: int, environment: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.transport.peer_process", lane, role, str(num_bytes)],
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.logs: list[str] = []
        self.hear()

    def start(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def do(self, command: str, **arguments: Any) -> Any:
        self.start(command, **arguments)
        return self.hear()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            if not line:
                raise AssertionError(f"the peer ended: {self.process.communicate()[1][-2000:]}")
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                self.logs.append(line)  # UCX logs to stdout

    def end(self) -> tuple[int, str]:
        """Exit status, and everything that it printed beside its answers."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        try:
            out, err = self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
        return self.process.returncode, "".join(self.logs) + out + err
