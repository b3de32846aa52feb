"""Report of a run: values, JSON, and tables."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import transfer
from kvferry.bench_serve.summary import ATTAINED, Objectives, RateSummary, Spread, sustained_rate

_WIDE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Report of all rates.

    Args:
        summaries: One for each rate that was started, in the order of the runs.
        nodes: Description of each decode node at the start.
        machine: The generator's machine.
        date: Start, ISO 8601.
        load_before: Load of the machine in the last minute before the first request.
        is_interrupted: A signal ended the run.
    """

    summaries: Sequence[RateSummary]
    objectives: Objectives
    settings: Mapping[str, Any]
    nodes: Sequence[Mapping[str, Any]]
    machine: Mapping[str, Any]
    command: str
    date: str
    load_before: float
    is_interrupted: bool = False

    @property
    def is_late(self) -> bool:
        """Return True if the generator could not keep up with a rate."""
        return any(one.lateness.is_late for one in self.summaries)

    @property
    def sustained_rate(self) -> float | None:
        return sustained_rate(self.summaries)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": transfer.__version__,
            "command": self.command,
            "date": self.date,
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            "load_before": self.load_before,
            "nodes": [dict(node) for node in self.nodes],
            "is_interrupted": self.is_interrupted,
            "is_late": self.is_late,
            "attained": ATTAINED,
            "sustained_rate": self.sustained_rate,
            "rates": [one.to_json() for one in self.summaries],
        }


def machine() -> dict[str, Any]:
    """Describe this machine."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    """Return the processor's name as the system reports it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def print_report(report: LoadReport, console: Console) -> None:
    """Print two tables with a row for each rate, and remarks."""
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)  # a file has no width
    console.print(_load_table(report))
    console.print(_transfer_table(report))
    for line in lines_of(report):
        console.print(line)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _load_table(report: LoadReport) -> Table:
    table = _table(
        "load: requests a second; times of served requests in ms, p50 / p90 / p99",
        "offered", "served", "failed", "goodput", "good", "TTFT", "TPOT", "ITL", "end to end", "tokens/s", "generator late p99",
    )  # fmt: skip
    for one in report.summaries:
        late_s = max(one.lateness.sends_s.p99, one.lateness.loop_s.p99)
        late = Text(f"{late_s * 1e3:,.1f}", style="red" if one.lateness.is_late else "")
        table.add_row(
            f"{one.offered_rate:,.2f}",
            f"{one.served:,} of {one.requests:,}",
            Text(f"{one.failed:,}", style="red" if one.failed else ""),
            f"{one.goodput:,.2f}",
            f"{one.attainment:.0%}",
            *(_three(spread) for spread in (one.ttft_s, one.tpot_s, one.itl_s, one.end_to_end_s)),
            f"{one.output_tokens_per_s:,.1f}",
            late,
        )
    return table


def _transfer_table(report: LoadReport) -> Table:
    table = _table(
        "transfer: its share of TTFT, p50 / p90 / p99",
        "offered", "after computing", "all of it", "of all TTFT", "moved", "cached", "writes", "resends",
        "prefill nodes, requests",
    )  # fmt: skip
    for one in report.summaries:
        counts = sorted(one.prefill_nodes.values())
        spread = f"{len(counts)}, each {counts[0]:,} to {counts[-1]:,}" if len(counts) > 1 else f"{len(counts)}"
        table.add_row(
            f"{one.offered_rate:,.2f}",
            _three(one.exposed_share, scale=100, unit="%"),
            _three(one.transfer_share, scale=100, unit="%"),
            f"{one.exposed_share_of_all:.1%}",
            f"{one.bytes_moved / 2**20:,.1f} MiB",
            Text(f"{one.cached_share:.1%}", style="yellow" if _is_cached_unasked(report, one) else ""),
            f"{one.writes:,}",
            f"{one.resends:,}",
            spread,
        )
    return table


def _three(spread: Spread, *, scale: float = 1e3, unit: str = "") -> str:
    if not spread.samples:
        return "-"
    return " / ".join(f"{value * scale:,.1f}{unit}" for value in (spread.p50, spread.p90, spread.p99))


def _is_cached_unasked(report: LoadReport, one: RateSummary) -> bool:
    return one.cached_tokens > 0 and not report.settings.get("shared_prefix")


def lines_of(report: LoadReport) -> list[Text]:
    """Return the remarks under the tables."""
    lines = [Text(_goodput_line(report))]
    if (seed := report.settings.get("seed")) is not None:
        lines.append(Text(f"--seed {seed} sends the same requests again"))
    for one in report.summaries:
        lines += [Text(f"at {one.offered_rate:,.2f}/s {text}", style) for text, style in _remarks(report, one)]
    return lines


def _remarks(report: LoadReport, one: RateSummary) -> Iterator[tuple[str, str]]:
    """Yield text and style of each remark about a rate."""
    if one.is_of_survivors:
        yield (
            f"{one.failed / one.requests:.1%} of the requests failed: the times are of those that were served, each of them "
            f"within --timeout, {report.settings.get('timeout_s', 0):g} s; nobody knows how long the others would have taken",
            "red",
        )
    if one.failed_warm_up:
        yield f"{one.failed_warm_up:,} requests of the warm-up failed, such as: {one.warm_up_reason}", "red"
    if _is_cached_unasked(report, one):
        yield (
            f"{one.cached_tokens:,} of {one.prompt_tokens:,} prompt tokens were there already ({one.cached_share:.1%}), though "
            "nothing shared was asked for: an earlier run with this seed has left them, and the times flatter",
            "yellow",
        )
    for code, count in one.failures.items():
        yield f"{count:,} failed {code}, such as: {one.reasons[code]}", "red"
    if one.lateness.is_late:
        late = one.lateness
        yield (
            f"the generator could not keep up: sends {late.sends_s.p99 * 1e3:,.1f} ms, its loop {late.loop_s.p99 * 1e3:,.1f} ms "
            f"late (p99; --max-lateness {late.limit_s * 1e3:g} ms), with {late.cpu_share:.0%} of a core: not to be quoted. Run "
            "it on another machine, or several of it",
            "red",
        )
    if one.is_partial:
        yield "the run was broken off: what had come by then", "yellow"


def _goodput_line(report: LoadReport) -> str:
    wanted = [
        f"{name} within {value * 1e3:g} ms"
        for name, value in (("TTFT", report.objectives.ttft_s), ("TPOT", report.objectives.tpot_s))
        if value is not None
    ]
    if not wanted:
        return "goodput: served requests a second of arrivals; no objectives (--slo-ttft, --slo-tpot)"
    rate = report.sustained_rate
    sustained = "no load had" if rate is None else f"{rate:,.2f}/s is the highest load that had"
    return f"goodput: requests a second of arrivals with {' and '.join(wanted)}; {sustained} {ATTAINED:.0%} of such"
