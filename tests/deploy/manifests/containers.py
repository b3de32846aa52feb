"""The daemons of a container: their settings, and variables and volumes as the kubelet would create them, on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from decode_node.command import app as decode_app
from prefill_node.command import app as prefill_app
from tests.authority import Authority, Files
from tests.deploy.manifests.kustomize import Manifest, Pod, of_kind
from transfer.config import DecodeNodeConfig, NodeConfig, PrefillNodeConfig, settings

POD_IP = "10.0.0.7"
CONFIGS: dict[str, type[NodeConfig]] = {"prefill": PrefillNodeConfig, "decode": DecodeNodeConfig}
_APPS = {"prefill": prefill_app, "decode": decode_app}


def variables_of(role: str) -> set[str]:
    """Return the names of the environment variables that the daemon reads."""
    return {f"KVFERRY_{path.upper().replace('.', '__')}" for path, _ in settings(CONFIGS[role])}


def check_config(role: str, arguments: Sequence[str]) -> str:
    """Assert that the daemon accepts the arguments and the environment; return its output."""
    result = CliRunner().invoke(_APPS[role], [*arguments, "--check-config"])
    assert result.exit_code == 0, result.output
    assert f"{role}: the configuration is valid" in result.output and "never be ready" not in result.output
    return result.output


def environment(pod: Pod, container: Manifest, pod_ip: str = POD_IP) -> dict[str, str]:
    """Return a container's variables. As in the kubelet, $(NAME) is replaced by the value of an earlier variable."""
    fields = {"status.podIP": pod_ip, "metadata.name": pod.name}
    found: dict[str, str] = {}
    for one in container["env"]:
        value = one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        assert isinstance(value, str), f"{one['name']}: the value of a variable must be a string, and is {value!r}"
        found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda use: found.get(use[1], use[0]), value)
    return found


class Disk:
    """A container's file system: a folder with content for each of its volumes.

    Args:
        root: Parent folder on this machine.
        variant: Variant of the manifests.
        pod, container: The container and its pod.
        model: Target of the link `model` in the volume of models.
        authority: Certificate authority in place of cert-manager.
    """

    def __init__(self, root: Path, variant: str, pod: Pod, container: Manifest, model: Path, authority: Authority) -> None:
        self._root = root
        self._places = {mount["mountPath"]: root / mount["name"] for mount in container["volumeMounts"]}
        volumes = {one["name"]: one for one in pod.spec["volumes"]}
        for mount in container["volumeMounts"]:
            volume, folder = volumes[mount["name"]], root / mount["name"]
            folder.mkdir(parents=True)
            if "configMap" in volume:
                (content,) = [
                    one["data"] for one in of_kind(variant, "ConfigMap") if one["metadata"]["name"] == volume["configMap"]["name"]
                ]
                for name, text in content.items():
                    (folder / name).write_text(self.here(text), encoding="utf-8")
            elif "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
                names = [
                    name
                    for one in of_kind(variant, "Certificate")
                    if one["spec"]["secretName"] == volume["secret"]["secretName"]
                    for name in one["spec"]["dnsNames"]
                ]
                chain, key = authority.issue(*names)
                Files(folder=folder).put(cert=chain, key=key, ca=authority.pem)
            elif mount["name"] == "model":
                (folder / "model").symlink_to(model)

    def here(self, text: str) -> str:
        """Return a text with the container's paths replaced by paths of this machine."""
        paths = "|".join(re.escape(path) for path in sorted(self._places, key=len, reverse=True))
        return re.sub(rf"(?<![\w./])({paths})(?=/|$|\s)", lambda found: str(self._places[found[1]]), text)
