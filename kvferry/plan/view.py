"""A memory plan as text: a bar, every line with its formula, two plans side by side; and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.text import Text

from kvferry.cli.text_bars import text_table
from kvferry.plan.device import Device
from node_runtime.view_cells import CellTable, Row, table_of
from planner.plan_inputs import GIB
from planner.plan_values import MemoryPlan, PlanLine
from transfer.errors import ConfigError
from transfer.host_memory import shown
from transfer.layer_groups import GroupKind

if TYPE_CHECKING:
    from matplotlib.artist import Artist

_LABELS: Final = {
    "in_use": "in use before",
    "page_tables": "page tables",
    "cuda_graphs": "CUDA graphs",
    "inductor": "torch.compile",
    "left": "left over",
}
"""Lines whose label is not their name."""

_MIN_SHARE_WITH_TEXT: Final = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class BarSegment:
    """A part of the bar: lines of one kind. Its letter marks it without colour."""

    letter: str
    label: str
    colour: str
    num_bytes: int


def segments(plan: MemoryPlan) -> list[BarSegment]:
    """Return the parts of the device in order, without empty ones."""
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
    """Return the label of a line."""
    if line.name.startswith("pool_"):
        return f"KV, {line.name.removeprefix('pool_').replace('_', ' ')}"
    return _LABELS.get(line.name, line.name)


def print_plan(console: Console, plan: MemoryPlan, device: Device) -> None:
    """Print the whole plan."""
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
    """Return the model and its parallel sizes in one line."""
    inputs = plan.inputs
    cut = f"tp {inputs.tp_size}" + (f", pp {inputs.pp_size} (stage {inputs.pp_rank})" if inputs.pp_size > 1 else "")
    cut += f", dp-attention over {inputs.dp_size}" if inputs.has_dp_attention else ""
    return f"{inputs.model.architecture}, {_counted(inputs.model.num_params)} parameters; {inputs.role} node, {cut}"


def _counted(number: int) -> str:
    """Return a number as ``27.4 billion`` or ``1.3 million``."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,}"


def capacity(plan: MemoryPlan) -> str:
    """Return the tokens and the pools in one line."""
    text = f"{plan.max_total_tokens:,} tokens: {plan.num_pages:,} pages of {plan.inputs.page_size}, {plan.cell_bytes:,} B a token"
    for group in plan.groups:
        if group.kind is GroupKind.STATE:
            text += f"; {group.num_pages:,} states of {group.cell_bytes:,} B"
        elif group.kind is GroupKind.WINDOW and len(plan.groups) > 1:
            text += f"; {group.num_pages:,} pages for windows, {group.cell_bytes:,} B a token"
    return text


def bar(plan: MemoryPlan, width: int) -> Text:
    """Return the device as a bar of `width` columns."""
    parts = segments(plan)
    columns = shares([part.num_bytes for part in parts], max(10, width - 2))
    text = Text("[")
    for part, count in zip(parts, columns, strict=True):
        text.append(part.letter * count, style=f"bold {part.colour}")
    return text.append("]")


def shares(sizes: Sequence[int], width: int) -> list[int]:
    """Distribute `width` columns by size; the largest remainders are rounded up."""
    total = sum(sizes)
    columns = [size * width // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda index: -(sizes[index] * width % total))
    for index in by_remainder[: width - sum(columns)]:
        columns[index] += 1
    return columns


def legend(plan: MemoryPlan) -> list[Text]:
    """Return letter, label and size of each part."""
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
    """Print two plans side by side: their bars and their numbers."""
    for name, one in (("as given", plan), (change, other)):
        _say(console, name)
        console.print(bar(one, console.width))
    console.print()
    console.print(text_table(table_of("", ("", ">as given", f">{change}", ">change"), _compared(plan, other))))
    for name, one in (("as given", plan), (change, other)):
        for advice in one.advice:
            _say(console, f"advice, {name}: {advice}")


def _compared(plan: MemoryPlan, other: MemoryPlan) -> Iterator[Row]:
    """Yield a row for each number of two plans: both values, and the change."""

    def row(name: str, left: float, right: float, text: Callable[[Any], str] = shown) -> Row:
        change = "" if left == right else f"{100 * (right - left) / left:+.1f} %" if left else "new"
        return Row(cells=(name, text(left), text(right), change))

    yield row("tokens", plan.max_total_tokens, other.max_total_tokens, "{:,}".format)
    yield row("pages", plan.num_pages, other.num_pages, "{:,}".format)
    yield row("bytes a token", plan.cell_bytes, other.cell_bytes, "{:,}".format)
    yield row("static fraction", plan.static_fraction, other.static_fraction, "{:.4g}".format)
    yield row("stays free", plan.free_bytes, other.free_bytes)
    mine, yours = ({line.name: line for line in one.lines} for one in (plan, other))
    for name in dict.fromkeys([*mine, *yours]):
        line = mine.get(name) or yours[name]
        left, right = (side[name].num_bytes if name in side else 0 for side in (mine, yours))
        if (left or right) and not line.inside:
            yield row(label(line), left, right)


def write_picture(plans: Sequence[tuple[str, MemoryPlan]], file: Path) -> None:
    """Write one bar for each named plan to a PNG file. Loads matplotlib only here.

    Raises:
        ConfigError: The name does not end in .png, matplotlib is not installed, or the file cannot be written.
    """
    if file.suffix.lower() not in ("", ".png"):
        raise ConfigError(f"--png is {file}; its name must end in .png")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--png needs matplotlib; pip install 'kvferry[plot]'") from None
    figure = Figure(figsize=(10, 1.7 + 0.8 * len(plans)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    named: dict[str, Artist] = {}
    for row, (_, plan) in enumerate(plans):
        begin = 0
        for part in segments(plan):
            patch = axes.barh(row, part.num_bytes / GIB, left=begin / GIB, color=part.colour, edgecolor="white", height=0.7)
            if part.num_bytes >= _MIN_SHARE_WITH_TEXT * plan.device_bytes:
                middle = (begin + part.num_bytes / 2) / GIB
                axes.text(middle, row, f"{part.label}\n{shown(part.num_bytes)}", ha="center", va="center", fontsize=9)
            named.setdefault(part.label if len(plans) > 1 else f"{part.label}, {shown(part.num_bytes)}", patch[0])
            begin += part.num_bytes
    axes.set_yticks(range(len(plans)), [name for name, _ in plans])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, max(plan.device_bytes for _, plan in plans) / GIB)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of the device")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title("\n".join((headline(plans[0][1]), *(capacity(plan) for _, plan in plans))), fontsize=10, loc="left")
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    try:
        figure.savefig(file, format="png", metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"--png is {file}; it cannot be written: {error.strerror}") from error
