"""One node of a local cluster: its process, its addresses, its log."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster.node_log import NodeLog
from kvferry.local_cluster.spec import Role
from node_runtime import exit_codes
from node_runtime.health import Readiness
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.security import Security

HTTP_TIMEOUT_S: Final = 2.0


class NodeFailed(TransferError):
    """A node of a local cluster refused to start, or ended when nobody had asked it to.

    Args:
        role: Which node.
        reason: One line, in the node's own words.
        exit_code: Of the node's process; None where it runs.
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
    """What a node writes once it is ready; `address` and `http_address` are host:port."""

    pid: int
    rank_pids: tuple[int, ...]
    address: str
    http_address: str
    incarnation: int


class ClusterNode:
    """Starts one node's process and speaks to it. Bound to no event loop.

    Args:
        role: "prefill" or "decode".
        command: Its command line.
        environment: Of its process.
        folder: Holds its ready file and its log.
        name: Tells it from other nodes of its role in that folder; empty: the role.
        security: How it is called; None: in plain text.
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
        """Where a node of that name is told to write its ready file."""
        return folder / f"{name}.ready"

    def launch(self) -> None:
        """Start the process; in a session of its own, because a terminal's Ctrl-C is for the cluster's owner only."""
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
        """Of the leader. Only after `launch()`."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or was never launched; negative: killed by that signal."""
        return self._process.poll() if self._process is not None else None

    @property
    def ready_file(self) -> ReadyFile | None:
        """Addresses and process ids, as of now (a rank that died is started anew); None: not yet ready."""
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
        """host:port of the gRPC API.

        Raises:
            NodeFailed: The node is not ready.
        """
        return self._ready().address

    @property
    def http_address(self) -> str:
        """host:port of /healthz, /readyz and /metrics."""
        return self._ready().http_address

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in rank order."""
        return self._ready().rank_pids

    @property
    def incarnation(self) -> int:
        return self._ready().incarnation

    @property
    def not_started(self) -> str:
        """What to say of a node that has no ready file."""
        lines = self.log.tail(1)
        return f"it has not started yet; its last line: {lines[0] if lines else 'none'}"

    def lives_anew(self, incarnation: int) -> bool:
        """Whether other ranks than those of that incarnation live; the file is read once, for it can go at any time."""
        ready = self.ready_file
        return ready is not None and ready.incarnation != incarnation

    async def status(self) -> pb.NodeStatus:
        """The node's Status answer.

        Raises:
            TransferError: It cannot be had.
        """
        async with NodeClient(self.address, security=self.security) as client:
            return await client.status()

    async def http(self, path: str) -> tuple[int, str]:
        """Status and text that the HTTP port answers to a GET, for example of ``/metrics``; status 0: no answer."""
        return await asyncio.to_thread(_get, f"http://{self.http_address}{path}")

    async def readiness(self) -> Readiness:
        """What `/readyz` says; not ready, too, while the node's ranks are started."""
        ready = self.ready_file
        if ready is None:
            return Readiness(is_ready=False, reason=self.not_started)
        status, text = await asyncio.to_thread(_get, f"http://{ready.http_address}/readyz")
        return Readiness(is_ready=status == 200, reason="" if status == 200 else text.strip())

    def terminate(self) -> None:
        """Ask it to drain and end; nothing if it has ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def reap(self, timeout_s: float) -> None:
        """Collect the exit code of a process that has been killed."""
        if self._process is not None:
            self._process.wait(timeout_s)

    def check_alive(self) -> None:
        """Raises:
        NodeFailed: The node has ended.
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
        """A `NodeFailed` of this node."""
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
