"""Dashboards as the JSON that Grafana 10.1 and newer imports; the only file that knows Grafana's SDK."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import inf
from typing import Final

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from deploy.monitoring.charts import Chart, Dashboard
from deploy.monitoring.promql import VARIABLES, selector

EVERY_NODE: Final = "kvferry_build_info"
"""A metric that each node has one series of: what the variables' values are looked up in."""

CHART_HEIGHT: Final = 8
NUMBER_HEIGHT: Final = 4
ALERTS: Final = selector("ALERTS", 'alertname=~"Kvferry.+", alertstate="firing"')
"""Of Prometheus: what fires on the nodes that are looked at. Marked on every graph."""

_GREEN, _YELLOW, _RED = "green", "yellow", "red"
_DATASOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")


def dashboard_json(dashboard: Dashboard) -> str:
    """The file to import: the same text for the same dashboard, with a line break at its end."""
    page = (
        builders.Dashboard(dashboard.title)
        .uid(f"kvferry-{dashboard.name}")
        .description(dashboard.description)
        .tags(["kvferry"])
        .editable()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone(common.TimeZoneBrowser)
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(builders.DatasourceVariable("datasource").label("data source").type("prometheus"))
    )
    for variable in _variables():
        page.with_variable(variable)
    page.annotation(_alerts()).link(_links())
    ids = count(1)
    for row in dashboard.rows:
        page.with_row(builders.Row(row.title).id(next(ids)))
        for chart in row.charts:
            page.with_panel(_panel(chart).id(next(ids)))
    return JSONEncoder(sort_keys=True, indent=2).encode(page.build()) + "\n"


def _variables() -> Iterator[builders.QueryVariable]:
    """Each offers what there is under those before it; at first, everything is shown."""
    for index, name in enumerate(VARIABLES):
        chosen = ", ".join(f'{before}=~"${before}"' for before in VARIABLES[:index])
        yield (
            builders.QueryVariable(name)
            .label(name)
            .datasource(_DATASOURCE)
            .query(f"label_values({EVERY_NODE}{{{chosen}}}, {name})" if chosen else f"label_values({EVERY_NODE}, {name})")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(VariableOption(selected=True, text="All", value="$__all"))
        )


def _alerts() -> builders.AnnotationQuery:
    return builders.AnnotationQuery().name("alerts").datasource(_DATASOURCE).expr(ALERTS).enable(True).icon_color(_RED)


def _links() -> builders.DashboardLink:
    """To all of kvferry's dashboards, with the variables and the time as they are."""
    return (
        builders.DashboardLink("kvferry")
        .type(DashboardLinkType.DASHBOARDS)
        .tags(["kvferry"])
        .as_dropdown(False)
        .include_vars(True)
        .keep_time(True)
    )


def _thresholds(chart: Chart) -> builders.ThresholdsConfig:
    """What is fine, doubtful and bad, from the lowest value up."""
    fine, bad = chart.fine, chart.bad
    steps = [(-inf, _GREEN)]
    if fine is not None and bad is not None:
        falls = bad < fine
        steps = [(-inf, _RED), (bad, _YELLOW), (fine, _GREEN)] if falls else [(-inf, _GREEN), (fine, _YELLOW), (bad, _RED)]
    found = [Threshold(value=None if value == -inf else value, color=colour) for value, colour in steps]
    return builders.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(found)


def _panel(chart: Chart) -> stat.Panel | timeseries.Panel:
    panel = _number(chart) if chart.is_number else _graph(chart)
    for index, line in enumerate(chart.lines):
        query = prometheus.Dataquery().expr(line.expr).legend_format(line.legend).ref_id(chr(ord("A") + index)).range()
        panel.with_target(query.datasource(_DATASOURCE))
    return panel


def _number(chart: Chart) -> stat.Panel:
    return (
        stat.Panel()
        .title(chart.title)
        .description(chart.description)
        .datasource(_DATASOURCE)
        .unit(chart.unit)
        .span(chart.columns)
        .height(NUMBER_HEIGHT)
        .thresholds(_thresholds(chart))
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.AREA)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _graph(chart: Chart) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(chart.title)
        .description(chart.description)
        .datasource(_DATASOURCE)
        .unit(chart.unit)
        .min(0)
        .span(chart.columns)
        .height(CHART_HEIGHT)
        .fill_opacity(30 if chart.is_stacked else 10)
        .legend(
            common_builders.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.BOTTOM)
            .calcs(["mean", "max", "lastNotNull"])
        )
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
    )
    if chart.is_stacked:
        panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    if chart.most is not None:
        panel.max(chart.most)
    if chart.bad is not None:
        dashed = common_builders.GraphThresholdsStyleConfig().mode(common.GraphTresholdsStyleMode.DASHED)
        panel.thresholds(_thresholds(chart)).thresholds_style(dashed)
    return panel
