"""UCX through UCXX's own plain API: tag send and receive, both ends polling their worker, every setting UCX's own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from bench.link_plan import Samples, Step
from bench.pair import bytes_on, synchronize


class UcxEnd:
    """A worker, and an endpoint to the other end's.

    Raises:
        ImportError: There is no UCXX.
    """

    def __init__(self) -> None:
        self._lib: Any = importlib.import_module("ucxx._lib.libucxx")
        self._array: Any = importlib.import_module("ucxx._lib.arr").Array
        features = (self._lib.Feature.TAG, self._lib.Feature.WAKEUP)
        self._worker = self._lib.UCXWorker(self._lib.UCXContext({}, feature_flags=features))
        self._endpoint: Any = None

    @property
    def blob(self) -> bytes:
        address: bytes = self._worker.address.tobytes()
        return address

    def meet(self, blob: bytes) -> None:
        # Without UCX's error handling shared memory is taken, which is what a benchmark of the library would measure.
        address = self._lib.UCXAddress.create_from_buffer(blob)
        self._endpoint = self._lib.UCXEndpoint.create_from_worker_address(self._worker, address, endpoint_error_handling=False)

    def send(self, memory: Tensor, tag: int) -> None:
        """Returns when the bytes may be reused."""
        self._wait(self._endpoint.tag_send(self._wrapped(memory), self._lib.UCXXTag(tag)))

    def receive(self, memory: Tensor, tag: int) -> None:
        self._wait(self._worker.tag_recv(self._wrapped(memory), self._lib.UCXXTag(tag), self._lib.UCXXTagMaskFull))

    def _wrapped(self, memory: Tensor) -> Any:
        return self._array(memory if memory.is_cuda else memory.numpy())

    def _wait(self, request: Any) -> None:
        while not request.completed:
            self.progress()
            os.sched_yield()  # pollers of both ends that share a core would take turns of whole scheduler slices
        request.check_error()

    def progress(self) -> None:
        self._worker.progress()


def write(pipe: Connection, device: str, plan: Sequence[Step]) -> dict[str, Samples]:
    """The writer: seconds of each send, by step."""
    memory, end = _open(pipe, device, plan)
    found: dict[str, Samples] = {}
    for step in plan:
        found[step.name] = step.sample(partial(end.send, memory[: step.num_bytes], 1))
    pipe.send("done")
    return found


def serve(pipe: Connection, device: str, plan: Sequence[Step]) -> None:
    memory, end = _open(pipe, device, plan)
    for step in plan:
        for _ in range(step.repetitions + 1):
            end.receive(memory[: step.num_bytes], 1)
    while not pipe.poll():
        end.progress()  # the writer's last send may still need an answer
        os.sched_yield()


def _open(pipe: Connection, device: str, plan: Sequence[Step]) -> tuple[Tensor, UcxEnd]:
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    memory = bytes_on(device, max(step.num_bytes for step in plan))
    synchronize(device)
    end = UcxEnd()
    pipe.send(end.blob)
    end.meet(pipe.recv())
    return memory, end
