"""What a dashboard shows, as plain values: nothing here knows Grafana."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

FULL_WIDTH: Final = 24
"""Columns of Grafana's grid."""


class Unit(StrEnum):
    """Of a chart's axis; the values are Grafana's names, "suffix:" being what it writes behind a plain number."""

    SHARE = "percentunit"
    SECONDS = "s"
    BYTES = "bytes"
    BYTES_PER_S = "binBps"
    TOKENS_PER_S = "suffix: tokens/s"
    PAGES = "suffix: pages"
    PAGES_PER_S = "suffix: pages/s"
    REQUESTS = "suffix: requests"
    REQUESTS_PER_S = "suffix: requests/s"
    MESSAGES_PER_S = "suffix: messages/s"
    TIMES_PER_S = "suffix: /s"
    AT_A_TIME = "suffix: at a time"
    CIRCUITS = "suffix: circuits"
    GRANTS = "suffix: grants"
    LINKS = "suffix: links"
    NODES = "suffix: nodes"
    ALERTS = "suffix: alerts"
    NUMBER = "short"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One query of a chart, and how the series that it gives are called.

    Args:
        expr: PromQL, see `deploy.monitoring.promql`; it may hold the dashboard's variables.
        legend: Grafana's template, such as "{{tier}}".
    """

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A graph over time, or the newest values as numbers.

    Args:
        title: What is shown, without its unit.
        description: What a reader should conclude from it, and what to do then; Grafana shows it behind the title.
        unit: Of all its lines.
        lines: At least one.
        columns: Of the grid.
        is_stacked: Whether the lines are parts of a whole.
        most: Upper end of the axis, where there is one.
        is_number: Whether the newest values are shown as numbers, with a small graph behind them.
        fine: Where what is fine ends: beyond it, away from zero or towards it as `bad` is, a value is coloured as doubtful.
        bad: Where it is bad; both of them or none.
    """

    title: str
    description: str
    unit: Unit
    lines: tuple[Line, ...]
    columns: int = 8
    is_stacked: bool = False
    most: float | None = None
    is_number: bool = False
    fine: float | None = None
    bad: float | None = None

    def __post_init__(self) -> None:
        if (self.fine is None) != (self.bad is None) or (self.fine is not None and self.fine == self.bad):
            raise ValueError(f"chart {self.title} is fine to {self.fine} and bad from {self.bad}; it needs two values, or none")
        if not self.lines or not all(line.legend for line in self.lines):
            raise ValueError(f"chart {self.title} needs a line, and each of its lines a legend")
        if not 1 <= self.columns <= FULL_WIDTH:
            raise ValueError(f"chart {self.title} has {self.columns} columns; it must be 1 to {FULL_WIDTH}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Charts under a common title, from left to right.

    Args:
        title: The question that they answer.
        charts: As many as it takes; what does not fit the width goes on below.
    """

    title: str
    charts: tuple[Chart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A page of Grafana.

    Args:
        name: Of its file, and, behind "kvferry-", its uid: links to it last as long as the name.
        title: As people look for it.
        description: Whom it serves, and when to look.
        rows: From top to bottom, the most important first.
    """

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
