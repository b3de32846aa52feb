"""The Helm chart installs the rendered overlays, changed by its values; the schemas of the API server accept the result."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

import transfer
from deploy.helm import CHART, OVERLAYS, file_of
from tests.deploy.manifests.kustomize import Manifest, name_of, rendered
from tests.deploy.manifests.test_manifests import schema_problems


def objects(text: str) -> list[Manifest]:
    return sorted((one for one in yaml.safe_load_all(text) if one), key=name_of)


def installed(**values: Any) -> list[Manifest]:
    """Return the objects that Helm installs."""
    helm = pytest.importorskip("helm_python", reason="pip install helm-python-sdk")
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values=values, name="kvferry", namespace="somewhere")
    return objects(files["kvferry/templates/manifests.yaml"])


def container_of(found: list[Manifest], name: str) -> Manifest:
    (one,) = [one for one in found if name_of(one) == name]
    container: Manifest = one["spec"]["template"]["spec"]["containers"][0]
    return container


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_has_the_overlays_as_kustomize_renders_them(overlay: str) -> None:
    kept = objects(file_of(overlay).read_text(encoding="utf-8"))
    assert kept == sorted(rendered(overlay), key=name_of), "run: python -m deploy.helm"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_without_values_the_chart_installs_an_overlay_as_it_is(overlay: str) -> None:
    assert installed(overlay=overlay) == objects(file_of(overlay).read_text(encoding="utf-8"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_with_values_match_the_schemas_of_kubernetes(overlay: str) -> None:
    kind = "StatefulSet" if overlay == "vllm" else "Deployment"
    images = {name: {"repository": f"registry.example/{name}", "tag": "1"} for name in ("kvferry", "kvferry-vllm")}
    found = installed(
        overlay=overlay,
        prometheusOperator=False,
        images=images,
        patches={f"{kind}/kvferry-prefill": {"spec": {"replicas": 4, "template": {"spec": {"nodeSelector": {"pool": "a"}}}}}},
        env={f"{kind}/kvferry-prefill": {"HOME": "/home", "KVFERRY_LOG__LEVEL": "debug"}},
        args={f"{kind}/kvferry-decode": ["--last"]},
        resources={f"{kind}/kvferry-decode": {"requests": {"cpu": "9"}}},
    )
    assert [problem for one in found for problem in schema_problems(one)] == []
    assert not [one for one in found if one["apiVersion"].startswith("monitoring.coreos.com/")]
    prefill, decode = (container_of(found, f"{kind}/kvferry-{tier}") for tier in ("prefill", "decode"))
    env = {one["name"]: one.get("value") for one in prefill["env"]}
    assert env["HOME"] == "/home" and env["KVFERRY_LOG__LEVEL"] == "debug" and len(env) == len(prefill["env"])
    assert "KVFERRY_SERVER__ADVERTISE_HOST" in env
    assert decode["args"][-1] == "--last" and decode["resources"]["requests"]["cpu"] == "9"
    assert prefill["image"] == f"registry.example/kvferry{'-vllm' if overlay == 'vllm' else ''}:1"
    (set_of_prefill,) = [one for one in found if name_of(one) == f"{kind}/kvferry-prefill"]
    assert set_of_prefill["spec"]["replicas"] == 4 and set_of_prefill["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "a"}


def test_a_value_for_an_object_that_does_not_exist_is_refused() -> None:
    helm = pytest.importorskip("helm_python")
    with pytest.raises(helm.HelmError, match="patches has Deployment/kvferry-prefil, which is not an object of the overlay"):
        installed(patches={"Deployment/kvferry-prefil": {}})


def test_unknown_values_are_refused_and_lint_has_no_errors() -> None:
    helm = pytest.importorskip("helm_python")
    with pytest.raises(helm.HelmError, match="replicas"):
        installed(replicas=3)
    assert helm.lint(CHART)["errors"] == []


def test_the_chart_has_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == transfer.__version__ and chart["version"] == transfer.__version__.replace(".dev", "-dev")
