"""Settings of a kvferry that an engine hosts in its own processes, see docs/engines.md."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from transfer.config.memory import ChunkConfig, RingConfig, StagingConfig
from transfer.config.network import PeersConfig
from transfer.config.nodes import InstanceConfig
from transfer.config.operation import BreakerConfig, PlacementConfig
from transfer.config.values import CountOrZero, Seconds, Section


class ConnectorLimitsConfig(Section):
    """Limits of a connector. The engine itself limits its computation."""

    meet_timeout_s: Seconds = Field(
        default=60.0,
        description=(
            "Longest that one side waits for the other: prefill for a prompt that its engine has not been given, or has not "
            "begun, decode for a prefill node that it has not joined."
        ),
    )
    hold_s: Seconds = Field(
        default=120.0,
        description="Prefill: time that the engine's pages of a computed prompt are held for a decode side that has not asked.",
    )
    prefill_retries: CountOrZero = Field(
        default=2,
        description="Decode: times that a transfer is tried again, while the prefill side still has the prompt; 0 never.",
    )
    max_transfers: CountOrZero = Field(default=4096, description="Transfers in flight on one side; more are refused at once.")


class ConnectorConfig(InstanceConfig):
    """Settings of a connector with one or both sides. They are part of the engine's connector configuration."""

    role: ClassVar[str] = "connector"

    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Where the engine has its KV; set by what hosts it.")
    limits: ConnectorLimitsConfig = Field(default_factory=ConnectorLimitsConfig, description="Bounds.")
    chunk: ChunkConfig = Field(default_factory=ChunkConfig, description="Prefill: how prompts are cut.")
    staging: StagingConfig = Field(default_factory=StagingConfig, description="Prefill: staging memory.")
    ring: RingConfig = Field(default_factory=RingConfig, description="Decode: the ring.")
    peers: PeersConfig = Field(default_factory=PeersConfig, description="Decode: the prefill tier.")
    placement: PlacementConfig = Field(
        default_factory=PlacementConfig, description="Decode: choice of the prefill node for a prompt that names none."
    )
    breaker: BreakerConfig = Field(default_factory=BreakerConfig, description="Decode: circuit breakers of the prefill nodes.")
    join_on_request: bool = Field(
        default=False,
        description=(
            "Decode: join also a prefill node that a request names and peers.prefill_nodes does not. Whoever may send requests "
            "then has this process connect to any address."
        ),
    )

    @model_validator(mode="after")
    def _check_one_list_of_prefill_nodes(self) -> Self:
        self.discovery.check_one_list(self.peers.prefill_nodes)
        return self

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        if self.transport.name == "inproc":
            raise ValueError("transport.name is inproc, which joins two ends of one process; an engine's ranks need another")
        return self
