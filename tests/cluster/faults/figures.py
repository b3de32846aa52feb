"""Resources of a process, which must be released after a fault."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.local_cluster.cluster import ClusterNode
from transfer.pb import kvferry_pb2 as pb

MORE_FILES: Final = 8
"""Descriptors above those of the first idle moment that are no leak: gRPC keeps some. A session that leaks holds twenty."""

MORE_THREADS: Final = 12  # gRPC's pool of threads grows with the cores and ends its threads when it likes
MORE_BYTES: Final = 96 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Resources of one process."""

    files: int
    threads: int
    resident_bytes: int

    def excess(self, name: str, idle: Figures) -> list[str]:
        """Return the resources that exceed those of the first idle moment by more than chance."""
        found = []
        for what, have, had, more in (
            ("files", self.files, idle.files, MORE_FILES),
            ("threads", self.threads, idle.threads, MORE_THREADS),
            ("resident_bytes", self.resident_bytes, idle.resident_bytes, MORE_BYTES),
        ):
            if have > had + more:
                found.append(f"{name}: {have} {what}, and {had} when it was idle first")
        return found


def figures_of_pid(pid: int) -> Figures:
    """Return the values in /proc."""
    resident_pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    return Figures(
        files=len(os.listdir(f"/proc/{pid}/fd")),
        threads=len(os.listdir(f"/proc/{pid}/task")),
        resident_bytes=resident_pages * os.sysconf("SC_PAGESIZE"),
    )


def figures_of_node(node: ClusterNode, status: pb.NodeStatus) -> dict[str, Figures]:
    """Return the resources of a node's leader, from /proc, and of its ranks, from `Status`."""
    found = {f"{node.role} leader": figures_of_pid(node.pid)}
    for rank in status.ranks:
        found[f"{node.role} rank {rank.rank}"] = Figures(
            files=rank.open_files, threads=rank.threads, resident_bytes=rank.resident_bytes
        )
    return found
