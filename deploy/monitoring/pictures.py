"""``python -m deploy.monitoring.pictures``: rows of the dashboards as pictures, of what a Prometheus has collected.

For reports and for the documentation: the same queries as Grafana's, drawn by matplotlib, with no Grafana.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from deploy.monitoring import DASHBOARDS
from deploy.monitoring.charts import FULL_WIDTH, Chart, Row, Unit
from deploy.monitoring.promql import VARIABLES

MAIN: Final = {
    "overview-speed": ("overview", "Does KV move at the speed of the link?"),
    "overview-bottleneck": ("overview", "Who is the bottleneck?"),
    "overview-users": ("overview", "User latency and requests"),
    "link-speed": ("link", "Speed"),
    "memory-rings": ("memory", "Rings and their watermarks"),
}
"""What is drawn unless rows are chosen: names of pictures, and of each the dashboard and its row's title."""

MAX_LEGEND: Final = 8
"""Series of a chart that are named; of more, the highest are."""

_ANSWER_S: Final = 30.0
_POINTS: Final = 240
_CHART_INCHES: Final = 2.7  # without its legend
_LEGEND_INCHES: Final = 0.15  # for each line of names
_NAME_CHARACTERS: Final = 4  # for each column of a chart: characters of a name that fit in half of its legend
_FULL_INCHES: Final = 16.0
_LEVELS: Final = 5
_COLOURS: Final = ("#336699", "#ff9900", "#cc3333", "#339933", "#663399", "#666666", "#cc3399", "#003366")
"""Such as `_LEVELS` leaves as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a graph; where Prometheus has no value, there is a gap.

    Args:
        name: As the legend has it.
        times_s: Unix times.
        values: At those times.
    """

    name: str
    times_s: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is looked at, as it is chosen at the top of a dashboard.

    Args:
        url: Of Prometheus.
        begin_s, end_s: Unix times.
        rate_interval: What Grafana would put in for ``$__rate_interval``: four times the scrape interval.
        chosen: Regular expressions by variable; without one, everything is shown.
    """

    url: str
    begin_s: float
    end_s: float
    rate_interval: str
    chosen: dict[str, str]

    def asked(self, expr: str) -> str:
        """An expression without variables."""
        expr = expr.replace("$__rate_interval", self.rate_interval)
        for name in VARIABLES:
            expr = expr.replace(f"${name}", self.chosen.get(name, ".*"))
        return expr

    def series(self, chart: Chart) -> Iterator[Series]:
        """What the chart's lines give, by legend.

        Raises:
            OSError: Prometheus does not answer, or refuses the query; the message says why.
        """
        step_s = max(1.0, (self.end_s - self.begin_s) / _POINTS)
        for line in chart.lines:
            query = {"query": self.asked(line.expr), "start": self.begin_s, "end": self.end_s, "step": step_s}
            found = _answer(f"{self.url.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(query)}")
            for one in sorted(found["data"]["result"], key=lambda one: str(sorted(one["metric"].items()))):
                yield _with_gaps(
                    _filled(line.legend, one["metric"]), [(float(at), float(value)) for at, value in one["values"]], step_s
                )


def _filled(legend: str, labels: Mapping[str, str]) -> str:
    """A legend with the labels of a series."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)


def _answer(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise OSError(f"Prometheus refuses the query: {error.read().decode(errors='replace')}") from error


def _with_gaps(name: str, points: Sequence[tuple[float, float]], step_s: float) -> Series:
    """A gap where a step is missing: a line through it would show what nobody has seen."""
    times_s: list[float] = []
    values: list[float] = []
    for at_s, value in points:
        if times_s and at_s - times_s[-1] > 1.5 * step_s:
            times_s.append(at_s)
            values.append(math.nan)
        times_s.append(at_s)
        values.append(value)
    return Series(name=name, times_s=tuple(times_s), values=tuple(values))


def named_by(legends: Sequence[str]) -> dict[str, str]:
    """Short names for the addresses in legends, for a picture is read without knowing them: node 1, node 2.

    Args:
        legends: Of all charts of a picture, so that a node is called the same in each.
    """
    addresses = sorted({address for legend in legends for address in re.findall(r"[\w.-]+:\d+", legend)})
    return {address: f"node {index}" for index, address in enumerate(addresses, start=1)}


def shown(unit: Unit) -> Callable[[float, object], str]:
    """How an axis writes its values."""

    def text(value: float, _: object = None) -> str:
        match unit:
            case Unit.SHARE:
                return f"{100 * value:.3g} %"
            case Unit.SECONDS:
                return _scaled(value, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))
            case Unit.BYTES | Unit.BYTES_PER_S:
                sizes = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
                return _scaled(value, sizes) + ("/s" if unit is Unit.BYTES_PER_S else "")
            case _:
                return f"{value:.4g}"

    return text


def _scaled(value: float, sizes: Sequence[tuple[str, float]]) -> str:
    for name, size in sizes:
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value / sizes[-1][1]:.3g} {sizes[-1][0]}"


def draw(row: Row, view: View, file: Path) -> None:
    """Write the charts of a row, as wide as on the dashboard, to a PNG file.

    Raises:
        OSError: Prometheus does not answer, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.image import imread, imsave

    found = {chart.title: list(view.series(chart)) for chart in row.charts}
    nodes = named_by([series.name for many in found.values() for series in many])
    seen = {title: _seen(many, nodes) for title, many in found.items()}
    lines = list(_lines(row.charts))
    heights = [_CHART_INCHES + _LEGEND_INCHES * max(_legend_lines(chart, seen[chart.title]) for chart in line) for line in lines]
    figure = Figure(figsize=(_FULL_INCHES, sum(heights)), dpi=75, layout="constrained")
    FigureCanvasAgg(figure)
    # One figure per line: in a common grid, charts of different lines that end in different columns collapse.
    for line, part in zip(lines, figure.subfigures(len(lines), 1, squeeze=False, height_ratios=heights)[:, 0], strict=True):
        grid, left = part.add_gridspec(1, FULL_WIDTH), 0
        for chart in line:
            _draw_chart(part.add_subplot(grid[0, left : left + chart.columns]), chart, seen[chart.title], view)
            left += chart.columns
    figure.draw_without_rendering()  # ticks depend on heights, and the space for their labels depends on the ticks
    with BytesIO() as drawn:
        figure.savefig(drawn, format="png")
        drawn.seek(0)
        pixels = imread(drawn)[..., :3]
    few_colours = (pixels * _LEVELS).round() / _LEVELS  # a third of the bytes, and nobody sees it
    imsave(file, few_colours, format="png", pil_kwargs={"optimize": True})


def _lines(charts: Sequence[Chart]) -> Iterator[list[Chart]]:
    """Return the charts of each line, from left to right."""
    line: list[Chart] = []
    for chart in charts:
        if sum(one.columns for one in line) + chart.columns > FULL_WIDTH:
            yield line
            line = []
        line.append(chart)
    yield line


def _seen(found: Sequence[Series], nodes: Mapping[str, str]) -> list[Series]:
    """Return the series to draw, with short names. Series that are always zero are left out if others are not."""
    seen = [series for series in found if _highest(series) > 0] or found[:MAX_LEGEND]
    return [replace(one, name=re.sub(r"[\w.-]+:\d+", lambda address: nodes[address[0]], one.name)) for one in seen]


def _legend_columns(chart: Chart, seen: Sequence[Series]) -> int:
    """Return 2 if names fit beside each other, otherwise 1."""
    return 2 if max((len(series.name) for series in seen), default=0) <= _NAME_CHARACTERS * chart.columns else 1


def _legend_lines(chart: Chart, seen: Sequence[Series]) -> int:
    return math.ceil(min(len(seen), MAX_LEGEND + 1) / _legend_columns(chart, seen))


def _draw_chart(axes: Any, chart: Chart, found: Sequence[Series], view: View) -> None:
    from matplotlib.ticker import MultipleLocator

    named = sorted(found, key=_highest, reverse=True)[:MAX_LEGEND]
    if chart.is_stacked and found:
        times_s = sorted({at for series in found for at in series.times_s})
        values = [dict(zip(series.times_s, series.values, strict=True)) for series in found]
        axes.stackplot(
            [at - view.begin_s for at in times_s],
            [[_or_zero(one.get(at, 0.0)) for at in times_s] for one in values],
            labels=[series.name if series in named else "" for series in found],
            colors=_COLOURS,
            alpha=0.8,
        )
    for index, series in enumerate([] if chart.is_stacked else found):
        axes.plot(
            [at - view.begin_s for at in series.times_s],
            series.values,
            color=_COLOURS[index % len(_COLOURS)],
            linestyle="-" if index < len(_COLOURS) else "--",
            linewidth=1.3,
            label=series.name if series in named else "",
        )
    highest = max((_highest(series) for series in found), default=0.0)
    for value in (chart.fine, chart.bad):
        if value is not None and value <= max(2 * highest, 1.0 if chart.unit is Unit.SHARE else 0.0):
            axes.axhline(value, color="#cc3333" if value == chart.bad else "#ff9900", linestyle=":", linewidth=1)
    axes.set_title(chart.title + ("" if not chart.unit.startswith("suffix:") else f" ({chart.unit.removeprefix('suffix: ')})"))
    axes.title.set_fontsize(10)
    axes.yaxis.set_major_formatter(shown(chart.unit))
    if chart.unit in (Unit.BYTES, Unit.BYTES_PER_S) and highest > 0:
        axes.yaxis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2(highest / 5))))
    axes.set_xlim(0, view.end_s - view.begin_s)
    axes.set_ylim(bottom=0, top=max(chart.most, highest) * 1.02 if chart.most is not None else None)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("seconds", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#cccccc", linewidth=0.6)
    if not found:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="0.5")
    else:
        if len(found) > len(named):
            axes.plot([], [], linestyle="", label=f"and {len(found) - len(named)} more")
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=_legend_columns(chart, found), frameon=False, fontsize=7)


def _highest(series: Series) -> float:
    return max((value for value in series.values if math.isfinite(value)), default=0.0)


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def row_of(dashboard: str, title: str) -> Row:
    """A row of a dashboard.

    Raises:
        ValueError: There is none; the message names those that there are.
    """
    rows = {(one.name, row.title): row for one in DASHBOARDS for row in one.rows}
    if (dashboard, title) not in rows:
        raise ValueError(f"no row {title} on {dashboard}; there are {', '.join(f'{name}: {row}' for name, row in rows)}")
    return rows[(dashboard, title)]


def _pictures(dashboards: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Names of files, and what is drawn into them."""
    if not dashboards:
        for name, (dashboard, title) in MAIN.items():
            yield name, row_of(dashboard, title)
    for page in DASHBOARDS:
        if page.name in dashboards:
            yield from ((f"{page.name}-{index}", row) for index, row in enumerate(page.rows, start=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 when every picture is written."""
    parser = argparse.ArgumentParser(prog="python -m deploy.monitoring.pictures", description=__doc__)
    parser.add_argument("--prometheus", metavar="URL", default="http://127.0.0.1:9090", help="default: %(default)s")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the PNG files go")
    parser.add_argument("--last", metavar="SECONDS", type=float, default=3600.0, help="default: %(default)g")
    parser.add_argument("--end", metavar="TIME", type=float, help="Unix time at which the pictures end (default: now)")
    parser.add_argument("--rate-interval", default="1m", help="four times the scrape interval (default: %(default)s)")
    parser.add_argument(
        "--dashboard", action="append", default=[], choices=[one.name for one in DASHBOARDS], help="all of its rows; repeatable"
    )
    for name in VARIABLES:
        parser.add_argument(f"--{name}", metavar="REGEX", default=".*", help="default: all")
    given = parser.parse_args(arguments)
    if given.last <= 0:
        parser.error(f"--last is {given.last:g}; it must be above 0")
    end_s = given.end if given.end is not None else time.time()
    view = View(
        url=given.prometheus,
        begin_s=end_s - given.last,
        end_s=end_s,
        rate_interval=given.rate_interval,
        chosen={name: getattr(given, name) for name in VARIABLES},
    )
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        for name, row in _pictures(given.dashboard):
            file = given.out / f"dashboard-{name}.png"
            draw(row, view, file)
            print(file)
    except OSError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
