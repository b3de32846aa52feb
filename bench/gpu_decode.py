"""Decode steps on a GPU: replayed CUDA graphs against single launches, paged attention against torch's, and the pool's size.

    python -m bench.gpu_decode [--json FILE] [--quick] [--torch-compile]

The model is a Llama of the 8B's shape with few layers and made-up weights. "step" is what passes from the items to the tokens on
the host, "device" what the device spends of it (the host runs ahead while the device sleeps). torch attends over K and V that
were gathered before, contiguous and of equal length: what paging costs is in the ratio. Both read every byte of K and V once, so
their throughput is held against a device copy, which reads and writes.

With `--torch-compile`, only replayed steps are measured, with compiled and with uncompiled layers. The facts contain the memory
that both need in addition to weights and pool.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from bench.gpu_timing import device_seconds
from bench.llama_engine import HEAD_DIM, KV_HEADS, PAGE_SIZE, QUERY_HEADS, llama_engine, llama_layout
from bench.timing import Report, Row, argument_parser
from embedded_engine.engine import EmbeddedEngine
from embedded_engine.kernels.arguments import DecodeCall
from embedded_engine.kernels.paged_decode import paged_decode_attention
from transfer.engine_types import DecodeItem
from transfer.layer_groups import layer_groups
from transfer.layout import Shard
from transfer.pool.kv_pool import KVPool

MAX_SEQ_LEN = 8192
BATCHES = (1, 8, 32, 64)
SLEEP_CYCLES = 60_000_000  # some 30 ms, longer than the host needs to launch a step
POOL_SHARE = 0.5  # of the free memory


def measure(*, num_layers: int, contexts: Sequence[int], repetitions: int) -> Report:
    report = Report(title=f"Decode on {torch.cuda.get_device_name()}: a Llama of the 8B's shape with {num_layers} layers")
    engine = llama_engine(
        "cuda",
        num_layers=num_layers,
        num_pages=max(BATCHES) * max(contexts) // PAGE_SIZE,
        max_running_requests=max(BATCHES),
        max_seq_len=MAX_SEQ_LEN,
    )
    launched = {(batch, context): _measure_step(engine, batch, context, repetitions) for context in contexts for batch in BATCHES}
    engine.capture_cuda_graphs(BATCHES)
    report.facts["CUDA graphs"] = {"sizes": len(engine.captured_batch_sizes), "MiB": engine.cuda_graph_bytes / 2**20}
    for (batch, context), (step, device) in launched.items():
        case = f"{batch} requests of {context} tokens"
        by_step = report.add(case, "step, launched", step)
        by_device = report.add(case, "device, launched", device)
        step, device = _measure_step(engine, batch, context, repetitions)
        row = report.add(case, "step, replayed", step, against=by_step)
        report.add(case, "device, replayed", device, against=by_device)
        report.facts[case] = {"tokens/s": batch / row.median_s, "tokens/s launched": batch / by_step.median_s}
    engine.close()
    del engine
    torch.cuda.empty_cache()
    copy = _measure_copy(report, repetitions)
    for context in contexts:
        for batch in BATCHES:
            _measure_attention(report, batch, context, repetitions, copy)
    _measure_pool(report)
    return report


def measure_compiled(*, num_layers: int, contexts: Sequence[int], repetitions: int) -> Report:
    """Measure replayed steps with and without torch.compile, and the memory that both need in addition to weights and pool."""
    report = Report(title=f"torch.compile on {torch.cuda.get_device_name()}: a Llama of the 8B's shape with {num_layers} layers")
    plain: dict[tuple[int, int], tuple[Row, Row]] = {}
    for name, max_bs in (("as they are", 0), ("compiled", max(BATCHES))):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        begun = time.perf_counter()
        engine = llama_engine(
            "cuda",
            num_layers=num_layers,
            num_pages=max(BATCHES) * max(contexts) // PAGE_SIZE,
            max_running_requests=max(BATCHES),
            max_seq_len=MAX_SEQ_LEN,
            cuda_graph_batch_sizes=BATCHES,
            torch_compile_max_bs=max_bs,
        )
        torch.cuda.synchronize()
        started_s = time.perf_counter() - begun
        taken, by_torch = free - torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved() - reserved
        report.facts[f"start, layers {name}"] = {
            "seconds": started_s,
            "compilation, MiB": engine.inductor_bytes / 2**20,
            "CUDA graphs, MiB": engine.cuda_graph_bytes / 2**20,
            "outside of torch's allocator, MiB": (taken - by_torch) / 2**20,
        }
        for context in contexts:
            for batch in BATCHES:
                case = f"{batch} requests of {context} tokens"
                step, device = _measure_step(engine, batch, context, repetitions)
                against = plain.get((batch, context), (None, None))
                rows = [
                    report.add(case, f"{what}, layers {name}", samples, against=other)
                    for what, samples, other in zip(("step", "device"), (step, device), against, strict=True)
                ]
                report.facts[f"{case}, layers {name}"] = {"steps/s": 1 / rows[0].median_s}
                plain.setdefault((batch, context), (rows[0], rows[1]))
        engine.close()
        del engine
        gc.collect()
    return report


def _items(batch: int, context: int, num_pages: int) -> list[DecodeItem]:
    """A step of requests that have `context` tokens after it, their pages in random order."""
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()
    each = context // PAGE_SIZE
    tables = [tuple(pages[index * each : (index + 1) * each]) for index in range(batch)]
    return [
        DecodeItem(request_id=str(index), token_id=5 + index, position=context - 1, page_tables=(table,))
        for index, table in enumerate(tables)
    ]


def _measure_step(engine: EmbeddedEngine, batch: int, context: int, repetitions: int) -> tuple[list[float], list[float]]:
    """Seconds of a step, the host's part included, and of its device's part."""
    items = _items(batch, context, engine.pool.num_pages[0])
    step_s, device_s = [], []
    for repetition in range(-3, repetitions):
        begun = time.perf_counter()
        engine.decode(items)
        elapsed = time.perf_counter() - begun
        prepared = engine.decode_batch(items)
        seconds = device_seconds(lambda prepared=prepared: engine.forward_batch(prepared), sleep_cycles=SLEEP_CYCLES)  # type: ignore[misc]
        if repetition >= 0:
            step_s.append(elapsed)
            device_s.append(seconds)
    return step_s, device_s


def _measure_copy(report: Report, repetitions: int) -> Row:
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    samples = [device_seconds(lambda: target.copy_(source), sleep_cycles=SLEEP_CYCLES) for _ in range(repetitions + 3)][3:]
    return report.add("1 GiB", "device copy, read and written", samples, num_bytes=2 * source.numel())


def _measure_attention(report: Report, batch: int, context: int, repetitions: int, copy: Row) -> None:
    """One layer's attention of a step."""
    num_pages = batch * context // PAGE_SIZE
    k, v = (torch.randn(num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(batch, QUERY_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    pages = torch.randperm(num_pages, device="cuda").view(batch, -1, 1)
    slots = torch.full((batch + 1, MAX_SEQ_LEN), -1, dtype=torch.int32, device="cuda")
    slots[:batch, :context] = (pages * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).view(batch, -1)
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")

    def gathered(buffer: Tensor) -> Tensor:
        return buffer.view(-1, KV_HEADS, HEAD_DIM)[slots[:batch, :context].long()].transpose(1, 2).contiguous()

    keys, values = gathered(k), gathered(v)
    grouped = query.view(batch, KV_HEADS, QUERY_HEADS // KV_HEADS, HEAD_DIM)
    scale = HEAD_DIM**-0.5

    def paged() -> Tensor:
        return paged_decode_attention(DecodeCall(query=query, k=k, v=v, slots=slots, rows=rows, lengths=lengths, scale=scale))[0]

    calls: dict[str, Callable[[], Tensor]] = {
        "torch, gathered": lambda: functional.scaled_dot_product_attention(grouped, keys, values, scale=scale),
        "torch, gathered, shared heads": lambda: functional.scaled_dot_product_attention(
            query.unsqueeze(2), keys, values, scale=scale, enable_gqa=True
        ),
        "paged": paged,
    }
    torch.testing.assert_close(paged(), calls["torch, gathered"]().view_as(query), rtol=3e-2, atol=3e-2)
    samples: dict[str, list[float]] = {what: [] for what in calls}
    for repetition in range(-3, repetitions):
        for what, call in calls.items():
            seconds = device_seconds(call, sleep_cycles=SLEEP_CYCLES)
            if repetition >= 0:
                samples[what].append(seconds)
    case, num_bytes = f"attention of {batch} over {context} tokens", 2 * keys.numel() * keys.element_size()
    fastest = min(("torch, gathered", "torch, gathered, shared heads"), key=lambda what: sorted(samples[what])[repetitions // 2])
    against = report.add(case, fastest, samples[fastest], num_bytes=num_bytes, against=copy)
    report.add(case, "paged", samples["paged"], num_bytes=num_bytes, against=against)


def _measure_pool(report: Report) -> None:
    """A pool of many GiB: what its pages take by the plan's arithmetic, and what the device has less afterwards."""
    layout, shard = llama_layout(32), Shard(page_size=PAGE_SIZE)
    (group,) = layer_groups(layout)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    before = torch.cuda.memory_allocated()
    num_pages = int(POOL_SHARE * free) // group.page_bytes(layout, shard)
    pool = KVPool(layout=layout, shard=shard, num_pages=num_pages, device="cuda")
    torch.cuda.synchronize()
    planned, allocated = num_pages * group.page_bytes(layout, shard), torch.cuda.memory_allocated() - before
    taken = free - torch.cuda.mem_get_info()[0]
    report.facts["pool"] = {
        "planned bytes": planned,
        "allocated bytes": allocated,
        "taken of the device": taken,
        "allocated / planned": allocated / planned,
        "taken / planned": taken / planned,
    }
    del pool


def main() -> None:
    parser = argument_parser("decode steps on a GPU")
    parser.add_argument("--torch-compile", action="store_true", help="compare compiled layers with uncompiled ones")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_decode: this torch sees no CUDA device")
    settings = (2, (1024,), 5) if arguments.quick else (8, (1024, 8192), 30)
    run = measure_compiled if arguments.torch_compile else measure
    run(num_layers=settings[0], contexts=settings[1], repetitions=settings[2]).finish(arguments.json)


if __name__ == "__main__":
    main()
