"""Several benchmarks in one go: each in a process of its own, a table of what they reached, a record, an exit code."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.table import Content, Outcome, Run
from bench.timing import ROOT, Environment, argument_parser

_NUM_LINES_TOLD = 4
_SIGNS = {"at least": ">=", "below": "<", "exactly": "="}


def run_one(run: Run, folder: Path, *, is_quick: bool, timeout_s: float) -> tuple[Content | None, str]:
    """A benchmark's report, and why it failed, or nothing.

    One that fails or is cut off may have written a part of its report before.

    Args:
        folder: For this run alone. What it prints is in ``log`` there.
    """
    folder.mkdir()
    file, log = folder / "report.json", folder / "log"
    command = [sys.executable, "-m", f"bench.{run.module}", "--json", str(file), *run.arguments]
    if is_quick and "--quick" not in command:
        command.append("--quick")
    reason = ""
    with log.open("w") as output:
        # In a session of its own: what it started ends with it, also when it is cut off.
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
    """Print each outcome with its measured value and its target."""
    if not console.is_terminal:
        console.width = max(console.width, 160)
    table = Table(title="kvferry: targets, and values measured here", title_justify="left")
    for name in ("what", "measured", "target", "", "met", "note"):
        table.add_column(name, justify="right" if name in ("measured", "target") else "left", no_wrap=name != "note")
    for one in outcomes:
        measured = "none" if one.measured is None else f"{one.measured:,.3g}" if one.measured < 1e4 else f"{one.measured:,.0f}"
        bound = "" if one.limit is None else f"{_SIGNS[one.bound]} {one.limit:,g}"
        verdict = "" if one.limit is None else "yes" if one.is_reached else "[bold red]NO"
        table.add_row(one.what, measured, bound, one.unit, verdict, one.note)
    console.print(table)
    console.print(str(environment))


def run_suite(
    runs: Sequence[Run],
    outcomes_of: Callable[[str, Content], Sequence[Outcome]],
    *,
    title: str,
    budget_s: float = math.inf,
) -> int:
    """A suite's whole command: ``[--json FILE] [--quick] [--only NAME ...]``.

    Args:
        runs: One after the other.
        outcomes_of: The lines that the report of a module gives.
        title: Of the record, and of the help.
        budget_s: For all of them; the last ones get what is left.

    Returns:
        The exit code: 1 if a benchmark fails or, without ``--quick``, a target is missed; otherwise 0.
    """
    names = [run.module for run in runs]
    parser = argument_parser(f"{title}, measured here")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    arguments = parser.parse_args()
    environment = Environment.here()
    outcomes: list[Outcome] = []
    reports: dict[str, Content | None] = {}
    load_before, started_s = os.getloadavg(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        for run in runs:
            if run.module in arguments.only:
                print(f"{run.module} ...", file=sys.stderr, flush=True)
                timeout_s = max(1.0, min(run.timeout_s, budget_s - (time.monotonic() - started_s)))
                content, reason = run_one(run, Path(folder) / run.module, is_quick=arguments.quick, timeout_s=timeout_s)
                reports[run.module] = None if reason else content
                if reason or content is None:
                    outcomes.append(Outcome.failed(run.module, reason))
                else:
                    outcomes += outcomes_of(run.module, content)
    print_table(outcomes, environment, Console())
    if arguments.json is not None:
        record = {
            "title": title,
            "environment": environment.to_json(),
            "is_quick": arguments.quick,
            "load_before": load_before[0],  # of other work on the machine, one-minute average
            "seconds": time.monotonic() - started_s,
            "rows": [outcome.to_json() for outcome in outcomes],
            "reports": reports,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    is_failed = any(outcome.measured is None for outcome in outcomes)
    is_missed = not arguments.quick and not all(outcome.is_reached for outcome in outcomes)
    return int(is_failed or is_missed)
