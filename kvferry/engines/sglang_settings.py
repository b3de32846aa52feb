"""Settings of kvferry inside SGLang: from a file that the environment names, and from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from transfer.config import ConnectorConfig
from transfer.errors import ConfigError
from transfer.load_config import load_config

CONFIG_FILE: Final = "SGLANG_KVFERRY_CONFIG"
"""Environment variable that names a YAML file of settings. Variables KVFERRY_... override it."""

HOLD_S: Final = 2.0
"""A computed prompt need not wait long, because SGLang's decode asks once, before prefill computes."""

HEARTBEAT_S: Final = 2.0
"""SGLang's schedulers never sleep, so heartbeats are late on a machine with fewer cores than schedulers. They only detect frozen
processes and lost networks: the sockets of a dead process close at once."""

SUPPORTED: Final[Mapping[str, object]] = {
    "pp_size on the decode side": 1,
    "nnodes": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "enable_kv_cache_sharding": False,
    "enable_hisparse": False,
    "enable_pd_role_switch": False,
    "disaggregation_decode_allocation_policy": "early",
    # SGLang's cache would give later prompts whole pages of a window. Of the first, only the window's tokens are received.
    "disaggregation_decode_enable_radix_cache with sliding windows": False,
}
"""The only value of each setting of SGLang with which KV can be transferred."""


def check_supported(engine: Mapping[str, object]) -> None:
    """Check the settings of an SGLang engine.

    Args:
        engine: Values of settings in `SUPPORTED`.

    Raises:
        ConfigError: KV cannot be transferred with a value; the message names the setting and both values.
    """
    for name, value in engine.items():
        if value != SUPPORTED[name]:
            raise ConfigError(f"{name} is {value}; with --disaggregation-transfer-backend kvferry it must be {SUPPORTED[name]}")


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
