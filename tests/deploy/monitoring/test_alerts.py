"""Every alert: that it is right PromQL, about metrics that there are; that it fires when it should, with what it says, and not
when it should not (promtool); and that whoever is woken finds what it means (docs/runbooks.md)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from deploy.monitoring import ALERTS, RULES
from deploy.monitoring.rule_file import Alert, Severity, rules_yaml
from tests.deploy.monitoring.alert_cases import CASES, Case, Fires
from tests.deploy.monitoring.prometheus import program
from tests.deploy.monitoring.promql_check import DECLARED, faults, labels_of, parsed, selectors
from transfer.config import DecodeNodeConfig, PrefillNodeConfig, settings

RUNBOOKS: Final = Path(__file__).resolve().parents[3] / "docs" / "runbooks.md"
ALL: Final = [alert for group in ALERTS for alert in group.alerts]
BY_NAME: Final = {alert.name: alert for alert in ALL}
TOOL_S: Final = 60.0

each_alert = pytest.mark.parametrize("alert", ALL, ids=lambda alert: alert.name)


def entries_of(text: str) -> dict[str, dict[str, Any]]:
    """What Prometheus loads from such a file, by name."""
    return {rule["alert"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}


@cache
def entries() -> dict[str, dict[str, Any]]:
    """What the committed file has."""
    return entries_of(RULES.read_text(encoding="utf-8"))


def expected(case: Case, fires: Fires) -> dict[str, Any]:
    """An alert as promtool compares it: whole."""
    rule = entries()[case.alert]

    def filled(text: str) -> str:
        text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: fires.labels[found[1]], text)
        return re.sub(r"\{\{ \$value[^}]*\}\}", lambda _: fires.value, text)

    annotations = {name: filled(text) for name, text in rule["annotations"].items()}
    return {"exp_labels": {**fires.labels, **rule["labels"]}, "exp_annotations": annotations}


def promtool_test(folder: Path, rules: Path, cases: Sequence[Case]) -> subprocess.CompletedProcess[str]:
    """``promtool test rules`` of these cases."""
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
            "alert_rule_test": [
                {"eval_time": case.at, "alertname": case.alert, "exp_alerts": [expected(case, fires) for fires in case.fires]}
            ],
        }
        for case in cases
    ]
    file = folder / "test.yaml"
    page = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(page, sort_keys=False, width=1000), encoding="utf-8")
    return subprocess.run(
        [program("promtool"), "test", "rules", file], cwd=folder, capture_output=True, text=True, timeout=TOOL_S
    )


def test_the_committed_file_is_what_the_code_gives() -> None:
    assert RULES.read_text(encoding="utf-8") == rules_yaml(ALERTS), "run: make dashboards"


def test_there_is_no_other_file() -> None:
    assert list(RULES.parent.iterdir()) == [RULES]


def test_prometheus_takes_the_file() -> None:
    checked = subprocess.run([program("promtool"), "check", "rules", RULES], capture_output=True, text=True, timeout=TOOL_S)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALL)} rules found" in checked.stdout
    assert len(BY_NAME) == len(ALL)


def test_every_alert_fires_when_it_should_and_says_what(tmp_path: Path) -> None:
    """All cases in one run of promtool; it names those that are wrong."""
    done = promtool_test(tmp_path, RULES, CASES)
    assert done.returncode == 0, done.stdout + done.stderr


@each_alert
def test_an_alert_has_a_case_that_fires_and_one_that_does_not(alert: Alert) -> None:
    cases = [case for case in CASES if case.alert == alert.name]
    assert any(case.fires for case in cases) and any(not case.fires for case in cases)
    read = {selector.name for selector in selectors(alert.expr)}
    for case in cases:  # or it would be quiet for want of data
        assert {series.partition("{")[0] for series in case.series} >= read, case.what


def test_cases_are_of_alerts_that_there_are() -> None:
    assert {case.alert for case in CASES} == set(BY_NAME)


def test_cases_tell_right_from_wrong(tmp_path: Path) -> None:
    """With rules that never fire every case that fires is found wrong."""
    wrong = tmp_path / "wrong.yaml"
    rules = [rule | {"expr": "vector(0) > 1"} for rule in entries().values()]
    wrong.write_text(yaml.safe_dump({"groups": [{"name": "wrong", "rules": rules}]}), encoding="utf-8")
    loud = [case for case in CASES if case.fires]
    done = promtool_test(tmp_path, wrong, loud)
    found = re.findall(r"alertname:\s*(\w+)", done.stdout + done.stderr)
    assert set(found) == {case.alert for case in loud}, done.stdout + done.stderr


def test_cases_find_alerts_that_fire_too_soon(tmp_path: Path) -> None:
    """Without any ``for``, and on whatever data there is, every case that is quiet is found wrong."""
    hasty = {name: rule | {"expr": always(BY_NAME[name]), "for": "0m"} for name, rule in entries().items()}
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump({"groups": [{"name": "wrong", "rules": list(hasty.values())}]}), encoding="utf-8")
    quiet = [case for case in CASES if not case.fires]
    done = promtool_test(tmp_path, wrong, quiet)
    found = re.findall(r"alertname:\s*(\w+)", done.stdout + done.stderr)
    assert set(found) == {case.alert for case in quiet}, done.stdout + done.stderr


def always(alert: Alert) -> str:
    """An expression with the series of the alert's first metric, whatever their values are."""
    name = selectors(alert.expr)[0].name
    return f"last_over_time({name}[10m])"


@each_alert
def test_metrics_and_labels_are_declared(alert: Alert) -> None:
    assert faults(alert.expr) == []


@each_alert
def test_what_an_alert_says_is_there_to_be_said(alert: Alert) -> None:
    """Labels that the texts name are those of the series; what is measured is told, where it is a measure of something."""
    shown = labels_of(alert.expr)
    for text in (alert.summary, alert.description):
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= shown
    assert set(re.findall(r"\$labels\.(\w+)", alert.description)) & {"instance", "role"}, "where?"
    assert alert.summary.endswith(".") and "\n" not in alert.summary and len(alert.summary) < 140
    assert len(re.findall(r"[.:] |\.$", alert.description)) >= 2, "what is so, and what it means"
    compared = parsed(alert.expr)
    while str(getattr(compared, "op", "")) in ("and", "unless"):
        compared = compared.lhs
    by_state = type(compared).__name__ == "BinaryExpr" and str(compared.op) == "=="
    if not by_state and "absent" not in alert.expr:
        assert "$value" in alert.description


@each_alert
def test_settings_that_are_spoken_of_exist(alert: Alert) -> None:
    assert unknown_settings(alert.description) == set()


def unknown_settings(text: str) -> set[str]:
    known = {path for config in (PrefillNodeConfig, DecodeNodeConfig) for path, _ in settings(config)}
    sections = {path.partition(".")[0] for path in known if "." in path}
    return {name for name in re.findall(r"\b([a-z_]+(?:\.[a-z_]+)+)\b", text) if name.partition(".")[0] in sections} - known


def runbooks() -> dict[str, str]:
    """Text below each alert's heading."""
    parts = re.split(r"^### (Kvferry\w+)\n", RUNBOOKS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    assert list(runbooks()) == [alert.name for alert in ALL], "in the order of deploy/monitoring/alerts.py"


@each_alert
def test_a_runbook_says_what_it_means_how_to_look_and_what_to_do(alert: Alert) -> None:
    text = runbooks()[alert.name]
    assert re.findall(r"^\*\*(.*?)\.\*\*", text, re.MULTILINE) == ["Means", "Look", "Do"]
    after = "at once" if alert.lasts == "0m" else f"after {alert.lasts.removesuffix('m')} minute"
    assert text.splitlines()[1].startswith(f"Severity {alert.severity}, {after}")
    assert unknown_settings(re.sub(r"\]\(.*?\)", "]", text)) == set()
    known = {name.removesuffix("_bucket") for name in DECLARED}
    assert {re.sub(r"\{.*", "", name) for name in re.findall(r"`(kvferry_\w+)", text)} <= known


def test_links_lead_to_the_runbooks_wherever_they_are_kept() -> None:
    """GitHub's anchor of a heading of one word is that word in lower case."""
    elsewhere = entries_of(rules_yaml(ALERTS, runbooks_url="https://wiki.internal/kvferry"))
    for name in BY_NAME:
        assert entries()[name]["annotations"]["runbook_url"].endswith(f"/docs/runbooks.md#{name.lower()}")
        assert elsewhere[name]["annotations"]["runbook_url"] == f"https://wiki.internal/kvferry#{name.lower()}"


@pytest.mark.parametrize("name", ["KvferryX", "kvferryDown", "Kvferry_Down", "Down"])
def test_a_name_that_is_no_anchor_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        Alert(name=name, severity=Severity.WARNING, expr="up", lasts="1m", summary="s.", description="d.")


def test_a_duration_that_prometheus_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="lasts 90;"):
        Alert(name="KvferryDown", severity=Severity.WARNING, expr="up", lasts="90", summary="s.", description="d.")
