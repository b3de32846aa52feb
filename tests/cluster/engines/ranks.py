"""Groups of ranks in real processes, driven from a test.

The ranks are forked from a process that has imported everything, as a node forks its own.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from embedded_engine.architectures import ARCHITECTURES, model_module
from embedded_engine.engine import EmbeddedEngine
from embedded_engine.model_files import read_model_files
from embedded_engine.tensor_parallel import init_distributed
from tests.embedded_engine.steps import fill_with_nan, pages_for
from transfer.copy.page_mover import PageMove, PageMover
from transfer.engine_types import DecodeItem, PrefillItem
from transfer.layer_groups import layer_groups
from transfer.layout import Shard
from transfer.pool.host_pool import HostPool

for architecture in ARCHITECTURES:
    importlib.import_module(model_module(architecture))

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
ANSWER_S = 300.0  # also for the start of all groups, some of which compile
END_S = 30.0


@dataclass(frozen=True, kw_only=True)
class GroupOfRanks:
    """What a group of ranks runs."""

    size: int
    model: Path
    timeout_s: float = 30.0
    settings: Mapping[str, Any] = field(default_factory=dict)


class Rank:
    """The engine of one rank, in its own process."""

    def __init__(self, group: GroupOfRanks, rank: int, store: str) -> None:
        files = read_model_files(group.model)
        self.engine = EmbeddedEngine(
            files,
            shard=Shard(tp_size=group.size, tp_rank=rank),
            num_pages=pages_for(layer_groups(files.layout()), 200),
            group=init_distributed(rank, group.size, store, timeout_s=group.timeout_s),
            num_threads=1,
            layers_per_group=2,
            **group.settings,
        )
        self.reads: deque[Callable[[], dict[str, int]]] = deque()

    def prefill(self, items: list[PrefillItem]) -> dict[str, int]:
        return self.engine.prefill(items, lambda layers_done, event: None)

    def decode(self, items: list[DecodeItem]) -> dict[str, int]:
        return self.engine.decode(items)

    def begin_decode(self, items: list[DecodeItem]) -> None:
        self.reads.append(self.engine.begin_decode(items))

    def read_tokens(self) -> dict[str, int]:
        return self.reads.popleft()()

    def prefill_broken_callback(self, items: list[PrefillItem]) -> None:
        def fail(layers_done: int, event: object) -> None:
            raise ValueError("the callback failed")

        self.engine.prefill(items, fail)

    def read(self, layer: int, slots: list[int]) -> list[Any]:
        """Return the buffers of a layer at some slots, as numpy arrays: K and V, latents or states."""
        pool = self.engine.pool
        return [part.numpy() for part in pool.read(layer, torch.tensor(slots))[: pool.layout.layers[layer].num_buffers]]

    def move_to_host(self, num_host_pages: int, moves: list[tuple[list[int], list[int]]]) -> None:
        """Give the engine a host pool, move (device pages, host pages) there, and fill the device pages with NaN."""
        pool = self.engine.pool
        host = HostPool(pool, num_pages=[num_host_pages])
        self.engine.use_host_pool(host, block_bytes=host.page_bytes[0])
        mover = PageMover(pool, host, buffer_bytes=2 * host.page_bytes[0])
        for device_pages, host_pages in moves:
            mover.save([PageMove(group=0, device_pages=device_pages, host_pages=host_pages)])
            for page in device_pages:
                fill_with_nan(pool, page=page)

    def fields(self) -> dict[str, str]:
        return dict(self.engine.model_fields)

    def close(self) -> None:
        self.engine.close()
        self.engine.close()


def serve(connection: Connection, group: GroupOfRanks, rank: int, store: str) -> None:
    """Receive (method, arguments) and answer (True, result) or (False, error text), until the test closes the connection."""
    own = Rank(group, rank, store)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(own, method)(*arguments)))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))


class Ranks:
    """All ranks of a group, driven in step as by a node's leader. Has the interface of an engine for `steps`."""

    def __init__(self, group: GroupOfRanks, store: str) -> None:
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        self._exit_codes = [0] * group.size
        for rank in range(group.size):
            own, theirs = FORKS.Pipe()
            process = FORKS.Process(target=serve, args=(theirs, group, rank, store), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(own)
            self.processes.append(process)

    def send(self, rank: int, method: str, *arguments: Any) -> None:
        self.connections[rank].send((method, arguments))

    def answer(self, rank: int) -> tuple[bool, Any]:
        assert self.connections[rank].poll(ANSWER_S), f"rank {rank} gave no answer within {ANSWER_S} s"
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

    def begin_decode(self, items: list[DecodeItem]) -> Callable[[], dict[str, int]]:
        self.call("begin_decode", items)
        return lambda: self._leader("read_tokens")

    def _leader(self, method: str, *arguments: Any) -> dict[str, int]:
        first, *others = self.call(method, *arguments)
        assert all(other == {} for other in others), "only rank 0 samples"
        tokens: dict[str, int] = first
        return tokens

    def freeze(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGSTOP)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self._exit_codes[rank] = -signal.SIGKILL

    def close(self) -> None:
        """End all ranks. Fail unless each rank that no test killed exits by itself."""
        for connection in self.connections:
            connection.close()
        try:
            for process in self.processes:
                process.join(END_S)
            assert [process.exitcode for process in self.processes] == self._exit_codes
        finally:
            for process in self.processes:
                process.kill()


class RankServer:
    """Start groups of ranks.

    Args:
        directory: An empty one, for the files by which the ranks of a group find each other.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._groups: list[Ranks] = []

    def start(self, groups: Mapping[str, GroupOfRanks]) -> dict[str, Ranks]:
        """Start groups whose names no other group has, each rank a process."""
        ranks = {name: Ranks(group, f"file://{self._directory / name}.store") for name, group in groups.items()}
        self._groups += ranks.values()
        return ranks

    def close(self) -> None:
        for ranks in self._groups:
            ranks.close()
