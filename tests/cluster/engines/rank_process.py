"""Ranks in real processes, forked from one process that has imported everything, as a node forks its own.

Run as ``python rank_process.py SOCKET_DIRECTORY``. A line ``GROUP:TP_SIZE:TIMEOUT_S:MODEL_DIRECTORY`` on its standard input
starts a group. Rank r of it serves one connection on ``SOCKET_DIRECTORY/GROUP-r``: it receives (method, arguments) and answers
(True, result) or (False, error text). At the end of its input the process waits for all ranks and prints their exit statuses.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from embedded_engine import engine as engines
from embedded_engine.architectures import ARCHITECTURES, model_module
from embedded_engine.model_files import read_model_files
from embedded_engine.tensor_parallel import init_distributed
from tests.embedded_engine.steps import fill_with_nan, pages_for
from transfer.copy.page_mover import PageMove, PageMover
from transfer.engine_types import DecodeItem, PrefillItem
from transfer.layer_groups import layer_groups
from transfer.layout import Shard
from transfer.pool.host_pool import HostPool


class Rank:
    """One rank's engine behind the connection."""

    def __init__(self, directory: Path, group: str, rank: int, tp_size: int, timeout_s: float, model: str) -> None:
        store = f"file://{directory / group}.store"
        process_group = init_distributed(rank, tp_size, store, timeout_s=timeout_s)
        files = read_model_files(model)
        self.engine = engines.EmbeddedEngine(
            files,
            shard=Shard(tp_size=tp_size, tp_rank=rank),
            num_pages=pages_for(layer_groups(files.layout()), 200),
            group=process_group,
            num_threads=1,
            layers_per_group=2,
        )

    def prefill(self, items: list[PrefillItem]) -> dict[str, int]:
        return self.engine.prefill(items, lambda layers_done, event: None)

    def decode(self, items: list[DecodeItem]) -> dict[str, int]:
        return self.engine.decode(items)

    def prefill_broken_callback(self, items: list[PrefillItem]) -> None:
        def fail(layers_done: int, event: object) -> None:
            raise ValueError("the callback failed")

        self.engine.prefill(items, fail)

    def read(self, layer: int, slots: list[int]) -> list[Any]:
        """Contents of the buffers of a layer at some slots, as numpy arrays: K and V, latents or states."""
        pool = self.engine.pool
        return [part.numpy() for part in pool.read(layer, torch.tensor(slots))[: pool.layout.layers[layer].num_buffers]]

    def move_to_host(self, num_host_pages: int, moves: list[tuple[list[int], list[int]]]) -> None:
        """Give the engine a host pool and move (device pages, host pages) there; on the device they are then no numbers."""
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


def serve(directory: Path, group: str, rank: int, tp_size: int, timeout_s: float, model: str) -> None:
    with Listener(str(directory / f"{group}-{rank}"), family="AF_UNIX") as listener:
        own = Rank(directory, group, rank, tp_size, timeout_s, model)
        connection: Connection = listener.accept()
        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:
                return
            try:
                connection.send((True, getattr(own, method)(*arguments)))
            except Exception as error:
                connection.send((False, f"{type(error).__name__}: {error}"))


def main() -> None:
    directory = Path(sys.argv[1])
    for architecture in ARCHITECTURES:
        importlib.import_module(model_module(architecture))
    num_ranks = 0
    for line in sys.stdin:
        group, tp_size, timeout_s, model = line.strip().split(":")
        for rank in range(int(tp_size)):
            num_ranks += 1
            if os.fork():
                continue
            try:
                serve(directory, group, rank, int(tp_size), float(timeout_s), model)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    print(sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(num_ranks)), flush=True)


if __name__ == "__main__":
    main()
