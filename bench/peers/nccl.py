"""NCCL send and receive through torch.distributed, one GPU each."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from bench.link_plan import Samples, Step
from bench.pair import bytes_on, synchronize


def write(pipe: Connection, device: str, plan: Sequence[Step]) -> dict[str, Samples]:
    """The writer: seconds of each send, by step, until its device is done."""
    with tempfile.TemporaryDirectory(prefix="kvferry-nccl-") as folder:
        store = str(Path(folder) / "store")
        pipe.send(store)
        memory = _join(store, 0, device, plan)

        def send(num_bytes: int) -> None:
            dist.send(memory[:num_bytes], 1)
            synchronize(device)

        found = {step.name: step.sample(partial(send, step.num_bytes)) for step in plan}
        pipe.recv()
        dist.destroy_process_group()
    return found


def serve(pipe: Connection, device: str, plan: Sequence[Step]) -> None:
    memory = _join(pipe.recv(), 1, device, plan)
    for step in plan:
        for _ in range(step.repetitions + 1):
            dist.recv(memory[: step.num_bytes], 0)
            synchronize(device)
    pipe.send("done")
    dist.destroy_process_group()


def _join(store: str, rank: int, device: str, plan: Sequence[Step]) -> Tensor:
    dist.init_process_group("nccl", store=FileStore(store, 2), rank=rank, world_size=2, device_id=torch.device(device))
    return bytes_on(device, max(step.num_bytes for step in plan))
