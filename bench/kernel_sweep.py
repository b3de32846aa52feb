"""Device time of gather and scatter with other tiles and warps than chosen: ``python -m bench.kernels --sweep [SECONDS]``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from bench.gpu_timing import cache_filler, device_seconds
from bench.kernel_setting import SLEEP_CYCLES, Geometry, Prepared, Side, prepare
from bench.timing import Report
from transfer.copy import head_slice_copier
from transfer.copy.head_slice import DEFAULT_TUNING, TritonCopier, Tuning
from transfer.layout import Range

COPY = "device copy"
_THREADS = 8  # that compile
_ROUND = 12  # variants that are compiled together

# The likeliest first: the time may be over before the last.
DIGESTING: tuple[dict[str, Any], ...] = (
    {},
    {"digest_words": 1024, "digest_warps": 8},
    {"digest_words": 1024, "digest_warps": 4},
    {"digest_words": 4096, "digest_warps": 16},
    {"digest_words": 2048, "digest_warps": 8},
    {"digest_words": 4096, "digest_warps": 32},
    {"digest_words": 512, "digest_warps": 4},
)
COPYING: tuple[dict[str, Any], ...] = (
    {},
    {"copy_words": 128, "copy_warps": 1},
    {"copy_words": 512, "copy_warps": 4},
    {"copy_words": 256, "copy_warps": 1},
    {"copy_words": 512, "copy_warps": 2},
    {"copy_words": 1024, "copy_warps": 8},
    {"copy_words": 128, "copy_warps": 2},
)


@dataclass(slots=True, kw_only=True, eq=False)
class _Shape:
    """One geometry's side, with or without digest."""

    base: Prepared
    has_digest: bool
    total: Tensor
    copy_s: list[float]
    found: dict[Tuning, list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.base.geometry.name}, {self.base.side}{' + digest' if self.has_digest else ''}"

    def prepared(self, tuning: Tuning) -> Prepared:
        geometry = self.base.geometry
        heads, scales = Range(begin=0, end=geometry.heads), geometry.scales()
        copier = TritonCopier(self.base.pool, heads=heads, wire_dtype=geometry.wire_dtype, scales=scales, tuning=tuning)
        return replace(self.base, plan=copier.plan(geometry.buffers()))

    def compiled(self, tuning: Tuning) -> Prepared:
        prepared = self.prepared(tuning)
        prepared.plan.compile(prepared.wire.data_ptr(), has_digest=self.has_digest, is_gather=prepared.side == "gather")
        return prepared

    def ratio(self, tuning: Tuning) -> float:
        return statistics.median(self.copy_s) / statistics.median(self.found[tuning])


def sweep(cases: Sequence[tuple[Geometry, Side]], *, repetitions: int, seconds: float) -> Report:
    """As many tunings as there is time for, each printed when it has been measured; the report has the best three of each shape.

    Some with a digest and some without, in turn.
    """
    empty = cache_filler()
    digesting = [_shape(geometry, side, repetitions, empty) for geometry, side in cases]
    bare = [replace(shape, has_digest=False, found={}) for shape in digesting]
    waiting = [(shape, replace(DEFAULT_TUNING, **change)) for shape, change in _in_turn(digesting, bare)]
    ends_at = time.monotonic() + seconds
    with ThreadPoolExecutor(_THREADS) as compilers:
        for some in (waiting[begin : begin + _ROUND] for begin in range(0, len(waiting), _ROUND)):
            if time.monotonic() > ends_at:
                break
            # Compiled before anything is timed: who compiles holds the interpreter's lock, and delays what is being timed.
            ready = list(compilers.map(lambda pair: pair[0].compiled(pair[1]), some))
            for (shape, tuning), prepared in zip(some, ready, strict=True):
                shape.found[tuning] = _timed(_call(shape, prepared), repetitions, empty)
                print(f"{shape.ratio(tuning):.3f}  {shape.name}: {told(tuning)}", flush=True)
    for what, shapes in (("with digest", digesting), ("without", bare)):
        worst = {tuning: min(one.ratio(tuning) for one in shapes) for tuning in shapes[-1].found}
        print(f"best of all shapes {what}: {told(max(worst, key=lambda tuning: worst[tuning]))}", flush=True)
    report = Report(title=f"Best sizes of the kernels on {torch.cuda.get_device_name()}, against a device copy")
    for shape in (*digesting, *bare):
        copy = report.add(shape.name, COPY, shape.copy_s, num_bytes=shape.base.traffic_bytes)
        for tuning in sorted(shape.found, key=shape.ratio, reverse=True)[:3]:
            report.add(shape.name, told(tuning), shape.found[tuning], num_bytes=shape.base.traffic_bytes, against=copy)
    return report


def told(tuning: Tuning) -> str:
    """What it changes."""
    changed = [
        f"{name} {getattr(tuning, name)}" for name in Tuning.__slots__ if getattr(tuning, name) != getattr(DEFAULT_TUNING, name)
    ]
    return ", ".join(changed) or "as chosen"


def _in_turn(digesting: Sequence[_Shape], bare: Sequence[_Shape]) -> Iterator[tuple[_Shape, dict[str, Any]]]:
    for with_digest, without in zip_longest(DIGESTING, COPYING):
        for shapes, change in ((digesting, with_digest), (bare, without)):
            if change is not None:
                yield from ((shape, change) for shape in shapes)


def _shape(geometry: Geometry, side: Side, repetitions: int, empty: Callable[[], object]) -> _Shape:
    base = prepare(geometry, side, "cuda", head_slice_copier)
    source, other = (torch.zeros(base.traffic_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy_s = _timed(lambda: other.copy_(source), repetitions, empty)
    return _Shape(base=base, has_digest=True, total=torch.zeros(1, dtype=torch.int64, device="cuda"), copy_s=copy_s)


def _call(shape: _Shape, prepared: Prepared) -> Callable[[], object]:
    return (lambda: prepared.copy(shape.total)) if shape.has_digest else prepared.copy


def _timed(call: Callable[[], object], repetitions: int, empty: Callable[[], object]) -> list[float]:
    samples_s: list[float] = []
    for repetition in range(-2, repetitions):
        empty()
        taken_s = device_seconds(call, sleep_cycles=SLEEP_CYCLES)
        if repetition >= 0:
            samples_s.append(taken_s)
    return samples_s
