"""Run every benchmark that needs GPUs, and compare them with their targets.

    python -m bench.gpu_suite --out FOLDER [--sglang-wheel FILE] [--only PART ...] [--budget-s 470] [--quick] [--rehearse]

FOLDER gets two files: `gpu_suite.json` with the report of every part, `gpu_suite.log` with the output of each. With two GPUs a
link joins them; parts named "one gpu" keep both ends on one. ``--rehearse`` runs them on CPUs with tiny sizes, as a check.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.gpu_table import outcomes_of
from bench.suite import run_suite
from bench.table import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One run of one benchmark.

    Args:
        name: Of the part.
        run: What runs on GPUs; its timeout is the part's.
        rehearsed: Its arguments on a machine without a GPU.
    """

    name: str
    run: Run
    rehearsed: tuple[str, ...]


_CUDA = ("--device", "cuda")
_TINY_POOL = ("--mb", "1", "--in-flight", "1", "--chunk-tokens", "4", "--ring-mb", "4", "--rounds", "1")

PARTS = (
    Part(name="kernels", run=Run(module="kernels", timeout_s=110.0), rehearsed=("--quick",)),
    Part(
        name="pool to pool",
        run=Run(
            module="pool_to_pool",
            arguments=(
                *(*_CUDA, "--lanes", "cuda_ipc/fused", "cuda_ipc/copy", "nixl", "ucx", "--mb", "320"),
                *("--in-flight", "1", "4", "16", "--rounds", "12", "--decode-page-size", "16", "--peers"),
            ),
            timeout_s=150.0,
        ),
        rehearsed=("--lanes", "nixl", "ucx", "--peers", *_TINY_POOL),
    ),
    Part(
        name="link",
        run=Run(module="link", arguments=_CUDA, timeout_s=90.0),
        rehearsed=("--quick", "--max-mb", "1", "--lanes", "copy", "ucx plain", "ucx/shm"),
    ),
    Part(
        name="pool to pool, 64 at once",
        run=Run(
            module="pool_to_pool",
            arguments=(
                *(*_CUDA, "--lanes", "cuda_ipc/fused", "nixl", "--mb", "320"),
                *("--in-flight", "64", "--rounds", "5", "--decode-page-size", "16"),
            ),
            timeout_s=68.0,
        ),
        rehearsed=("--lanes", "ucx", *_TINY_POOL, "--in-flight", "3"),
    ),
    Part(
        name="pool to pool, pieces",
        run=Run(
            module="pool_to_pool",
            arguments=(
                *(*_CUDA, "--lanes", "cuda_ipc/fused", "--mb", "320", "--in-flight", "1", "16"),
                *("--piece-mb", "64", "160", "320", "--rounds", "8", "--decode-page-size", "16"),
            ),
            timeout_s=60.0,
        ),
        rehearsed=("--lanes", "ucx", *_TINY_POOL, "--piece-mb", "0.5", "1"),
    ),
    Part(
        name="pool to pool, other sizes",
        run=Run(
            module="pool_to_pool",
            arguments=(
                *(*_CUDA, "--lanes", "cuda_ipc/fused", "--mb", "16", "64"),
                *("--in-flight", "1", "16", "64", "--rounds", "12", "--decode-page-size", "16"),
            ),
            timeout_s=120.0,
        ),
        rehearsed=("--lanes", "ucx", *_TINY_POOL, "--mb", "1", "2"),
    ),
    Part(
        name="pool to pool, 1 GiB",
        run=Run(
            module="pool_to_pool",
            arguments=(*_CUDA, "--lanes", "cuda_ipc/fused", "nixl", "--mb", "1024", "--in-flight", "1", "4", "--rounds", "6"),
            timeout_s=60.0,
        ),
        rehearsed=("--lanes", "ucx", *_TINY_POOL, "--mb", "3"),
    ),
    Part(
        name="link, one gpu",
        run=Run(module="link", arguments=(*_CUDA, "--one-gpu", "--quick", "--max-mb", "256"), timeout_s=75.0),
        rehearsed=("--quick", "--max-mb", "1", "--lanes", "copy", "ucx/net"),
    ),
    Part(
        name="pool to pool, one gpu",
        run=Run(
            module="pool_to_pool",
            arguments=(*_CUDA, "--one-gpu", "--lanes", "cuda_ipc/fused", "nixl", "--in-flight", "1", "--rounds", "8"),
            timeout_s=60.0,
        ),
        rehearsed=("--lanes", "ucx", *_TINY_POOL),
    ),
)


def commands(*, wheel: Path | None, is_rehearsal: bool) -> dict[str, Run]:
    """What is run for each part, by its name."""
    found = {}
    for part in PARTS:
        arguments = part.rehearsed if is_rehearsal else part.run.arguments
        if part.name == "kernels" and wheel is not None:
            arguments += ("--peer", "sglang")
        if wheel is not None and {"--peer", "--peers"} & set(arguments):
            arguments += ("--sglang-wheel", str(wheel))
        found[part.name] = replace(part.run, arguments=arguments)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="run every benchmark that needs GPUs")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="gets gpu_suite.json and gpu_suite.log")
    parser.add_argument("--sglang-wheel", type=Path, metavar="FILE", help="SGLang's wheel, or a directory with its files")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--budget-s", type=float, default=470.0, help="for all parts")
    parser.add_argument("--quick", action="store_true", help="few repetitions: to see that it runs, not to be quoted")
    parser.add_argument("--rehearse", action="store_true", help="on CPUs with tiny sizes")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    runs = commands(wheel=given.sglang_wheel, is_rehearsal=given.rehearse)
    _, failures = run_suite(
        {name: runs[name] for name in given.only},
        outcomes_of,
        title="kvferry on GPUs",
        budget_s=given.budget_s,
        is_quick=given.quick,
        json_file=given.out / "gpu_suite.json",
        log_file=given.out / "gpu_suite.log",
    )
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
