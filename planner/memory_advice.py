"""Settings to change where memory runs out or is full, with their current values. All errors and log events use this table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from planner.node_plan import has_host_pages
from transfer.config import ConnectorConfig, DecodeNodeConfig, NodeConfig
from transfer.host_memory import shown


class Phase(StrEnum):
    """Work that takes memory, or memory that is full. The values are rows of a table in docs/troubleshooting.md."""

    START = "other work at start"
    WEIGHTS = "loading the weights"
    POOL = "allocating the KV pool"
    WORKSPACES = "allocating the workspaces of block-sparse prefill"
    PAGE_TABLES = "allocating the page tables"
    COMPILE = "compiling decode steps"
    CUDA_GRAPHS = "capturing CUDA graphs"
    HOST_BLOCKS = "allocating the buffers for host blocks"
    STAGING = "allocating the staging slots"
    RING = "allocating the ring"
    HOST_POOL = "allocating the host pool"
    PREFILL_STEP = "computing a prefill step"
    DECODE_STEP = "computing a decode step"
    COPY = "copying KV"
    FULL_POOL = "requests wait for pages of the pool"
    FULL_HOST_MEMORY = "requests find no room in host memory"


_FRACTION: Final = "memory.static_fraction"
_HOST_MEMORY: Final = "offload.host_memory"
_DRAFT_TOKENS: Final = "speculative.num_speculative_tokens"

_CHANGES: Final[Mapping[Phase, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    Phase.START: (("lower", (_FRACTION,)),),
    Phase.WEIGHTS: (("raise", ("parallel.tp_size",)), ("end other processes that use this memory", ())),
    Phase.POOL: (("lower", (_FRACTION, "pool.num_pages")),),
    Phase.WORKSPACES: (
        ("lower", ("chunk.chunk_tokens", "limits.max_seq_len", _FRACTION)),
        ("raise", ("prefill.sparse_stride",)),
    ),
    Phase.PAGE_TABLES: (("lower", ("limits.max_running_requests", "limits.max_seq_len", _FRACTION)),),
    Phase.COMPILE: (("lower", ("torch_compile_max_bs", _FRACTION)),),
    Phase.CUDA_GRAPHS: (("lower", ("cuda_graph_max_bs", _DRAFT_TOKENS, _FRACTION)),),
    Phase.HOST_BLOCKS: (("lower", ("offload.buffer_bytes", "cuda_graph_max_bs", _FRACTION)),),
    Phase.STAGING: (("lower", ("staging.num_slots", "staging.slot_bytes", "chunk.chunk_tokens", _FRACTION)),),
    Phase.RING: (("lower", ("ring.capacity_bytes", _FRACTION)),),
    Phase.HOST_POOL: (("lower", (_HOST_MEMORY,)),),
    Phase.PREFILL_STEP: (("lower", (_FRACTION, "limits.max_step_tokens", "chunk.chunk_tokens")),),
    Phase.DECODE_STEP: (("lower", (_FRACTION, "limits.max_running_requests", _DRAFT_TOKENS)),),
    Phase.COPY: (("lower", (_FRACTION,)),),
    Phase.FULL_POOL: (
        ("raise", (_FRACTION, "pool.num_pages", _HOST_MEMORY)),
        ("lower", ("limits.max_running_requests",)),
        ("add nodes", ()),
    ),
    Phase.FULL_HOST_MEMORY: (("raise", (_HOST_MEMORY,)), ("lower", ("limits.max_running_requests",)), ("add nodes", ())),
}
"""Phase -> alternatives: an imperative, and the settings that it is about."""

_NOTES: Final = {"cuda_graph_max_bs": "0 runs without graphs", "cuda_graph_bs": "[] runs without graphs"}

_ALTERNATIVES: Final = {_HOST_MEMORY: "offload.host_ratio", "cuda_graph_max_bs": "cuda_graph_bs"}
"""Setting -> the setting that can be set instead."""

_MISSING: Final = object()
"""In place of the value of a setting that a process does not have."""

_ENGINE_SHARE: Final = "the engine's share of the GPU (--gpu-memory-utilization of vLLM, --mem-fraction-static of SGLang)"

_CHOSEN_BY_PLAN: Final = {
    "memory.static_fraction": "static_fraction",
    "pool.num_pages": "num_pages",
    "limits.max_seq_len": "max_seq_len",
    "cuda_graph_max_bs": "cuda_graph_max_bs",
}
"""Setting -> key of `MemoryPlan.as_json` with the value that is used if the setting is not set."""


def settings_of(phase: Phase) -> tuple[str, ...]:
    """Return the settings that can help, for any configuration."""
    return tuple(setting for _, settings in _CHANGES[phase] for setting in settings)


def advice_for(
    phase: Phase,
    config: NodeConfig | ConnectorConfig | None = None,
    *,
    plan: Mapping[str, Any] | None = None,
    chosen: Mapping[str, object] | None = None,
) -> str:
    """Return the changes that can help, as imperatives. Each setting is followed by its current value.

    Args:
        config: Settings of the process; settings that it does not have are left out. None gives all names, without values.
        plan: The rank's memory plan as `MemoryPlan.as_json`; it has the values of some settings that are not set.
        chosen: Values of other settings that are not set, by name.
    """
    values = {name: (plan or {}).get(key) for name, key in _CHOSEN_BY_PLAN.items()} | dict(chosen or {})
    changes: list[str] = []
    for imperative, settings in _CHANGES[phase]:
        named = [_named(setting, phase, config, values) for setting in settings]
        found = [one for one in named if one is not None]
        if found:
            *others, last = found
            changes.append(f"{imperative} {', '.join(others) + ' or ' if others else ''}{last}")
        elif not settings:
            changes.append(imperative)
    return ", or ".join(changes)


def _named(setting: str, phase: Phase, config: NodeConfig | ConnectorConfig | None, chosen: Mapping[str, object]) -> str | None:
    """Return a setting with its current value; None if it does not help in this process."""
    if config is None:
        return f"{setting} ({_NOTES[setting]})" if setting in _NOTES else setting
    if isinstance(config, ConnectorConfig):
        if setting == _FRACTION:
            return _ENGINE_SHARE
    elif setting == _FRACTION and config.memory.policy == "page-count":
        setting = "memory.memory_ratio"
    elif setting == _HOST_MEMORY and phase is Phase.FULL_POOL and not has_host_pages(config):
        return None  # it keeps KV for later requests only
    elif setting == _DRAFT_TOKENS and isinstance(config, DecodeNodeConfig) and not config.speculative.is_on:
        return None
    other = _ALTERNATIVES.get(setting, "")
    if _value_of(config, other) not in (_MISSING, None):
        setting = other
    value = _value_of(config, setting)
    if value is _MISSING:
        return None
    value = chosen.get(setting) if value is None else value
    note = f"; {_NOTES[setting]}" if setting in _NOTES else ""
    return f"{setting} (now {_text(setting, value)}{note})"


def _value_of(config: object, setting: str) -> object:
    """Return the value of a setting, or `_MISSING`."""
    for name in setting.split("."):
        config = getattr(config, name, _MISSING)
    return config


def _text(setting: str, value: object) -> str:
    match value:
        case None:
            return "null"
        case tuple():
            return f"up to {max(value, default=0)}"
        case float():
            return f"{value:.4g}"
        case int() if setting.endswith("_bytes") or setting == _HOST_MEMORY:
            return shown(value)
        case _:
            return str(value)
