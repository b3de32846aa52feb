"""The two ends of a session whose writer maps the target's memory, each in a separate process that takes commands over a pipe.

The memory is on a GPU or its twin (CUDA IPC), or on the host (shared memory).

Between commands a process makes progress all the time, so that it can be killed or stopped in the middle of a write. It is forked
from a server that has imported torch, so that a new one costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.transport.host_cuda import HostCuda, remove_files
from transfer.errors import TransferError
from transfer.pool.staging import zeroed_bytes
from transfer.transport.base import ByteRange, DirectMemory
from transfer.transport.cuda_ipc import CudaIpcTransport, Mode
from transfer.transport.cuda_ipc_driver import process_cuda
from transfer.transport.shared_memory import region_of
from transfer.transport.shm import ShmTransport

_ANSWER_S = 60.0  # the first use of a GPU and the compiler take seconds
_FACTOR = 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one end lives.

    Attributes:
        is_gpu: Whether the memory is on a GPU. Otherwise it is on the twin.
        is_host: Whether the memory is on the host, for the transport shm.
        device: As the process sees it.
        visible: CUDA_VISIBLE_DEVICES of the process; empty: all.
    """

    is_gpu: bool = False
    is_host: bool = False
    device: int = 0
    visible: tuple[int, ...] = ()


def pattern(num_bytes: int, seed: int, device: str) -> Tensor:
    """uint8 [num_bytes]: no two words of 8 bytes, and no two seeds, alike."""
    words = torch.arange(-(-num_bytes // 8), dtype=torch.int64, device=device)
    words.mul_(2 * seed + 1).add_(seed).mul_(_FACTOR)
    return words.view(torch.uint8)[:num_bytes]


class End:
    """One process's transport, its one memory, and its sessions; every public method is a command."""

    def __init__(self, place: Place, mode: Mode, num_bytes: int) -> None:
        self._place = place
        self._twin: HostCuda | None = None
        registrable: Any
        if place.is_gpu:
            torch.cuda.set_device(place.device)
            self._torch_device = f"cuda:{place.device}"
            registrable = self._tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=self._torch_device)
        elif place.is_host:
            self._torch_device = "cpu"
            registrable = self._tensor = zeroed_bytes(num_bytes, is_shared=True)
        else:
            self._twin = HostCuda(visible=place.visible or (0, 1))
            self._torch_device = "cpu"
            registrable = self._twin.allocate(place.device, num_bytes)
            self._tensor = registrable.tensor
        self._transport: Any = ShmTransport() if place.is_host else CudaIpcTransport(mode=mode, cuda=self._twin)
        self._memory = self._transport.register(registrable)
        self._offer: Any = None
        self._session: Any = None
        self._handles: dict[int, Any] = {}

    def progress(self) -> bool:
        return self._session is not None and self._session.progress()

    # Sessions

    def offer(self) -> bytes:
        self._offer = self._transport.offer()
        return bytes(self._offer.blob)

    def accept(self, blob: bytes) -> bytes:
        self._session, answer = self._transport.accept(blob, self._memory)
        return answer

    def complete(self, answer: bytes) -> str:
        self._session = self._offer.complete(answer)
        self._handles = {}
        return str(self._session.lane)

    def close(self) -> None:
        self._session.close()

    def close_offer(self) -> None:
        self._offer.close()

    def is_over(self) -> bool:
        return bool(self._session.is_over)

    def is_over_within(self, seconds: float) -> bool:
        ends_at = time.monotonic() + seconds
        while not self._session.is_over and time.monotonic() < ends_at:
            time.sleep(0.001)
        return bool(self._session.is_over)

    def has_ended_within(self, seconds: float) -> bool:
        ends_at = time.monotonic() + seconds
        while not self._session.has_ended and time.monotonic() < ends_at:
            time.sleep(0.001)
        return bool(self._session.has_ended)

    def deregister(self) -> None:
        self._transport.deregister(self._memory)

    def close_transport(self) -> None:
        self._transport.close()

    # Bytes

    def fill(self, seed: int) -> None:
        self._tensor.copy_(pattern(self._tensor.numel(), seed, self._torch_device))
        self._synchronize()

    def stamp(self, value: int) -> None:
        self._tensor.fill_(value)
        self._synchronize()

    def is_stamp(self, value: int) -> bool:
        return bool((self._tensor == value).all())

    def holds(self, begin: int, end: int, seed: int, source_begin: int, around: int) -> bool:
        """Whether [begin, end) is the peer's pattern from `source_begin` on, and everything else still `around`."""
        wanted = pattern(self._tensor.numel(), seed, self._torch_device)[source_begin : source_begin + end - begin]
        is_right = torch.equal(self._tensor[begin:end], wanted)
        return is_right and bool((self._tensor[:begin] == around).all() and (self._tensor[end:] == around).all())

    def content(self) -> bytes:
        return self._tensor.cpu().numpy().tobytes()

    def write(self, begin: int, end: int, target_begin: int, key: int) -> None:
        target = ByteRange(begin=target_begin, end=target_begin + end - begin)
        self._handles[key] = self._session.write(self._memory, ByteRange(begin=begin, end=end), target, key)

    def write_all(self, times: int) -> None:
        """The whole memory, again and again; keys count from 0."""
        size = self._tensor.numel()
        for key in range(times):
            self.write(0, size, 0, key)

    def wait(self, key: int, seconds: float) -> str:
        """What becomes of a write: "done", "pending", or its error's class and words."""
        ends_at = time.monotonic() + seconds
        while True:
            try:
                if self._handles[key].poll():
                    return "done"
            except TransferError as error:
                return f"{type(error).__name__}: {error}"
            if time.monotonic() >= ends_at:
                return "pending"
            self._session.progress()

    def store(self, begin: int, end: int, target_begin: int, sleep_cycles: int = 0) -> bool:
        """Let a kernel store own bytes straight into the peer's memory; False where the session gives none.

        With `sleep_cycles` the kernel waits on the GPU that long, and this call waits for nothing; call it without before, so
        that nothing is compiled and loaded while the GPU sleeps.
        """
        found = self._session.direct(ByteRange(begin=target_begin, end=target_begin + end - begin))
        if found is None:
            return False
        if sleep_cycles:
            from tests.gpu.busy import occupy

            occupy(sleep_cycles)
        self._store(found, self._tensor[begin:end])
        if not sleep_cycles:
            self._synchronize()
        return True

    # This process

    def count(self) -> dict[str, int]:
        """What a session could leak."""
        if self._place.is_host:
            own = region_of(self._tensor.data_ptr(), 1)
            assert own is not None
            maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:kvferry" in line]
            num_mapped = sum(int(fields[4]) != own.inode for fields in maps)
        else:
            num_mapped = (self._twin or process_cuda()).num_mapped
        return {"fds": len(os.listdir("/proc/self/fd")), "mapped": num_mapped}

    def break_device(self) -> str:
        """Let a kernel fail: the process can use its GPU no more. Returns what CUDA says to that.

        By an index out of bounds, and not by a store to an address where nothing is: which those are only the driver knows.
        """
        try:
            torch.zeros(1, device=self._torch_device)[torch.ones(1, dtype=torch.int64, device=self._torch_device)]
            self._synchronize()
        except RuntimeError as error:
            return str(error)
        return "nothing"

    def _synchronize(self) -> None:
        if self._place.is_gpu:
            torch.cuda.synchronize()

    def _store(self, target: DirectMemory, source: Tensor) -> None:
        if self._place.is_gpu:
            from tests.transport.store_kernel import store

            store(target, source)
        else:
            import ctypes

            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())


def _live(pipe: Connection, place: Place, mode: Mode, num_bytes: int) -> None:
    """A process's life: commands until the pipe ends."""
    if place.is_gpu and place.visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.visible))
    try:
        end = End(place, mode, num_bytes)
        pipe.send(("ok", None))
        while True:
            while not pipe.poll(0.0 if end.progress() else 0.0002):
                pass
            name, arguments = pipe.recv()
            try:
                pipe.send(("ok", getattr(end, name)(**arguments)))
            except TransferError as error:
                pipe.send(("failed", f"{type(error).__name__}: {error}"))
    except EOFError:
        pass


class Remote:
    """A process with an `End`."""

    def __init__(self, place: Place, *, mode: Mode = "fused", num_bytes: int = 1 << 20) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "tests.transport.mapped_ends"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_live, args=(theirs, place, mode, num_bytes), daemon=True)
        self.process.start()
        theirs.close()
        self.hear()

    def start(self, name: str, **arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def hear(self) -> Any:
        assert self._pipe.poll(_ANSWER_S), "no answer"
        kind, value = self._pipe.recv()
        if kind == "failed":
            raise Refused(value)
        return value

    def do(self, name: str, **arguments: Any) -> Any:
        self.start(name, **arguments)
        return self.hear()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(10)

    def end(self) -> None:
        assert self.process.pid is not None
        self._pipe.close()
        if self.process.is_alive():  # it ends with its pipe, unless it is frozen
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
        self.process.join(10)
        if self.process.is_alive():
            self.kill()
        remove_files(self.process.pid)


class Refused(Exception):
    """What a command raised: class and words of a `TransferError`."""


def attach(writer: Remote, target: Remote) -> str:
    """Open a session from one to the other; returns the writer's lane."""
    blob = writer.do("offer")
    return str(writer.do("complete", answer=target.do("accept", blob=blob)))


@contextlib.contextmanager
def remotes() -> Iterator[Any]:
    """A function that makes a `Remote`; all end with the block."""
    made: list[Remote] = []

    def make(place: Place, **settings: Any) -> Remote:
        made.append(Remote(place, **settings))
        return made[-1]

    try:
        yield make
    finally:
        for remote in made:
            remote.end()
