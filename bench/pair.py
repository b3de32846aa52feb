"""Two processes of a benchmark, a writer and a target, each on its own device if there are two."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch
from torch import Tensor

from node_runtime.process_setup import streaming_copies
from transfer.pool.staging import zeroed_bytes

DeviceType = Literal["cpu", "cuda"]


class PairFailed(Exception):
    """One of the two processes failed, or both took too long."""

    @property
    def lacks_library(self) -> bool:
        """Return True if the only problem is that an optional library is not installed."""
        return any(name in str(self) for name in ("ConfigError", "ModuleNotFoundError", "ImportError"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Devices of the two processes. Both see all GPUs, because a process can map the memory only of a GPU that it sees."""

    writer: str
    target: str

    @classmethod
    def of(cls, device_type: DeviceType, *, is_one_gpu: bool = False) -> Devices:
        """Return two GPUs if there are two, and otherwise, or with `is_one_gpu`, the same GPU for both ends.

        Raises:
            PairFailed: `device_type` is cuda, and there is no GPU.
        """
        if device_type == "cpu":
            return cls(writer="cpu", target="cpu")
        count = torch.cuda.device_count()
        if count == 0:
            raise PairFailed("device is cuda, and torch sees no CUDA device here")
        return cls(writer="cuda:0", target="cuda:0" if count == 1 or is_one_gpu else "cuda:1")

    @property
    def is_cuda(self) -> bool:
        return self.writer != "cpu"

    @property
    def are_same(self) -> bool:
        return self.writer == self.target

    def __str__(self) -> str:
        if not self.is_cuda:
            return "two CPU processes"
        return "two processes on one GPU" if self.are_same else f"two processes on {self.writer} and {self.target}"


def bytes_on(device: str, num_bytes: int, *, is_shared: bool = False) -> Tensor:
    """uint8 [num_bytes] of ones, aligned and touched; `is_shared` as in `transfer.pool.staging.StagingBuffer`."""
    return zeroed_bytes(num_bytes, device, is_shared=is_shared).fill_(1)


def synchronize(device: str) -> None:
    """Wait for the work that this process has queued on the device, unless it is the CPU."""
    if device != "cpu":
        torch.cuda.synchronize(device)


End = Callable[..., Any]
"""`end(pipe, device, *arguments)`: the work of a process. `pipe` leads to the other process, and `device` is already current. The
result must be picklable."""


def run_pair(
    write: End,
    serve: End,
    *arguments: Any,
    devices: Devices,
    timeout_s: float,
    roles: tuple[str, str] = ("writer", "target"),
) -> Any:
    """Run both ends in separate processes, and return the result of the first one.

    Args:
        write, serve: Functions of a module, because they are pickled by name.
        devices: `writer` is the device of the first end.
        roles: Names of the ends in errors.

    Raises:
        PairFailed: One of them raised or died, or the first did not return within `timeout_s`. Both have ended then.
    """
    context = multiprocessing.get_context("spawn")
    writer_pipe, target_pipe = context.Pipe()
    results, processes = [], []
    for end, pipe, device in ((write, writer_pipe, devices.writer), (serve, target_pipe, devices.target)):
        result, far_result = context.Pipe(duplex=False)
        process = context.Process(target=_run_end, args=(end, pipe, far_result, device, arguments), daemon=False)
        with streaming_copies():  # as ranks are started
            process.start()
        for used in (pipe, far_result):
            used.close()  # so that the end of the process closes its pipes
        results.append(result)
        processes.append(process)
    grace_s = 0.0
    try:
        value = _first_result(dict(zip(roles, results, strict=True)), timeout_s)
        grace_s = _GRACE_S
        return value
    finally:
        for process in processes:
            process.join(grace_s)
            if process.is_alive():
                process.kill()
                process.join()


_GRACE_S = 5.0  # for the other process to end, or to report its failure


def _first_result(waiting: dict[str, Connection], timeout_s: float) -> Any:
    """Return the result of the first end; of the other one only an error matters."""
    ends_s = time.monotonic() + timeout_s
    first = next(iter(waiting))
    while ready := wait(waiting.values(), max(0.0, ends_s - time.monotonic())):
        for role in [role for role, connection in waiting.items() if connection in ready]:
            is_good, value = _received(waiting.pop(role))
            if not is_good:
                # Usually the failure of one end closes the pipe, so that the other one fails, too.
                others = [f"the {other} {_received(pipe)[1]}" for other, pipe in waiting.items() if pipe.poll(_GRACE_S)]
                raise PairFailed("; ".join([f"the {role} {value}", *others]))
            if role == first:
                return value
    raise PairFailed(f"not done within {timeout_s:.0f} s")


def _received(connection: Connection) -> tuple[bool, Any]:
    try:
        is_good, value = connection.recv()
    except EOFError:
        return False, "died"
    return is_good, value


def _run_end(end: End, pipe: Connection, result: Connection, device: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        if device != "cpu":
            torch.cuda.set_device(device)
        value = end(pipe, device, *arguments)
    except Exception as error:
        with contextlib.suppress(OSError):
            where = traceback.extract_tb(error.__traceback__)[-1]
            result.send(
                (False, f"failed with {type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})")
            )
        return
    result.send((True, value))
