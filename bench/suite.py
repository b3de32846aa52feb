"""Run several benchmarks, each in a separate process, and write a table of their outcomes and a record."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.table import Content, Outcome, Run
from bench.timing import ROOT, Environment, argument_parser, cpu_model

_NUM_LINES_TOLD = 4
_LEAST_S = 15.0  # a benchmark with less time left is not started
_SIGNS = {"at least": ">=", "below": "<", "exactly": "="}


def run_one(run: Run, folder: Path, *, is_quick: bool, timeout_s: float) -> tuple[Content | None, str]:
    """Run a benchmark; return its report, if any, and the reason of its failure, or nothing.

    A benchmark that fails or is cut off may have written a part of its report.

    Args:
        folder: New folder for this run. Its ``log`` gets the output.
    """
    folder.mkdir()
    file, log = folder / "report.json", folder / "log"
    command = [sys.executable, "-m", f"bench.{run.module}", "--json", str(file), *run.arguments]
    if is_quick and "--quick" not in command:
        command.append("--quick")
    reason = ""
    with log.open("w") as output:
        # In its own session, so that its processes end with it, also if it is cut off.
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(timeout_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            reason = f"did not end within {timeout_s:.0f} s"
    if not reason and (process.returncode or not file.exists()):
        reason = f"ended with {process.returncode}: {' | '.join(log.read_text().splitlines()[-_NUM_LINES_TOLD:])}"
    content: Content | None = json.loads(file.read_text()) if file.exists() else None
    return content, reason


def print_table(outcomes: Sequence[Outcome], environment: Environment, console: Console) -> None:
    """Print each outcome with its measured value and its target. Name the CPU of a missed target that is for another CPU."""
    if not console.is_terminal:
        console.width = max(console.width, 160)
    table = Table(title="kvferry: targets, and values measured here", title_justify="left")
    for name in ("what", "measured", "target", "", "met", "note"):
        table.add_column(name, justify="right" if name in ("measured", "target") else "left", no_wrap=name != "note")
    for one in outcomes:
        measured = "none" if one.measured is None else f"{one.measured:,.3g}" if one.measured < 1e4 else f"{one.measured:,.0f}"
        bound = "" if one.limit is None else f"{_SIGNS[one.bound]} {one.limit:,g}"
        if one.is_reached:
            verdict = "" if one.limit is None else "yes"
        else:
            verdict = "[bold red]NO" if one.is_missed(environment.cpu) else f"no (for {one.cpu})"
        table.add_row(one.what, measured, bound, one.unit, verdict, one.note)
    console.print(table)
    console.print(str(environment))


def run_suite(
    runs: Mapping[str, Run],
    outcomes_of: Callable[[str, Content], Sequence[Outcome]],
    *,
    title: str,
    budget_s: float,
    is_quick: bool,
    json_file: Path | None,
    log_file: Path | None = None,
) -> tuple[list[Outcome], dict[str, str]]:
    """Run benchmarks one after the other, print a table, and write a record.

    A benchmark that fails or is cut off does not affect the others.

    Args:
        runs: By name of the part.
        outcomes_of: Returns the lines for the report of a part.
        budget_s: Time for all of them; the last ones get the remaining time.
        log_file: Receives the output of all benchmarks.

    Returns:
        The outcomes, and the reasons of failures by part.
    """
    environment, load_before, begun_s = Environment.here(), os.getloadavg(), time.monotonic()
    outcomes: list[Outcome] = []
    reports: dict[str, Content] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder, open(log_file or os.devnull, "w") as logged:
        for number, (name, run) in enumerate(runs.items()):
            content: Content | None
            left_s = budget_s - (time.monotonic() - begun_s)
            if left_s < _LEAST_S:
                content, reason = None, f"not begun: the budget of {budget_s:.0f} s is spent"
            else:
                part, part_begun_s = Path(folder) / str(number), time.monotonic()
                content, reason = run_one(run, part, is_quick=is_quick, timeout_s=min(run.timeout_s, left_s))
                logged.write(f"===== {name}: {' '.join([run.module, *run.arguments])}\n{(part / 'log').read_text()}\n")
                logged.flush()
                took = f"{time.monotonic() - part_begun_s:.0f} s"
                print(f"{name}: {took}{', ' + reason if reason else ''}", file=sys.stderr, flush=True)
            if reason:
                failures[name] = reason
                outcomes.append(Outcome.failed(name, reason))
            if content is None:
                continue
            reports[name] = content
            outcomes += outcomes_of(name, content)
            for missing, why in content.get("facts", {}).get("not measured", {}).items():
                print(f"  not measured: {missing}: {why}", file=sys.stderr, flush=True)
    print_table(outcomes, environment, Console())
    if json_file is not None:
        record = {
            "title": title,
            "environment": environment.to_json(),
            "is_quick": is_quick,
            "load_before": load_before[0],  # of other work on the machine, one-minute average
            "seconds": time.monotonic() - begun_s,
            "failures": failures,
            "rows": [outcome.to_json() for outcome in outcomes],
            "reports": reports,
        }
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    return outcomes, failures


def run_command(
    runs: Sequence[Run], outcomes_of: Callable[[str, Content], Sequence[Outcome]], *, title: str, budget_s: float = 3600.0
) -> int:
    """Run the command of a suite: ``[--json FILE] [--quick] [--only NAME ...]``.

    Returns:
        The exit code: 1 if a benchmark fails or lacks a value or, without ``--quick``, a target for this CPU is missed.
        Otherwise 0.
    """
    names = [run.module for run in runs]
    parser = argument_parser(f"{title}, measured here")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    arguments = parser.parse_args()
    outcomes, _ = run_suite(
        {run.module: run for run in runs if run.module in arguments.only},
        outcomes_of,
        title=title,
        budget_s=budget_s,
        is_quick=arguments.quick,
        json_file=arguments.json,
    )
    is_failed = any(outcome.measured is None for outcome in outcomes)
    cpu = cpu_model()
    is_missed = not arguments.quick and any(outcome.is_missed(cpu) for outcome in outcomes)
    return int(is_failed or is_missed)
