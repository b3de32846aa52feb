"""Searches every target for its share of the time, and prints what came of it: ``make fuzz MINUTES=10``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.timing import Environment
from fuzz.plain import replay
from fuzz.target import CORPUS, NAMES, load

FOUND = Path(".kvferry") / "fuzz"
"""Where inputs that something was wrong at are left, and corpora that grow; not committed."""

_INPUT_LIMIT_S = 20  # one execution; a loaded machine stands still for seconds
_START_LIMIT_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the search of one target came to."""

    target: str
    about: str
    seconds: float
    cpu_s: float
    executions: int
    executions_per_s: float
    edges: int
    features: int
    corpus_before: int
    corpus: int
    corpus_bytes: int
    crashes: int
    peak_rss_mib: int
    found: list[str]


def main() -> int:
    """1 when anything was found."""
    arguments = _arguments()
    if arguments.replay:
        name, *files = arguments.replay
        for file in files:
            replay(load(name), Path(file))
        print(f"{name}: {len(files)} inputs, nothing found")
        return 0
    if importlib.util.find_spec("atheris") is None:
        raise SystemExit(
            "fuzzing needs atheris: pip install 'kvferry[fuzz]' (Python 3.11 to 3.13); the corpus runs without it in the tests"
        )
    names = arguments.only or list(NAMES)
    seconds = 60 * arguments.minutes / len(names)
    load_before = os.getloadavg()[0]
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for name in names:
        print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
        outcomes.append(_search(name, seconds))
    if arguments.keep:
        for name in names:
            _minimise(name)
    _print(outcomes)
    if arguments.json:
        record = {
            "title": "kvferry: fuzzing of every decoder and of both protocol machines",
            "hardware": arguments.hardware,
            "environment": Environment.here().to_json(),
            "load_before": load_before,
            "seconds": time.monotonic() - started,
            "targets": [asdict(outcome) for outcome in outcomes],
        }
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if any(outcome.crashes for outcome in outcomes) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="TARGET", help=f"some of: {', '.join(NAMES)}")
    parser.add_argument("--keep", action="store_true", help="put what takes a new way, minimised, into the committed corpus")
    parser.add_argument("--json", metavar="FILE", help="write the record")
    parser.add_argument("--hardware", default="", help="what the record calls the machine")
    parser.add_argument("--replay", nargs="+", metavar=("TARGET", "FILE"), help="run these inputs again, without atheris")
    return parser.parse_args()


def _search(name: str, seconds: float) -> Outcome:
    """One process of libFuzzer: a finding ends it, so that a flaw is met once and not a thousand times."""
    grown, found = FOUND / "corpus" / name, FOUND / "found" / name
    for folder in (grown, found):
        folder.mkdir(parents=True, exist_ok=True)
    committed = CORPUS / name
    inputs = sorted(path for path in committed.glob("*") if path.is_file())
    with tempfile.TemporaryDirectory(prefix="kvferry-fuzz-") as scratch:
        seeds = Path(scratch) / "seeds"
        seeds.mkdir()
        _write_seeds(name, seeds)
        command = [
            sys.executable, "-m", "fuzz.search", name, str(grown), *([str(committed)] if inputs else []), str(seeds),
            f"-max_total_time={max(1, int(seconds))}", f"-timeout={_INPUT_LIMIT_S}", "-rss_limit_mb=4096", "-print_final_stats=1",
            f"-artifact_prefix={found}/", "-verbosity=1",
        ]  # fmt: skip
        began, cpu_before = time.monotonic(), _cpu_s()
        before = {path.name for path in found.iterdir()}
        ended = _run(command, scratch, limit_s=seconds + _START_LIMIT_S)
        took, cpu_s = time.monotonic() - began, _cpu_s() - cpu_before
    new = sorted(path.name for path in found.iterdir() if path.name not in before)
    is_broken = ended.returncode != 0 or bool(new)
    if is_broken:
        print(ended.stdout[-3000:], ended.stderr[-1500:], sep="\n", file=sys.stderr)
    files = [path for path in grown.iterdir() if path.is_file()]
    coverage = re.findall(r"cov: (\d+) ft: (\d+)", ended.stderr)
    return Outcome(
        target=name,
        about=load(name).about if not _is_heavy(name) else "safetensors headers and their index (JSON)",
        seconds=took,
        cpu_s=cpu_s,
        executions=_stat(ended.stderr, "number_of_executed_units"),
        executions_per_s=_stat(ended.stderr, "number_of_executed_units") / took,
        edges=int(coverage[-1][0]) if coverage else 0,
        features=int(coverage[-1][1]) if coverage else 0,
        corpus_before=len(inputs),
        corpus=len(files) + len(inputs),
        corpus_bytes=sum(path.stat().st_size for path in (*files, *inputs)),
        crashes=max(len(new), int(is_broken)),
        peak_rss_mib=_stat(ended.stderr, "peak_rss_mb"),
        found=[f"{found}/{one}" for one in new],
    )


def _is_heavy(name: str) -> bool:
    """Whether the target's libraries take seconds to load, which this process then does not."""
    return name == "weight_files"


def _write_seeds(name: str, folder: Path) -> None:
    code = (
        "import sys, pathlib; from fuzz.target import load\n"
        "for number, data in enumerate(load(sys.argv[1]).seeds()):\n"
        "    pathlib.Path(sys.argv[2], str(number)).write_bytes(data)"
    )
    subprocess.run([sys.executable, "-c", code, name, str(folder)], check=True)


def _run(command: list[str], scratch: str, *, limit_s: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": scratch, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", timeout=limit_s)


def _stat(text: str, name: str) -> int:
    found = re.findall(rf"stat::{name}:\s+(\d+)", text)
    return int(found[-1]) if found else 0


def _minimise(name: str) -> None:
    """Put the fewest inputs that take every way which the grown and the committed ones take into the committed corpus."""
    code = (
        "import sys; from pathlib import Path; from fuzz.plain import minimised; from fuzz.target import load\n"
        "target, folders = load(sys.argv[1]), [Path(one) for one in sys.argv[2:]]\n"
        "inputs = [path.read_bytes() for folder in folders for path in folder.glob('*') if path.is_file()]\n"
        "kept = minimised(target, [*target.seeds(), *inputs])\n"
        "target.corpus.mkdir(parents=True, exist_ok=True)\n"
        "[path.unlink() for path in target.corpus.iterdir()]\n"
        "import hashlib\n"
        "[(target.corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data) for data in kept]"
    )
    folders = [str(CORPUS / name), str(FOUND / "corpus" / name)]
    subprocess.run([sys.executable, "-c", code, name, *folders], check=True)


def _print(outcomes: list[Outcome]) -> None:
    table = Table(title="fuzzing")
    for column in ("target", "executions", "a second", "edges", "features", "corpus", "crashes", "peak RSS"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for one in outcomes:
        table.add_row(
            one.target,
            f"{one.executions:,}",
            f"{one.executions_per_s:,.0f}",
            str(one.edges),
            str(one.features),
            str(one.corpus),
            str(one.crashes),
            f"{one.peak_rss_mib} MiB",
        )
    Console(width=110).print(table)
    for one in outcomes:
        for file in one.found:
            print(f"{one.target}: found {file}; python -m fuzz --replay {one.target} {file}")
    print(f"CPU time {sum(one.cpu_s for one in outcomes):.0f} s")


def _cpu_s() -> float:
    """CPU time of all children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


if __name__ == "__main__":
    sys.exit(main())
