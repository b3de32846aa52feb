"""Dashboards name existing metrics, labels and settings, and are valid for Grafana."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pytest

from deploy.monitoring import DASHBOARDS, FOLDER
from deploy.monitoring.charts import FULL_WIDTH, Dashboard
from deploy.monitoring.grafana import EVERY_NODE, dashboard_json
from deploy.monitoring.promql import VARIABLES, over, per_second, selector
from tests.deploy.monitoring.promql_check import faults, parsed, unknown_settings

CHARTS: Final = [chart for dashboard in DASHBOARDS for row in dashboard.rows for chart in row.charts]

each_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)


def test_the_deploy_readme_lists_every_dashboard() -> None:
    page = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    assert {file.name for file in FOLDER.iterdir()} == {f"{dashboard.name}.json" for dashboard in DASHBOARDS}
    listed = re.findall(r"^\| \[\w+\.json\]\((.*?)\) \| ([^;|]*?)(?:;.*)? \|", page, re.MULTILINE)
    assert listed == [(f"monitoring/dashboards/{dashboard.name}.json", dashboard.title) for dashboard in DASHBOARDS]


@each_dashboard
def test_panels_have_unique_places_and_use_the_selected_data_source(dashboard: Dashboard) -> None:
    """Panels do not overlap or share ids, and each panel queries the selected data source."""
    page = json.loads(dashboard_json(dashboard))
    assert page["uid"] == f"kvferry-{dashboard.name}" and page["title"] and page["schemaVersion"]
    variables = {variable["name"]: variable for variable in page["templating"]["list"]}
    assert list(variables) == ["datasource", *VARIABLES]
    assert all(variables[name]["query"].startswith(f"label_values({EVERY_NODE}") for name in VARIABLES)
    panels = page["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < FULL_WIDTH
    for panel in (panel for panel in panels if panel["type"] != "row"):
        assert [target["datasource"]["uid"] for target in panel["targets"]] == ["${datasource}"] * len(panel["targets"])


def test_charts_name_declared_metrics_labels_and_settings_and_legends_distinguish_series() -> None:
    for dashboard in DASHBOARDS:
        titles = [chart.title for row in dashboard.rows for chart in row.charts]
        assert len(set(titles)) == len(titles)
    for chart in CHARTS:
        assert chart.description.endswith("."), chart.title
        assert unknown_settings(chart.description) == set(), chart.title
        for line in chart.lines:
            assert set(re.findall(r"\{\{(\w+)\}\}", line.legend)) == set(_labels_shown(line.expr)), f"{line.legend}: {line.expr}"
    found = {line.expr: faults(line.expr) for chart in CHARTS for line in chart.lines}
    assert {expr: wrong for expr, wrong in found.items() if wrong} == {}


def _labels_shown(expr: str) -> tuple[str, ...]:
    """Return the labels that distinguish the series of a line."""
    node: Any = parsed(expr)
    while type(node).__name__ != "AggregateExpr":
        node = node.lhs if type(node).__name__ == "BinaryExpr" else node.args[-1]
    return tuple(label for label in (node.modifier.labels if node.modifier else ()) if label != "le")


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        (selector("kvferry_host_pages"), ""),
        (per_second("kvferry_offload_stalls_total", "instance"), ""),
        (per_second("kvferry_offload_stalls", "instance"), "kvferry_offload_stalls is not a metric"),
        (per_second("kvferry_host_pages"), "kvferry_host_pages is a gauge, but is read as a counter"),
        (selector("kvferry_host_pages", 'tier="host"'), "kvferry_host_pages has no label tier"),
        (per_second("kvferry_store_bytes_total", "rank"), "no label rank to group by"),  # series of leaders have no rank
        (over(per_second("kvferry_writes_total", "rank"), per_second("kvferry_writes_total", "instance")), "sides differ"),
    ],
)
def test_the_check_accepts_valid_and_reports_invalid_expressions(expr: str, fault: str) -> None:
    found = faults(expr)
    assert (not found) if not fault else any(one.startswith(fault) for one in found), found
