"""Gather and scatter in host memory against a single-thread memcpy of the same bytes in the same run.

    python -m bench.bench_kernels            # 64 MiB of payload, one thread

Each round times the copy, then a gather and a scatter of each case; the best of all rounds counts, for other load only adds time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from transfer.kernels import head_slice_copier
from transfer.kv_pool import PagedKVPool
from transfer.layout import DType, HeadSlice, KVLayout, Route, Shard, Span, TokenOrder, wire_buffers
from transfer.staging import StagingBuffer, zeroed_bytes

PAYLOAD_BYTES = 64 << 20
NUM_LAYERS = 8
NUM_HEADS = 8
ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One geometry: how many of the 8 heads travel, in which order, and whether pages are consecutive."""

    page_size: int
    order: TokenOrder = TokenOrder.NHD
    num_heads: int = NUM_HEADS
    is_consecutive: bool = False
    wire_dtype: DType = DType.BFLOAT16

    @property
    def name(self) -> str:
        pages = "consecutive" if self.is_consecutive else "scattered"
        return f"{self.order} page {self.page_size:>3}, {self.num_heads} of {NUM_HEADS} heads, {pages}, wire {self.wire_dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The two calls of a case, ready to be timed, and the payload of each in bytes."""

    gather: Callable[[], None]
    scatter: Callable[[], None]
    num_bytes: int


CASES = (
    Case(page_size=16),
    Case(page_size=16, is_consecutive=True),
    Case(page_size=256),
    Case(page_size=1),
    Case(page_size=16, num_heads=4),
    Case(page_size=16, num_heads=4, is_consecutive=True),
    Case(page_size=16, order=TokenOrder.HND),
    Case(page_size=16, order=TokenOrder.HND, is_consecutive=True),
    Case(page_size=16, order=TokenOrder.HND, num_heads=4),
    Case(page_size=16, wire_dtype=DType.FLOAT8_E4M3),
)


def prepare(case: Case) -> Copies:
    layout = KVLayout.uniform(num_layers=NUM_LAYERS, num_kv_heads=NUM_HEADS, head_dim=128, dtype=DType.BFLOAT16)
    token_bytes = 2 * NUM_LAYERS * case.num_heads * 128 * case.wire_dtype.num_bytes
    num_pages = PAYLOAD_BYTES // token_bytes // case.page_size
    tokens, layers = Span(begin=0, end=num_pages * case.page_size), Span(begin=0, end=NUM_LAYERS)
    pool = PagedKVPool(layout=layout, shard=Shard(page_size=case.page_size, order=case.order), num_pages=2 * num_pages)
    pages = torch.arange(num_pages) if case.is_consecutive else torch.randperm(2 * num_pages)[:num_pages]
    slice_ = HeadSlice(source_start=0, target_start=0, count=case.num_heads)
    route = Route(index=0, prefill_rank=0, decode_rank=0, layers=layers, heads=slice_)
    buffers = wire_buffers(layout, route, tokens=tokens, layers=layers, num_tokens=tokens.end, dtype=case.wire_dtype)
    num_bytes = buffers[-1].offset_bytes + buffers[-1].num_bytes
    wire = StagingBuffer(num_bytes).tensor
    copier = head_slice_copier(pool, heads=Span(begin=0, end=case.num_heads), wire_dtype=case.wire_dtype)
    return Copies(
        gather=lambda: copier.gather(pages, buffers, wire),
        scatter=lambda: copier.scatter(pages, buffers, wire),
        num_bytes=num_bytes,
    )


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def rows() -> Iterator[str]:
    """The table, line by line: GB/s of payload (each byte counted once) and the share of memcpy."""
    source, target = zeroed_bytes(PAYLOAD_BYTES).numpy(), zeroed_bytes(PAYLOAD_BYTES).numpy()
    yield f"{'case':<62} {'memcpy':>7} {'gather':>14} {'scatter':>14}"
    for case in CASES:
        copies = prepare(case)
        copy_s = gather_s = scatter_s = float("inf")
        for _ in range(ROUNDS):
            copy_s = min(copy_s, seconds(lambda: np.copyto(target, source)))
            gather_s = min(gather_s, seconds(copies.gather))
            scatter_s = min(scatter_s, seconds(copies.scatter))
        memcpy = PAYLOAD_BYTES / copy_s / 1e9
        gather, scatter = copies.num_bytes / gather_s / 1e9, copies.num_bytes / scatter_s / 1e9
        yield (f"{case.name:<62} {memcpy:>7.1f} {gather:>7.1f} ({gather / memcpy:.2f}) {scatter:>7.1f} ({scatter / memcpy:.2f})")


def main() -> None:
    torch.set_num_threads(1)
    for row in rows():
        print(row, flush=True)


if __name__ == "__main__":
    main()
