"""What of the simulated settings nodes have to be told, because their own defaults are others."""

from __future__ import annotations

from dataclasses import dataclass

from bench.simulation.settings import ClusterSettings
from transfer.config import ChunkConfig, DecodeLimitsConfig, PrefillLimitsConfig, RingConfig, StagingConfig
from transfer.sizes import ring_capacity_bytes

_LARGE_GPU_BYTES = 80 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """A setting as it was simulated.

    Args:
        role: Whose it is: "prefill" or "decode".
        name: As docs/configuration.md has it.
        simulated, default: Of the simulation, and of a node on a GPU that is told nothing.
    """

    role: str
    name: str
    simulated: int
    default: int


def differing(settings: ClusterSettings) -> list[Differing]:
    """Settings of which the simulated value is not what nodes take by themselves.

    Not among them: pools, which the memory plan sizes, and layers of a group, which nodes choose by the speed of their links.
    """
    prefill, decode = PrefillLimitsConfig(), DecodeLimitsConfig()
    ring = ring_capacity_bytes(RingConfig(), _LARGE_GPU_BYTES, device="cuda")
    compared = (
        ("prefill", "chunk.chunk_tokens", settings.chunk_tokens, ChunkConfig().chunk_tokens),
        ("prefill", "limits.max_step_tokens", settings.max_step_tokens, prefill.max_step_tokens),
        ("prefill", "limits.max_running_requests", settings.prefill_running, prefill.max_running_requests),
        ("prefill", "staging.num_slots", settings.staging_slots, StagingConfig().num_slots),
        ("decode", "limits.max_running_requests", settings.decode_running, decode.max_running_requests),
        ("decode", "limits.max_queued_requests", settings.max_queued, decode.max_queued_requests),
        ("decode", "ring.capacity_bytes", settings.ring_bytes, ring),
    )
    return [
        Differing(role=role, name=name, simulated=simulated, default=default)
        for role, name, simulated, default in compared
        if simulated != default
    ]
