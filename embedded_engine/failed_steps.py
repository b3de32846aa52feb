"""End a failed step: choose the error for the caller, and decide whether the engine can go on."""

from __future__ import annotations

import re
from typing import Final

import torch

from embedded_engine.model_config import one_line
from transfer.errors import EngineError
from transfer.out_of_memory import drop_frames, give_back, is_out_of_memory, out_of_memory

_OF_A_GPU: Final = re.compile("CUDA|CUBLAS|cuBLAS|CUDNN|cuDNN|NCCL")
"""Words in errors of torch and Triton about a GPU that have no type of their own."""


class EngineBroken(EngineError):
    """The device, or the group's other ranks, can no longer be used."""

    is_fatal = True


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
