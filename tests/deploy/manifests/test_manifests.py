"""All manifests of deploy/kubernetes can be built, and match the schemas of the API server."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import custom_resources
from tests.deploy.manifests.kustomize import (
    KUBERNETES,
    SERVER_VARIANTS,
    VARIANTS,
    Manifest,
    name_of,
    pods,
    rendered,
)

VERSION = "1.37"
"""Version of the Kubernetes schemas."""


def schema_problems(manifest: Manifest) -> list[str]:
    """Return the errors for which Kubernetes would reject an object, such as unknown fields."""
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


@pytest.mark.parametrize("variant", VARIANTS | SERVER_VARIANTS)
def test_built_objects_match_the_schemas_of_kubernetes_and_the_operators(variant: str) -> None:
    names = [name_of(one) for one in rendered(variant)]
    assert len(names) == len(set(names))
    assert [problem for one in rendered(variant) for problem in schema_problems(one)] == []


def test_pods_of_a_leader_worker_set_match_the_pod_schema() -> None:
    """The stored schema of LeaderWorkerSet has no pod schema, because the pod schema is too large to repeat."""
    for one in pods("lws"):
        page = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": one.name, "labels": one.labels}, "spec": one.spec}
        assert schema_problems(page) == []


def test_every_overlay_and_component_is_built_by_some_variant() -> None:
    folders = {kind: {one.name for one in (KUBERNETES / kind).iterdir()} for kind in ("overlays", "components")}
    variants = (VARIANTS | SERVER_VARIANTS).values()
    assert {overlay for overlay, _ in variants} == folders["overlays"]
    used = {one for _, components in variants for one in components}
    for overlay in folders["overlays"]:
        for file in (KUBERNETES / "overlays" / overlay).rglob("kustomization.yaml"):
            used |= {one.rpartition("/")[2] for one in yaml.safe_load(file.read_text()).get("components", [])}
    assert used == folders["components"]


@pytest.mark.parametrize(
    ("variant", "kind", "path", "value"),
    [
        ("two-tier", "Deployment", ("spec", "template", "spec", "terminationGraceSeconds"), 1),
        ("two-tier", "Certificate", ("spec", "usages"), ["sign everything"]),
        ("lws", "LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "restartPolicy"), "Never"),
    ],
)
def test_the_schemas_reject_invalid_objects(variant: str, kind: str, path: tuple[Any, ...], value: object) -> None:
    manifest = copy.deepcopy(next(one for one in rendered(variant) if one["kind"] == kind))
    assert schema_problems(manifest) == []
    *parents, last = path
    inner = manifest
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    assert schema_problems(manifest) != []
