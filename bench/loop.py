"""The longest turn of a rank's or leader's event loop, by CPU time, in hard cases. Nothing else runs on the loop meanwhile.

    python -m bench.loop [--json FILE] [--quick] [--only WORD ...] [--bound-ms 50] [--only-measure]

Every session of a process waits during a turn, and three missed heartbeats of 0.5 s end it. So no input may make a turn long.
Each case drives the real classes. Its docstring (in `bench.loop_cases`, `bench.loop_many_peers` or `bench.loop_many_requests`)
names them, and the parts that are left out.

The garbage collector is set up as in nodes: objects from before a case are frozen (`node_runtime.process_setup`). A case can have
several ranks in one process, and the collector walks over the objects of all ranks at once. So turns exclude the collector. Its
longest pause is reported beside them, and one case measures the pause in a single rank. One row is the cost of measuring a turn.

Exit code 1 when a case misses the bound or fails; with ``--quick`` (few cases, small ones) only when one fails.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import loop_cases, loop_many_peers, loop_many_requests
from bench.loop_turns import BOUND_MS, COST, COST_BOUND_US, TURN, Watch
from bench.timing import Report, argument_parser
from node_runtime.process_setup import freeze_gc
from transfer.config import LogConfig
from transfer.logs import configure_logging
from transfer.loop_turns import MeasuredLoop

NUM_EMPTY_TURNS = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row.

    Args:
        name: Description of the case.
        run: Runs the case.
        is_quick: Whether it is part of ``--quick``.
    """

    name: str
    run: Callable[[Watch], None]
    is_quick: bool = False


def cases() -> list[Case]:
    def storm(is_one_sided: bool) -> Callable[[Watch], None]:
        return lambda watch: loop_cases.storm_of_cancels(watch, is_one_sided=is_one_sided)

    return [
        Case(name="64 requests cancelled at once, while another begins; one-sided", run=storm(True)),
        Case(name="64 requests cancelled at once, while another begins; two-sided", run=storm(False)),
        Case(name="a frozen writer holds the whole ring, and another asks for grants", run=loop_cases.frozen_writer),
        Case(name="a writer repeats its question for 1,024 grants 256 times", run=loop_cases.repeated_questions),
        Case(name="10,000 live grants", run=loop_cases.many_grants),
        Case(name="a decode rank makes a writer look back 1,023 laps for each of 2,048 grants", run=loop_cases.dear_looks),
        Case(name="a writer with a grant in each of 4,000 laps asks for 1,024 more", run=loop_cases.dear_grants),
        Case(name="256 sessions with requests, lost one by one", run=loop_cases.many_sessions),
        Case(name="256 writers of a decode rank", run=loop_many_peers.writers),
        Case(name="256 prefill nodes of a decode leader", run=loop_many_peers.prefill_nodes),
        Case(name="10,000 prompts of 1,024 decode nodes wait for a prefill leader", run=loop_many_requests.prefill_queue),
        Case(name="32 prompts of 131,072 tokens that waited for a prefill node", run=loop_many_peers.placed_together),
        Case(name="pages of one token: hashes of 131,072 tokens on both leaders", run=loop_cases.hash_chains),
        Case(name="pages of one token: tables of 32 requests of 130,000 tokens", run=loop_cases.step_tables, is_quick=True),
        Case(name="four prompts of 131,072 tokens are nearly whole: a cancel, a session lost", run=loop_cases.nearly_whole),
        Case(name="eight prompts of 131,072 tokens to eight decode ranks: one of these is lost", run=loop_cases.lost_decode_rank),
        Case(name="eight prompts of 131,072 tokens are nearly whole: the garbage collector", run=loop_cases.collector_pause),
        *(Case(name=name, run=run) for name, run in loop_cases.prompts()),
    ]


def measure_case(case: Case) -> Watch:
    """Run the case once; return what was measured."""
    watch = Watch()
    freeze_gc()
    with watch.collecting():
        case.run(watch)
    return watch


def cost_of_measuring() -> list[float]:
    """Return the CPU seconds that measuring adds to an empty turn, one value per round."""

    async def turns() -> None:
        for _ in range(NUM_EMPTY_TURNS):
            await asyncio.sleep(0)

    def measured() -> MeasuredLoop:
        loop = MeasuredLoop()
        loop.turns.start_counting()
        return loop

    def seconds(make: Callable[[], asyncio.AbstractEventLoop]) -> float:
        with asyncio.Runner(loop_factory=make) as runner:
            begun_s = time.thread_time()
            runner.run(turns())
            return (time.thread_time() - begun_s) / NUM_EMPTY_TURNS

    return [max(0.0, seconds(measured) - seconds(asyncio.SelectorEventLoop)) for _ in range(5)]


def measure(chosen: Sequence[Case], *, bound_s: float) -> Report:
    """Return a report with a row for each case. A case that raises ends the benchmark."""
    report = Report(title=f"Longest turn of a loop, CPU time (at most {bound_s * 1e3:g} ms)")
    for case in chosen:
        begun_s = time.monotonic()
        watch = measure_case(case)
        report.add(case.name, TURN, [watch.worst.seconds])
        report.facts[case.name] = {
            "event": watch.worst.name,
            "collector_s": watch.longest_gc_s,
            "turns": watch.num_turns,
            "seconds": time.monotonic() - begun_s,
        }
        print(f"{case.name}: {watch.worst.seconds * 1e3:.1f} ms", file=sys.stderr, flush=True)
    report.add("an empty turn", COST, cost_of_measuring())
    return report


def print_table(report: Report, *, bound_s: float, console: Console | None = None) -> None:
    """Print each case with its longest turn, the verdict and the longest event."""
    console = Console() if console is None else console
    if not console.is_terminal:
        console.width = max(console.width, 200)
    table = Table(title=report.title, title_justify="left")
    for name in ("case", "longest turn", "ok", "in it", "collector"):
        table.add_column(
            name, justify="right" if name in ("longest turn", "collector") else "left", no_wrap=name == "longest turn"
        )
    for row in report.rows:
        if row.what != TURN:
            continue
        facts = report.facts[row.case]
        verdict = "yes" if row.median_s <= bound_s else "[bold red]NO"
        collector = f"{float(str(facts['collector_s'])) * 1e3:.1f} ms"
        table.add_row(row.case, f"{row.median_s * 1e3:.1f} ms", verdict, str(facts["event"]), collector)
    console.print(table)
    (cost,) = [row for row in report.rows if row.what == COST]
    console.print(f"measuring a turn takes {cost.median_s * 1e6:.2f} us (at most {COST_BOUND_US:g})")
    console.print(str(report.environment))


def main() -> None:
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--bound-ms", type=float, default=BOUND_MS, help="longest turn that passes, in milliseconds of CPU time")
    parser.add_argument("--only-measure", action="store_true", help="exit with 0 also when a case misses the bound")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose names contain one of these")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if case.is_quick or not arguments.quick]
    if arguments.only:
        chosen = [case for case in chosen if any(word in case.name for word in arguments.only)]
    bound_s = arguments.bound_ms / 1e3
    with open(os.devnull, "w") as nowhere:
        configure_logging(LogConfig(format="json"), role="decode", stream=nowhere)  # lines are made as a node's are
        report = measure(chosen, bound_s=bound_s)
    print_table(report, bound_s=bound_s)
    json_path: Path | None = arguments.json
    if json_path is not None:
        report.write_json(json_path)
    is_missed = any(row.median_s > bound_s for row in report.rows if row.what == TURN)
    sys.exit(int(is_missed and not arguments.quick and not arguments.only_measure))


if __name__ == "__main__":
    main()
