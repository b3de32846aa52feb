"""What memory itself gives where only some heads of a row travel: plain copies of rows with gaps between them, no page table.

A gather reads, and a scatter writes, part of each of the pool's rows. These copies move as many rows of the same size between
the same places, in order, in one call: by CUDA's own copy of two dimensions, and by torch with 16-byte elements.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.kernel_setting import Geometry, Side
from transfer.layout import TokenOrder

STRIDED_TORCH, STRIDED_CUDA = "strided copy, torch", "strided copy, cudaMemcpy2DAsync"


def strided_copies(geometry: Geometry, side: Side, wire: Tensor) -> dict[str, Callable[[], object]]:
    """Copies like a side's, by what makes them; none where whole rows travel, elements are converted or rows are no 16 bytes.

    Args:
        wire: uint8 [bytes] that the rows lie in without gaps; in host memory torch alone copies. A gather's is written.
    """
    held = geometry.held[side == "scatter"]
    head_bytes = geometry.head_dim * geometry.dtype.num_bytes * (geometry.page_size if geometry.order is TokenOrder.HND else 1)
    width, pitch = geometry.heads * head_bytes, held * head_bytes
    if held == geometry.heads or geometry.is_conversion or width % 16 or wire.data_ptr() % 16:
        return {}
    height = wire.numel() // width
    rows = torch.zeros(height * pitch, dtype=torch.uint8, device=wire.device)
    ends = (wire, width), (rows, pitch)
    (target, target_pitch), (source, source_pitch) = ends if side == "gather" else ends[::-1]
    # The only type of 16 bytes that torch has.
    of_target, of_source = (_rows(one, by)[:, : width // 16] for one, by in ((target, target_pitch), (source, source_pitch)))
    found: dict[str, Callable[[], object]] = {STRIDED_TORCH: lambda: of_target.copy_(of_source)}
    if not wire.is_cuda:
        return found
    try:
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        print(f"{STRIDED_CUDA} is left out: {error}", flush=True)
        return found
    to_device, done = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice, runtime.cudaError_t.cudaSuccess
    where = target.data_ptr(), target_pitch, source.data_ptr(), source_pitch, width, height, to_device

    def by_cuda() -> None:
        (status,) = runtime.cudaMemcpy2DAsync(*where, torch.cuda.current_stream().cuda_stream)
        if status != done:
            raise RuntimeError(f"cudaMemcpy2DAsync of {height} rows of {width} of {pitch} bytes: {status}")

    try:
        by_cuda()
    except RuntimeError as error:  # a yardstick that cannot be had costs only its row
        print(f"{STRIDED_CUDA} is left out: {error}", flush=True)
        return found
    return found | {STRIDED_CUDA: by_cuda}


def _rows(memory: Tensor, pitch: int) -> Tensor:
    """As complex128 [rows, pitch / 16]."""
    return memory.view(torch.complex128).view(-1, pitch // 16)
