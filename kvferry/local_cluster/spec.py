"""Specification of a local cluster: its two tiers, and the command lines of their nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import kvferry
from transfer.config import ENVIRONMENT_PREFIX
from transfer.errors import ConfigError
from transfer.plain_text import ON_LOOPBACK
from transfer.registry.security import Security

Role = Literal["prefill", "decode"]

ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """Settings of the nodes of one tier. The nodes check them.

    Args:
        model: Hugging Face model directory.
        tp_size: Tensor parallel degree, which is the number of rank processes.
        page_size: Tokens per page.
        order: "NHD" or "HND".
        pool_tokens: Capacity of each rank's KV pool.
        settings: Other settings of the node by path, for example ``{"limits.max_running_requests": 4}``; they win.
        first_devices: `first_device` of each node, in turn. If empty, nodes use that of `settings` or the default.
    """

    model: Path
    tp_size: int = 1
    page_size: int = 16
    order: str = "NHD"
    pool_tokens: int = 16_384
    settings: Mapping[str, object] = field(default_factory=dict)
    first_devices: Sequence[int] = ()

    def all_settings(self) -> dict[str, object]:
        """Return all settings by path."""
        return {
            "model": self.model,
            "parallel.tp_size": self.tp_size,
            "pool.page_size": self.page_size,
            "pool.order": self.order,
            "pool.num_tokens": self.pool_tokens,
        } | dict(self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Both tiers and their common settings. None means the node's default.

    Args:
        prefill, decode: The tiers. Their models may differ, so that a test can check this case.
        num_prefill, num_decode: Nodes of each tier; every decode node uses every prefill node.
        security: TLS for nodes whose settings have certificates. None means plain text on the loopback device.
        layers_per_group: Layers per chunk; 0 means all.
        staging_slots: Staging slots of each prefill rank.
        ring_bytes: Ring of each decode rank.
        start_timeout_s: Longest time from the start until the tiers are joined.
    """

    prefill: TierSpec
    decode: TierSpec
    num_prefill: int = 1
    num_decode: int = 1
    transport: str = "auto"
    security: Security | None = None
    chunk_tokens: int | None = None
    layers_per_group: int | None = None
    staging_slots: int | None = None
    ring_bytes: int | None = None
    heartbeat_s: float | None = None
    log_level: str = "info"
    start_timeout_s: float = 90.0

    def __post_init__(self) -> None:
        if not self.start_timeout_s > 0:
            raise ConfigError(f"start_timeout_s is {self.start_timeout_s}; it must be above 0")
        for name in ("num_prefill", "num_decode"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def tier(self, role: Role) -> TierSpec:
        return self.prefill if role == "prefill" else self.decode

    def names(self, role: Role) -> tuple[str, ...]:
        """Return the names of the tier's nodes: the role, with a number if there are several."""
        number = self.num_prefill if role == "prefill" else self.num_decode
        return (role,) if number == 1 else tuple(f"{role}-{index}" for index in range(number))

    def settings_of(self, role: Role) -> dict[str, object]:
        """Return the settings of the tier's nodes that are not left at their defaults, by path."""
        shared = {"transport.name": self.transport, "heartbeat.interval_s": self.heartbeat_s}
        own: dict[str, object]
        if role == "prefill":
            own = {
                "chunk.chunk_tokens": self.chunk_tokens,
                "chunk.layers_per_group": self.layers_per_group,
                "staging.num_slots": self.staging_slots,
            }
        else:
            own = {"ring.capacity_bytes": self.ring_bytes}
        given = {path: value for path, value in (shared | own).items() if value is not None}
        plain_text = {"tls.insecure": ON_LOOPBACK} if self.security is None else {}
        return given | plain_text | self.tier(role).all_settings()

    def command(self, role: Role, index: int = 0, *, port: int, prefill_addresses: Sequence[str], ready_file: Path) -> list[str]:
        """Return the command line of a node.

        Args:
            index: Number of the node in its tier.
            port: Port of its gRPC API.
            prefill_addresses: host:port of the prefill nodes that a decode node joins.
            ready_file: File that the node writes once it is ready.
        """
        command = [
            sys.executable,
            "-m",
            f"{role}_node",
            "serve",
            "--port",
            str(port),
            "--http-port",
            "0",
            "--ready-file",
            str(ready_file),
        ]
        command += ["--log-format", "json", "--log-level", self.log_level]
        if role == "decode":
            command += [part for address in prefill_addresses for part in ("--prefill-node", address)]
        for override in self.overrides(role):
            command += ["--set", override]
        if devices := self.tier(role).first_devices:
            command += ["--set", f"first_device={devices[index % len(devices)]}"]
        return command

    def overrides(self, role: Role) -> list[str]:
        """Return the settings of the tier's nodes as ``path=value``."""
        return [f"{path}={_text(value)}" for path, value in self.settings_of(role).items()]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def child_environment() -> dict[str, str]:
    """Return the environment of a process that runs this source, installed or not, without settings from this environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    source = str(Path(kvferry.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(part for part in (source, environment.get("PYTHONPATH")) if part)
    return environment
