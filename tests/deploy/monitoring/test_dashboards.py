"""Dashboards name metrics, labels and settings that exist, and are pages that Grafana can show."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pytest

from deploy.monitoring import DASHBOARDS, FOLDER
from deploy.monitoring.charts import FULL_WIDTH, Chart, Dashboard, Line, Unit
from deploy.monitoring.grafana import EVERY_NODE, dashboard_json
from deploy.monitoring.overview import OVERVIEW
from deploy.monitoring.promql import VARIABLES, over, per_second, quantile, selector
from tests.deploy.monitoring.promql_check import faults, parsed, unknown_settings

CHARTS: Final = [chart for dashboard in DASHBOARDS for row in dashboard.rows for chart in row.charts]

each_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)


def test_the_page_for_operators_lists_all_of_them() -> None:
    page = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    assert {file.name for file in FOLDER.iterdir()} == {f"{dashboard.name}.json" for dashboard in DASHBOARDS}
    listed = re.findall(r"^\| \[\w+\.json\]\((.*?)\) \| (.*?) \|", page, re.MULTILINE)
    assert listed == [(f"monitoring/dashboards/{dashboard.name}.json", dashboard.title) for dashboard in DASHBOARDS]


@each_dashboard
def test_what_grafana_needs_of_a_page(dashboard: Dashboard) -> None:
    """No two panels lie over each other or have the same id; each asks the data source that is chosen."""
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


@each_dashboard
def test_dashboards_lead_to_each_other_and_show_alerts(dashboard: Dashboard) -> None:
    page = json.loads(dashboard_json(dashboard))
    (link,) = page["links"]
    assert (link["type"], link["tags"], link["includeVars"], link["keepTime"]) == ("dashboards", ["kvferry"], True, True)
    assert page["tags"] == ["kvferry"]
    (marked,) = page["annotations"]["list"]
    assert marked["enable"] and marked["datasource"]["uid"] == "${datasource}"
    assert faults(marked["expr"]) == [] and 'alertstate="firing"' in marked["expr"]
    assert all(f'{name}=~"${name}"' in marked["expr"] for name in VARIABLES)


def test_what_is_bad_is_coloured_from_the_right_side() -> None:
    """Of a share of the probe, low is bad; of failures, high is."""
    panels = {panel["title"]: panel for panel in json.loads(dashboard_json(OVERVIEW))["panels"]}

    def steps(title: str) -> list[tuple[float | None, str]]:
        return [(step["value"], step["color"]) for step in panels[title]["fieldConfig"]["defaults"]["thresholds"]["steps"]]

    assert steps("Speed of the links, of their probes") == [(None, "red"), (0.2, "yellow"), (0.5, "green")]
    assert steps("Requests failed or refused") == [(None, "green"), (0.001, "yellow"), (0.05, "red")]
    assert panels["Speed while busy, of the probe"]["fieldConfig"]["defaults"]["custom"]["thresholdsStyle"] == {"mode": "dashed"}
    assert (panels["KV moved"]["type"], panels["Tokens"]["type"]) == ("stat", "timeseries")


def test_charts_name_declared_metrics_labels_and_settings_and_legends_tell_their_series_apart() -> None:
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
    """Labels that tell the series of a line apart."""
    node: Any = parsed(expr)
    while type(node).__name__ != "AggregateExpr":
        node = node.lhs if type(node).__name__ == "BinaryExpr" else node.args[-1]
    return tuple(label for label in (node.modifier.labels if node.modifier else ()) if label != "le")


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        (selector("kvferry_host_pages"), ""),
        (per_second("kvferry_offload_stalls_total", "instance"), ""),
        (quantile(0.5, "kvferry_store_seconds", "op"), ""),
        (per_second("kvferry_offload_stalls", "instance"), "kvferry_offload_stalls is no metric"),
        (per_second("kvferry_store_seconds", "op"), "kvferry_store_seconds is no metric"),
        (per_second("kvferry_host_pages"), "kvferry_host_pages is a gauge, and read as a counter"),
        (selector("kvferry_offload_stalls_total"), "kvferry_offload_stalls_total is a counter, and read as a gauge"),
        (selector("kvferry_host_pages", 'tier="host"'), "kvferry_host_pages has no label tier"),
        (per_second("kvferry_store_bytes_total", "rank"), "there is no label rank to group by"),  # leaders have none
        (over(per_second("kvferry_writes_total", "rank"), per_second("kvferry_writes_total", "rank")), ""),
        (over(per_second("kvferry_writes_total", "rank"), per_second("kvferry_writes_total", "instance")), "sides differ"),
        ('absent(kvferry_build_info{role="decode"}) or kvferry_build_info', ""),
        ("kvferry_certificate_stale - time() > 5", ""),
        ("kvferry_host_pages * on (role, rank) kvferry_host_pages", "one side has no label rank"),
        ("increase(kvferry_rank_restarts[5m]) > 0", "kvferry_rank_restarts is a gauge, and read as a counter"),
        ("delta(kvferry_writes_total[5m]) > 0", "kvferry_writes_total is a counter, and read as a gauge"),
        (
            f"sum by (group, state) ({selector('kvferry_host_pages')}) / sum by (group) ({selector('kvferry_host_pages')})",
            "sides differ",
        ),
    ],
)
def test_the_check_tells_right_from_wrong(expr: str, fault: str) -> None:
    found = faults(expr)
    assert (not found) if not fault else any(one.startswith(fault) for one in found), found


def test_a_chart_without_legend_or_room_is_refused() -> None:
    for legend, options, says in (
        ("", {}, "legend"),
        ("l", {"fine": 1}, "two values, or none"),
        ("l", {"columns": 25}, "columns"),
    ):
        with pytest.raises(ValueError, match=says):
            Chart(title="t", description="d", unit=Unit.SECONDS, lines=(Line(expr="vector(1)", legend=legend),), **options)
