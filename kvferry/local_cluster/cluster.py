"""Both tiers on this machine, in separate processes: for the demos, for tests, and for experiments.

    spec = ClusterSpec(prefill=TierSpec(model=path, tp_size=4), decode=TierSpec(model=path, tp_size=2))
    async with LocalCluster(spec) as cluster:
        status = await cluster.decode.status()

When the block or the process around it ends (normally, by an exception, cancelled, or killed by a signal), no process and no file
of the cluster remains.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvferry.local_cluster import process_guard
from kvferry.local_cluster.fork_server import SharedForkServer
from kvferry.local_cluster.node import ClusterNode, NodeFailed
from kvferry.local_cluster.spec import ROLES, ClusterSpec, Role, TierSpec, child_environment
from node_runtime import exit_codes
from transfer.errors import TransferError
from transfer.registry.security import PlainText

__all__ = ["ClusterNode", "ClusterSpec", "LocalCluster", "NodeFailed", "StopReport", "TierSpec"]

_HOST: Final = "127.0.0.1"
_POLL_S: Final = 0.05
_REFUSAL_GRACE_S: Final = 2.0  # the decode node joins again after 0.4 and 0.8 s; a refusal that lasts longer is final
_FADE_S: Final = 15.0  # fork servers end after their leader, and need seconds to unload torch on a busy machine
_STOP_S: Final = 20.0  # for an orderly stop
_KILL_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReport:
    """Outcome of stopping a cluster.

    Args:
        exit_codes: Exit code of each node, by name.
        survivors: Command lines of processes that did not end by themselves and were killed.
    """

    exit_codes: Mapping[str, int]
    survivors: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Return True if every node drained, ended with exit code 0, and left no process behind."""
        return not self.complaints

    @property
    def complaints(self) -> tuple[str, ...]:
        """Return the failures of the shutdown, one line each."""
        codes = (
            f"exit code of the {name} node is {code}, not 0" for name, code in self.exit_codes.items() if code != exit_codes.OK
        )
        return (*codes, *(f"process {survivor} was left" for survivor in self.survivors))


class LocalCluster:
    """Both tiers, each with one node or several.

    Args:
        environment: Variables for the nodes, in addition to those of this process except ``KVFERRY_...``.
    """

    def __init__(self, spec: ClusterSpec, *, environment: Mapping[str, str] | None = None) -> None:
        self.spec = spec
        self.stop_report: StopReport | None = None
        self._security = spec.security or PlainText()
        self._token = secrets.token_hex(16)
        self._extra_environment = dict(environment or {})
        self._folder: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._fork_server: SharedForkServer | None = None
        self._ports: dict[str, socket.socket] = {}  # by name of the node
        self._nodes: dict[str, ClusterNode] = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            await self.stop()
        else:
            self.kill()

    @property
    def prefill(self) -> ClusterNode:
        """Return the first prefill node."""
        return self.prefill_nodes[0]

    @property
    def decode(self) -> ClusterNode:
        """Return the first decode node."""
        return self.decode_nodes[0]

    @property
    def prefill_nodes(self) -> tuple[ClusterNode, ...]:
        return tuple(node for node in self.nodes if node.role == "prefill")

    @property
    def decode_nodes(self) -> tuple[ClusterNode, ...]:
        return tuple(node for node in self.nodes if node.role == "decode")

    @property
    def nodes(self) -> tuple[ClusterNode, ...]:
        return tuple(self._nodes.values())

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the cluster's processes. Any process that is started with it ends with the cluster."""
        environment = child_environment() | self._extra_environment
        environment[process_guard.MARK] = self._token
        if self._folder is not None:
            environment["TMPDIR"] = str(self._folder)  # so that sockets and rendezvous files go when the folder goes
        return environment

    def processes(self) -> dict[int, str]:
        """Return the command lines of all living processes of the cluster (leaders, ranks, fork servers), by process id."""
        return process_guard.processes_of(self._token)

    async def start(self) -> None:
        """Start both tiers, and return when every decode node has joined every prefill node.

        Raises:
            NodeFailed: A node refused, died, or was not ready in time. No process remains.
            ConfigError: The folder for temporary files has a path that is too long for a socket. No process remains.
        """
        if self._folder is not None or self.stop_report is not None:
            raise TransferError("this local cluster was started before; make another one")
        self._folder = Path(tempfile.mkdtemp(prefix="kvferry-"))
        try:
            self._open(self._folder)
            for role in ROLES:
                for index in range(len(self.spec.names(role))):
                    self.launch(role, index)
            await self.wait_joined()
        except BaseException:
            self.kill()
            raise

    def launch(self, role: Role, index: int = 0) -> ClusterNode:
        """Start a node. If it replaces one that ended, it uses the same address."""
        name = self.spec.names(role)[index]
        folder, former = self._opened(), self._nodes.get(name)
        assert former is None or former.exit_code is not None, f"the {name} node runs"
        ready_file = ClusterNode.ready_path(folder, name)
        ready_file.unlink(missing_ok=True)  # a killed node leaves it
        ports = {name: held.getsockname()[1] for name, held in self._ports.items()}
        prefill = [f"{_HOST}:{ports[name]}" for name in self.spec.names("prefill")]
        command = self.spec.command(role, index, port=ports[name], prefill_addresses=prefill, ready_file=ready_file)
        environment = self.environment | ({} if self._fork_server is None else self._fork_server.variables)
        node = self._nodes[name] = ClusterNode(role, command, environment, folder, name=name, security=self._security)
        node.launch()
        return node

    async def wait_joined(self, timeout_s: float | None = None) -> None:
        """Wait until all nodes are ready, and every decode node has joined every prefill node.

        Args:
            timeout_s: By default the spec's `start_timeout_s`.

        Raises:
            NodeFailed: A node ended or refused another one, or the time is over.
        """
        timeout_s = self.spec.start_timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        refused_before = len(self._refusals())
        refused_s: float | None = None
        while True:
            for node in self.nodes:
                node.check_alive()
            waiting_for, reason = await self._what_is_missing()
            if waiting_for is None:
                return
            now_s = time.monotonic()
            if len(refusals := self._refusals()) > refused_before:
                refused_s = now_s if refused_s is None else refused_s
                if now_s - refused_s > _REFUSAL_GRACE_S:
                    node, why = refusals[-1]
                    raise node.failure(why)
            if now_s > deadline_s:
                raise waiting_for.failure(f"not ready within {timeout_s:g} s: {reason}")
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> StopReport:
        """Let all nodes drain and end, and kill the processes that remain. A second call returns the first report."""
        if self.stop_report is not None:
            return self.stop_report
        try:
            # Decode first: once its requests have ended, no prompt reaches prefill.
            for node in (*self.decode_nodes, *self.prefill_nodes):
                node.terminate()
            await self._until(lambda: all(node.exit_code is not None for node in self.nodes), _STOP_S)
            self._end_fork_server()
            await self._until(lambda: not self.processes(), _FADE_S)
        finally:
            self.kill()
        assert self.stop_report is not None
        return self.stop_report

    def kill(self) -> None:
        """Kill all processes at once. It needs no event loop, cannot be cancelled, and takes some ten milliseconds."""
        if self._folder is None:
            return
        survivors = self.processes()
        process_guard.kill_all(self._token, timeout_s=_KILL_S)
        self._end_fork_server()
        for node in self.nodes:
            node.reap(_KILL_S)
        codes = {node.name: node.exit_code or 0 for node in self.nodes}
        self.stop_report = StopReport(
            exit_codes=codes, survivors=tuple(f"pid {pid}: {command}" for pid, command in survivors.items())
        )
        for held in self._ports.values():
            held.close()
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait(_KILL_S)
        self._folder = None

    def _open(self, folder: Path) -> None:
        command = [sys.executable, "-I", "-S", process_guard.__file__, self._token, str(folder)]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        # A socket that is bound but does not listen keeps the port from other programs. The node can still listen on it, because
        # it also sets SO_REUSEADDR. So all nodes can start at once and know the others' addresses.
        for name in (name for role in ROLES for name in self.spec.names(role)):
            held = self._ports[name] = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((_HOST, 0))
        self._fork_server = SharedForkServer.for_cluster(self.spec, folder, self.environment)

    def _end_fork_server(self) -> None:
        if self._fork_server is not None:
            self._fork_server.end()
            self._fork_server = None

    def _opened(self) -> Path:
        if self._folder is None:
            raise TransferError("this local cluster is not started, or has been stopped")
        return self._folder

    async def _what_is_missing(self) -> tuple[ClusterNode | None, str]:
        """Return a node that is not ready and the reason; (None, "") if all are ready and joined."""
        for node in self.nodes:
            if node.ready_file is None:
                return node, node.not_started
        for node in self.decode_nodes:
            readiness = await node.readiness()
            if not readiness.is_ready:
                return node, readiness.reason
            if len(self.prefill_nodes) > 1:
                try:
                    apart = [peer for peer in (await node.status()).peers if peer.state != "joined"]
                except TransferError as error:  # its ranks have died; it reports that soon
                    return node, str(error)
                if apart:
                    return node, f"prefill node {apart[0].address} is {apart[0].state}: {apart[0].reason}"
        return None, ""

    def _refusals(self) -> list[tuple[ClusterNode, str]]:
        """Return the prefill node and the reason of each refused join."""
        return [(node, str(event.get("reason"))) for node in self.prefill_nodes for event in node.log.events("join_refused")]

    async def _until(self, is_true: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_true() and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
