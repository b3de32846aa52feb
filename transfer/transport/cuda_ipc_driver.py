"""The part of CUDA's driver API that the CUDA IPC transport uses: the only file that calls cuda-bindings.

It uses the driver API, not the runtime API. Each call makes a device's primary context current, and restores the previous one. In
the runtime API, restoring would give a thread that had no device one, with a context of hundreds of MiB on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from transfer.errors import ConfigError
from transfer.transport.cuda_ipc_blob import HANDLE_BYTES
from transfer.transport.mapped_session import CopyError
from transfer.transport.registered_memory import device_of_address
from transfer.transport.signals import DeviceWords

log = logging.getLogger(__name__)


class CudaError(CopyError):
    """A call of CUDA failed; the message names both. Many such errors end the process's use of its device for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A run of device memory as another process finds it: `offset` bytes into the allocation that `handle` names."""

    handle: bytes
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A peer's allocation in this process, for the device that it was opened for."""

    device: int
    handle: bytes
    address: int
    num_bytes: int


class CopyStream:
    """Copies of one session, one after the other. Events are used again."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda = cuda
        self._device = device
        self._stream = cuda.create_stream(device)
        self._idle_events: list[Any] = []
        self._events: list[Any] = []

    def copy(self, target: int, source: int, num_bytes: int) -> Any:
        """Queue a copy between two device addresses. Return the argument of `is_done`."""
        with self._cuda.on(self._device):
            event = self._idle_events.pop() if self._idle_events else self._new_event()
            self._cuda.call("cuMemcpyAsync", target, source, num_bytes, self._stream)
            self._cuda.call("cuEventRecord", event, self._stream)
        return event

    def is_done(self, copy: Any) -> bool:
        """Return whether the copy has ended. Ask for each copy until it has, the oldest first."""
        (status,) = self._cuda.driver.cuEventQuery(copy)  # needs no current context, unlike most calls
        if status == self._cuda.driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._cuda.check("cuEventQuery", status)
        self._idle_events.append(copy)
        return True

    def synchronize(self) -> None:
        """Wait until all queued copies have ended."""
        with self._cuda.on(self._device):
            self._cuda.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Free the stream, after `synchronize()`."""
        with self._cuda.on(self._device):
            for event in self._events:
                self._cuda.call("cuEventDestroy", event)
            self._cuda.call("cuStreamDestroy", self._stream)
        self._events = self._idle_events = []

    def _new_event(self) -> Any:
        event = self._cuda.call("cuEventCreate", self._cuda.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
        self._events.append(event)
        return event


class CudaWords:
    """Words of host memory that streams of a device read and write; a `transfer.transport.signals.DeviceWords`.

    The device's context must be current when a method is called, as it must be for the kernels of the same stream.

    Args:
        memory: Page-aligned and writable. It is kept until CUDA has let go of it.
        closing: Runs a function on a thread that may wait for the device.
    """

    def __init__(self, cuda: Cuda, device: int, memory: Any, closing: Callable[[Callable[[], None]], None]) -> None:
        self._cuda = cuda
        self._device = device
        self.words = memoryview(memory).cast("B").cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        register = cuda.driver.CU_MEMHOSTREGISTER_PORTABLE | cuda.driver.CU_MEMHOSTREGISTER_DEVICEMAP
        with cuda.on(device), cuda.beside_captures():
            cuda.call("cuMemHostRegister", self.address, self.words.nbytes, register)
            # Streams of a session that is over are done with it, but other streams of the device delay the call.
            unregister = functools.partial(_unregister, cuda, device, self.address, memory)
            weakref.finalize(self, closing, unregister).atexit = False  # also if the next call fails
            self.device_address = int(cuda.call("cuMemHostGetDevicePointer", self.address, 0))
        self.functions = _stream_functions()

    @property
    def context(self) -> int:
        return self._cuda.context_handle(self._device)

    def write(self, stream: int, word: int, value: int) -> None:
        flag = self._cuda.driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT.value  # with a memory barrier
        self._cuda.call("cuStreamWriteValue64", stream, self.device_address + 8 * word, value, flag)

    def copy(self, stream: int, word: int, source: int) -> None:
        self._cuda.call("cuMemcpyDtoHAsync", self.address + 8 * word, source, 8, stream)


@functools.cache
def _stream_functions() -> tuple[int, ...]:
    """Return the addresses of `DeviceWords.functions`. The names have the versions that cuda.h selects.

    Raises:
        CudaError: The driver does not have them.
    """
    contexts = "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"
    names = (*contexts, "cuStreamWaitValue64_v2", "cuLaunchKernel", "cuMemcpyDtoHAsync_v2", "cuStreamWriteValue64_v2")
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names)
    except (OSError, AttributeError) as error:
        raise CudaError(f"the driver lacks a function ({_in_a_line(error)})") from error


def _unregister(cuda: Cuda, device: int, address: int, memory: Any) -> None:
    with cuda.on(device), cuda.beside_captures():
        cuda.call("cuMemHostUnregister", address)
    del memory  # until here, it was mapped


class Cuda:
    """CUDA's driver API. Any thread may use it. Every method can raise `CudaError`.

    `process_cuda()` returns the one instance of the process, because mappings belong to a process. Devices are numbered as this
    process sees them.

    Raises:
        ConfigError: cuda-bindings or a device is missing.
    """

    def __init__(self) -> None:
        try:
            self.driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise ConfigError(
                f"transport cuda_ipc needs cuda-bindings ({_in_a_line(error)}): pip install 'kvferry[cuda-ipc]', or choose "
                "transport: ucx"
            ) from error
        try:
            self.call("cuInit", 0)
            self._num_devices = int(self.call("cuDeviceGetCount"))
        except Exception as error:  # without libcuda, exceptions of several kinds are raised
            raise ConfigError(
                f"transport cuda_ipc needs an NVIDIA GPU and its driver, and there is none ({_in_a_line(error)}): choose "
                "transport: ucx"
            ) from error
        if self._num_devices == 0:
            raise ConfigError("transport cuda_ipc needs an NVIDIA GPU, and CUDA_VISIBLE_DEVICES contains none")
        self._lock = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self._mapped: dict[tuple[int, bytes], tuple[Mapped, int]] = {}

    @property
    def num_mapped(self) -> int:
        """Mappings of other processes' memory that are open."""
        return len(self._mapped)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call one function of the driver API; return its value, if it has one.

        Raises:
            CudaError: It failed.
        """
        status, *values = getattr(self.driver, name)(*arguments)
        self.check(name, status)
        return values[0] if len(values) == 1 else values

    def check(self, name: str, status: Any) -> None:
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise CudaError(f"{name} failed with {getattr(status, 'name', status)}")

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a device's primary context current, which is the one that torch uses too."""
        self.call("cuCtxPushCurrent", self._context(device))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    def device_of(self, address: int) -> int | None:
        """Return the device on which an address lies; None if it is no device memory."""
        attributes = self.driver.CUpointer_attribute
        status, kind = self.driver.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
        if status != self.driver.CUresult.CUDA_SUCCESS or int(kind) != int(self.driver.CUmemorytype.CU_MEMORYTYPE_DEVICE):
            return None
        # Not by cuda-bindings, which return 0 for every device (13.2 to 13.5 at least: NVIDIA/cuda-python issue 2928).
        return device_of_address(address)

    def uuid_of(self, device: int) -> str:
        # CUDA 12's plain cuDeviceGetUuid names the whole GPU where a MIG slice is used; CUDA 13 has only the correct function.
        name = "cuDeviceGetUuid_v2" if hasattr(self.driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return str(UUID(bytes=bytes(self.call(name, self._device(device)).bytes)))

    def device_with(self, uuid: str) -> int | None:
        """Return the device with a UUID; None if this process does not see it (CUDA_VISIBLE_DEVICES)."""
        return next((device for device in range(self._num_devices) if self.uuid_of(device) == uuid), None)

    def can_access(self, device: int, peer: int) -> bool:
        """Return whether kernels of `device` can use memory of `peer`, which may be the same one."""
        return device == peer or bool(self.call("cuDeviceCanAccessPeer", self._device(device), self._device(peer)))

    def enable_access(self, device: int, peer: int) -> None:
        """Let kernels of `device` use memory of `peer` in this process. May be called twice."""
        if device == peer:
            return
        with self.on(device):
            (status,) = self.driver.cuCtxEnablePeerAccess(self._context(peer), 0)
        if status != self.driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            self.check("cuCtxEnablePeerAccess", status)

    def export(self, device: int, address: int) -> Exported:
        """Name memory of a device to other processes.

        Raises:
            ConfigError: It was allocated in a way that cannot be shared.
        """
        attribute = self.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        if not self.call("cuPointerGetAttribute", attribute, address):
            raise ConfigError(
                "the ring's memory cannot be shared over CUDA IPC, because cudaMalloc did not allocate it: remove "
                "expandable_segments:True and backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF); for "
                "memory of cuMemCreate, choose transport: nixl or ucx"
            )
        with self.on(device):
            base, _ = self.call("cuMemGetAddressRange", address)
            handle = self.call("cuIpcGetMemHandle", int(base))
        return Exported(handle=ctypes.string_at(handle.getPtr(), HANDLE_BYTES), offset=address - int(base))

    def open(self, device: int, handle: bytes) -> Mapped:
        """Map a peer's allocation for kernels and copies of `device`. All callers share one mapping."""
        with self._lock:
            mapped, times = self._mapped.get((device, handle), (None, 0))
            if mapped is None:
                mapped = self._map(device, handle)
            self._mapped[device, handle] = (mapped, times + 1)
            return mapped

    def close(self, mapped: Mapped) -> None:
        """Undo one `open`; the mapping ends with the last."""
        with self._lock:
            _, times = self._mapped.pop((mapped.device, mapped.handle))
            if times > 1:
                self._mapped[mapped.device, mapped.handle] = (mapped, times - 1)
                return
        # Without the lock, because it can wait for the device while others attach. CUDA counts, too, so an `open` of the same
        # handle in between gets a mapping that this call does not end.
        self._unmap(mapped)

    def open_words(self, device: int, memory: Any, closing: Callable[[Callable[[], None]], None]) -> DeviceWords | None:
        """Let streams of a device use host memory, as `CudaWords`. Return None if the device or the driver cannot do it."""
        name = "CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS"
        attribute = getattr(self.driver.CUdevice_attribute, name, None)
        try:
            if attribute is None or not self.call("cuDeviceGetAttribute", attribute, self._device(device)):
                log.info("signals cannot be used: device %d has no 64-bit memory operations of streams", device)
                return None
            return CudaWords(self, device, memory, closing)
        except CudaError as error:  # such as a limit of locked memory
            log.info("signals cannot be used: %s", error)
            return None

    def create_stream(self, device: int) -> int:
        """Return the handle of a new stream, which does not wait for the default stream."""
        with self.on(device), self.beside_captures():
            return int(self.call("cuStreamCreate", self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value))

    def context_handle(self, device: int) -> int:
        """Return the handle of the device's primary context."""
        return int(self._context(device))

    def parameters_of(self, function: int) -> tuple[tuple[int, int], ...]:
        """Return the offset and size in bytes of each parameter of a kernel."""
        found: list[tuple[int, int]] = []
        while True:
            try:
                status, *place = self.driver.cuFuncGetParamInfo(function, len(found))
            except (AttributeError, RuntimeError) as error:  # cuda-bindings, or the driver, is older than CUDA 12.4
                raise CudaError(f"cuFuncGetParamInfo is missing ({_in_a_line(error)})") from error
            if status == self.driver.CUresult.CUDA_ERROR_INVALID_VALUE:  # behind the last parameter
                return tuple(found)
            self.check("cuFuncGetParamInfo", status)
            found.append((int(place[0]), int(place[1])))

    @contextlib.contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Let this thread make calls that would break the graph that another thread captures."""
        relaxed = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = self.call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", mode)

    def open_stream(self, device: int) -> CopyStream:
        return CopyStream(self, device)

    def synchronize(self, device: int) -> None:
        """Wait until all work that this process queued on the device has ended."""
        with self.on(device):
            self.call("cuCtxSynchronize")

    def _map(self, device: int, handle: bytes) -> Mapped:
        native = self.driver.CUipcMemHandle()
        # By address: the field that holds the bytes has no name in every cuda-bindings (none in 13.5).
        ctypes.memmove(native.getPtr(), handle, HANDLE_BYTES)
        flag = self.driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with self.on(device):  # the device that will use it: only then kernels of that device may be given the address
            address = int(self.call("cuIpcOpenMemHandle", native, flag.value))
            base, num_bytes = self.call("cuMemGetAddressRange", address)
        return Mapped(device=device, handle=handle, address=int(base), num_bytes=int(num_bytes))

    def _unmap(self, mapped: Mapped) -> None:
        with self.on(mapped.device):
            self.call("cuIpcCloseMemHandle", mapped.address)

    def _device(self, device: int) -> Any:
        return self.call("cuDeviceGet", device)

    def _context(self, device: int) -> Any:
        """Return the device's primary context. It is kept for the life of the process, as torch keeps it."""
        context = self._contexts.get(device)
        if context is None:
            context = self._contexts[device] = self.call("cuDevicePrimaryCtxRetain", self._device(device))
        return context


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())


@functools.cache
def process_cuda() -> Cuda:
    """Return the CUDA of this process; raises as `Cuda`."""
    return Cuda()
