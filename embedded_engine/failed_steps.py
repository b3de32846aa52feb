"""Steps that fail: choose the error for the caller, and decide whether the engine can go on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from embedded_engine.forward_batch import BadLogits
from embedded_engine.model_config import one_line
from transfer.errors import EngineError, OutOfMemory
from transfer.out_of_memory import drop_frames, give_back, is_out_of_memory, out_of_memory

_OF_A_GPU: Final = re.compile("CUDA|CUBLAS|cuBLAS|CUDNN|cuDNN|NCCL")
"""Words in errors of torch and Triton about a GPU that have no type of their own."""


class EngineBroken(EngineError):
    """The device, or the group's other ranks, can no longer be used."""

    is_fatal = True


class StepGuard:
    """Runs the steps of an engine, and refuses further ones after a failure that they would meet as well.

    Args:
        rank: Name of the rank for messages.
        device: Device of the steps.
        is_alone: Whether no other rank takes part. The ranks of a group may have stopped at different places in a failed step.
    """

    def __init__(self, rank: str, *, device: torch.device, is_alone: bool) -> None:
        self._rank = rank
        self._device = device
        self._is_alone = is_alone
        self._is_closed = False
        self._failure: str | None = None

    def close(self) -> None:
        """Refuse further steps. May be called twice."""
        self._is_closed = True

    def check_works(self) -> None:
        """Raise EngineBroken after such a failure."""
        if self._failure is not None:
            raise EngineBroken(f"the engine failed in an earlier step and must be restarted: {self._failure}")

    @contextmanager
    def step(self, doing: str, advise: Callable[[], str]) -> Iterator[None]:
        """Run a step without autograd, and convert each failure to an `EngineError`.

        Args:
            doing: That of `out_of_memory`.
            advise: Returns the advice of the same.
        """
        if self._is_closed:
            raise EngineError("the engine is closed; a step needs an open one")
        self.check_works()
        is_complete = False
        failure: EngineError | None = None
        try:
            with torch.inference_mode():
                yield
            is_complete = True
        except BadLogits:
            # Every rank has run the whole step: the group is still in step.
            is_complete = True
            raise
        except (RuntimeError, MemoryError) as error:  # from torch: no memory, a closed connection, a deadline
            failure = end_failed_step(error, doing, advise(), rank=self._rank, device=self._device, is_alone=self._is_alone)
            if isinstance(failure, EngineBroken):
                self._failure = str(failure)
            if not isinstance(failure, OutOfMemory):
                raise failure from error
        finally:
            if not is_complete and not self._is_alone and self._failure is None:
                self._failure = f"{self._rank} did not finish a step"
        if failure is not None:
            raise failure


def end_failed_step(
    error: RuntimeError | MemoryError, doing: str, advice: str, *, rank: str, device: torch.device, is_alone: bool
) -> EngineError:
    """End a step that failed, and return the error to report.

    Args:
        error: The failure.
        doing, advice: Those of `out_of_memory`.
        rank: Name of the rank for the message.
        device: Device of the step.
        is_alone: Whether no other rank takes part. Only then the device is waited for: the ranks of a group do not go on.

    Returns:
        An `EngineBroken` if every later step would fail as well. An `OutOfMemory` holds no tensor of the step.
    """
    is_memory = is_out_of_memory(error)
    if is_memory:
        failure: EngineError = out_of_memory(error, f"{doing} on {rank}", device=device, advice=advice)
    else:
        failure = EngineError(f"the step failed on {rank}: {one_line(error)}")
        if _has_broken_device(error):
            return EngineBroken(str(failure))
    if is_alone and device.type == "cuda":
        try:
            # Kernels that the step queued still write KV, and its pages go to other requests next.
            torch.cuda.synchronize(device)
        except RuntimeError as broken:
            return EngineBroken(f"{failure}; then the device failed: {one_line(broken)}")
    if is_memory:
        drop_frames(error)
        give_back(device)
    return failure


def _has_broken_device(error: RuntimeError | MemoryError) -> bool:
    """Return whether every later call would fail as well, as after an illegal memory access. False for lack of memory."""
    return isinstance(error, torch.AcceleratorError) or _OF_A_GPU.search(str(error)) is not None
