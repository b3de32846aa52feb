"""The dashboards are what the code gives, and speak of metrics and settings that there are: names, labels, how each is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import promql_parser
import pytest
from grafana_foundation_sdk.models import units

from deploy.monitoring import DASHBOARDS, FOLDER
from deploy.monitoring.charts import FULL_WIDTH, Chart, Dashboard, Line, Unit
from deploy.monitoring.grafana import EVERY_NODE, dashboard_json
from deploy.monitoring.promql import VARIABLES, per_second, quantile, selector
from transfer.config import DecodeNodeConfig, PrefillNodeConfig, settings
from transfer.metrics import NODE_METRICS, RANK_METRICS, MetricSpec

OF_THE_SCRAPE: Final = {"job", "instance"}
OF_EVERY_METRIC: Final = {"role"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A metric as nodes show it: one name of its samples, how it is read, and its labels."""

    kind: str
    labels: frozenset[str]


def shown_names(spec: MetricSpec) -> Iterator[tuple[str, str, set[str]]]:
    match spec.kind:
        case "counter":
            yield f"{spec.name}_total", "counter", set()
        case "histogram":
            yield f"{spec.name}_bucket", "counter", {"le"}
            yield f"{spec.name}_sum", "counter", set()
            yield f"{spec.name}_count", "counter", set()
        case _:
            yield spec.name, "gauge", set()


def declared() -> dict[str, Shown]:
    """What leaders and ranks show, by name; ranks' series have the label ``rank``."""
    found: dict[str, Shown] = {}
    for specs, own in ((RANK_METRICS, {"rank"}), (NODE_METRICS, set[str]())):
        for spec in specs:
            for name, kind, more in shown_names(spec):
                labels = OF_THE_SCRAPE | OF_EVERY_METRIC | own | more | set(spec.labels)
                if name in found:  # what leaders and ranks both show can be read by what both have
                    labels &= found[name].labels
                found[name] = Shown(kind=kind, labels=frozenset(labels))
    return found


DECLARED: Final = declared()


def parsed(expr: str) -> promql_parser.Expr:
    """As Grafana sends it; the parser knows no variables."""
    return promql_parser.parse(expr.replace("$__rate_interval", "1m"))


def faults(expr: str) -> list[str]:
    """What an expression gets wrong about the metrics that are declared; one line each."""
    wrong: list[str] = []

    def labels_of(node: Any) -> frozenset[str]:
        """Labels of what a part of the expression gives, once everything below it has been looked at."""
        match type(node).__name__:
            case "VectorSelector":
                return of_selector(node, "gauge")
            case "MatrixSelector":
                return of_selector(node.vector_selector, "counter")
            case "Call":
                found = [labels_of(argument) for argument in node.args if type(argument).__name__ != "NumberLiteral"]
                return frozenset[str]().union(*found) - ({"le"} if node.func.name == "histogram_quantile" else set())
            case "AggregateExpr":
                return grouped(node, labels_of(node.expr))
            case "BinaryExpr":
                return matched(node, labels_of(node.lhs), labels_of(node.rhs))
            case "ParenExpr":
                return labels_of(node.expr)
            case "NumberLiteral":
                return frozenset()
            case other:
                raise AssertionError(f"{other} in {expr}: teach this test to read it")

    def of_selector(node: Any, kind: str) -> frozenset[str]:
        shown = DECLARED.get(node.name)
        if shown is None:
            wrong.append(f"{node.name} is no metric")
            return frozenset()
        if shown.kind != kind:
            wrong.append(f"{node.name} is a {shown.kind}, and read as a {kind}")
        for matcher in node.matchers.matchers:
            if matcher.name not in shown.labels:
                wrong.append(f"{node.name} has no label {matcher.name}")
        return shown.labels

    def grouped(node: Any, labels: frozenset[str]) -> frozenset[str]:
        by = frozenset(node.modifier.labels) if node.modifier is not None else frozenset[str]()
        wrong.extend(f"there is no label {label} to group by in {node.prettify()}" for label in sorted(by - labels))
        return by

    def matched(node: Any, left: frozenset[str], right: frozenset[str]) -> frozenset[str]:
        ignored = frozenset(node.modifier.matching.labels) if node.modifier and node.modifier.matching else frozenset[str]()
        if left - ignored != right - ignored:
            wrong.append(f"sides differ by {sorted((left - ignored) ^ (right - ignored))} in {node.prettify()}")
        return left

    labels_of(parsed(expr))
    return wrong


CHARTS: Final = [
    pytest.param(chart, id=f"{dashboard.name}: {chart.title}")
    for dashboard in DASHBOARDS
    for row in dashboard.rows
    for chart in row.charts
]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_the_committed_file_is_what_the_code_gives(dashboard: Dashboard) -> None:
    file = FOLDER / f"{dashboard.name}.json"
    assert file.read_text(encoding="utf-8") == dashboard_json(dashboard), "run: make dashboards"


def test_there_is_no_other_file() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {f"{dashboard.name}.json" for dashboard in DASHBOARDS}


def test_the_page_for_operators_lists_all_of_them() -> None:
    page = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[\w+\.json\]\((.*?)\) \| (.*?) \|", page, re.MULTILINE)
    assert listed == [(f"monitoring/dashboards/{dashboard.name}.json", dashboard.title) for dashboard in DASHBOARDS]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
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


def test_titles_are_told_apart() -> None:
    for dashboard in DASHBOARDS:
        titles = [chart.title for row in dashboard.rows for chart in row.charts]
        assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("chart", CHARTS)
def test_a_chart_tells_its_reader_what_to_do(chart: Chart) -> None:
    """A description says what is shown, and what to conclude: two sentences at least."""
    assert len(re.findall(r"[.:] |\.$", chart.description)) >= 2 and chart.description.endswith(".")
    for line in chart.lines:
        named = set(re.findall(r"\{\{(\w+)\}\}", line.legend))
        assert named == set(_labels_shown(line.expr)), f"{line.legend}: the series of {line.expr}"


def _labels_shown(expr: str) -> tuple[str, ...]:
    """Labels that tell the series of a line apart."""
    node: Any = parsed(expr)
    while type(node).__name__ != "AggregateExpr":
        node = node.lhs if type(node).__name__ == "BinaryExpr" else node.args[-1]
    return tuple(label for label in (node.modifier.labels if node.modifier else ()) if label != "le")


@pytest.mark.parametrize("chart", CHARTS)
def test_metrics_and_labels_are_declared(chart: Chart) -> None:
    found = {line.expr: faults(line.expr) for line in chart.lines}
    assert not any(found.values()), found


@pytest.mark.parametrize("chart", CHARTS)
def test_settings_that_are_spoken_of_exist(chart: Chart) -> None:
    known = {path for config in (PrefillNodeConfig, DecodeNodeConfig) for path, _ in settings(config)}
    sections = {path.partition(".")[0] for path in known if "." in path}
    spoken = {name for name in re.findall(r"\b([a-z_]+\.[a-z_]+)\b", chart.description) if name.partition(".")[0] in sections}
    assert spoken <= known


def test_units_are_grafanas() -> None:
    known = {value for name, value in vars(units).items() if isinstance(value, str) and not name.startswith("_")}
    assert {unit for unit in Unit if not unit.startswith("suffix:")} <= known


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
    line = Line(expr="vector(1)", legend="")
    with pytest.raises(ValueError, match="legend"):
        Chart(title="t", description="d", unit=Unit.SECONDS, lines=(line,))
    with pytest.raises(ValueError, match="columns"):
        Chart(title="t", description="d", unit=Unit.SECONDS, lines=(Line(expr="vector(1)", legend="l"),), columns=25)
