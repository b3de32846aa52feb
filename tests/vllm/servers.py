"""Real server processes for tests: started in sessions of their own, waited for, and ended with all that they have started.

A server takes a free port by itself (`--port 0`); which one is read from the sockets that its first process listens on. So no two
ever want the same one.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from kvferry.local_cluster import process_guard

HOST = "127.0.0.1"
START_S = 300.0  # 17 to 30 are enough for a vLLM server by itself; on a loaded machine, beside others, 150
STOP_S = 30.0
LOOK_S = 0.1
TAIL_LINES = 60


class Server:
    """One server: its first process, and all that this has started.

    Args:
        name: What its log is called.
        process: The first process, the leader of its session.
        log: Where both of its outputs go.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._port = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Of the first process; None while it runs, and the negative signal that ended it."""
        return self._process.poll()

    @property
    def url(self) -> str:
        """http://host:port; known once `wait_ready()` has returned."""
        assert self._port, f"{self.name} is not ready"
        return f"http://{HOST}:{self._port}"

    def processes(self) -> dict[int, str]:
        """Names of what lives of it, by process id."""
        found = {}
        for process in psutil.process_iter():
            # One that has ended meanwhile is none of it any more; the dead whom nobody has asked for yet hold nothing.
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process.name()
        return found

    def wait_ready(self, timeout_s: float = START_S) -> Server:
        """Returns itself once it answers /health with 200.

        Raises:
            RuntimeError: It has ended, or takes too long; the end of its log is in the message.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._is_healthy():
            if self.exit_code is not None:
                raise RuntimeError(f"{self.name} has ended with {self.exit_code}\n{self.tail()}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.name} is not ready after {timeout_s:g} s\n{self.tail()}")
            time.sleep(LOOK_S)
        return self

    def stop(self, timeout_s: float = STOP_S) -> dict[int, str]:
        """SIGTERM to the first process; returns what of it had to be killed, for it should be nothing."""
        if self.exit_code is None:
            self._process.terminate()
        deadline_s = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline_s:
            self._process.poll()
            time.sleep(LOOK_S)
        self.kill()
        return left

    def kill(self) -> None:
        """SIGKILL to all of it, and wait until nothing is left."""
        deadline_s = time.monotonic() + STOP_S
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.name}: {left} do not end")
            time.sleep(0.01)
        self._process.wait(STOP_S)

    def tail(self, num_lines: int = TAIL_LINES) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"--- {self.name}, the last lines of {self.log}", *lines[-num_lines:]])

    def _is_healthy(self) -> bool:
        for port in [self._port] if self._port else self._listening_ports():
            # With data parallelism, the first process also listens for those after it, and answers no HTTP there.
            refused = contextlib.suppress(OSError, http.client.HTTPException)
            with refused, urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5.0) as answer:
                if answer.status == 200:
                    self._port = port
                    return True
        return False

    def _listening_ports(self) -> list[int]:
        """Those of the first process; none until it listens."""
        try:
            sockets = psutil.Process(self.pid).net_connections("tcp")
        except psutil.Error:
            return []
        return [one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN]


class Servers:
    """Starts servers, and ends them: those of a scope with it, and all of them when this process is gone, however it went.

    Args:
        folder: Where the logs go; made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._token = secrets.token_hex(16)
        self._started: list[Server] = []
        # The guard removes the folder that it is given: here one in which nothing lies.
        nothing = folder / "nothing"
        nothing.mkdir()
        command = [sys.executable, "-I", "-S", process_guard.__file__, self._token, str(nothing)]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    @property
    def running(self) -> tuple[Server, ...]:
        return tuple(self._started)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Server:
        """Start one, without waiting for it: several start side by side, and `wait_ready()` comes after.

        Args:
            name: For its log; may be given more than once.
            environment: On top of this process's.
        """
        log = self._folder / f"{name}-{len(list(self._folder.glob(f'{name}-*.log'))) + 1}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment, process_guard.MARK: self._token},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(name, process, log)
        self._started.append(server)
        return server

    def end(self, servers: Sequence[Server]) -> None:
        """Kill them: what a test wants to see of an orderly end it has asked for by `stop()`."""
        for server in servers:
            server.kill()
            if server in self._started:
                self._started.remove(server)

    def close(self) -> None:
        self.end(self.running)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(STOP_S)
