"""Picture of goodput and times against offered load. Only this file loads matplotlib, and only for a picture."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.bench_serve.report import LoadReport
from transfer.errors import ConfigError


def check_picture(file: Path) -> None:
    """Check before a long run that `write_picture` can write the file.

    Raises:
        ConfigError: It cannot.
    """
    if file.suffix.lower() != ".png":
        raise ConfigError(f"--plot is {file}; its name must end in .png")
    if not os.path.isdir(file.parent):  # Path.is_dir raises OSError for a name that is too long
        raise ConfigError(f"--plot is {file}; the folder does not exist: {file.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install 'kvferry[plot]'") from None


def write_picture(report: LoadReport, file: Path) -> None:
    """Write three panels to a PNG file: goodput, TTFT and TPOT.

    Raises:
        ConfigError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ran = sorted(report.summaries, key=lambda one: one.offered_rate)
    offered = [one.offered_rate for one in ran]
    figure = Figure(figsize=(13, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    load, first, token = figure.subplots(1, 3)
    load.plot(offered, offered, color="0.8", linestyle="--", label="offered")
    load.plot(offered, [one.throughput for one in ran], color="#7a7a7a", marker="o", label="served a second, to the last token")
    load.plot(offered, [one.goodput for one in ran], color="#1f6f8b", marker="o", label="goodput")
    load.set_ylabel("requests a second")
    objectives = report.objectives
    for axes, name, spreads, objective_s in (
        (first, "time to first token, ms", [one.ttft_s for one in ran], objectives.ttft_s),
        (token, "time per output token, ms", [one.tpot_s for one in ran], objectives.tpot_s),
    ):
        for share, colour in (("p50", "#1f6f8b"), ("p90", "#e08e0b"), ("p99", "#b3261e")):
            axes.plot(offered, [getattr(spread, share) * 1e3 for spread in spreads], color=colour, marker="o", label=share)
        if objective_s is not None:
            axes.axhline(objective_s * 1e3, color="0.6", linestyle="--", label="objective")
        axes.set_ylabel(name)
    for axes in (load, first, token):
        axes.set_xlabel("offered load, requests a second")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(file, format="png", metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"--plot is {file}; it cannot be written: {error.strerror}") from error
