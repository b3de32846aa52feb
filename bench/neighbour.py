"""Measure how KV copies slow down engine steps on the same GPU.

    python -m bench.neighbour [--json FILE] [--quick] [--rehearse]

The engine has the shape of Llama 3 8B and made-up weights: decode steps of 32 requests by a CUDA graph, and prefill steps of
2,048 tokens. A thread copies 2,048 tokens of KV (256 MiB) at a time with their digest, at 20 GB/s, on its own CUDA stream, as
`transfer.copy.device_copy_queue` does. It scatters during decode steps and gathers during prefill steps. Rounds with and without
copies alternate. ``--rehearse`` checks the benchmark itself with a tiny model on the CPU.

Commit 3a162c07 could limit the number of Triton programs per copy. The results are in docs/measurements.md.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from bench.gpu_stages import decode_items, prefill_items
from bench.kernel_setting import ON_GPU, ON_HOST, Prepared, Side, prepare
from bench.llama_engine import llama_engine
from bench.timing import Report, argument_parser
from transfer.copy import head_slice_copier
from transfer.copy.digest import DIGEST_XXH3, HostDigest

RATE = 20e9  # bytes a second, of the KV alone
BATCH, CONTEXT, PROMPT = 32, 1024, 2048


def measure(*, device: str, is_tiny: bool, rounds: int) -> Report:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    report = Report(title=f"Steps beside copies of {RATE / 1e9:g} GB/s on {name}")
    batch, context, prompt = (2, 16, 32) if is_tiny else (BATCH, CONTEXT, PROMPT)
    engine = llama_engine(
        device,
        num_layers=2 if is_tiny else 32,
        num_pages=batch * context // 16 + 1,
        max_seq_len=2 * max(context, prompt),
        max_running_requests=batch,
        is_tiny=is_tiny,
    )
    if device == "cuda":
        engine.capture_cuda_graphs([batch])
    decodes, prefills = decode_items(batch, context), prefill_items(prompt, 0)
    # Steps of a turn: about half a second each.
    _measure_side(report, f"decode of {batch} requests", "scatter", lambda: engine.decode(decodes), 40, rounds, device)
    _measure_side(report, f"prefill of {prompt} tokens", "gather", lambda: engine.prefill(prefills), 6, rounds, device)
    engine.close()
    return report


def _measure_side(
    report: Report, case: str, side: Side, step: Callable[[], object], num_steps: int, rounds: int, device: str
) -> None:
    """Add rows for the steps alone, for the steps beside copies, and for the copies."""
    geometry = next(one for one in ON_GPU if one.name.startswith("Llama-3-8B P1->D1") and not one.is_conversion)
    geometry = replace(geometry, num_tokens=PROMPT) if device == "cuda" else ON_HOST[0].smaller(16)
    prepared = prepare(geometry, side, device, head_slice_copier)
    prepared.plan.compile(prepared.wire.data_ptr(), has_digest=True, is_gather=side == "gather")
    alone_s, beside_s, copies_s = list[float](), list[float](), list[float]()
    for turn in range(-1, rounds):
        for steps_s in (alone_s, beside_s):
            copying = _copying(prepared, copies_s if turn >= 0 else [], device) if steps_s is beside_s else nullcontext()
            with copying:
                for _ in range(num_steps):
                    begun_s = time.perf_counter()
                    step()
                    if turn >= 0:
                        steps_s.append(time.perf_counter() - begun_s)
    alone = report.add(case, "step alone", alone_s)
    report.add(case, f"step beside {side}s", beside_s, against=alone)
    report.add(case, side, copies_s, num_bytes=prepared.traffic_bytes)


@contextmanager
def _copying(prepared: Prepared, taken_s: list[float], device: str) -> Iterator[None]:
    """Copy at `RATE` on a thread, meanwhile. Adds the seconds of each copy."""
    is_over = threading.Event()
    thread = threading.Thread(target=_copy_until, args=(prepared, taken_s, device, is_over))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _copy_until(prepared: Prepared, taken_s: list[float], device: str, is_over: threading.Event) -> None:
    interval_s = prepared.traffic_bytes / RATE
    next_s = time.perf_counter()
    if device == "cpu":
        while not is_over.wait(max(0.0, next_s - time.perf_counter())):
            next_s = begun_s = time.perf_counter()
            prepared.copy(HostDigest(DIGEST_XXH3))
            taken_s.append(time.perf_counter() - begun_s)
            next_s += interval_s
        return
    total = torch.zeros(1, dtype=torch.int64, device=device)
    torch.cuda.synchronize()  # of the sum
    stream = torch.cuda.Stream()
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    while not is_over.wait(max(0.0, next_s - time.perf_counter())):
        next_s += interval_s
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            begin.record()
            prepared.copy(total)
            end.record()
        events.append((begin, end))
    stream.synchronize()
    taken_s += [begin.elapsed_time(end) / 1e3 for begin, end in events]


def main() -> int:
    parser = argument_parser("steps of an engine beside copies on the same GPU")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on CPUs")
    arguments = parser.parse_args()
    device = "cpu" if arguments.rehearse else "cuda"
    rounds = 1 if arguments.rehearse else 3 if arguments.quick else 10
    report = measure(device=device, is_tiny=arguments.rehearse, rounds=rounds)
    report.finish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
