"""All-reduces between two GPUs, as in the embedded engine's tensor parallelism: through torch, and with direct calls of NCCL.

    python -m bench.collectives [--json FILE] [--quick]

- torch: ``torch.distributed.all_reduce``, which the engine uses.
- direct: ``ncclAllReduce`` of the same library on torch's current stream, through ctypes, with a second communicator. vLLM and
  SGLang call this "PyNCCL".

Sizes are those of a decode step: rows of 8,192 elements in bfloat16. "host" is the host time of a call without a graph. "step" is
160 all-reduces with a small kernel between them, as in a model with 80 layers, without a graph. "graph" is the same step as a
replayed CUDA graph. The facts compare a gloo group with NCCL for numbers on the host, and show the device memory of each
communicator.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from bench.timing import Report, argument_parser, readable_bytes, sample

HIDDEN: Final = 8192
ROWS: Final = (1, 8, 32, 128)
CALLS_PER_STEP: Final = 160
WORLD: Final = 2

_UNIQUE_ID_BYTES: Final = 128  # nccl.h: NCCL_UNIQUE_ID_BYTES
_BFLOAT16: Final = 9  # nccl.h: ncclDataType_t
_SUM: Final = 0  # nccl.h: ncclRedOp_t


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _UNIQUE_ID_BYTES),)


class DirectNccl:
    """A communicator over all ranks of the default group. It uses the NCCL library that torch has loaded."""

    def __init__(self, rank: int) -> None:
        self._nccl = ctypes.CDLL(_loaded_nccl())
        self._nccl.ncclAllReduce.argtypes = (
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
            *(ctypes.c_void_p, ctypes.c_void_p),
        )
        self._nccl.ncclCommInitRank.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int)
        identity = _UniqueId()
        if rank == 0:
            _check(self._nccl.ncclGetUniqueId(ctypes.byref(identity)))
        shared = [bytes(identity)]
        dist.broadcast_object_list(shared, src=0, device=torch.device("cuda", rank))
        self._comm = ctypes.c_void_p()
        identity = _UniqueId.from_buffer_copy(shared[0])
        _check(self._nccl.ncclCommInitRank(ctypes.byref(self._comm), WORLD, identity, rank))

    def sum(self, tensor: Tensor) -> None:
        address, stream = tensor.data_ptr(), torch.cuda.current_stream().cuda_stream
        _check(self._nccl.ncclAllReduce(address, address, tensor.numel(), _BFLOAT16, _SUM, self._comm, stream))

    def close(self) -> None:
        self._nccl.ncclCommDestroy(self._comm)


def _loaded_nccl() -> str:
    """Return the path of the NCCL library that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return next(line.split()[-1] for line in maps if "libnccl.so" in line)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NCCL returned {status}")


def _rank(rank: int, rendezvous: str, repetitions: int, out: Queue[dict[str, Any]]) -> None:
    """Measure in one of the two processes; rank 0 reports."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    dist.init_process_group(
        "nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    found: dict[str, Any] = {"samples": {}, "facts": {}}
    facts = found["facts"]

    def taken(what: str, act: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        free, begun_s = torch.cuda.mem_get_info(device)[0], time.perf_counter()
        result = act()
        torch.cuda.synchronize()
        facts[f"{what}, s"] = time.perf_counter() - begun_s
        facts[f"{what}, MiB"] = (free - torch.cuda.mem_get_info(device)[0]) / (1 << 20)
        return result

    taken("torch's communicator", lambda: dist.all_reduce(torch.ones(1, device=device)))
    direct = taken("direct communicator", lambda: DirectNccl(rank))
    taken("first direct call", lambda: direct.sum(torch.ones(8, device=device, dtype=torch.bfloat16)))
    gloo = taken("gloo group", lambda: dist.new_group(backend="gloo"))
    facts["numbers over NCCL, s"] = statistics.median(sample(lambda: _gather_number(rank, device, None), repetitions=50))
    facts["numbers over gloo, s"] = statistics.median(
        sample(lambda: _gather_number(rank, torch.device("cpu"), gloo), repetitions=50)
    )
    sums: dict[str, Callable[[Tensor], object]] = {"torch": dist.all_reduce, "direct": direct.sum}
    for rows in ROWS:
        tensor = torch.full((rows, HIDDEN), 1.0, device=device, dtype=torch.bfloat16)
        for what, add in sums.items():
            check = torch.full((rows, HIDDEN), float(rank + 1), device=device, dtype=torch.bfloat16)
            add(check)
            assert bool((check == 3.0).all()), f"{what} gave {check[0, 0]}"
        steps: dict[str, Callable[[], object]] = {}
        graphs = []
        for what, add in sums.items():

            def step(add: Callable[[Tensor], object] = add, tensor: Tensor = tensor) -> None:
                for _ in range(CALLS_PER_STEP):
                    add(tensor)
                    tensor.mul_(0.5)

            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            graphs.append(graph)
            steps[f"{what}, host"] = lambda add=add, tensor=tensor: _host_time(add, tensor)  # type: ignore[misc]
            steps[f"{what}, step"] = lambda step=step: _whole(step)  # type: ignore[misc]
            steps[f"{what}, graph"] = lambda graph=graph: _whole(graph.replay)  # type: ignore[misc]
        case = f"{rows} rows, {readable_bytes(rows * HIDDEN * 2)}"
        samples: dict[str, list[float]] = {what: [] for what in steps}
        for turn in range(repetitions + 2):  # in turns, because the speed of a machine changes
            for what, act in steps.items():
                dist.barrier()
                torch.cuda.synchronize()
                seconds = act()
                if turn >= 2:
                    samples[what].append(float(seconds))  # type: ignore[arg-type]
        found["samples"][case] = samples
        del graphs, steps
    if rank == 0:
        out.put(found)
    dist.barrier()
    direct.close()
    dist.destroy_process_group()


def _gather_number(rank: int, device: torch.device, group: dist.ProcessGroup | None) -> list[int]:
    mine = torch.tensor([rank], device=device)
    parts = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(parts, mine, group=group)
    return [int(part) for part in parts]


def _host_time(add: Callable[[Tensor], object], tensor: Tensor) -> float:
    """Return the host time of one call in seconds: the mean over as many calls as fit the queue of the device."""
    begun_s = time.perf_counter()
    for _ in range(50):
        add(tensor)
    seconds = (time.perf_counter() - begun_s) / 50
    torch.cuda.synchronize()
    return seconds


def _whole(act: Callable[[], object]) -> float:
    """Return the seconds from the call until the device has finished the work."""
    begun_s = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - begun_s


def measure(repetitions: int) -> Report:
    report = Report(title=f"All-reduces between two GPUs: {torch.cuda.get_device_name()}")
    context = multiprocessing.get_context("spawn")
    out: Queue[dict[str, Any]] = context.Queue()
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        ranks = [context.Process(target=_rank, args=(rank, f"{folder}/meet", repetitions, out)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        try:
            found = out.get(timeout=240)
        finally:
            for process in ranks:
                process.join(timeout=20)
                process.kill()
    for case, samples in found["samples"].items():
        for kind in ("host", "step", "graph"):
            of_torch = report.add(case, f"torch, {kind}", samples[f"torch, {kind}"])
            report.add(case, f"direct, {kind}", samples[f"direct, {kind}"], against=of_torch)
    report.facts["groups"] = found["facts"]
    return report


def main() -> None:
    arguments = argument_parser("all-reduces between two GPUs").parse_args()
    if torch.cuda.device_count() < WORLD:
        raise SystemExit(f"this benchmark needs {WORLD} GPUs; torch sees {torch.cuda.device_count()}")
    measure(repetitions=5 if arguments.quick else 40).finish(arguments.json)


if __name__ == "__main__":
    main()
