"""CUDA graphs of decode steps: one per batch size, in one memory pool. A replay takes the place of some hundred launches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from embedded_engine.model_config import one_line
from transfer.errors import EngineError
from transfer.out_of_memory import allocating, is_out_of_memory


class CannotBeCaptured(EngineError):
    """The step waits for the device, for example to look experts up one by one, so no graph can hold it."""


class DecodeGraphs:
    """A captured step for each of some batch sizes.

    The largest is captured first, so that smaller ones reuse the memory of its intermediate results: steps never overlap, and the
    graph copies its logits out of the pool.

    Args:
        batch_sizes: Sizes to capture, at least one.
        load: Fills the inputs of a step of this size, in rows, with dummy requests.
        step: Launches a step of this size from its inputs; returns logits [rows, vocabulary]. Values of the inputs that it reads
            on the host are captured as constants.
        advice: The settings to change if the device has too little memory.
        beside: Graphs of the same sizes whose memory these share: a step of either kind ends before the next one begins.

    Attributes:
        batch_sizes: The sizes, ascending.
        num_bytes: Bytes that the graphs took through torch's allocator. The driver's own memory and the kernels' code are not
            counted: any number that has them would also contain other processes' memory.

    Raises:
        CannotBeCaptured: The step waits for the device. Found before anything is captured, on all ranks of a group alike.
        OutOfMemory: The device has too little memory left.
        EngineError: The capture failed.
    """

    def __init__(
        self,
        batch_sizes: Sequence[int],
        load: Callable[[int], None],
        step: Callable[[int], Tensor],
        device: torch.device,
        *,
        advice: str,
        beside: DecodeGraphs | None = None,
    ) -> None:
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: Tensor
        with torch.cuda.device(device):
            stream = _capture_stream(device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                with allocating("running decode steps before their CUDA graphs are captured", device=device, advice=advice):
                    # A capture first allocates two small tensors for the random generator. If that fails, torch 2.11 ends the
                    # process when the graph is destroyed. A live tensor of this stream keeps room for them in its segment.
                    self._segment = torch.empty(1, device=device)
                    shape, dtype = self._warm_up(load, step)
                    before = reserved_bytes(device)
                    self._logits = torch.empty(shape, dtype=dtype, device=device) if beside is None else beside._logits
                self._pool: Any = torch.cuda.graph_pool_handle() if beside is None else beside._pool
                for size in reversed(self.batch_sizes):
                    doing = f"capturing the CUDA graph of a decode step of {size} tokens"
                    with allocating(doing, device=device, advice=advice):
                        load(size)
                        self._graphs[size] = self._captured(size, step, stream)
                self.num_bytes = max(0, reserved_bytes(device) - before)
            torch.cuda.current_stream().wait_stream(stream)

    def size_for(self, num_rows: int) -> int | None:
        """Return the smallest captured size of at least `num_rows`; None if there is none."""
        place = bisect_left(self.batch_sizes, num_rows)
        return self.batch_sizes[place] if place < len(self.batch_sizes) else None

    def replay(self, size: int) -> Tensor:
        """Queue the captured step of `size` rows; return its logits, in memory that all sizes share."""
        self._graphs[size].replay()
        return self._logits[:size]

    def _warm_up(self, load: Callable[[int], None], step: Callable[[int], Tensor]) -> tuple[torch.Size, torch.dtype]:
        """Run every size, so that a capture compiles and loads nothing; return shape and dtype of the largest logits."""
        logits = torch.empty(0)
        for size in self.batch_sizes:
            load(size)
            step(size)
            load(size)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                logits = step(size)
            except RuntimeError as error:
                if "synchronizing" not in str(error):
                    raise
                raise CannotBeCaptured(f"a decode step waits for the device: {one_line(error)}") from error
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return logits.shape, logits.dtype

    def _captured(self, size: int, step: Callable[[int], Tensor], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the process, such as NCCL's watchdog, may go on to use the device.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                self._logits[:size].copy_(step(size))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise EngineError(
                f"the CUDA graph of a decode step of {size} tokens could not be captured: {one_line(error)}; "
                "cuda_graph_max_bs 0 runs without graphs"
            ) from error
        return graph


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures of a process: torch keeps 32 MiB (on Hopper) for cuBLAS per stream, for ever."""
    return torch.cuda.Stream(device)


def reserved_bytes(device: torch.device) -> int:
    """Free unused memory, and return the bytes that this process has reserved on a GPU, with the pools of CUDA graphs."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
