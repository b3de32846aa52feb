"""Declarations of metrics are complete, and the queries of docs/metrics.md name existing metrics and labels."""

from __future__ import annotations

import re

from docs.counterparts import SGLANG, VLLM
from docs.metrics_page import QUERIES, SECTIONS
from transfer.metrics import NODE_METRICS, RANK_METRICS, STORE_METRICS
from transfer.metrics.specs import ROLES, STORE_OUTCOMES
from transfer.storage.base import Outcome

SPECS = {spec.shown_name: spec for spec in (*RANK_METRICS, *NODE_METRICS)}
SHOWN = {
    name + suffix: spec
    for name, spec in SPECS.items()
    for suffix in (("_bucket", "_sum", "_count", "") if spec.kind == "histogram" else ("",))
}


def test_every_metric_is_in_one_section() -> None:
    listed = [spec.name for _, _, specs in SECTIONS for spec in specs]
    assert sorted(listed) == sorted({spec.name for spec in SPECS.values()})
    assert {spec.name for spec in STORE_METRICS} <= set(listed)


def test_every_declaration_is_complete() -> None:
    for spec in SPECS.values():
        assert len(spec.values) == len(spec.labels) and all(spec.values), spec.name
        assert spec.advice.endswith(".") and "|" not in spec.help + spec.advice, spec.name
        assert spec.roles and set(spec.roles) <= set(ROLES), spec.name
        assert spec.kind != "histogram" or spec.unit in ("seconds", "ratio"), spec.name
    assert tuple(outcome.value for outcome in Outcome) == STORE_OUTCOMES


def test_queries_and_counterparts_name_metrics_and_labels_that_exist() -> None:
    for where in [*(query for _, query in QUERIES), *(row.here + row.differs for row in (*VLLM, *SGLANG))]:
        assert set(re.findall(r"kvferry_[a-z_]+", where)) <= SHOWN.keys(), where
        for name, matchers in re.findall(r"(kvferry_[a-z_]+)\{([^}]*)\}", where):
            for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
                values = ROLES if label == "role" else SHOWN[name].values[SHOWN[name].labels.index(label)]
                assert set(value.split("|")) <= set(values), (name, label)
    theirs = [name for row in (*VLLM, *SGLANG) for name in row.theirs]
    assert len(theirs) == len(set(theirs)) and all(re.fullmatch(r"(vllm|sglang):[a-z_]+", name) for name in theirs)
