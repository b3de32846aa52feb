"""Groups of ranks in real processes, driven from a test, see `rank_process`."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from transfer.engine_types import DecodeItem, PrefillItem

START_S = 60.0
ANSWER_S = 60.0


class Ranks:
    """All ranks of a group, driven in step: what a node's leader does. Looks like an engine to `steps`."""

    def __init__(self, directory: Path, group: str, size: int) -> None:
        self.connections = [_connect(directory / f"{group}-{rank}") for rank in range(size)]
        self.pids = [_peer_pid(connection) for connection in self.connections]
        self.num_killed = 0

    def send(self, rank: int, method: str, *arguments: Any) -> None:
        self.connections[rank].send((method, arguments))

    def answer(self, rank: int, wait_s: float = ANSWER_S) -> tuple[bool, Any]:
        assert self.connections[rank].poll(wait_s), f"rank {rank} gave no answer within {wait_s} s"
        answer: tuple[bool, Any] = self.connections[rank].recv()
        return answer

    def call(self, method: str, *arguments: Any) -> list[Any]:
        for rank in range(len(self.connections)):
            self.send(rank, method, *arguments)
        answers = [self.answer(rank) for rank in range(len(self.connections))]
        assert all(is_ok for is_ok, _ in answers), answers
        return [result for _, result in answers]

    def prefill(self, items: list[PrefillItem]) -> dict[str, int]:
        return self._leader("prefill", items)

    def decode(self, items: list[DecodeItem]) -> dict[str, int]:
        return self._leader("decode", items)

    def _leader(self, method: str, items: list[Any]) -> dict[str, int]:
        first, *others = self.call(method, items)
        assert all(other == {} for other in others), "only rank 0 samples"
        tokens: dict[str, int] = first
        return tokens

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)
        self.num_killed += 1

    def hang_up(self) -> None:
        for connection in self.connections:
            connection.close()


@dataclass(frozen=True, kw_only=True)
class GroupOfRanks:
    """What a group of ranks runs."""

    size: int
    model: Path
    timeout_s: float = 30.0


class RankServer:
    """The process that all ranks are forked from; it imports what they need, which takes seconds, once.

    Args:
        directory: An empty one, for sockets.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ranks: list[Ranks] = []
        command = [sys.executable, str(Path(__file__).with_name("rank_process.py")), str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, groups: Mapping[str, GroupOfRanks]) -> dict[str, Ranks]:
        """Start groups whose names no other group has, each rank a process."""
        assert self._process.stdin is not None
        for name, group in groups.items():
            self._process.stdin.write(f"{name}:{group.size}:{group.timeout_s}:{group.model}\n")
        self._process.stdin.flush()
        ranks = {name: Ranks(self._directory, name, group.size) for name, group in groups.items()}
        self._ranks += ranks.values()
        return ranks

    def close(self) -> None:
        """End everything; fails where a rank that no test has killed did not end by itself and in order."""
        try:
            for ranks in self._ranks:
                ranks.hang_up()
            output, _ = self._process.communicate(timeout=30)
            num_killed = sum(ranks.num_killed for ranks in self._ranks)
            num_ranks = sum(len(ranks.pids) for ranks in self._ranks)
            assert output.strip() == str([-9] * num_killed + [0] * (num_ranks - num_killed))
        finally:
            for pid in (pid for ranks in self._ranks for pid in ranks.pids):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._process.kill()
            self._process.wait(timeout=30)


def _connect(path: Path) -> Connection:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return Client(str(path), family="AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            assert time.monotonic() < deadline, f"no rank at {path}"
            time.sleep(0.05)


def _peer_pid(connection: Connection) -> int:
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        return int(struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
