"""The values that the loops and sessions of a rank share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from transfer.config import TransportConfig
from transfer.copy.kernel_choice import Kernels
from transfer.instance import Instance
from transfer.metrics import RankMetrics
from transfer.tracing import Tracer
from transfer.transport.base import Transport

if TYPE_CHECKING:
    from transfer.registry.security import Security


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank, for the parts that send or receive KV.

    Args:
        loop: The event loop that owns the rank. Every method of the parts is called on it.
        device: Device of pool, staging memory, ring and probes.
        transport: The data plane. The loop of the part closes it.
        transport_config: Bounds of probes and links.
        security: Protection of gRPC connections. None means plain text on loopback addresses.
        on_crash: Called with an error that must end the rank.
        tracer: Records spans of requests. None disables tracing.
        mem_pool: Pool of the owner for memory of the transport. None means private pools, see `StagingBuffer`.
        kernels: Implementation of copies. None means the fastest for the device.
    """

    loop: asyncio.AbstractEventLoop
    instance: Instance
    rank: int
    device: torch.device
    transport: Transport
    transport_config: TransportConfig = field(default_factory=TransportConfig)
    security: Security | None = None
    metrics: RankMetrics
    on_crash: Callable[[BaseException], None]
    tracer: Tracer | None = None
    mem_pool: torch.cuda.MemPool | None = None
    kernels: Kernels | None = None
