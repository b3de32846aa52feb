"""A `tests.transport.peer_process`, started, told what to do and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class RemotePeer:
    """Handle on a `tests.transport.peer_process`."""

    def __init__(
        self, lane: str, role: str, num_bytes: int, environment: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe that nobody reads would stop the peer when it is full
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.transport.peer_process", lane, role, str(num_bytes)],
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
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
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait(timeout=20)
            raise AssertionError(f"the peer ended with {status}: {self._read_log()[-2000:]}")
        return json.loads(line)

    def end(self) -> tuple[int, str]:
        """Exit status, and everything that it printed beside its answers."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        try:
            self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        return self.process.returncode, self._read_log()

    def _read_log(self) -> str:
        self._log.seek(0)
        return self._log.read()
