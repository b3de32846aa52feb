"""What is simulated: the cluster's settings, as the nodes have them, and the load."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from transfer.ring import ALIGNMENT_BYTES


class Placement(StrEnum):
    """Which prefill node gets a request: the one with the fewest outstanding prompt tokens, as far as the decode node knows.

    The first two are the nodes' own code (`transfer.connector.prefill_routing`), the others are there to compare it with.
    """

    TOLD = "told"  # it knows its own requests, and of others' what the last heartbeat told; all links differ in speed
    ALIKE = "alike"  # the same, and all links measure exactly alike
    ORDER = (
        "order"  # it knows its own requests, and takes the first of equal ones in an order of its own: nodes that were not told
    )
    FIRST = "first"  # the same, and all decode nodes in the same order
    TURNS = "turns"  # the same, and its own equal ones take turns
    INFORMED = "informed"  # it knows of everybody's requests at every moment

    @property
    def is_told(self) -> bool:
        return self in (Placement.TOLD, Placement.ALIKE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Nodes and their settings; names and defaults are those of docs/configuration.md, one rank stands for all ranks of a node.

    Args:
        num_prefill, num_decode: Nodes of each tier.
        prefill_pool_tokens, decode_pool_tokens: KV pool of a rank.
        ring_bytes: Of a decode rank.
        staging_slots: Of a prefill rank.
        chunk_tokens, max_step_tokens: How prompts are computed.
        layer_groups: Pieces that a chunk travels in.
        grants_ahead: Grants that a request asks for ahead of the data.
        prefill_running, decode_running: ``limits.max_running_requests`` of each tier.
        max_queued: ``limits.max_queued_requests`` of the decode nodes.
        queue_timeout_s: ``limits.queue_timeout_s``.
        retry_s: After which a request that got no room asks again.
        placement: Among prefill nodes. Requests go to decode nodes by turns.
        group_size: ``placement.group_size``, where placement is `told` or `alike`.
        heartbeat_s: ``heartbeat.interval_s``: between two heartbeats of a prefill node to a decode node.
    """

    num_prefill: int = 1
    num_decode: int = 1
    prefill_pool_tokens: int = 1 << 19
    decode_pool_tokens: int = 1 << 19
    ring_bytes: int = 2 << 30
    staging_slots: int = 4
    chunk_tokens: int = 128
    max_step_tokens: int = 512
    layer_groups: int = 1
    grants_ahead: int = 8
    prefill_running: int = 32
    decode_running: int = 32
    max_queued: int = 256
    queue_timeout_s: float = 60.0
    retry_s: float = 0.05
    placement: Placement = Placement.TURNS
    group_size: int | None = None
    heartbeat_s: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (
            ("num_prefill", 1), ("num_decode", 1), ("prefill_pool_tokens", 1), ("decode_pool_tokens", 1), ("staging_slots", 2),
            ("chunk_tokens", 1), ("max_step_tokens", 1), ("layer_groups", 1), ("grants_ahead", 1), ("prefill_running", 1),
            ("decode_running", 1), ("max_queued", 1), ("ring_bytes", ALIGNMENT_BYTES),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.ring_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"ring_bytes is {self.ring_bytes}; it must be a multiple of {ALIGNMENT_BYTES}")
        for name in ("queue_timeout_s", "retry_s", "heartbeat_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def num_nodes(self) -> int:
        return self.num_prefill + self.num_decode

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
