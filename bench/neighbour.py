"""Steps of an engine while KV arrives or leaves on the same GPU, by the number of programs that a copy may have.

    python -m bench.neighbour [--json FILE] [--quick] [--rehearse]

The engine has the shape of Llama 3 8B and made-up weights: decode steps of 32 requests by a CUDA graph, and prefill steps of
2,048 tokens. Beside them, a thread scatters (decode) or gathers (prefill) 2,048 tokens of KV with their digest, 256 MiB, at a
time, 20 GB/s, on a stream of its own as `transfer.copy.device_copy_queue` does. Steps alone and with each limit take turns.
``--rehearse`` runs a tiny model on CPUs under Triton's interpreter, to see that it runs.
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
from bench.kernel_setting import ON_GPU, Geometry, Prepared, Side, prepare
from bench.llama_engine import llama_engine
from bench.timing import Report, argument_parser
from transfer.copy.head_slice import DEFAULT_TUNING, TritonCopier

RATE = 20e9  # bytes a second, of the KV alone
BATCH, CONTEXT, PROMPT = 32, 1024, 2048
LIMITS = (0, 8, 16, 32, 64, 128, 256)
"""Programs of a copy; 0 means one for each tile."""

ALONE = "no copies"


def measure(*, device: str, is_tiny: bool, rounds: int) -> Report:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    report = Report(title=f"Steps beside copies of {RATE / 1e9:g} GB/s on {name}, by the limit of a copy's programs")
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
    _measure_side(report, f"decode of {batch} requests", "scatter", lambda: engine.decode(decodes), 40, rounds, device, is_tiny)
    _measure_side(report, f"prefill of {prompt} tokens", "gather", lambda: engine.prefill(prefills), 6, rounds, device, is_tiny)
    engine.close()
    return report


def _measure_side(
    report: Report, case: str, side: Side, step: Callable[[], object], num_steps: int, rounds: int, device: str, is_tiny: bool
) -> None:
    """Add a row for the steps without copies, and for each limit one for the steps beside them and one for the copies."""
    geometry = next(one for one in ON_GPU if one.name.startswith("Llama-3-8B P1->D1") and not one.is_conversion)
    geometry = replace(geometry, num_tokens=PROMPT)
    geometry = geometry.smaller(16) if is_tiny else geometry
    copies = {limit: _prepared(geometry, side, device, limit) for limit in LIMITS}
    steps: dict[int | None, list[float]] = {limit: [] for limit in (None, *LIMITS)}
    moves: dict[int, list[float]] = {limit: [] for limit in LIMITS}
    for turn in range(-1, rounds):
        for limit in (None, *LIMITS):
            beside = nullcontext() if limit is None else _copying(copies[limit], moves[limit] if turn >= 0 else [], device)
            with beside:
                for _ in range(1 if is_tiny else num_steps):
                    begun_s = time.perf_counter()
                    step()
                    if turn >= 0:
                        steps[limit].append(time.perf_counter() - begun_s)
    alone = report.add(case, ALONE, steps[None])
    for limit in LIMITS:
        what = f"{limit} programs" if limit else "all programs"
        report.add(case, f"{side}, {what}: step", steps[limit], against=alone)
        report.add(case, f"{side}, {what}: copy", moves[limit], num_bytes=copies[limit].traffic_bytes)


def _prepared(geometry: Geometry, side: Side, device: str, limit: int) -> Prepared:
    tuning = replace(DEFAULT_TUNING, max_programs=limit)
    found = prepare(geometry, side, device, lambda *given, **more: TritonCopier(*given, **more, tuning=tuning))
    found.plan.compile(found.wire.data_ptr(), has_digest=True, is_gather=side == "gather")
    return found


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
    total = torch.zeros(1, dtype=torch.int64, device=device)
    if device == "cpu":
        begun_s = time.perf_counter()
        prepared.copy(total)
        taken_s.append(time.perf_counter() - begun_s)
        return
    torch.cuda.synchronize()  # of the sum
    stream = torch.cuda.Stream()
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    next_s = time.perf_counter()
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
    is_rehearsal = arguments.rehearse
    report = measure(
        device="cpu" if is_rehearsal else "cuda", is_tiny=is_rehearsal, rounds=1 if is_rehearsal else 3 if arguments.quick else 10
    )
    report.finish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
