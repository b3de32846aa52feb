"""A memory plan for people: the device as a bar, every line with its formula, and two plans side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.text import Text

from kvferry.cli.text_bars import text_table
from kvferry.plan.device import Device
from node_runtime.view_cells import CellTable, Row, table_of
from planner.plan_values import MemoryPlan, PlanLine
from transfer.host_memory import shown
from transfer.layer_groups import GroupKind

LABELS: Final = {
    "in_use": "in use before",
    "weights": "weights",
    "staging": "staging",
    "ring": "ring",
    "page_tables": "page tables",
    "reserve": "reserve",
    "cuda_graphs": "CUDA graphs",
    "activations": "activations",
    "left": "left over",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BarSegment:
    """A stretch of the bar: lines of one kind.

    Args:
        letter: Marks it where there is no colour.
        label: Its name.
        colour: Of the terminal and of the picture.
        num_bytes: Its size.
    """

    letter: str
    label: str
    colour: str
    num_bytes: int


def segments(plan: MemoryPlan) -> list[BarSegment]:
    """The device from its beginning to its end, without what is empty."""
    allocated = sum(one.num_bytes for one in plan.workspaces if one.is_allocated)
    sizes = {"pool": plan.pool_bytes, "workspaces": allocated + plan.inputs.offload_bytes}
    sizes["transfer"] = plan.inputs.staging_bytes + plan.inputs.ring_bytes
    lines = {line.name: line.num_bytes for line in plan.lines} | sizes
    kinds = (
        ("in_use", "x", "in use before", "#aaaaaa"),
        ("weights", "W", "weights", "#77aadd"),
        ("transfer", "T", "staging and ring", "#ffaabb"),
        ("page_tables", "p", "page tables", "#99ddff"),
        ("workspaces", "s", "workspaces", "#ee8866"),
        ("pool", "K", "KV pools", "#44bb99"),
        ("reserve", "R", "reserve", "#eedd88"),
        ("left", ".", "left over", "#dddddd"),
    )
    found = [
        BarSegment(letter=letter, label=label, colour=colour, num_bytes=lines[name]) for name, letter, label, colour in kinds
    ]
    return [segment for segment in found if segment.num_bytes]


def label(line: PlanLine) -> str:
    """Name of a line, for people."""
    if line.name.startswith("pool_"):
        return f"KV, {line.name.removeprefix('pool_').replace('_', ' ')}"
    return LABELS.get(line.name, line.name)


def print_plan(console: Console, plan: MemoryPlan, device: Device) -> None:
    """Print it whole."""
    _say(console, headline(plan))
    _say(console, f"device: {device.text}")
    console.print()
    console.print(bar(plan, console.width))
    for line in legend(plan):
        console.print(line)
    console.print()
    console.print(text_table(_line_table(plan)))
    if any(not one.is_allocated for one in plan.workspaces):
        console.print()
        console.print(text_table(_workspace_table(plan)))
    console.print()
    _say(console, capacity(plan))
    _say(console, f"{shown(plan.free_bytes)} stay free once it runs, of {shown(plan.device_bytes)}")
    for advice in plan.advice:
        _say(console, f"advice: {advice}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


def headline(plan: MemoryPlan) -> str:
    """The model and the cut, in one line."""
    inputs = plan.inputs
    cut = f"tp {inputs.tp_size}" + (f", pp {inputs.pp_size} (stage {inputs.pp_rank})" if inputs.pp_size > 1 else "")
    cut += f", dp-attention over {inputs.dp_size}" if inputs.has_dp_attention else ""
    return f"{inputs.model.architecture}, {_counted(inputs.model.num_params)} parameters; {inputs.role} node, {cut}"


def _counted(number: int) -> str:
    """``27.4 billion``, ``1.3 million``."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,}"


def capacity(plan: MemoryPlan) -> str:
    """How many tokens, and in which pools."""
    text = f"{plan.max_total_tokens:,} tokens: {plan.num_pages:,} pages of {plan.inputs.page_size}, {plan.cell_bytes:,} B a token"
    for group in plan.groups:
        if group.kind is GroupKind.STATE:
            text += f"; {group.num_pages:,} states of {group.cell_bytes:,} B"
        elif group.kind is GroupKind.WINDOW and len(plan.groups) > 1:
            text += f"; {group.num_pages:,} pages for windows, {group.cell_bytes:,} B a token"
    return text


def bar(plan: MemoryPlan, width: int) -> Text:
    """The device, `width` columns wide; each kind has a letter, so that it reads without colour."""
    parts = segments(plan)
    columns = shares([part.num_bytes for part in parts], max(10, width - 2))
    text = Text("[")
    for part, count in zip(parts, columns, strict=True):
        text.append(part.letter * count, style=f"bold {part.colour}")
    return text.append("]")


def shares(sizes: Sequence[int], width: int) -> list[int]:
    """`width` columns dealt out by size, to the last: the largest remainders are rounded up."""
    total = sum(sizes)
    columns = [size * width // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda index: -(sizes[index] * width % total))
    for index in by_remainder[: width - sum(columns)]:
        columns[index] += 1
    return columns


def legend(plan: MemoryPlan) -> list[Text]:
    """Letter, name and size of each stretch."""
    lines = []
    for part in segments(plan):
        share = 100 * part.num_bytes / plan.device_bytes
        text = Text(part.letter, style=f"bold {part.colour}")
        lines.append(text.append(f" {part.label:<16} {shown(part.num_bytes):>11} {share:5.1f} %", style="not bold default"))
    return lines


def _line_table(plan: MemoryPlan) -> CellTable:
    lines = ((f"  {label(line)}" if line.inside else label(line), shown(line.num_bytes), line.formula) for line in plan.lines)
    device = ("device", shown(plan.device_bytes), "the sum, but for what is inside the reserve")
    return table_of("", ("line", ">size", "how"), (Row(cells=cells) for cells in (*lines, device)))


def _workspace_table(plan: MemoryPlan) -> CellTable:
    """Return the workspaces that have no line in the plan."""
    rows = []
    for one in plan.workspaces:
        if not one.is_allocated:
            when = "allocated on first use: " if one.num_bytes else ""
            rows.append(Row(cells=(one.name, shown(one.num_bytes), when + one.reason)))
    return table_of("workspaces not allocated at start", ("workspace", ">size", "why"), rows)


def print_comparison(console: Console, plan: MemoryPlan, other: MemoryPlan, change: str) -> None:
    """Two plans side by side: their bars, and every figure that there is to compare."""
    for name, one in (("as given", plan), (change, other)):
        _say(console, name)
        console.print(bar(one, console.width))
    console.print()
    rows = (Row(cells=(name, *_sides(name, left, right))) for name, left, right in _compared(plan, other))
    console.print(text_table(table_of("", ("", ">as given", f">{change}", ">change"), rows)))
    for name, one in (("as given", plan), (change, other)):
        for advice in one.advice:
            _say(console, f"advice, {name}: {advice}")


def _compared(plan: MemoryPlan, other: MemoryPlan) -> list[tuple[str, float, float]]:
    mine, yours = ({line.name: line for line in one.lines} for one in (plan, other))
    rows: list[tuple[str, float, float]] = [
        ("tokens", plan.max_total_tokens, other.max_total_tokens),
        ("pages", plan.num_pages, other.num_pages),
        ("bytes a token", plan.cell_bytes, other.cell_bytes),
        ("static fraction", plan.static_fraction, other.static_fraction),
        ("stays free", plan.free_bytes, other.free_bytes),
    ]
    for name in dict.fromkeys([*mine, *yours]):
        line = mine.get(name) or yours[name]
        sizes = [side[name].num_bytes if name in side else 0 for side in (mine, yours)]
        if any(sizes) and not line.inside:
            rows.append((label(line), sizes[0], sizes[1]))
    return rows


def _sides(name: str, left: float, right: float) -> tuple[str, str, str]:
    change = f"{100 * (right - left) / left:+.1f} %" if left and left != right else ("" if left == right else "new")
    if name == "static fraction":
        return f"{left:.4g}", f"{right:.4g}", change
    if name in ("tokens", "pages", "bytes a token"):
        return f"{left:,.0f}", f"{right:,.0f}", change
    return shown(int(left)), shown(int(right)), change
