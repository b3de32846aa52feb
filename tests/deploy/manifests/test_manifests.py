"""Everything below deploy/kubernetes can be built, and the API server would take it, field by field."""

from __future__ import annotations

import copy
import functools
import json
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.kubernetes import PROMETHEUS_RULE, RULE_FILE, prometheus_rule
from tests.deploy.manifests import custom_resources
from tests.deploy.manifests.kustomize import (
    KUBERNETES,
    VARIANTS,
    Manifest,
    build,
    name_of,
    pods,
    pods_and_variants,
    pods_of,
    rendered,
    with_components,
)

VERSION = "1.37"
"""Of Kubernetes."""


def schema_problems(manifest: Manifest) -> list[str]:
    """What Kubernetes would refuse, unknown fields among it; of a custom resource its operator's schema says that."""
    return _problems_of(json.dumps(manifest, sort_keys=True))


@functools.cache  # most objects are in several variants
def _problems_of(text: str) -> list[str]:
    manifest = json.loads(text)
    if custom_resources.is_known(manifest):
        return custom_resources.problems(manifest)
    try:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{name_of(manifest)}: {error.message}"]
    return []


@pods_and_variants()
def test_what_is_built_has_only_fields_that_kubernetes_and_the_operators_know(variant: str) -> None:
    assert [problem for one in rendered(variant) for problem in schema_problems(one)] == []


def test_pods_of_a_leader_worker_set_are_pods() -> None:
    """Its own schema is too large to keep here where it repeats that of pods."""
    found = pods("lws")
    assert {one.of for one in found} == {"LeaderWorkerSet/kvferry-group"} and len(found) == 2
    for one in found:
        page = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": one.name, "labels": one.labels}, "spec": one.spec}
        assert schema_problems(page) == []


def test_every_overlay_and_component_is_built_by_some_variant() -> None:
    folders = {kind: {one.name for one in (KUBERNETES / kind).iterdir()} for kind in ("overlays", "components")}
    assert {overlay for overlay, _ in VARIANTS.values()} == folders["overlays"]
    used = {one for _, components in VARIANTS.values() for one in components}
    for overlay in folders["overlays"]:
        for file in (KUBERNETES / "overlays" / overlay).rglob("kustomization.yaml"):
            used |= {one.rpartition("/")[2] for one in yaml.safe_load(file.read_text()).get("components", [])}
    assert used == folders["components"]


def said_of_combinations() -> dict[tuple[str, str], str]:
    """What the table of components in deploy/README.md says of each with each overlay: "part", "yes", "templates" or nothing."""
    readme = (KUBERNETES.parent / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| component \|.*\n(?:\|.*\n)+", readme, re.M)
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {
        (name, overlay): cells[column]
        for cells in rows
        for name in re.findall(r"\]\(kubernetes/components/([a-z0-9-]+)\)", cells[0])
        for column, overlay in enumerate(header)
        if (KUBERNETES / "overlays" / overlay).is_dir()
    }


def parts_of(overlay: str) -> set[str]:
    """The components that it has by itself."""
    files = (KUBERNETES / "overlays" / overlay).rglob("kustomization.yaml")
    pages = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]
    return {one.rpartition("/")[2] for page in pages for one in page.get("components", [])}


def env_of(component: str) -> set[str]:
    """Variables that it gives the nodes of both tiers."""
    file = KUBERNETES / "components" / component / "nodes.yaml"
    if not file.exists():
        return set()
    spec = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]["template"]["spec"]
    return {one["name"] for container in spec.get("containers", []) for one in container.get("env", [])}


def test_the_readme_says_of_each_component_which_overlays_take_it() -> None:
    """Each that it says go together are built, valid, and reach both nodes; of what an overlay has already it says so."""
    said = said_of_combinations()
    folders = {kind: {one.name for one in (KUBERNETES / kind).iterdir()} for kind in ("overlays", "components")}
    assert set(said) == {(component, overlay) for component in folders["components"] for overlay in folders["overlays"]}
    for (component, overlay), word in said.items():
        assert word in ("part", "", "templates" if overlay == "lws" else "yes"), (component, overlay)
        assert (word == "part") is (component in parts_of(overlay)), (component, overlay)
        if word in ("", "part"):
            continue
        built = with_components(overlay, (component,))
        assert [problem for one in built for problem in schema_problems(one)] == [], (component, overlay)
        scaled = [one for one in built if one["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
        there = {one["metadata"]["name"] for one in built if one["kind"] == "Deployment"}
        assert {one["spec"]["scaleTargetRef"]["name"] for one in scaled} <= there
        nodes = [node for one in pods_of(built) for node in one.nodes]
        assert len(nodes) == 2
        for node in nodes:
            assert env_of(component) <= {one["name"] for one in node["env"]}, (component, overlay, node["name"])


def test_the_base_can_be_built_by_itself() -> None:
    kinds = {one["kind"] for one in yaml.safe_load_all(build(KUBERNETES / "base"))}
    assert {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "PrometheusRule", "ConfigMap"} <= kinds


@pods_and_variants()
def test_nothing_is_there_twice(variant: str) -> None:
    names = [name_of(one) for one in rendered(variant)]
    assert len(names) == len(set(names))


def test_alerts_of_the_operator_are_those_of_the_rule_file() -> None:
    """`make dashboards` writes them."""
    rules = RULE_FILE.read_text(encoding="utf-8")
    written = PROMETHEUS_RULE.read_text(encoding="utf-8")
    assert written == prometheus_rule(rules)
    assert yaml.safe_load(written)["spec"] == yaml.safe_load(rules)


def _first(variant: str, kind: str) -> Any:
    return copy.deepcopy(next(one for one in rendered(variant) if one["kind"] == kind))


@pytest.mark.parametrize(
    ("variant", "kind", "path", "value"),
    [
        ("two-tier", "Deployment", ("spec", "template", "spec", "terminationGraceSeconds"), 1),
        ("two-tier", "Deployment", ("spec", "replicas"), "two"),
        ("two-tier", "NetworkPolicy", ("spec", "policyTypes"), "Ingress"),
        ("two-tier", "Certificate", ("spec", "secret"), "name"),
        ("two-tier", "Certificate", ("spec", "usages"), ["sign everything"]),
        ("two-tier", "Issuer", ("spec", "ca"), {}),
        ("two-tier", "PodMonitor", ("spec", "podMetricsEndpoint"), []),
        ("two-tier", "PrometheusRule", ("spec", "groups", 0, "rules", 0, "for"), "soon"),
        ("keda", "ScaledObject", ("spec", "triggers"), "prometheus"),
        ("lws", "LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "restartPolicy"), "Never"),
    ],
)
def test_the_schemas_refuse_what_is_wrong(variant: str, kind: str, path: tuple[Any, ...], value: object) -> None:
    manifest = _first(variant, kind)
    assert schema_problems(manifest) == []
    *parents, last = path
    inner = manifest
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    assert schema_problems(manifest) != []
