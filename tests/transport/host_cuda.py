"""A twin of CUDA in host memory, for machines without a GPU: allocations are files in /dev/shm, and other processes map them.

What it shows is everything around CUDA: who maps, closes and says so, when, and what stays alive. It keeps CUDA's habits on
purpose: a copy runs only while its stream is looked at or waited for (256 KiB each time), an allocation is larger than what is
asked for and begins elsewhere, and a process cannot open its own handle.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfer.errors import ConfigError
from transfer.transport.cuda_ipc import CudaIpcTransport
from transfer.transport.cuda_ipc_blob import HANDLE_BYTES
from transfer.transport.cuda_ipc_driver import CopyStream, Cuda, CudaError, Exported, Mapped
from transfer.transport.registered_memory import DeviceBuffer

PREFIX = "kvferry-twin-"
_STEP_BYTES = 1 << 18
_LEAD_BYTES = 3 * 4096  # before what was asked for, in the same allocation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TwinBuffer:
    """Memory of a device: a tensor for tests to look at, and what a transport registers."""

    tensor: Tensor
    address: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.tensor.numel(),), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)  # kDLCUDA; the transport asks `HostCuda.device_of`


@dataclass(slots=True, kw_only=True, eq=False)
class _Copy:
    target: int
    source: int
    left: int

    def step(self) -> None:
        size = min(_STEP_BYTES, self.left)
        ctypes.memmove(self.target, self.source, size)
        self.target, self.source, self.left = self.target + size, self.source + size, self.left - size


class TwinStream(CopyStream):
    _cuda: HostCuda

    def __init__(self, cuda: HostCuda) -> None:
        self._cuda = cuda
        self._copies: deque[_Copy] = deque()

    def copy(self, target: int, source: int, num_bytes: int) -> _Copy:
        self._cuda.run("cuMemcpyAsync")
        copy = _Copy(target=target, source=source, left=num_bytes)
        self._copies.append(copy)
        return copy

    def is_done(self, copy: _Copy) -> bool:
        self._cuda.run("cuEventQuery")
        if self._copies:
            self._step()
        return copy.left == 0

    def synchronize(self) -> None:
        self._cuda.run("cuStreamSynchronize")
        while self._copies:
            self._step()

    def close(self) -> None:
        assert not self._copies

    def _step(self) -> None:
        self._copies[0].step()
        if self._copies[0].left == 0:
            self._copies.popleft()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allocation:
    name: str
    address: int
    num_bytes: int
    device: int


class HostDriver:
    """The driver's functions of `DeviceWords.functions`, as a C thread calls them. A thread runs the work of all streams.

    Any number identifies a stream. A kernel is a Python function, which the number from `kernel` identifies.
    """

    def __init__(self) -> None:
        self._streams: dict[int, deque[Callable[[], bool]]] = {}
        self._kernels: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self.status = 0
        """Returned by every launch from now on."""
        self.is_blocking = False
        """Whether a launch returns only when its stream is done, as the first launch of a kernel can."""
        self.contexts: dict[int, list[int | None]] = {}
        """Stack of contexts of each thread."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called by the thread that queues a wait."""
        word, size, handle = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        number = ctypes.c_uint
        kinds: list[tuple[Any, ...]] = [
            (handle,),
            (handle,),
            (handle, word, word, number),
            (handle, *7 * [number], handle, handle, handle),
            (handle, word, size, handle),
            (handle, word, word, number),
        ]
        calls: list[Any] = [self._push_context, self._pop_context, self._wait, self._launch, self._copy_to_host, self._write]
        self._kept = [ctypes.CFUNCTYPE(ctypes.c_int, *kind)(call) for kind, call in zip(kinds, calls, strict=True)]
        self.functions = tuple(ctypes.cast(call, ctypes.c_void_p).value or 0 for call in self._kept)
        threading.Thread(target=self._run, name="host-driver", daemon=True).start()

    def kernel(self, function: Callable[[], None]) -> int:
        """Return the number of a new kernel, which can be launched once."""
        number = next(self._numbers)
        self._kernels[number] = function
        return number

    def is_idle(self, stream: int) -> bool:
        """Return whether all work of the stream has run."""
        with self._changed:
            return not self._streams.get(stream)

    def queue(self, stream: int | None, work: Callable[[], bool]) -> int:
        """Queue work that returns whether it is done."""
        with self._changed:
            self._streams.setdefault(stream or 0, deque()).append(work)
            self._changed.notify()
        return 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(self._streams.values()))
                first = [(works, works[0]) for works in self._streams.values() if works]
            done = [works for works, work in first if work()]
            with self._changed:
                for works in done:
                    works.popleft()
            if not done:
                time.sleep(0.0002)

    def _push_context(self, context: int | None) -> int:
        self.contexts.setdefault(threading.get_ident(), []).append(context)
        return 0

    def _pop_context(self, place: int) -> int:
        self.contexts[threading.get_ident()].pop()
        return 0

    def _wait(self, stream: int, address: int, value: int, flags: int) -> int:
        self.on_wait()
        # CUDA compares cyclically: the signed difference must be at least 0.
        return self.queue(stream, lambda: (ctypes.c_uint64.from_address(address).value - value) % 2**64 < 2**63)

    def _launch(self, function: int, *arguments: Any) -> int:
        while self.is_blocking and not self.is_idle(arguments[7]):
            time.sleep(0.0002)
        kernel = self._kernels.pop(function)
        return self.status or self.queue(arguments[7], lambda: kernel() is None)

    def _copy_to_host(self, target: int, source: int, num_bytes: int, stream: int) -> int:
        return self.queue(stream, lambda: ctypes.memmove(target, source, num_bytes) is not None)

    def _write(self, stream: int, address: int, value: int, flags: int) -> int:
        def write() -> bool:
            ctypes.c_uint64.from_address(address).value = value
            return True

        return self.queue(stream, write)


class HostWords:
    """`CudaWords` whose writer's stream does everything at once.

    Args:
        driver: Driver of the target's streams. None means that no scatter may be armed.
    """

    context = 0

    def __init__(self, memory: Any, driver: HostDriver | None = None) -> None:
        self.words = memoryview(memory).cast("B").cast("Q")
        self.address = self.device_address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.functions = (0,) * 6 if driver is None else driver.functions
        self._memory = memory

    def write(self, stream: int, word: int, value: int) -> None:
        self.words[word] = value

    def copy(self, stream: int, word: int, source: int) -> None:
        self.words[word] = ctypes.c_uint64.from_address(source).value


class HostCuda(Cuda):
    """`Cuda` without a driver.

    Args:
        visible: What CUDA_VISIBLE_DEVICES would leave: the real numbers of this process's devices.
        apart: Pairs of real devices without peer access.
    """

    def __init__(self, *, visible: tuple[int, ...] = (0, 1), apart: Collection[frozenset[int]] = ()) -> None:
        self.broken: str | None = None  # the error of every call from now on, as after an illegal address
        self.unshareable = False  # as with expandable segments
        self.has_words = True
        self.stream_driver: HostDriver | None = None
        self.idle = threading.Event()  # cleared: a kernel runs, and the device is waited for until it is set again
        self.idle.set()
        self._lock = threading.Lock()
        self._visible = visible
        self._apart = apart
        self._num_devices = len(visible)
        self._allocations: list[_Allocation] = []
        self._mapped = {}
        self._files: dict[int, mmap.mmap] = {}
        self._stem = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}-"
        self._numbers = itertools.count()

    def allocate(self, device: int, num_bytes: int) -> TwinBuffer:
        name = f"{self._stem}{next(self._numbers)}"
        size = _LEAD_BYTES + num_bytes
        with open(f"/dev/shm/{name}", "w+b") as file:
            file.truncate(size)
            memory = mmap.mmap(file.fileno(), size)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._allocations.append(_Allocation(name=name, address=whole.data_ptr(), num_bytes=size, device=device))
        return TwinBuffer(tensor=whole[_LEAD_BYTES:], address=whole.data_ptr() + _LEAD_BYTES)

    def adopt(self, tensor: Tensor) -> TwinBuffer:
        """Call memory that there is device memory; no other process can map it."""
        address = tensor.data_ptr()
        self._allocations.append(_Allocation(name="", address=address, num_bytes=tensor.numel(), device=0))
        return TwinBuffer(tensor=tensor, address=address)

    def run(self, name: str) -> None:
        """Fail as a call of CUDA does if the device is broken."""
        if self.broken is not None:
            raise CudaError(f"{name} failed with {self.broken}")

    def device_of(self, address: int) -> int | None:
        found = self._find(address)
        return None if found is None else found.device

    def uuid_of(self, device: int) -> str:
        return f"{self._visible[device]:08x}-0000-4000-8000-000000000000"

    def can_access(self, device: int, peer: int) -> bool:
        return frozenset((self._visible[device], self._visible[peer])) not in self._apart

    def enable_access(self, device: int, peer: int) -> None:
        self.run("cuCtxEnablePeerAccess")

    def export(self, device: int, address: int) -> Exported:
        found = self._find(address)
        if self.unshareable or found is None:
            raise ConfigError("the ring's memory cannot be shared over CUDA IPC")
        return Exported(handle=found.name.encode().ljust(HANDLE_BYTES, b"\0"), offset=address - found.address)

    def _map(self, device: int, handle: bytes) -> Mapped:
        self.run("cuIpcOpenMemHandle")
        name = handle.rstrip(b"\0").decode()
        if name.startswith(self._stem) or not Path(f"/dev/shm/{name}").is_file() or not name.startswith(PREFIX):
            raise CudaError("cuIpcOpenMemHandle failed with CUDA_ERROR_INVALID_VALUE")
        with open(f"/dev/shm/{name}", "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._files[address] = memory
        return Mapped(device=device, handle=handle, address=address, num_bytes=len(memory))

    def _unmap(self, mapped: Mapped) -> None:
        self.run("cuIpcCloseMemHandle")
        self._files.pop(mapped.address).close()

    def open_words(self, device: int, memory: Any, closing: Any) -> HostWords | None:
        return HostWords(memory, self.stream_driver) if self.has_words else None

    def open_stream(self, device: int) -> TwinStream:
        self.run("cuStreamCreate")
        return TwinStream(self)

    def synchronize(self, device: int) -> None:
        self.idle.wait()
        self.run("cuCtxSynchronize")

    def _find(self, address: int) -> _Allocation | None:
        return next((one for one in self._allocations if one.address <= address < one.address + one.num_bytes), None)


class TwinTransport(CudaIpcTransport):
    """Takes a test's arrays for memory of a device; both ends in one process."""

    def __init__(self, cuda: HostCuda) -> None:
        super().__init__(cuda=cuda)
        self._twin = cuda

    def register(self, buffer: Any) -> DeviceBuffer:
        return super().register(self._twin.adopt(torch.as_tensor(buffer)))


def remove_files(pid: int) -> None:
    """Of a process that was killed: nobody else does it."""
    for file in Path("/dev/shm").glob(f"{PREFIX}{pid}-*"):
        file.unlink()
