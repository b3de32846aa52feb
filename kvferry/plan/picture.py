"""A memory plan as a picture. matplotlib is loaded only here, and only when a picture is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvferry.plan.view import capacity, headline, segments
from planner.plan_values import MemoryPlan
from transfer.errors import ConfigError
from transfer.host_memory import shown

if TYPE_CHECKING:
    from matplotlib.artist import Artist

_MIN_SHARE_WITH_TEXT: Final = 0.06
_GIB: Final = 1 << 30


def write_picture(plans: Sequence[tuple[str, MemoryPlan]], file: Path) -> None:
    """Write one bar for each plan, named, to a PNG file.

    Raises:
        ConfigError: The file is called otherwise, matplotlib is not installed, or the file cannot be written.
    """
    if file.suffix.lower() not in ("", ".png"):
        raise ConfigError(f"--png is {file}; its name must end in .png, for that is what is written")
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
            patch = axes.barh(row, part.num_bytes / _GIB, left=begin / _GIB, color=part.colour, edgecolor="white", height=0.7)
            if part.num_bytes >= _MIN_SHARE_WITH_TEXT * plan.device_bytes:
                middle = (begin + part.num_bytes / 2) / _GIB
                axes.text(middle, row, f"{part.label}\n{shown(part.num_bytes)}", ha="center", va="center", fontsize=9)
            named.setdefault(part.label if len(plans) > 1 else f"{part.label}, {shown(part.num_bytes)}", patch[0])
            begin += part.num_bytes
    axes.set_yticks(range(len(plans)), [name for name, _ in plans])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, max(plan.device_bytes for _, plan in plans) / _GIB)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of the device")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title("\n".join((headline(plans[0][1]), *(capacity(plan) for _, plan in plans))), fontsize=10, loc="left")
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    try:
        figure.savefig(file, format="png", metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"--png is {file}; it cannot be written: {error.strerror}") from error
