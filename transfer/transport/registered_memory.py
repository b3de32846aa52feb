"""Views of registered memory: one flat run of bytes, on the host or on a device."""

from __future__ import annotations

import ctypes
import importlib
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from transfer.errors import ConfigError, LocalProtocolError
from transfer.transport.base import ByteRange

_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostMemory:
    """Host memory as one flat array of bytes; the array keeps the caller's buffer alive."""

    view: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        return self.view.nbytes

    @property
    def is_device(self) -> bool:
        return False

    def part(self, byte_range: ByteRange) -> npt.NDArray[np.uint8]:
        """Return the bytes of `byte_range`, shared and not copied."""
        return self.view[byte_range.begin : byte_range.end]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceBuffer:
    """A run of device bytes by address. UCXX, CuPy and Numba accept it, and so does a kernel.

    Args:
        owner: Keeps the memory, or its mapping, alive.
        address: Of the first byte, in this process.
        device_index: The device whose kernels may use the address. If the memory is a peer's, it may lie on another one.
    """

    owner: object
    address: int
    num_bytes: int
    device_index: int

    @property
    def is_device(self) -> bool:
        return True

    def part(self, byte_range: ByteRange) -> DeviceBuffer:
        """Return the bytes of `byte_range`, shared and not copied."""
        address = self.address + byte_range.begin
        return replace(self, address=address, num_bytes=byte_range.num_bytes)

    def data_ptr(self) -> int:
        """Return the address, as a tensor does."""
        return self.address

    def numel(self) -> int:
        """Return the number of bytes."""
        return self.num_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3}


Memory = HostMemory | DeviceBuffer


def memory_of(buffer: Any) -> Memory:
    """Describe a caller's buffer as flat memory without copying it.

    Args:
        buffer: Contiguous and writable: anything with the buffer protocol (NumPy array, bytearray, memoryview, mmap), a torch
            CPU tensor of any dtype, or an object with `__cuda_array_interface__`.

    Raises:
        ConfigError: The buffer is empty, read-only, not contiguous, of a kind that holds no memory, or on an unknown device.
    """
    interface = getattr(buffer, "__cuda_array_interface__", None)
    memory = _host_memory(buffer) if interface is None else _device_memory(buffer, interface)
    if memory.num_bytes == 0:
        raise ConfigError(f"buffer of type {type(buffer).__name__} has 0 bytes; register at least 1")
    return memory


def wait_for_devices() -> None:
    """Wait until every copy that this process queued on any of its devices has ended.

    A destroyed UCX worker queues nothing more, but the device copies that it had queued (CUDA IPC, GPU staging) go on. Memory is
    safe to reuse only after them.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(device):  # otherwise nothing is queued there, and asking would make a context
                torch.cuda.synchronize(device)
        return
    runtime = importlib.import_module("cuda.bindings.runtime")  # ucxx installs it; it has no type stubs
    (status,) = runtime.cudaDeviceSynchronize()
    if int(status) != 0:
        raise LocalProtocolError(f"cudaDeviceSynchronize failed with {status!r}: pending device copies cannot be ruled out")


def _device_memory(buffer: Any, interface: dict[str, Any]) -> DeviceBuffer:
    address, is_read_only = interface["data"]
    item_bytes = np.dtype(interface["typestr"]).itemsize
    num_bytes = item_bytes
    expected_strides: list[int] = []
    for length in reversed(interface["shape"]):
        expected_strides.insert(0, num_bytes)
        num_bytes *= length
    strides = interface.get("strides")
    if strides is not None and num_bytes and list(strides) != expected_strides:
        raise ConfigError(f"device buffer with strides {tuple(strides)} is not contiguous; expected {tuple(expected_strides)}")
    if is_read_only:
        raise ConfigError("device buffer is read-only; register a writable one")
    if num_bytes == 0:
        return DeviceBuffer(owner=buffer, address=0, num_bytes=0, device_index=0)  # lies nowhere
    return DeviceBuffer(
        owner=buffer, address=int(address), num_bytes=int(num_bytes), device_index=_device_index(buffer, int(address))
    )


def _device_index(buffer: Any, address: int) -> int:
    """Return the device on which `buffer` lies, as this process counts them. `__cuda_array_interface__` does not name it."""
    index = getattr(getattr(buffer, "device", None), "index", None)
    if isinstance(index, int):  # torch
        return index
    if hasattr(buffer, "__dlpack_device__"):  # CuPy, JAX, Numba and others
        return int(buffer.__dlpack_device__()[1])
    found = device_of_address(address)
    if found is None:
        raise ConfigError(
            f"device buffer of type {type(buffer).__name__} has no device, and CUDA's driver does not "
            f"know its address {address:#x}; register an array with __dlpack_device__ (torch, CuPy)"
        )
    return found


def device_of_address(address: int) -> int | None:
    """Return the device of an address; None if there is no driver, or the driver does not know the address."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    ordinal = ctypes.c_int(-1)
    cuda.cuInit(0)
    status = cuda.cuPointerGetAttribute(ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_uint64(address))
    return ordinal.value if status == 0 and ordinal.value >= 0 else None


def _host_memory(buffer: Any) -> HostMemory:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu":
            raise ConfigError(f"tensor on device {buffer.device} offers no __cuda_array_interface__; use a CPU or CUDA tensor")
        if not buffer.is_contiguous():
            raise ConfigError(f"tensor of shape {tuple(buffer.shape)} and stride {buffer.stride()} is not contiguous")
        # Through uint8, because NumPy knows no bfloat16 or float8.
        return HostMemory(view=buffer.detach().reshape(-1).view(torch.uint8).numpy())
    try:
        raw = memoryview(buffer)
    except TypeError as error:
        raise ConfigError(
            f"buffer of type {type(buffer).__name__} has neither the buffer protocol nor __cuda_array_interface__"
        ) from error
    if raw.readonly:
        raise ConfigError(f"buffer of type {type(buffer).__name__} is read-only; register a writable one")
    if not raw.c_contiguous:
        raise ConfigError(f"buffer of shape {raw.shape} and strides {raw.strides} is not contiguous")
    return HostMemory(view=np.frombuffer(raw.cast("B"), dtype=np.uint8) if raw.nbytes else np.empty(0, dtype=np.uint8))
