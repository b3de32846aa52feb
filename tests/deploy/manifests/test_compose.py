"""The Compose files match the schema of Compose, and daemons, connector and router accept their commands and settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import transfer
from node_runtime.supervisor import STOP_GRACE_S
from tests.deploy.manifests.containers import CONFIGS, check_config, variables_of
from tests.deploy.manifests.vllm_servers import connector_config, option
from transfer.config import DecodeNodeConfig, NodeConfig
from transfer.load_config import load_config

ROOT = Path(__file__).resolve().parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
VLLM: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.vllm.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads(Path(__file__).with_name("compose-spec.json").read_text(encoding="utf-8"))["schema"]


def interpolated(text: str) -> str:
    """Interpolate as Compose does for unset variables: ${NAME:-default} becomes the default, and $$ becomes $."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")


def environment(service: str) -> dict[str, str]:
    return {name: interpolated(value) for name, value in COMPOSE["services"][service]["environment"].items()}


def node_config(service: str) -> NodeConfig:
    return load_config(CONFIGS[service], environment=environment(service))


@pytest.mark.parametrize("page", [COMPOSE, VLLM], ids=["nodes", "vllm"])
def test_the_compose_files_match_the_schema_of_compose(page: dict[str, Any]) -> None:
    assert [error.message for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(page)] == []


def test_the_schema_of_compose_rejects_a_wrong_file() -> None:
    wrong = {**COMPOSE, "services": {"prefill": {**COMPOSE["services"]["prefill"], "healthchek": {}}}}
    assert not jsonschema.Draft7Validator(SCHEMA).is_valid(wrong)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_check_config_accepts_each_service(role: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the model is replaced by its path on this machine."""
    service = COMPOSE["services"][role]
    command, *arguments = service["command"]
    assert command == f"{role}-node"
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "demo").symlink_to(model)
    for name, value in environment(role).items():
        assert name in variables_of(role)
        monkeypatch.setenv(name, value.replace("/models", str(tmp_path / "models")))
    check_config(role, arguments)


def test_the_nodes_connect_on_loopback_and_health_checks_use_their_ports() -> None:
    prefill, decode = node_config("prefill"), node_config("decode")
    assert isinstance(decode, DecodeNodeConfig)
    assert decode.peers.prefill_nodes == (f"{prefill.server.host}:{prefill.server.port}",)
    for role, config in (("prefill", prefill), ("decode", decode)):
        assert config.server.host == "127.0.0.1" and config.tls.insecure == 1
        service = COMPOSE["services"][role]
        assert service["network_mode"] == "host"
        assert f"http://127.0.0.1:{config.server.http_port}/readyz" in service["healthcheck"]["test"][-1]
    ports = [port for config in (prefill, decode) for port in (config.server.port, config.server.http_port)]
    assert len(set(ports)) == 4
    for target in re.findall(r"--target (\S+)", (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")):
        assert target == f"127.0.0.1:{decode.server.port}"


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_containers_have_no_privileges_and_time_to_drain(service: str) -> None:
    one = COMPOSE["services"][service]
    assert one["read_only"] is True and one["cap_drop"] == ["ALL"] and "privileged" not in one
    assert one["user"] == "10001:10001" and one["security_opt"] == ["no-new-privileges:true"]
    assert interpolated(one["image"]) == f"kvferry:{transfer.__version__}"
    if service in CONFIGS:
        assert int(one["stop_grace_period"].removesuffix("s")) >= node_config(service).drain_timeout_s + 2 * STOP_GRACE_S


def test_the_connectors_of_the_vllm_servers_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = {role: connector_config(VLLM["services"][role], monkeypatch) for role in ("prefill", "decode")}
    prefill, decode = configs["prefill"], configs["decode"]
    assert decode.peers.prefill_nodes == (f"{prefill.server.host}:{prefill.server.port}",)
    assert {config.tls.insecure for config in configs.values()} == {1} and prefill.server.host == "127.0.0.1"


def test_the_router_of_the_vllm_servers_calls_their_ports() -> None:
    services = VLLM["services"]
    ports = {role: option(services[role]["command"], "--port") for role in ("prefill", "decode")}
    assert services["router"]["command"] == [
        "kvferry", "route", "--prefill", f"http://127.0.0.1:{ports['prefill']}", "--decode", f"http://127.0.0.1:{ports['decode']}",
        "--port", "8000",
    ]  # fmt: skip
    for role, port in (*ports.items(), ("router", "8000")):
        assert f"http://127.0.0.1:{port}/" in services[role]["healthcheck"]["test"][-1]
        assert services[role]["network_mode"] == "host" and services[role]["user"] == "10001:10001"
        assert services[role]["read_only"] is True and services[role]["cap_drop"] == ["ALL"]
        image = "kvferry" if role == "router" else "kvferry-vllm"
        assert interpolated(services[role]["image"]) == f"{image}:{transfer.__version__}"
