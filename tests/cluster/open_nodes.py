"""Single nodes in any number and combination, where a `LocalCluster` of two does not do."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvferry.local_cluster import process_guard
from kvferry.local_cluster.node import ClusterNode
from kvferry.local_cluster.spec import Role, child_environment
from tests.cluster.calls import until

START_S = 150.0


class Nodes:
    """Starts nodes in one folder; all of their processes carry one mark, by which `kill()` finds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._token = secrets.token_hex(16)
        self.nodes: list[ClusterNode] = []
        self._ports: list[socket.socket] = []

    def environment(self) -> dict[str, str]:
        return child_environment() | {process_guard.MARK: self._token}

    def hold_ports(self, number: int) -> list[int]:
        """Ports that nobody else gets while these nodes live, so that nodes can be told of each other before they start."""
        for _ in range(number):
            held = socket.socket()  # bound, not listening, and with SO_REUSEADDR, as LocalCluster holds its own
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            self._ports.append(held)
        return [held.getsockname()[1] for held in self._ports[-number:]]

    def launch(
        self,
        role: Role,
        settings: Mapping[str, object],
        *prefill_nodes: str,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        kind: type[ClusterNode] = ClusterNode,
        is_on_loopback: bool = True,
    ) -> ClusterNode:
        """Start a node and do not wait for it.

        Args:
            role: "prefill" or "decode".
            settings: By path.
            prefill_nodes: host:port of those that it joins.
            prefix: What its command line begins with; the process that it starts must become the node.
            environment: Variables on top of this process's.
            kind: What speaks to it.
            is_on_loopback: False: its addresses are not, and plain text is allowed on them.
        """
        folder = self._folder / f"{len(self.nodes)}-{role}"
        folder.mkdir()
        command = [*prefix, sys.executable, "-m", f"{role}_node", "serve", "--port", "0", "--http-port", "0"]
        command += ["--ready-file", str(ClusterNode.ready_path(folder, role))]
        command += ["--log-format", "json", "--insecure" if is_on_loopback else "--insecure-anywhere"]
        for address in prefill_nodes:
            command += ["--prefill-node", address]
        for path, value in settings.items():
            command += ["--set", f"{path}={value}"]
        node = kind(role, command, self.environment() | dict(environment or {}), folder)
        node.launch()
        self.nodes.append(node)
        return node

    def relaunch(self, node: ClusterNode) -> None:
        """Start a node again that was killed, as it was started before."""
        node.reap(10)
        folder = self._folder / f"{self.nodes.index(node)}-{node.role}"
        ClusterNode.ready_path(folder, node.role).unlink(missing_ok=True)  # one that was killed leaves it
        node.launch()

    async def until_started(self, *nodes: ClusterNode) -> None:
        """Wait until the nodes' ranks live."""

        def are_started() -> bool:
            for node in nodes:
                node.check_alive()
            return all(node.ready_file is not None for node in nodes)

        await until(are_started, "all nodes started", within_s=START_S)

    def processes(self) -> dict[int, str]:
        """Command lines of all that lives, by process id."""
        return process_guard.processes_of(self._token)

    def kill(self) -> None:
        process_guard.kill_all(self._token)
        for node in self.nodes:
            node.reap(10)
        for held in self._ports:
            held.close()


@contextmanager
def open_nodes(folder: Path) -> Iterator[Nodes]:
    """Nodes of one test; all are ended afterwards, and their logs printed for a test that failed."""
    nodes = Nodes(folder)
    try:
        yield nodes
    finally:
        for node in nodes.nodes:
            print(f"--- {node.role}-node, exit code {node.exit_code}", *node.log.tail(60), sep="\n")
        nodes.kill()
