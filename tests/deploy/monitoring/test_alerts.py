"""Each alert reads existing metrics, fires only in its cases and with its texts, and has a runbook."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from deploy.monitoring import ALERTS, RULES
from deploy.monitoring.rule_file import Alert
from tests.deploy.monitoring.alert_cases import CASES, Case, Fires
from tests.deploy.monitoring.prometheus import program
from tests.deploy.monitoring.promql_check import DECLARED, faults, labels_of, parsed, selectors, unknown_settings

RUNBOOKS: Final = Path(__file__).resolve().parents[3] / "docs" / "runbooks.md"
BY_NAME: Final = {alert.name: alert for group in ALERTS for alert in group.alerts}
TOOL_S: Final = 60.0

each_alert = pytest.mark.parametrize("alert", BY_NAME.values(), ids=lambda alert: alert.name)


def entries_of(text: str) -> dict[str, dict[str, Any]]:
    """Return the rules of a rule file by name."""
    return {rule["alert"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}


@cache
def entries() -> dict[str, dict[str, Any]]:
    """Return the rules of the committed file by name."""
    return entries_of(RULES.read_text(encoding="utf-8"))


def expected(name: str, fires: Fires) -> dict[str, Any]:
    """Return the labels and annotations of an alert, as promtool compares them."""
    rule = entries()[name]

    def filled(text: str) -> str:
        text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: fires.labels[found[1]], text)
        return re.sub(r"\{\{ \$value[^}]*\}\}", lambda _: fires.value, text)

    annotations = {name: filled(text) for name, text in rule["annotations"].items()}
    return {"exp_labels": {**fires.labels, **rule["labels"]}, "exp_annotations": annotations}


def promtool_test(folder: Path, rules: Path, cases: list[tuple[str, Case]]) -> subprocess.CompletedProcess[str]:
    """Run ``promtool test rules`` with these cases."""
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
            "alert_rule_test": [
                {"eval_time": case.at, "alertname": name, "exp_alerts": [expected(name, fires) for fires in case.fires]}
            ],
        }
        for name, case in cases
    ]
    page = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}
    (folder / "test.yaml").write_text(yaml.safe_dump(page, sort_keys=False, width=1000), encoding="utf-8")
    command = [program("promtool"), "test", "rules", "test.yaml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TOOL_S)


def cases_that(*, fire: bool) -> list[tuple[str, Case]]:
    return [(name, case) for name, cases in CASES.items() for case in cases if bool(case.fires) is fire]


def test_prometheus_accepts_the_only_rule_file() -> None:
    assert list(RULES.parent.iterdir()) == [RULES]
    checked = subprocess.run([program("promtool"), "check", "rules", RULES], capture_output=True, text=True, timeout=TOOL_S)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(BY_NAME)} rules found" in checked.stdout


def test_every_case_has_the_expected_alerts_and_texts(tmp_path: Path) -> None:
    """One run of promtool checks all cases and names the failed ones."""
    done = promtool_test(tmp_path, RULES, cases_that(fire=True) + cases_that(fire=False))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    assert CASES.keys() == BY_NAME.keys()
    for name, cases in CASES.items():
        assert {bool(case.fires) for case in cases} == {True, False}, name
        read = {selector.name for selector in selectors(BY_NAME[name].expr)}
        for case in cases:  # without data, no alert fires
            assert {series.partition("{")[0] for series in case.series} >= read, case.what


@each_alert
def test_an_alert_names_declared_metrics_labels_and_settings(alert: Alert) -> None:
    """The texts name labels of the series, and the description contains the measured value."""
    assert faults(alert.expr) == []
    shown = labels_of(alert.expr)
    for text in (alert.summary, alert.description):
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= shown
    assert set(re.findall(r"\$labels\.(\w+)", alert.description)) & {"instance", "role"}, "the description names no node or tier"
    compared = parsed(alert.expr)
    while str(getattr(compared, "op", "")) in ("and", "unless"):
        compared = compared.lhs
    by_state = type(compared).__name__ == "BinaryExpr" and str(compared.op) == "=="
    assert by_state or "absent" in alert.expr or "$value" in alert.description
    assert unknown_settings(alert.description) == set()


def test_every_alert_has_a_runbook_with_its_severity_and_all_parts() -> None:
    parts = re.split(r"^### (Kvferry\w+)\n", RUNBOOKS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    runbooks = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(runbooks) == list(BY_NAME), "runbooks and deploy/monitoring/alerts.py differ in names or order"
    known = {name.removesuffix("_bucket") for name in DECLARED}
    for name, text in runbooks.items():
        alert = BY_NAME[name]
        assert re.findall(r"^\*\*(.*?)\.\*\*", text, re.MULTILINE) == ["Look", "Do"], name
        assert text.startswith(f"\n{alert.severity.capitalize()}."), name
        assert unknown_settings(re.sub(r"\]\(.*?\)", "]", text)) == set(), name
        assert set(re.findall(r"`(kvferry_\w+)", text)) <= known, name
