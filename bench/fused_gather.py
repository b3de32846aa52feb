"""Gather on one GPU straight into a ring on another, by kvferry's `cuda_ipc`; the copy engine into the same memory beside it.

What arrives is compared with what a gather into this GPU's own memory gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch

from bench.link_ends import open_transport
from bench.link_plan import Samples
from bench.llama70b import TOKEN_BYTES, Gather
from bench.pair import bytes_on, synchronize
from bench.peers.cuda_copy import queue_copy
from bench.timing import sample
from transfer.transport.base import ByteRange

KEYS = ("copy", "fused", "fused with digest")
_LANE = "cuda_ipc/fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Tokens of Llama 3 70B, P4 -> D2, all layers."""

    num_tokens: int
    repetitions: int

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * TOKEN_BYTES

    @property
    def name(self) -> str:
        return f"{self.num_bytes / 1e6:,.0f} MB of Llama 3 70B, P4 -> D2"


def cases(*, is_quick: bool) -> list[Case]:
    """16, 68, 136, 335 and 1,074 MB."""
    return [Case(num_tokens=tokens, repetitions=3 if is_quick else 30) for tokens in (208, 832, 1664, 4096, 13_104)]


def write(pipe: Connection, device: str, plan: Sequence[Case]) -> dict[str, dict[str, Samples]]:
    """The writer: seconds by `KEYS` and case, each until the device is done; the calls alternate."""
    transport = open_transport(_LANE, device)
    most = max(case.num_bytes for case in plan)
    local = bytes_on(device, most)
    memory = transport.register(local)
    offer = transport.offer()
    pipe.send((most, offer.blob))
    session = offer.complete(pipe.recv())
    found: dict[str, dict[str, Samples]] = {key: {} for key in KEYS}
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for case in plan:
        ring = session.direct(ByteRange(begin=0, end=case.num_bytes))
        if ring is None:
            raise RuntimeError(f"a session over {session.lane} gives kernels nothing to store into")
        job = Gather.of(case.num_tokens, device)
        calls: dict[str, Callable[[], object]] = {
            "copy": partial(queue_copy, ring.data_ptr(), local[: case.num_bytes]),
            "fused": partial(job.plan.gather, job.pages, ring),
            "fused with digest": partial(job.plan.gather, job.pages, ring, digest=total),
        }
        taken: dict[str, Samples] = {key: [] for key in KEYS}
        for turn in range(case.repetitions + 2):  # the first ones compile and warm up
            for key, call in calls.items():
                seconds = sample(partial(_until_done, call, device), repetitions=1, warmup=0)
                taken[key] += seconds if turn > 1 else []
        for key in KEYS:
            found[key][case.name] = taken[key]
        job.plan.gather(job.pages, local)
        synchronize(device)
        pipe.send((case.num_bytes, _sum_of(local[: case.num_bytes])))
        if not pipe.recv():
            raise RuntimeError(f"{case.name}: what arrived in the ring is not what was gathered")
    pipe.send(None)
    transport.close()
    pipe.send("closed")
    del memory
    return found


def serve(pipe: Connection, device: str, plan: Sequence[Case]) -> None:
    transport = open_transport(_LANE, device)
    most, blob = pipe.recv()
    ring = bytes_on(device, most)
    synchronize(device)
    _, answer = transport.accept(blob, transport.register(ring))
    pipe.send(answer)
    while (expected := pipe.recv()) is not None:
        num_bytes, total = expected
        pipe.send(_sum_of(ring[:num_bytes]) == total)
        ring.zero_()
        synchronize(device)
    pipe.recv()
    transport.close()


def _until_done(call: Callable[[], object], device: str) -> None:
    call()
    synchronize(device)


def _sum_of(memory: torch.Tensor) -> int:
    """A sum in which places count: bytes on another place, or of another request, change it."""
    words = memory.view(torch.int64)
    return int((words * torch.arange(1, 2 * len(words), 2, device=words.device)).sum())
