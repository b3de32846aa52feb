"""Settings of kvferry inside SGLang: from a file that the environment names, and from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from transfer.config import ConnectorConfig
from transfer.load_config import load_config

CONFIG_FILE: Final = "SGLANG_KVFERRY_CONFIG"
"""Environment variable that names a YAML file of settings. Variables KVFERRY_... override it."""

HOLD_S: Final = 2.0
"""A computed prompt need not wait long, because SGLang's decode asks once, before prefill computes."""

HEARTBEAT_S: Final = 2.0
"""SGLang's schedulers never sleep, so heartbeats are late on a machine with fewer cores than schedulers. They only detect frozen
processes and lost networks: the sockets of a dead process close at once."""


def sglang_settings(environment: Mapping[str, str], *, device: str, meet_timeout_s: float) -> ConnectorConfig:
    """Return the settings, with defaults that fit SGLang.

    Args:
        device: "cpu" or "cuda", where SGLang has its KV.
        meet_timeout_s: Longest wait of one side for the other in SGLang.

    Raises:
        ConfigError: A setting is unknown or invalid; one line for each.
    """
    file = environment.get(CONFIG_FILE)
    flags = {"device": device, "join_on_request": True}  # SGLang's requests name their prefill engine
    config = load_config(ConnectorConfig, file=Path(file) if file else None, environment=environment, flags=flags)
    limits, heartbeat = config.limits, config.heartbeat
    fitting = {
        "meet_timeout_s": meet_timeout_s,
        "hold_s": HOLD_S,
        "prefill_retries": 0,  # the router, which sent the request to both engines, retries
    }
    left = {name: value for name, value in fitting.items() if name not in limits.model_fields_set}
    if "interval_s" not in heartbeat.model_fields_set:
        heartbeat = heartbeat.model_copy(update={"interval_s": HEARTBEAT_S})
    return config.model_copy(update={"limits": limits.model_copy(update=left), "heartbeat": heartbeat})
