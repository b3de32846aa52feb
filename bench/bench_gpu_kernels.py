"""Gather and scatter on a GPU against a plain device copy of the same bytes in the same run.

    python -m bench.bench_gpu_kernels [--json FILE] [--quick]

A copy reads and writes every byte once, and so do gather and scatter: the copy is their limit. "device" is what the device spends
(the host runs ahead while the device sleeps), "call" what passes on an idle device, the host's part included: checks and tables
of 160 buffers are made anew for each call. Every case's calls alternate with its copies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.gpu_timing import device_seconds
from bench.timing import Report, argument_parser
from transfer.kernels import head_slice_copier
from transfer.kv_pool import PagedKVPool
from transfer.layout import DType, HeadSlice, KVLayout, Route, Shard, Span, TokenOrder, wire_buffers

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 80, 8, 128  # Llama 3 70B
SLEEP_CYCLES = 10_000_000  # some 5 ms, longer than the host needs for any call


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One geometry; `num_heads` of the eight travel, as from TP 4 to TP 2 or from TP 1 to TP 4."""

    page_size: int
    order: TokenOrder
    num_heads: int

    @property
    def name(self) -> str:
        return f"{self.order} pages of {self.page_size} in random order, {self.num_heads} of {NUM_HEADS} heads"


CASES = tuple(
    Case(page_size=page_size, order=order, num_heads=num_heads)
    for order in (TokenOrder.NHD, TokenOrder.HND)
    for page_size in (16, 1, 64)
    for num_heads in (8, 2)
)


def measure(*, num_mib: int, repetitions: int) -> Report:
    report = Report(title=f"Gather and scatter of {num_mib} MiB on {torch.cuda.get_device_name()}, against a device copy")
    for case in CASES:
        _measure(report, case, num_mib << 20, repetitions)
        torch.cuda.empty_cache()
    return report


def _measure(report: Report, case: Case, num_bytes: int, repetitions: int) -> None:
    layout = KVLayout.uniform(num_layers=NUM_LAYERS, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype=DType.BFLOAT16)
    token_bytes = 2 * NUM_LAYERS * case.num_heads * HEAD_DIM * 2
    num_pages = num_bytes // token_bytes // case.page_size
    tokens, layers = Span(begin=0, end=num_pages * case.page_size), Span(begin=0, end=NUM_LAYERS)
    shard = Shard(page_size=case.page_size, order=case.order)
    pool = PagedKVPool(layout=layout, shard=shard, num_pages=2 * num_pages, device="cuda")
    pages = torch.randperm(2 * num_pages, generator=torch.Generator().manual_seed(1))[:num_pages].to("cuda")
    heads = HeadSlice(source_start=0, target_start=0, count=case.num_heads)
    route = Route(index=0, prefill_rank=0, decode_rank=0, layers=layers, heads=heads)
    buffers = wire_buffers(layout, route, tokens=tokens, layers=layers, num_tokens=tokens.end, dtype=layout.dtype)
    wire = torch.zeros(buffers[-1].offset_bytes + buffers[-1].num_bytes, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(wire)
    copier = head_slice_copier(pool, heads=Span(begin=0, end=case.num_heads), wire_dtype=layout.dtype)
    calls: dict[str, Callable[[], object]] = {
        "device copy": lambda: other.copy_(wire),
        "gather": lambda: copier.gather(pages, buffers, wire),
        "scatter": lambda: copier.scatter(pages, buffers, wire),
    }
    samples_s: dict[tuple[str, str], list[float]] = {}
    for repetition in range(-3, repetitions):  # the first calls compile, and are not counted
        for what, call in calls.items():
            for part, cycles in (("device", SLEEP_CYCLES), ("call", 0)):
                seconds = device_seconds(call, sleep_cycles=cycles)
                if repetition >= 0:
                    samples_s.setdefault((what, part), []).append(seconds)
    copy = report.add(case.name, "device copy", samples_s["device copy", "device"], num_bytes=wire.numel())
    for what in ("gather", "scatter"):
        for part in ("device", "call"):
            report.add(case.name, f"{what}, {part}", samples_s[what, part], num_bytes=wire.numel(), against=copy)


def main() -> None:
    arguments = argument_parser("gather and scatter on a GPU against a device copy").parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_gpu_kernels: this torch sees no CUDA device")
    measure(num_mib=32 if arguments.quick else 320, repetitions=5 if arguments.quick else 50).finish(arguments.json)


if __name__ == "__main__":
    main()
