"""Device time of gather and scatter with other sizes than the chosen ones: ``python -m bench.kernels --sweep [SECONDS]``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench.gpu_timing import cache_filler, device_seconds
from bench.kernel_setting import SLEEP_CYCLES, Geometry, Prepared, Side, prepare
from bench.timing import Report
from transfer.kernels import head_slice_copier
from transfer.kernels.head_slice import DEFAULT_TUNING, TritonCopier, Tuning
from transfer.layout import Span

COPY = "device copy"
_THREADS = 8  # that compile
_ROUND = 4  # tunings that are compiled together, for all shapes

_EVICT = {"load_eviction": "evict_first", "store_eviction": "evict_first"}
_HINTS: tuple[dict[str, Any], ...] = (
    _EVICT,
    {"store_cache": ".cs"},
    {"load_cache": ".cg"},
    {"load_eviction": "evict_first", "store_cache": ".cs"},
    {"is_strided": False},
)

# The most promising first: the time may be over before the last.
DIGESTING: tuple[dict[str, Any], ...] = (
    {},
    {"digest_tiles": 1, "digest_words": 2048},
    {"num_stages": 3},
    {"is_strided": False},
    {"digest_words": 2048},
    {"digest_words": 512, "digest_tiles": 16},
    _EVICT,
    {"digest_words": 2048, "num_warps": 8},
    {"num_stages": 2},
    {"digest_tiles": 16, "min_programs": 2048},
    {"digest_words": 512, "num_stages": 4},
    {"digest_tiles": 1},
    {"digest_tiles": 4},
    {"store_cache": ".cs"},
    {"digest_words": 512, "num_warps": 2, "digest_tiles": 16},
    {"digest_tiles": 64, "min_programs": 1056},
    {"digest_tiles": 2},
    {"digest_words": 4096, "num_warps": 8, "digest_tiles": 2},
    {"digest_words": 512, "num_warps": 2, "num_stages": 4},
    {"digest_words": 2048, "num_stages": 3},
)
COPYING: tuple[dict[str, Any], ...] = (
    {},
    {"copy_words": 2048},
    {"copy_tiles": 4},
    {"copy_words": 512},
    _EVICT,
    {"copy_tiles": 8, "num_stages": 3},
    {"copy_words": 2048, "num_warps": 8},
    {"store_cache": ".cs"},
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
        heads, scales = Span(begin=0, end=geometry.heads), geometry.scales()
        copier = TritonCopier(self.base.pool, heads=heads, wire_dtype=geometry.wire_dtype, scales=scales, tuning=tuning)
        return replace(self.base, plan=copier.plan(geometry.buffers()))

    def compiled(self, tuning: Tuning) -> Prepared:
        prepared = self.prepared(tuning)
        prepared.plan.compile(prepared.wire, has_digest=self.has_digest, is_gather=prepared.side == "gather")
        return prepared

    def ratio(self, tuning: Tuning) -> float:
        return statistics.median(self.copy_s) / statistics.median(self.found[tuning])


def sweep(cases: Sequence[tuple[Geometry, Side]], *, repetitions: int, seconds: float) -> Report:
    """As many tunings as there is time for, each printed when it has been measured; the report has the best three of each shape.

    With a digest first; then what the best of all was with other hints; then copies alone.
    """
    ends_at = time.monotonic() + seconds
    empty = cache_filler()
    shapes = [_shape(geometry, side, repetitions, empty) for geometry, side in cases]
    with ThreadPoolExecutor(_THREADS) as compilers:

        def measure(shapes: Sequence[_Shape], changes: Iterable[dict[str, Any]], base: Tuning) -> None:
            tunings = dict.fromkeys(replace(base, **change) for change in changes)
            new = [one for one in tunings if one not in shapes[0].found]
            for some in (new[begin : begin + _ROUND] for begin in range(0, len(new), _ROUND)):
                if time.monotonic() > ends_at:
                    return
                # Compiled before anything is timed: who compiles holds the interpreter's lock, and delays what is being timed.
                ready = {key: compilers.submit(key[0].compiled, key[1]) for key in _pairs(shapes, some)}
                prepared = {key: future.result() for key, future in ready.items()}
                for (shape, tuning), one in prepared.items():
                    shape.found[tuning] = _timed(_call(shape, one), repetitions, empty)
                    print(f"{shape.ratio(tuning):.3f}  {shape.name}: {told(tuning)}", flush=True)

        measure(shapes, DIGESTING, DEFAULT_TUNING)
        best = max(shapes[0].found, key=lambda tuning: min(shape.ratio(tuning) for shape in shapes))
        print(f"best of all shapes: {told(best)}", flush=True)
        measure(shapes, _HINTS, best)
        bare = [replace(shape, has_digest=False, found={}) for shape in shapes]
        measure(bare, COPYING, DEFAULT_TUNING)
    report = Report(title=f"Best sizes of the kernels on {torch.cuda.get_device_name()}, against a device copy")
    for shape in (*shapes, *bare):
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


def _pairs(shapes: Sequence[_Shape], tunings: Sequence[Tuning]) -> Iterator[tuple[_Shape, Tuning]]:
    return ((shape, tuning) for tuning in tunings for shape in shapes)


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
