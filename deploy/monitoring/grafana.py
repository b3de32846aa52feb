"""Dashboards as the JSON that Grafana 10.1 and newer imports; the only file that knows Grafana's SDK."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Final

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from deploy.monitoring.charts import Chart, Dashboard
from deploy.monitoring.promql import VARIABLES

EVERY_NODE: Final = "kvferry_build_info"
"""A metric that each node has one series of: what the variables' values are looked up in."""

CHART_HEIGHT: Final = 8
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


def _panel(chart: Chart) -> timeseries.Panel:
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
    for index, line in enumerate(chart.lines):
        query = prometheus.Dataquery().expr(line.expr).legend_format(line.legend).ref_id(chr(ord("A") + index)).range()
        panel.with_target(query.datasource(_DATASOURCE))
    return panel
