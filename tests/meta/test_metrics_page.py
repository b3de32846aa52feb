"""docs/metrics.md is what the declarations make of it, and what it speaks of exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from transfer.metrics import NODE_METRICS, RANK_METRICS, STORE_METRICS, MetricSpec
from transfer.metrics.document import QUESTIONS, SECTIONS, metrics_page
from transfer.metrics.other_names import SGLANG, VLLM
from transfer.metrics.specs import ROLES
from transfer.metrics.store_specs import STORE_OUTCOMES
from transfer.storage.base import Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
SPECS = {spec.shown_name: spec for spec in (*RANK_METRICS, *NODE_METRICS)}
SHOWN = {
    name + suffix: spec
    for name, spec in SPECS.items()
    for suffix in (("_bucket", "_sum", "_count", "") if spec.kind == "histogram" else ("",))
}


def test_the_page_is_what_the_declarations_make_of_it() -> None:
    assert metrics_page() == PAGE.read_text(encoding="utf-8"), "run: python -m transfer.metrics > docs/metrics.md"


def test_every_metric_is_in_one_section() -> None:
    listed = [spec.name for _, _, specs in SECTIONS for spec in specs]
    assert sorted(listed) == sorted({spec.name for spec in SPECS.values()})
    assert {spec.name for spec in STORE_METRICS} <= set(listed)


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_a_declaration_is_whole(spec: MetricSpec) -> None:
    assert len(spec.values) == len(spec.labels) and all(spec.values)
    assert spec.advice.endswith(".") and "|" not in spec.help + spec.advice
    assert spec.roles and set(spec.roles) <= set(ROLES)
    if spec.kind == "histogram":
        assert spec.unit in ("seconds", "ratio")


@pytest.mark.parametrize("where", [query for _, query in QUESTIONS] + [row.here + row.differs for row in (*VLLM, *SGLANG)])
def test_metrics_that_are_spoken_of_exist_and_have_those_labels(where: str) -> None:
    spoken = re.findall(r"kvferry_[a-z_]+", where)
    assert set(spoken) <= SHOWN.keys()
    for name, matchers in re.findall(r"(kvferry_[a-z_]+)\{([^}]*)\}", where):
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
            if label != "role":
                values = SHOWN[name].values[SHOWN[name].labels.index(label)]
                assert set(value.split("|")) <= set(values), (name, label)


def test_advice_speaks_of_metrics_that_exist() -> None:
    bare = {name.removeprefix("kvferry_").removesuffix("_total") for name in SPECS}
    for spec in SPECS.values():
        spoken = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", re.sub(r"\b\w+\.\w+|kvferry_\w+", "", spec.advice)))
        assert (
            spoken <= bare | {value for values in spec.values if isinstance(values, tuple) for value in values} | LOGGED | STAGES
        )


LOGGED = {"link_slow", "loop_turn_long", "transport_fell_back"}
STAGES = {"credit_wait"}


def test_outcomes_of_the_store_are_those_that_it_has() -> None:
    assert tuple(outcome.value for outcome in Outcome) == STORE_OUTCOMES


def test_a_name_of_others_is_told_once() -> None:
    names = [name for row in (*VLLM, *SGLANG) for name in row.theirs]
    assert len(names) == len(set(names)) and all(re.fullmatch(r"(vllm|sglang):[a-z_]+", name) for name in names)
