"""Out-of-memory errors are recognized, and become one line for operators."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from transfer.errors import EngineError, MemoryPlanError, OutOfMemory
from transfer.out_of_memory import allocating, is_out_of_memory
from transfer.pool.staging import StagingBuffer

TOO_MANY = 2**60
MIB, GIB = 1 << 20, 1 << 30

REFUSED: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.empty(TOO_MANY, dtype=torch.uint8),
    "python": lambda: bytearray(TOO_MANY),
    "numpy": lambda: np.zeros(TOO_MANY, dtype=np.uint8),
    "mmap": lambda: mmap.mmap(-1, TOO_MANY),
    "staging": lambda: StagingBuffer(TOO_MANY),
}
"""Allocations that the system really refuses."""

ON_A_GPU = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"),
    torch.AcceleratorError("CUDA error: out of memory", 2),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("NCCL error: unhandled cuda error, NCCL version 2.27.5. Cuda failure 2 'out of memory'"),
]
OTHERS = [
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700),
    RuntimeError("cuBLAS error: CUBLAS_STATUS_EXECUTION_FAILED"),
    OSError(2, "No such file or directory"),
    KeyError("out of memory"),
]


def failing(error: Exception) -> None:
    raise error


class Gpu:
    """A fake torch.cuda with 512 MiB of 79.1 GiB free."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_emptied = 0
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (512 * MIB, int(79.1 * GIB)))
        patch.setattr(torch.cuda, "memory_reserved", lambda device: 70 * GIB)
        patch.setattr(torch.cuda, "empty_cache", self.empty_cache)

    def empty_cache(self) -> None:
        self.num_emptied += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_system_refuses_is_named_in_one_line(name: str) -> None:
    with pytest.raises(OutOfMemory) as caught, allocating("taking a lot", device="cpu", advice="lower a.b", num_bytes=TOO_MANY):
        REFUSED[name]()
    said = str(caught.value)
    assert said.startswith("out of memory while taking a lot: 1,073,741,824.0 GiB asked for, the host has ")
    assert said.endswith(" free; lower a.b") and "\n" not in said
    assert caught.value.spares_kv and not caught.value.is_fatal
    assert isinstance(caught.value, MemoryPlanError) and isinstance(caught.value, EngineError)


@pytest.mark.parametrize("error", ON_A_GPU, ids=str)
def test_every_form_of_a_gpu(gpu: Gpu, error: Exception) -> None:
    with pytest.raises(OutOfMemory) as caught, allocating("computing a step", device="cuda:1", advice="lower a.b"):
        failing(error)
    said = str(caught.value)
    assert "cuda:1 has 512.0 MiB of 79.1 GiB free (this process holds 70.0 GiB)" in said and said.endswith("; lower a.b")
    asked = "2.00 GiB asked for" if "Tried" in str(error) else "an unknown number of bytes asked for"
    assert f"computing a step: {asked}, cuda:1 has" in said
    # CUDA has one error for its own memory and for pinned memory of the host: there both are shown.
    assert ("the host has" in said) == (type(error) is not torch.OutOfMemoryError)
    assert gpu.num_emptied == 1


def test_memory_of_the_host_is_not_blamed_on_the_gpu(gpu: Gpu) -> None:
    with pytest.raises(OutOfMemory) as caught, allocating("x", device="cuda", advice="y"):
        REFUSED["torch"]()
    assert "cuda" not in str(caught.value) and "the host has" in str(caught.value)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as caught, allocating("x", device="cpu", advice="y"):
        failing(error)
    assert caught.value is error


def test_an_error_that_was_raised_because_of_it_counts() -> None:
    """An example is the error of a CUDA graph capture that cannot be ended after the first error."""
    try:
        try:
            raise ON_A_GPU[0]
        finally:
            failing(RuntimeError("CUDA error: operation failed due to a previous error during capture"))
    except RuntimeError as error:
        assert is_out_of_memory(error)


def test_an_out_of_memory_error_names_its_innermost_allocation() -> None:
    outer, inner = (allocating(f"allocating the {name}", device="cpu", advice="a") for name in ("rank", "ring"))
    with pytest.raises(OutOfMemory, match="while allocating the ring"), outer, inner:
        REFUSED["python"]()


def test_an_engine_of_no_more_use_stays_one() -> None:
    class Broken(EngineError):
        is_fatal = True

    with pytest.raises(Broken), allocating("x", device="cpu", advice="y"):
        try:
            REFUSED["python"]()
        except MemoryError as error:
            raise Broken("the device is gone") from error
    with pytest.raises(OutOfMemory), allocating("x", device="cpu", advice="y"):
        try:
            REFUSED["python"]()
        except MemoryError as error:
            raise EngineError("of a foreign engine") from error


class Activations:
    pass


def test_the_failed_work_holds_no_memory(gpu: Gpu) -> None:
    held: list[weakref.ref[Activations]] = []

    def work() -> None:
        activations = Activations()
        held.append(weakref.ref(activations))
        raise ON_A_GPU[0]

    with pytest.raises(OutOfMemory) as caught, allocating("x", device="cuda", advice="y"):
        work()
    assert held[0]() is None, f"with {caught.value} still there"
