"""Check the Promela models of this folder with spin: `make model`.

Each run is one search through every state that a model of given sizes can reach. Some have to find nothing; the others carry a
planted bug, which has to be found. A search that ended early (memory, depth, time) is neither. See README.md beside this file.

Needs spin and a C compiler, and of Python only what comes with it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TOOLS = ("spin", "gcc")
MAX_DEPTH = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One search.

    Args:
        model: File of the model, without ``.pml``.
        name: Unique among the runs of its model.
        asks: What has to hold, or which bug has to be found.
        sizes: Macros of the model, as ``NAME=value`` or ``NAME``.
        claim: Name of the model's LTL formula; None: assertions, and, with `ends`, that no run gets stuck.
        ends: Whether a state in which nothing can go on, and something is not at its end, is an error.
        finds: Part of what spin has to say of the planted bug; None: nothing may be found.
        is_quick: A matter of a second or two.
        reduces: Whether spin may leave out orders that cannot differ; not where the model asks for `timeout`.
    """

    model: str
    name: str
    asks: str
    sizes: tuple[str, ...] = ()
    claim: str | None = None
    ends: bool = False
    finds: str | None = None
    is_quick: bool = False
    reduces: bool = True

    @property
    def id(self) -> str:
        return f"{self.model}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a search came to. `num_steps`: of the counterexample, without those that set the model up; 0 without one."""

    is_complete: bool
    error: str
    num_states: int
    depth: int
    num_steps: int
    seconds: float


RULES = {"ring": "R1 R2 R4 R5 R6", "sessions": "R1 R4 R6"}


def rules(model: str, name: str, *sizes: str, is_quick: bool = False) -> Run:
    """A run of all of a model's rules, in which nothing may get stuck either."""
    return Run(model=model, name=name, asks=f"{RULES[model]}, no deadlock", sizes=sizes, ends=True, is_quick=is_quick)


def bug(model: str, name: str, asks: str, finds: str, *sizes: str, claim: str | None = None, ends: bool = False) -> Run:
    """A run with the bug ``BUG_<NAME>`` planted."""
    sizes = (*sizes, f"BUG_{name.upper()}")
    is_one_sided = "ONE_SIDED" in sizes
    return Run(
        model=model,
        name=f"one_sided.{name}" if is_one_sided else name,
        asks=f"bug: {asks}" + (" (one-sided)" if is_one_sided else ""),
        sizes=sizes,
        claim=claim,
        ends=ends,
        finds=finds,
        is_quick=True,
    )


FOUR = ("PIECES=4", "OF_FIRST=2")
STANDING_STILL = ("PIECES=4", "OF_FIRST=2", "CAP=4", "MAX_CELLS=1", "MAX_ABORTS=0", "STILL=3", "ONE_RANGE")

RUNS = (
    rules("ring", "rules", *FOUR),
    rules("ring", "five_pieces", "PIECES=5", "OF_FIRST=3", "MAX_ABORTS=0"),
    rules("ring", "late_acks", "PIECES=3", "OF_FIRST=2", "LATE_ACKS"),
    rules("ring", "one_range", "PIECES=5", "OF_FIRST=4", "AHEAD=4", "CAP=4", "MAX_CELLS=1", "ONE_RANGE"),
    Run(
        model="ring",
        name="standing_still",
        asks="pieces end although another writer stands still",
        sizes=STANDING_STILL,
        ends=True,
        is_quick=True,
    ),
    Run(model="ring", name="released", asks="every grant is released", sizes=FOUR, claim="every_grant_is_released"),
    Run(
        model="ring",
        name="ended",
        asks="every piece ends at its writer",
        sizes=("PIECES=3", "OF_FIRST=2"),
        claim="every_piece_ends",
        is_quick=True,
    ),
    bug("ring", "timeout", "released on time-out", "user[", *FOUR),
    bug("ring", "no_drain", "released at abort, not at drained", "user[", *FOUR),
    bug("ring", "total_only", "writer counts free bytes, not which", "user[", *FOUR),
    bug("ring", "wrapped_grant", "a grant wraps round the ring's end", "begin[p]", *FOUR),
    bug("ring", "older_ack", "writer takes an older ack", "late[w]", "PIECES=3", "OF_FIRST=2", "LATE_ACKS"),
    bug("ring", "range_lost", "ring forgets a released range", "invalid end state", "PIECES=3", "OF_FIRST=2", ends=True),
    bug("ring", "lowest_ranges_only", "acks name the lowest ranges only", "invalid end state", *STANDING_STILL, ends=True),
    Run(model="transfer", name="two_sided", asks="R1 R3 R4, each key once", is_quick=True),
    Run(model="transfer", name="one_sided", asks="R1 R3 R4, each key once", sizes=("ONE_SIDED",), is_quick=True),
    Run(model="transfer", name="direct", asks="R1 R3 R4, each key once", sizes=("DIRECT", "SLOTS=2"), is_quick=True),
    Run(model="transfer", name="signals", asks="R1 R3 R4, each key once", sizes=("SIGNALS", "SLOTS=2")),
    Run(
        model="transfer",
        name="careless_writer",
        asks="R1: two-sided, writer ignores watermarks (ADR 0004)",
        sizes=("BUG_NO_WATERMARK",),
        is_quick=True,
    ),
    Run(
        model="transfer",
        name="three_pieces",
        asks="R1 R3 R4, each key once",
        sizes=("PIECES=3", "OF_FIRST=2", "CAP=2", "MAX_ABORTS=0"),
    ),
    Run(
        model="transfer",
        name="two_sided.ends",
        asks="all ends, nothing is left, R5",
        sizes=("PATIENT", "MAX_REPEATED=0", "MAX_LOST=2"),
        claim="everything_ends",
        reduces=False,
    ),
    Run(
        model="transfer",
        name="one_sided.ends",
        asks="all ends, nothing is left, R5",
        sizes=("PATIENT", "ONE_SIDED", "MAX_REPEATED=0", "MAX_LOST=2"),
        claim="everything_ends",
        reduces=False,
    ),
    Run(
        model="transfer",
        name="shared_slot.ends",
        asks="all ends, also if two writable pieces need one slot",
        sizes=("PATIENT", "ONE_SIDED", "CAP=2", "MAX_REPEATED=0", "MAX_LOST=1"),
        claim="everything_ends",
        reduces=False,
    ),
    bug("transfer", "timeout", "quarantine ends on time-out", "user["),
    bug("transfer", "no_drain", "released at abort, not at drained", "user[", "ONE_SIDED"),
    bug("transfer", "drained_too_early", "drained is reported while a write is under way", "user[", "ONE_SIDED"),
    bug("transfer", "no_settle", "released before the receive has settled", "user["),
    bug("transfer", "no_watermark", "writer ignores the watermark", "user[", "ONE_SIDED"),
    bug("transfer", "posted_early", "receive posted before its bytes are free", "user["),
    bug("transfer", "scatter_before_end", "a signalled scatter does not wait for its gather", "t_bytes[", "SIGNALS", "SLOTS=2"),
    bug("transfer", "sent_key_forgotten", "the first key of a rejected piece is declined", "sent&"),
    bug("transfer", "grant_changes", "a repeated request has another answer (R3)", "grant[p]"),
    bug(
        "transfer",
        "not_reminded",
        "grants are not repeated to a drained writer",
        "acceptance cycle",
        "PATIENT",
        claim="everything_ends",
    ),
    rules("sessions", "rules"),
    rules("sessions", "revocable", "REVOCABLE"),
    Run(
        model="sessions",
        name="released",
        asks="every grant is released, R5",
        sizes=("MAX_DEATHS=0",),
        claim="every_grant_is_released",
    ),
    bug("sessions", "timeout", "quarantine of a lost session ends on time-out", "user["),
    bug("sessions", "other_life", "messages of another incarnation are accepted", "user["),
    bug("sessions", "access_ends_early", "a session is over while a gather is under way", "user["),
    Run(model="heartbeats", name="rules", asks="only dead ends are declared dead, and in time", ends=True, is_quick=True),
    bug("heartbeats", "own_interval", "each end applies the interval that it stated itself", "frozen["),
    bug("heartbeats", "not_excused", "silence before the interval was shortened counts", "frozen["),
    bug("heartbeats", "always_excused", "all silence before the interval was shortened is excused", "since[e]"),
)


def missing_tools() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def search(run: Run, folder: Path, *, limit_s: float, memory_mb: int) -> Outcome:
    """Carry a run out in an empty folder, and leave the counterexample there.

    Raises:
        RuntimeError: The model cannot be translated or compiled.
    """
    macros = [f"-D{size}" for size in run.sizes]
    _build(["spin", "-a", *macros, str(FOLDER / f"{run.model}.pml")], folder)
    options = ["-O2", "-w", "-DCOLLAPSE", f"-DMEMLIM={memory_mb}"]
    options += ["-DSAFETY", "-DNOCLAIM"] if run.claim is None else []
    options += ["-DBFS"] if run.claim is None and run.finds is not None else []  # the shortest counterexample
    options += [] if run.reduces else ["-DNOREDUCE"]
    _build(["gcc", *options, "-o", "pan", "pan.c"], folder)
    command = ["./pan", f"-m{MAX_DEPTH}"]
    command += ["-a", "-N", run.claim] if run.claim is not None else []
    command += [] if run.ends else ["-E"]
    begun_s = time.monotonic()
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(is_complete=False, error="", num_states=0, depth=0, num_steps=0, seconds=time.monotonic() - begun_s)
    seconds = time.monotonic() - begun_s
    return _outcome(run, done.stdout + done.stderr, folder, seconds)


def _build(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or "Error" in done.stdout:
        raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr).strip()}")


def _outcome(run: Run, report: str, folder: Path, seconds: float) -> Outcome:
    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found[1]) if found else 0

    error = re.search(r"^pan:\d+: (.+?)(?: \(at depth \d+\))?$", report, re.M)
    errors = re.search(r"errors: (\d+)", report)
    is_cut = "Search not completed" in report or "max search depth too small" in report or errors is None
    trails = sorted(folder.glob("*.trail"))
    first_pid = 2 if run.claim is not None else 1  # init comes before; with a formula, it and the formula
    steps = [line.split(":") for line in trails[0].read_text(encoding="ascii").splitlines()] if trails else []
    return Outcome(
        is_complete=error is not None or (not is_cut and errors is not None and errors[1] == "0"),
        error=error[1] if error else "",
        num_states=number(r"(\d+) states, stored"),
        depth=number(r"depth reached (\d+)"),
        num_steps=sum(len(step) == 3 and int(step[0]) >= 0 and int(step[1]) >= first_pid for step in steps),
        seconds=seconds,
    )


def verdict(run: Run, outcome: Outcome) -> tuple[bool, str]:
    """Whether it is as expected, and in words."""
    if not outcome.is_complete:
        return False, "NOT COMPLETE: out of time, memory or depth"
    if run.finds is None:
        return (False, f"FAILS: {outcome.error}") if outcome.error else (True, "holds")
    if run.finds in outcome.error:
        return True, f"found, {outcome.num_steps} steps"
    return False, f"FOUND SOMETHING ELSE: {outcome.error}" if outcome.error else "NOT FOUND"


HEADER = f"{'run':<36} {'asked':<58} {'states':>9} {'depth':>5} {'time':>7}  verdict"


def row(run: Run, outcome: Outcome, words: str) -> str:
    return f"{run.id:<36} {run.asks:<58} {outcome.num_states:>9,} {outcome.depth:>5} {outcome.seconds:>6.1f}s  {words}"


def show(run: Run, folder: Path, *, limit_s: float, memory_mb: int) -> int:
    """Print the counterexample of a run, step by step."""
    outcome = search(run, folder, limit_s=limit_s, memory_mb=memory_mb)
    print(HEADER, row(run, outcome, verdict(run, outcome)[1]), sep="\n")
    trails = sorted(folder.glob("*.trail"))
    if not trails:
        print("no counterexample")
        return 0
    macros = [f"-D{size}" for size in run.sizes]
    command = ["spin", "-p", "-g", "-k", str(trails[0]), *macros, str(FOLDER / f"{run.model}.pml")]
    return subprocess.run(command, cwd=folder, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when every run is as expected, 1 when one is not, 2 when a tool is missing."""
    parser = argparse.ArgumentParser(prog="make model", description="Check the protocol's models with spin.")
    parser.add_argument("--only", metavar="TEXT", default="", help="runs whose name contains it")
    parser.add_argument("--quick", action="store_true", help="the runs of a second or two")
    parser.add_argument("--list", action="store_true", help="names of the runs, and nothing else")
    parser.add_argument("--show", metavar="RUN", help="the counterexample of one run, step by step")
    parser.add_argument("--jobs", type=int, default=2, help="searches at a time (default: 2)")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds that one search may take (default: 600)")
    parser.add_argument("--memory-mb", type=int, default=1500, help="MB that one search may take (default: 1500)")
    options = parser.parse_args(arguments)
    runs = [run for run in RUNS if options.only in run.id and (run.is_quick or not options.quick)]
    if options.list:
        print(*(run.id for run in runs), sep="\n")
        return 0
    if missing := missing_tools():
        print(
            f"make model needs {' and '.join(TOOLS)}; not found: {', '.join(missing)}. "
            "On Debian or Ubuntu: apt-get install spin gcc",
            file=sys.stderr,
        )
        return 2
    if options.show is not None:
        runs = [run for run in RUNS if run.id == options.show]
    if not runs:
        print("no run has that name; --list names them", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="kvferry-model-") as place:
        folders = [Path(place) / run.id for run in runs]
        for folder in folders:
            folder.mkdir()
        if options.show is not None:
            return show(runs[0], folders[0], limit_s=options.limit_s, memory_mb=options.memory_mb)
        print(HEADER, flush=True)
        num_wrong = 0
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = pool.map(
                lambda run, folder: search(run, folder, limit_s=options.limit_s, memory_mb=options.memory_mb), runs, folders
            )
            for run, outcome in zip(runs, outcomes, strict=True):
                is_expected, words = verdict(run, outcome)
                num_wrong += not is_expected
                print(row(run, outcome, words), flush=True)
    print(f"{len(runs) - num_wrong} of {len(runs)} runs are as expected")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
