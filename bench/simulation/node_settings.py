"""Compare the simulated settings with the defaults of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.simulation.settings import ClusterSettings
from planner.device_defaults import with_gpu_defaults
from transfer.config import DecodeNodeConfig, PrefillNodeConfig
from transfer.layout import DType, KVLayout
from transfer.sizes import ring_capacity_bytes

LARGE_GPU_BYTES: Final = 80 << 30
_LLAMA_8B: Final = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """A simulated setting.

    Args:
        role: "prefill" or "decode".
        name: Its path, as in docs/configuration.md.
        default: Default of a node on a GPU.
    """

    role: str
    name: str
    simulated: int
    default: int


def gpu_nodes() -> tuple[PrefillNodeConfig, DecodeNodeConfig]:
    """Return the settings of nodes of Llama 3 8B on large GPUs, with nothing set."""
    given = {"model": Path("llama-3-8b"), "device": "cuda"}
    prefill, decode = PrefillNodeConfig.model_validate(given), DecodeNodeConfig.model_validate(given)
    return (
        with_gpu_defaults(prefill, _LLAMA_8B, device_bytes=LARGE_GPU_BYTES),
        with_gpu_defaults(decode, _LLAMA_8B, device_bytes=LARGE_GPU_BYTES),
    )


def differing(settings: ClusterSettings) -> list[Differing]:
    """Return the simulated settings that differ from the defaults of nodes.

    Pools, which the memory plan sizes, and layers of a group, which nodes choose by the speed of their links, are not compared.
    """
    prefill, decode = gpu_nodes()
    ring = ring_capacity_bytes(decode.ring, LARGE_GPU_BYTES, device="cuda")
    compared = (
        ("prefill", "chunk.chunk_tokens", settings.chunk_tokens, prefill.chunk.chunk_tokens),
        ("prefill", "limits.max_step_tokens", settings.max_step_tokens, prefill.limits.max_step_tokens),
        ("prefill", "limits.max_running_requests", settings.prefill_running, prefill.limits.max_running_requests),
        ("prefill", "staging.num_slots", settings.staging_slots, prefill.staging.num_slots),
        ("decode", "limits.max_running_requests", settings.decode_running, decode.limits.max_running_requests),
        ("decode", "limits.max_queued_requests", settings.max_queued, decode.limits.max_queued_requests),
        ("decode", "ring.capacity_bytes", settings.ring_bytes, ring),
    )
    return [
        Differing(role=role, name=name, simulated=simulated, default=default)
        for role, name, simulated, default in compared
        if simulated != default
    ]
