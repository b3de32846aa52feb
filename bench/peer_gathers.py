"""Gathers into another GPU's memory with few and many programs, and how they slow down matrix products beside them.

    python -m bench.peer_gathers [--json FILE] [--quick] [--programs N ...]

Needs two GPUs. A gather has 336 MB of Llama-3-70B, TP 4 to 2, with its digest. A step is 60 matrix products of 8,192 tokens, each
with two small kernels, on a stream of its own. `--programs` gives values of `Tuning.peer_programs`; 0 is a program per tile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from bench.kernel_setting import ON_GPU, prepare
from bench.timing import Report, argument_parser
from transfer.copy import CopyPlan
from transfer.copy.head_slice import DEFAULT_TUNING, TritonCopier, Tuning
from transfer.layout import Range
from transfer.pool.staging import StagingBuffer
from transfer.transport.cuda_ipc_driver import process_cuda

NUM_LAYERS = 60
NUM_BESIDE = 3  # gathers beside one step: together the KV of 8,000 tokens of Llama-3-8B
_IN_A_ROW = 8
_GATE_CYCLES = 24_000_000  # some 12 ms, in which the host queues a round


def measure(programs: Sequence[int], rounds: int) -> Report:
    torch.cuda.set_device(0)
    job = prepare(ON_GPU[0], "gather", "cuda:0", TritonCopier)
    geometry, num_bytes = job.geometry, job.plan.num_wire_bytes
    ring = StagingBuffer(num_bytes, device="cuda:1").tensor
    ring.copy_(job.wire)  # torch enables the access of GPU 0 to GPU 1
    out: Any = SimpleNamespace(device_index=0, data_ptr=ring.data_ptr, numel=ring.numel)
    total = torch.zeros(1, dtype=torch.int64, device="cuda:0")
    copying, engine = torch.cuda.Stream(0), torch.cuda.Stream(0)
    x = torch.randn(8192, 4096, device="cuda:0").to(torch.bfloat16)
    y = torch.empty_like(x)
    weights = [torch.randn(4096, 4096, device="cuda:0").div(64).to(torch.bfloat16) for _ in range(4)]

    def copy(_: CopyPlan) -> None:
        process_cuda().call("cuMemcpyDtoDAsync", ring.data_ptr(), job.wire.data_ptr(), num_bytes, copying.cuda_stream)

    def gather(plan: CopyPlan) -> None:
        with torch.cuda.stream(copying):
            plan.gather(job.pages, out, digest=total)

    def step(plan: CopyPlan, *, num_beside: int = 0) -> None:
        with torch.cuda.stream(engine):
            for layer in range(NUM_LAYERS):
                torch.mm(x, weights[layer % 4], out=y)
                torch.tanh(y, out=x)
                x.add_(0.01)
                if layer == NUM_LAYERS // 6 and num_beside:
                    copying.wait_stream(engine)
        for _ in range(num_beside):
            gather(plan)

    def seconds(queue: Callable[[CopyPlan], None], plan: CopyPlan, stream: torch.cuda.Stream, count: int = 1) -> list[float]:
        """Return the time on the stream per call, of each round."""
        found: list[float] = []
        for _ in range(rounds + 1):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(_GATE_CYCLES)
            begin.record()
            for one in (copying, engine):
                one.wait_event(begin)
            for _ in range(count):
                queue(plan)
            end.record(stream)
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 1e3 / count)
        return found[1:]

    report = Report(title=f"Gathers into another {torch.cuda.get_device_name()}, and steps beside them")
    memcpy = report.add("copies in a row", "peer memcpy", seconds(copy, job.plan, copying, _IN_A_ROW), num_bytes=num_bytes)
    for number in programs:
        case = f"{number} programs" if number else "a program per tile"
        tuning = Tuning(peer_programs=number)
        heads = Range(begin=0, end=geometry.heads)
        plan = TritonCopier(job.pool, heads=heads, wire_dtype=geometry.wire_dtype, tuning=tuning).plan(geometry.buffers())
        gather(plan)  # compiled
        taken = seconds(gather, plan, copying, _IN_A_ROW)
        report.add(case, "gathers in a row", taken, num_bytes=num_bytes, against=memcpy)
        alone = report.add(case, "step alone", seconds(step, plan, engine))
        beside = seconds(lambda plan: step(plan, num_beside=NUM_BESIDE), plan, engine)
        report.add(case, f"step beside {NUM_BESIDE} gathers", beside, against=alone)
    return report


def main() -> int:
    parser = argument_parser("gathers into another GPU's memory, and matrix products beside them")
    most = DEFAULT_TUNING.peer_programs
    parser.add_argument("--programs", type=int, nargs="+", default=[0, most // 2, most, 2 * most], metavar="N")
    arguments = parser.parse_args()
    measure(arguments.programs, 3 if arguments.quick else 10).finish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
