"""kvferry's settings inside SGLang, which has no place for them: a file that the environment names, and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from transfer.config import ConnectorConfig
from transfer.load_config import load_config

CONFIG_FILE: Final = "SGLANG_KVFERRY_CONFIG"
"""Environment variable that names a YAML file of kvferry's settings; those of the environment (KVFERRY_...) are stronger."""

HOLD_S: Final = 2.0
"""SGLang's decode asks before its prefill computes, and does not ask again: a computed prompt need not wait for long."""

HEARTBEAT_S: Final = 2.0
"""A scheduler of SGLang always runs, and keeps kvferry's thread waiting where there are fewer cores than schedulers. A dead
process is noticed at once anyway, by its sockets; heartbeats only tell a frozen one, or a network that is gone."""


def sglang_settings(environment: Mapping[str, str], *, device: str, meet_timeout_s: float) -> ConnectorConfig:
    """The settings; where they say nothing, what fits SGLang.

    Args:
        environment: Variables of the process.
        device: "cpu" or "cuda", where SGLang has its KV.
        meet_timeout_s: How long SGLang lets one side wait for the other.

    Raises:
        ConfigError: A setting is unknown, or cannot be; one line for each.
    """
    file = environment.get(CONFIG_FILE)
    flags = {"device": device, "join_on_request": True}  # SGLang's requests name their prefill engine
    config = load_config(ConnectorConfig, file=Path(file) if file else None, environment=environment, flags=flags)
    limits, heartbeat = config.limits, config.heartbeat
    fitting = {
        "meet_timeout_s": meet_timeout_s,
        "hold_s": HOLD_S,
        "prefill_retries": 0,  # whoever sent the request to both engines knows better where to try again
    }
    left = {name: value for name, value in fitting.items() if name not in limits.model_fields_set}
    if "interval_s" not in heartbeat.model_fields_set:
        heartbeat = heartbeat.model_copy(update={"interval_s": HEARTBEAT_S})
    return config.model_copy(update={"limits": limits.model_copy(update=left), "heartbeat": heartbeat})
