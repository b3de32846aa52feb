"""One node of a local cluster: its process, its addresses, its log."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster.spec import Role
from node_runtime import exit_codes
from node_runtime.health import Readiness
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.security import Security

HTTP_TIMEOUT_S: Final = 2.0
_HIDDEN: Final = {"event", "level", "logger", "timestamp", "role", "incarnation", "exception"}
_REASONS: Final = {"start_failed": "error", "rank_start_failed": "error", "too_many_restarts": "reason"}
"""Events that report why a node ended, most specific first, and the field with the reason."""


class NodeFailed(TransferError):
    """A node of a local cluster refused to start, or ended by itself.

    Args:
        reason: One line of the node itself.
        exit_code: None if its process runs.
        log_tail: The last lines of its log.
    """

    def __init__(self, role: Role, reason: str, *, exit_code: int | None, log_tail: list[str]) -> None:
        super().__init__(f"{role}-node: {reason}")
        self.role = role
        self.reason = reason
        self.exit_code = exit_code
        self.log_tail = log_tail


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyFile:
    """The file that a node writes once it is ready; `address` and `http_address` are host:port."""

    pid: int
    rank_pids: tuple[int, ...]
    address: str
    http_address: str
    incarnation: int


class ClusterNode:
    """Starts the process of a node and calls it. Not bound to an event loop.

    Args:
        command: Command line of its process.
        environment: Environment of its process.
        folder: Folder of its ready file and its log.
        name: Unique name in that folder; by default the role.
        security: None means plain text.
    """

    def __init__(
        self,
        role: Role,
        command: list[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        name: str = "",
        security: Security | None = None,
    ) -> None:
        self.role = role
        self.name = name or role
        self.log = NodeLog(folder / f"{self.name}.log")
        self.security = security
        self._command = command
        self._environment = dict(environment)
        self._ready_path = self.ready_path(folder, self.name)
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def ready_path(folder: Path, name: str) -> Path:
        """Return the path of the ready file of the node with that name."""
        return folder / f"{name}.ready"

    def launch(self) -> None:
        """Start the process in its own session, because a terminal's Ctrl-C is for the cluster's owner only."""
        with open(self.log.path, "ab") as log_file:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Return the process id of the leader. Call it only after `launch()`."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return None while it runs or before it is launched; a negative number if a signal killed it."""
        return self._process.poll() if self._process is not None else None

    @property
    def ready_file(self) -> ReadyFile | None:
        """Return the current addresses and process ids (a rank that dies is restarted); None means not ready."""
        try:
            content = json.loads(self._ready_path.read_text())
        except FileNotFoundError:
            return None
        return ReadyFile(
            pid=content["pid"],
            rank_pids=tuple(content["rank_pids"]),
            address=content["address"],
            http_address=content["http_address"],
            incarnation=int(content["incarnation"], 16),
        )

    @property
    def address(self) -> str:
        """Return host:port of the gRPC API.

        Raises:
            NodeFailed: The node is not ready, as for the next three properties.
        """
        return self._ready().address

    @property
    def http_address(self) -> str:
        """Return host:port of /healthz, /readyz and /metrics."""
        return self._ready().http_address

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Return the process ids of the ranks, in rank order."""
        return self._ready().rank_pids

    @property
    def incarnation(self) -> int:
        return self._ready().incarnation

    @property
    def not_started(self) -> str:
        """Return the reason why a node without a ready file is not ready."""
        lines = self.log.tail(1)
        return f"it has not started yet; its last line: {lines[0] if lines else 'none'}"

    def lives_anew(self, incarnation: int) -> bool:
        """Return True if ranks of another incarnation live. It reads the file once, because the file can go at any time."""
        ready = self.ready_file
        return ready is not None and ready.incarnation != incarnation

    async def status(self) -> pb.NodeStatus:
        """Return the node's status.

        Raises:
            TransferError: The call failed.
        """
        async with NodeClient(self.address, security=self.security) as client:
            return await client.status()

    async def http(self, path: str) -> tuple[int, str]:
        """Return status and text of a GET, for example of ``/metrics``; status 0 means no answer."""
        return await asyncio.to_thread(_get, f"http://{self.http_address}{path}")

    async def readiness(self) -> Readiness:
        """Return the answer of `/readyz`; not ready if there is no ready file."""
        ready = self.ready_file
        if ready is None:
            return Readiness(is_ready=False, reason=self.not_started)
        status, text = await asyncio.to_thread(_get, f"http://{ready.http_address}/readyz")
        return Readiness(is_ready=status == 200, reason="" if status == 200 else text.strip())

    def terminate(self) -> None:
        """Ask the node to drain and end; do nothing if it has ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def reap(self, timeout_s: float) -> None:
        """Collect the exit code of a process that was killed."""
        if self._process is not None:
            self._process.wait(timeout_s)

    def check_alive(self) -> None:
        """Check that the node has not ended.

        Raises:
            NodeFailed: It has ended.
        """
        code = self.exit_code
        if code is None:
            return
        reason = self.log.reason(self.role)
        if code < 0:
            reason = f"killed by {signal.Signals(-code).name}; its last line: {reason}"
        elif code == exit_codes.OK:
            reason = "it ended although nobody had asked it to"
        raise self.failure(reason)

    def failure(self, reason: str) -> NodeFailed:
        """Return a `NodeFailed` of this node."""
        return NodeFailed(self.role, reason, exit_code=self.exit_code, log_tail=self.log.tail())

    def _ready(self) -> ReadyFile:
        ready = self.ready_file
        if ready is None:
            raise self.failure("not ready")
        return ready


def _get(url: str) -> tuple[int, str]:
    # The cluster's own traffic never goes through a proxy that is meant for the internet.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=HTTP_TIMEOUT_S) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, f"no answer from {url}: {error}"


class NodeLog:
    """The log of a node: JSON lines, and everything else that reached its standard error. It may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[str]:
        """Return all complete lines."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        return text.split("\n")[:-1]

    def events(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the log events of that name, oldest first."""
        for line in self.lines():
            event = _event_of(line)
            if event is not None and event.get("event") == name:
                yield event

    def tail(self, num_lines: int = 15) -> list[str]:
        """Return the last lines in readable form."""
        return [_readable(line) for line in self.lines() if line.strip()][-num_lines:]

    def reason(self, role: str) -> str:
        """Return one line with the reason why the node ended, as far as its log contains it."""
        lines = [line for line in self.lines() if line.strip()]
        own = [line for line in lines if line.startswith(f"{role}-node: ")]
        if own:
            return own[0].removeprefix(f"{role}-node: ")
        for name, key in _REASONS.items():
            for event in self.events(name):
                return str(event.get(key, name))
        return _readable(lines[-1]) if lines else "it wrote nothing"


def _event_of(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _readable(line: str) -> str:
    event = _event_of(line)
    if event is None:
        return line
    fields = " ".join(f"{name}={value}" for name, value in event.items() if name not in _HIDDEN)
    return f"{event.get('level', ''):<7} {event.get('event', '')} {fields}".rstrip()
