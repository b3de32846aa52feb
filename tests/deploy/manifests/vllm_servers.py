"""Command lines of vLLM servers in manifests and Compose files, and the settings of their connectors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.engines.vllm_settings import VllmConfig, sides_of, vllm_settings


def option(command: Sequence[str], name: str) -> str:
    """Return the value of an option ``NAME=VALUE``."""
    (found,) = [word.partition("=")[2] for word in command if word.startswith(f"{name}=")]
    return found


def connector_config(container: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """Return the settings that the connector of a server has, from its command line and its environment."""
    given = (
        container["environment"] if "environment" in container else {one["name"]: one.get("value") for one in container["env"]}
    )
    environment = {name: "10.1.2.3" if value is None else value for name, value in given.items()}  # None: the pod's address
    for name, value in environment.items():
        if name.startswith("KVFERRY_"):
            monkeypatch.setenv(name, value)
    transfer = json.loads(option([*container["command"], *container.get("args", ())], "--kv-transfer-config"))
    assert transfer["kv_connector_module_path"] == "kvferry.engines.vllm_connector"
    sides_of(transfer["kv_role"])
    config = vllm_settings(transfer.get("kv_connector_extra_config", {}), device="cuda")
    for name in environment:
        monkeypatch.delenv(name, raising=False)
    return config
