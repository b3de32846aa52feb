"""Gather and scatter against a plain copy of the same bytes in the same run: on a GPU, or in host memory where there is none.

    python -m bench.kernels [--json FILE] [--quick] [--cases TEXT] [--peer sglang [--sglang-wheel FILE]] [--sweep [SECONDS]]
        [--host]

A copy reads and writes every byte once, and so do gather and scatter: the copy is their limit. Where elements are converted, it
is a copy of as many bytes as are read and written then. Every case's calls alternate with its copies.

On a GPU: rows without a remark are the device's time alone, from caches that have been emptied. "strided copy" is what memory
gives where only part of each of the pool's rows travels. "host" is how long a call keeps the host in steady state, as in service:
one of several in a row while the device is at work; "checks, host" is the part of it before anything is queued. "first, host" is
one call on an idle device after the host's caches have been used for something else. "call" is the time until all is done on an
idle device, the host's part included. In host memory rows are whole calls, by one thread.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_timing import cache_filler, device_seconds, host_seconds, whole_seconds
from bench.kernel_setting import ON_GPU, ON_HOST, SLEEP_CYCLES, Geometry, Prepared, Side, prepare
from bench.peers import sglang
from bench.strided_copy import strided_copies
from bench.timing import Report, argument_parser, sample
from transfer.copy import Digest, Kernels, add_digest, head_slice_copier
from transfer.copy.digest import DIGEST_WORDS, DIGEST_XXH3, HostDigest
from transfer.layout import Range

SIDES: tuple[Side, ...] = ("gather", "scatter")
COPY, MEMCPY = "device copy", "memcpy"
IN_A_ROW = 16  # calls; the host time of one is told

HARDEST: tuple[tuple[str, Side], ...] = (
    ("Llama-3-70B P2->D4, 4096 tokens, pages of 16", "gather"),
    ("Llama-3-70B P4->D2, 4096 tokens, pages of 16", "scatter"),
    ("Qwen3-8B P4->D1, 8192", "scatter"),
)
"""What the kernels' sizes are chosen for: how the names of the geometries begin."""

Calls = dict[str, Callable[[], object]]


def measure_gpu(geometries: Sequence[Geometry], *, repetitions: int, peer: sglang.SglangStaging | None) -> Report:
    report = Report(title=f"Gather and scatter on {torch.cuda.get_device_name()}, against a device copy")
    for geometry in geometries:
        for side in SIDES:
            _measure_side(report, prepare(geometry, side, "cuda", head_slice_copier), repetitions, peer)
            torch.cuda.empty_cache()
    _add_headline(report)
    return report


def _measure_side(report: Report, prepared: Prepared, repetitions: int, peer: sglang.SglangStaging | None) -> None:
    total = torch.zeros(1, dtype=torch.int64, device="cuda")
    digesting = _digesting(prepared, total)
    _check(prepared, digesting, total)
    source, other = (torch.zeros(prepared.traffic_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    side, empty = prepared.side, cache_filler()
    on_device: Calls = {COPY: lambda: other.copy_(source), side: prepared.copy, f"{side} + digest": digesting}
    on_device |= strided_copies(prepared.geometry, side, prepared.wire)
    in_torch = _in_torch(prepared, total)
    in_a_row: Calls = {f"{side} + digest": digesting, "checks": _checks(prepared, total), f"{side} + digest in torch": in_torch}
    calls: Calls = {f"{side} + digest": digesting, f"{side} + digest in torch": in_torch}
    if peer is not None and prepared.geometry.has_peer:
        kernel, call = _peer_calls(peer, prepared)
        on_device[f"SGLang {side} kernel"] = kernel
        calls[f"SGLang {side}"] = call
    samples_s: dict[str, list[float]] = {}
    for repetition in range(-3, repetitions):  # the first calls compile, and are not counted
        found = {}
        for what, call in on_device.items():
            empty()
            found[what] = device_seconds(call, sleep_cycles=SLEEP_CYCLES)
        found[f"{side} + digest, first, host"] = host_seconds(digesting)
        for what, call in in_a_row.items():
            found[f"{what}, host"] = host_seconds(partial(_repeat, call), sleep_cycles=SLEEP_CYCLES) / IN_A_ROW
        for what, call in calls.items():
            found[f"{what}, call"] = whole_seconds(call)
        if repetition >= 0:
            for what, seconds in found.items():
                samples_s.setdefault(what, []).append(seconds)
    case, num_bytes = prepared.geometry.name, prepared.traffic_bytes
    copy = report.add(f"{case}, {side}", COPY, samples_s.pop(COPY), num_bytes=num_bytes)
    for what, found_s in samples_s.items():
        is_host = what.endswith(", host")
        report.add(f"{case}, {side}", what, found_s, num_bytes=0 if is_host else num_bytes, against=None if is_host else copy)


def _checks(prepared: Prepared, total: torch.Tensor) -> Callable[[], object]:
    """What a call does before it queues its kernel."""
    plan, inside = prepared.plan, total if prepared.plan.can_digest else None
    return lambda: plan._check(prepared.pages, prepared.wire, "wire", 0, inside)


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(IN_A_ROW):
        call()


def _digesting(prepared: Prepared, digest: Digest) -> Callable[[], object]:
    """The copy with its digest: on its way where it can be."""
    if prepared.plan.can_digest:
        return lambda: prepared.copy(digest)

    def in_two_passes() -> None:
        prepared.copy()
        add_digest(digest, prepared.wire, prepared.plan.num_wire_bytes)

    return in_two_passes


def _in_torch(prepared: Prepared, digest: torch.Tensor) -> Callable[[], object]:
    """Return the same copy and digest by plain torch (setting `kernels`)."""
    geometry, heads, kernels = prepared.geometry, Range(begin=0, end=prepared.geometry.heads), Kernels.TORCH
    what: dict[str, Any] = {"heads": heads, "wire_dtype": geometry.wire_dtype, "scales": geometry.scales()}
    plan = head_slice_copier(prepared.pool, kernels=kernels, **what).plan(geometry.buffers())
    move = plan.gather if prepared.side == "gather" else plan.scatter

    def copy() -> None:
        move(prepared.pages, prepared.wire)
        add_digest(digest, prepared.wire, plan.num_wire_bytes, kernels)

    return copy


def _check(prepared: Prepared, digesting: Callable[[], object], total: torch.Tensor) -> None:
    """That the digest is of the bytes, by another kernel: a benchmark of a broken copy is worth nothing."""
    digesting()
    expected = torch.zeros_like(total)
    add_digest(expected, prepared.wire, prepared.plan.num_wire_bytes)
    if int(total) != int(expected):
        raise RuntimeError(f"{prepared.geometry.name}, {prepared.side}: digest {int(total):#x} of bytes with {int(expected):#x}")


def _peer_calls(peer: sglang.SglangStaging, prepared: Prepared) -> tuple[Callable[[], object], Callable[[], object]]:
    """SGLang's bare kernel with its tables made before, and its whole call."""
    geometry, pool = prepared.geometry, prepared.pool
    keys, values = ([pool.buffer(layer, is_v=is_v).flatten(0, 1) for layer in pool.layers] for is_v in (False, True))
    pages, what = prepared.pages.cpu().numpy().astype(np.int32), {"num_heads": geometry.heads, "page_size": geometry.page_size}
    addresses = [one.data_ptr() for one in (*keys, *values)]
    table = torch.tensor(addresses, dtype=torch.uint64, device="cuda").view(torch.int64)
    elements = geometry.num_tokens * geometry.heads * geometry.head_dim
    sizes = (geometry.num_tokens, geometry.held[prepared.side == "scatter"] * geometry.head_dim)
    row, grid = geometry.heads * geometry.head_dim, (2 * geometry.num_layers, -(-elements // 1024))
    wire = prepared.wire.view(torch.int16)
    kernels: Any = peer.module
    if prepared.side == "gather":
        staging = peer.buffer(prepared.plan.num_wire_bytes, prepared.wire.device)
        gather = kernels._fused_gather_to_staging_kernel[grid]
        return (
            lambda: gather(table, prepared.pages, wire, *sizes, 0, elements, row, geometry.page_size, 1024),
            lambda: peer.gather(keys, values, pages, staging, **what),
        )
    scatter, offsets = kernels._fused_scatter_from_staging_kernel[grid], torch.zeros(1, dtype=torch.int64, device="cuda")
    return (
        lambda: scatter(
            table, prepared.pages, wire, offsets, *sizes, elements, row, geometry.page_size, 2 * geometry.num_layers, 1024
        ),
        lambda: peer.scatter(prepared.wire, keys, values, prepared.pages, **what),
    )


def _add_headline(report: Report) -> None:
    """Add the worst ratios of copies and of conversions, as far as there are cases of them."""
    for name, is_conversion in (("ratio", False), ("converted_ratio", True)):
        rows = [row for row in report.rows if row.ratio is not None and ("wire" in row.case) is is_conversion]
        for what, names in (("without_digest", SIDES), ("with_digest", tuple(f"{side} + digest" for side in SIDES))):
            ratios = [row.ratio for row in rows if row.what in names and row.ratio is not None]
            if ratios:
                report.headline[f"worst_{name}_{what}"] = min(ratios)
    report.headline["worst_host_s"] = max(row.median_s for row in report.rows if row.what.endswith("digest, host"))


def by_name(begin: str) -> Geometry:
    return next(one for one in ON_GPU if one.name.startswith(begin))


def measure_host(geometries: Sequence[Geometry], *, repetitions: int) -> Report:
    report = Report(title="Gather and scatter in host memory, against a copy of the same bytes by one thread")
    for geometry in geometries:
        for side in SIDES:
            _measure_host_side(report, prepare(geometry, side, "cpu", head_slice_copier), repetitions)
    return report


def _measure_host_side(report: Report, prepared: Prepared, repetitions: int) -> None:
    source, other = (np.ones(prepared.traffic_bytes, dtype=np.uint8) for _ in range(2))
    calls: Calls = {
        MEMCPY: lambda: np.copyto(other, source),
        prepared.side: prepared.copy,
        **{
            f"{prepared.side} + {algorithm}": partial(_copy_and_digest, prepared, algorithm)
            for algorithm in (DIGEST_XXH3, DIGEST_WORDS)
        },
    }
    samples_s: dict[str, list[float]] = {what: [] for what in calls}
    for repetition in range(-1, repetitions):
        for what, call in calls.items():
            (seconds,) = sample(call, repetitions=1, warmup=0)
            if repetition >= 0:
                samples_s[what].append(seconds)
    case = f"{prepared.geometry.name}, {prepared.side}"
    copy = report.add(case, MEMCPY, samples_s.pop(MEMCPY), num_bytes=prepared.traffic_bytes)
    for what, found in samples_s.items():
        report.add(case, what, found, num_bytes=prepared.traffic_bytes, against=copy)


def _copy_and_digest(prepared: Prepared, algorithm: str) -> None:
    _digesting(prepared, HostDigest(algorithm))()


def measure_interpreted(geometries: Sequence[Geometry]) -> Report:
    """The kernels under Triton's interpreter: no speed to speak of, but all that a GPU is asked for is called once."""
    from transfer.copy.head_slice import TritonCopier

    report = Report(title="Kernels under Triton's interpreter: only to see that they run")
    for geometry in geometries:
        for side in SIDES:
            prepared, total = prepare(geometry, side, "cpu", TritonCopier), torch.zeros(1, dtype=torch.int64)
            digesting = _digesting(prepared, total)
            _check(prepared, digesting, total)
            found = sample(digesting, repetitions=1, warmup=0)
            report.add(f"{geometry.name}, {side}", f"{side} + digest", found, num_bytes=prepared.traffic_bytes)
    return report


def parser() -> argparse.ArgumentParser:
    made = argument_parser("gather and scatter against a plain copy")
    made.add_argument("--cases", metavar="TEXT", default="", help="only cases whose name contains it: wire, for conversions")
    made.add_argument("--peer", choices=["sglang"], help="also SGLang's staging kernels and calls (on a GPU)")
    made.add_argument("--sglang-wheel", type=Path, help="its wheel, or a directory with its files; pip downloads it by default")
    made.add_argument(
        "--sweep", type=float, nargs="?", const=30.0, metavar="SECONDS", help="other sizes of the kernels instead (on a GPU)"
    )
    made.add_argument("--host", action="store_true", help="host memory, also where there is a GPU")
    return made


def main() -> None:
    arguments = parser().parse_args()
    is_quick: bool = arguments.quick
    on_gpu, on_host = ([one for one in every if arguments.cases in one.name] for every in (ON_GPU, ON_HOST))
    if not on_gpu:
        raise SystemExit(f"no case has {arguments.cases!r} in its name")
    if torch.cuda.is_available() and not arguments.host:
        if arguments.sweep:
            from bench.kernel_sweep import sweep  # Triton is only where there is a GPU

            report = sweep([(by_name(name), side) for name, side in HARDEST], repetitions=5, seconds=arguments.sweep)
        else:
            peer = sglang.load(arguments.sglang_wheel) if arguments.peer else None
            geometries = [one.smaller(8) for one in on_gpu] if is_quick else on_gpu
            report = measure_gpu(geometries, repetitions=3 if is_quick else 20, peer=peer)
    elif os.environ.get("TRITON_INTERPRET") == "1" and not arguments.host:
        report = measure_interpreted([one.smaller(256) for one in on_gpu])
    else:
        torch.set_num_threads(1)
        geometries = [one.smaller(4) for one in on_host] if is_quick else on_host
        report = measure_host(geometries, repetitions=3 if is_quick else 9)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
