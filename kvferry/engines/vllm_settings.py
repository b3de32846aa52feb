"""Settings of the vLLM connector (`kv_connector_extra_config` of `--kv-transfer-config`), and the supported versions of vLLM."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from pydantic import Field

from kvferry.engines.connector import DECODE, PREFILL, Sides
from kvferry.engines.vllm_layout import WindowLayers
from transfer.config import ConnectorConfig, StoreConnectorConfig
from transfer.config.values import Count
from transfer.errors import ConfigError
from transfer.load_config import load_config

OLDEST_VLLM: Final = (0, 32)
NEWEST_VLLM: Final = (0, 33)

_STORE_VARIABLES: Final = ("KVFERRY_STORAGE__", "KVFERRY_OFFLOAD__")
"""Variables of the store. The transfer connector ignores them, because vLLM's MultiConnector can contain both connectors."""

_SIDES: Final = {"kv_producer": PREFILL, "kv_consumer": DECODE, "kv_both": PREFILL | DECODE}


class VllmConfig(ConnectorConfig):
    """Settings of kvferry in a vLLM instance."""

    role: ClassVar[str] = "connector"

    allow_untested_vllm: bool = Field(
        default=False,
        description="Run also in a vLLM version that the connector was not tested with; its hooks may have changed.",
    )
    window_layers: WindowLayers | None = Field(
        default=None,
        description=(
            "What moves of layers with a sliding window, the same on both sides: whole, every token; last_window, the last "
            "window of a prompt, as between kvferry's own nodes. null: last_window if vLLM's hybrid KV cache manager is on, "
            "otherwise whole."
        ),
    )
    api_url: str | None = Field(
        default=None,
        description=(
            "Prefill: URL of this instance's own OpenAI API, for example http://127.0.0.1:8000. With it, kvferry's own decode "
            "nodes can have prompts computed here that no router has sent. null: prompts come by a router only."
        ),
    )
    api_key: str | None = Field(default=None, description="Prefill: key of that API, where it asks for one.")


class VllmStoreConfig(StoreConnectorConfig):
    """Settings of kvferry's store in a vLLM instance."""

    allow_untested_vllm: bool = Field(
        default=False,
        description="Also run in a vLLM version that the connector was not tested with; its interfaces may have changed.",
    )
    page_blocks: Count = Field(
        default=1,
        description="vLLM blocks of a stored page, the same in all instances that share pages. Only whole pages are stored.",
    )
    save_generated: bool = Field(
        default=False,
        description="Also save pages with generated tokens, for example for conversations. false: only pages of prompts.",
    )


def vllm_settings(extra_config: Mapping[str, object], *, device: str) -> VllmConfig:
    """Return the settings, from the connector's extra config and the environment.

    Args:
        device: "cpu" or "cuda", where vLLM has its KV cache.

    Raises:
        ConfigError: A setting is unknown or invalid; one line for each.
    """
    return load_config(
        VllmConfig,
        given={"kv_connector_extra_config": extra_config},
        environment={name: value for name, value in os.environ.items() if not name.startswith(_STORE_VARIABLES)},
        flags={"device": device},
    )


def settings_of_replica(config: VllmConfig, parallel: Any) -> VllmConfig:
    """Return the settings of one data-parallel rank, which has a leader and ports of its own.

    Args:
        parallel: vLLM's ``ParallelConfig`` in a process of the rank.

    Raises:
        ConfigError: Ports of two ranks would collide, or the rank spans hosts and has no `leader.address`.
    """
    index = int(parallel.data_parallel_index)  # vLLM counts a rank of a dense model as the only one, but keeps its index
    if parallel.nnodes_within_dp > 1 and config.leader.address is None:
        raise ConfigError(
            f"this engine spans {parallel.nnodes_within_dp} hosts (--nnodes), and leader.address is missing in "
            "kv_connector_extra_config; it must be HOST:PORT of the host with its --node-rank 0, the same on all of its hosts"
        )
    return config.for_replica(index, max(int(parallel.data_parallel_size), index + 1))


def api_headers(parallel: Any) -> dict[str, str]:
    """Return the headers by which a request to vLLM's API reaches this data-parallel rank."""
    local = parallel.data_parallel_rank_local
    if local is None:
        return {}
    return {"X-data-parallel-rank": str(local if parallel.local_engines_only else parallel.data_parallel_index)}


def store_settings(extra_config: Mapping[str, object]) -> VllmStoreConfig:
    """Return the settings of the store, from the connector's extra config and the environment.

    Raises:
        ConfigError: A setting is unknown, invalid or missing; one line for each.
    """
    names = (*_STORE_VARIABLES, "KVFERRY_LOG__")
    return load_config(
        VllmStoreConfig,
        given={"kv_connector_extra_config": extra_config},
        environment={name: value for name, value in os.environ.items() if name.startswith(names)},
    )


def sides_of(kv_role: str | None) -> Sides:
    """Return the sides of an instance with that role. Raises ConfigError for an unknown role."""
    sides = _SIDES.get(kv_role or "")
    if sides is None:
        raise ConfigError(f"kv_role is {kv_role}; it must be one of {', '.join(_SIDES)}")
    return sides


def check_version(version: str, *, allow_untested: bool) -> None:
    """Raise ConfigError if the version is outside the tested range and `allow_untested` is False. Its hooks may differ."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and OLDEST_VLLM <= (int(found[1]), int(found[2])) <= NEWEST_VLLM:
        return
    if not allow_untested:
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST_VLLM, NEWEST_VLLM))
        raise ConfigError(
            f"vLLM is {version}; this connector was written for {oldest} to {newest}: install one of them, or set "
            "allow_untested_vllm to true in kv_connector_extra_config"
        )
