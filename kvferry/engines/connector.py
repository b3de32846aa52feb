"""The sides, the engine's description and the messages that leader and ranks of a connector share."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, Final

import structlog
import torch

from node_runtime.loop_thread import LoopThread
from node_runtime.rank_link import RankCodec
from node_runtime.rank_messages import RankLogLevel
from transfer.config import ConnectorConfig
from transfer.connector.bound_prompts import PromptState, PromptView
from transfer.connector.incoming_rank import Settled
from transfer.connector.messages import (
    INCOMING_MESSAGES,
    OUTGOING_MESSAGES,
    AttachDecode,
    CancelIncoming,
    DecodeAttached,
    DecodeLost,
    DetachDecode,
    ExpectBound,
    ForgetPrefill,
    LinkProbed,
    PrefillRankLost,
    SettlePrompt,
)
from transfer.connector.outgoing_rank import Free, Wanted
from transfer.connector.rank_report import RankReady, RankReport, RankStartFailed
from transfer.errors import ConfigError
from transfer.layout import KVLayout, Shard
from transfer.plain_text import check_etcd, is_loopback
from transfer.pool.kv_pool import KVPool
from transfer.registry.security import Security, security_of_tier

__all__ = [
    "CLOSE_TIMEOUT_S",
    "CODEC",
    "DECODE",
    "FROM_DECODE",
    "PREFILL",
    "TO_DECODE",
    "ConnectorEngine",
    "Free",
    "LifeBegins",
    "PromptState",
    "PromptView",
    "RankWaiting",
    "Settled",
    "SideReport",
    "Sides",
    "Wanted",
    "close_on",
    "security_for",
]

CLOSE_TIMEOUT_S: Final = 5.0

log = structlog.get_logger(__name__)


class Sides(Flag):
    """Sides of an instance."""

    PREFILL = auto()  # computes prompts and sends their KV
    DECODE = auto()  # receives KV and generates


PREFILL, DECODE = Sides.PREFILL, Sides.DECODE


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorEngine:
    """The engine of one rank.

    Args:
        layout: KV of the whole model.
        shard: This rank's shard of it.
        pool: View of the engine's own tensors (`transfer.pool.kv_pool.PoolView`), or a pool of that layout and shard.
        model_fields: Fields of the model that must be equal on both sides, by name.
        max_context_tokens: Longest prompt.
        vocab_size: Upper bound of token ids, exclusive.
        step_tokens: Most prompt tokens of a step of the engine.
        reports_layers: Whether the engine reports the layers of a running step (`ConnectorRank.progress` with `end_layer`).
        kv_scales: Scales of 8-bit floats; see `transfer.instance.Instance`.
        mem_pool: Pool of the engine, from which the GPU memory for staging slots, ring and probes is allocated. None means
            private pools; see `transfer.pool.staging.StagingBuffer`.
    """

    layout: KVLayout
    shard: Shard
    pool: KVPool
    model_fields: Mapping[str, str]
    max_context_tokens: int
    vocab_size: int
    step_tokens: int = 2048
    reports_layers: bool = False
    kv_scales: Sequence[tuple[float, float]] = ()
    mem_pool: torch.cuda.MemPool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWaiting:
    """Rank -> leader: the rank runs and needs the incarnation."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeBegins:
    """Leader -> rank."""

    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SideReport:
    """Rank -> leader: state and metrics of one side of the rank."""

    side: int
    report: RankReport


CODEC = RankCodec(
    RankWaiting,
    LifeBegins,
    SideReport,
    RankReady,
    RankStartFailed,
    RankLogLevel,
    AttachDecode,
    DetachDecode,
    DecodeAttached,
    DecodeLost,
    *OUTGOING_MESSAGES,
    ForgetPrefill,
    PrefillRankLost,
    LinkProbed,
    *INCOMING_MESSAGES,
)

TO_DECODE = (ExpectBound, CancelIncoming, SettlePrompt, ForgetPrefill)
FROM_DECODE = (PrefillRankLost, LinkProbed, *INCOMING_MESSAGES)


def security_for(config: ConnectorConfig, sides: Sides) -> Security:
    """Return TLS or plain text for calls to the other tier. Raises ConfigError if the settings cannot be used."""
    named: list[tuple[str, str | None]] = [
        ("server.host", config.server.host),
        ("server.advertise_host", config.server.advertise_host),
        ("leader.address", config.leader.address),
        *(("peers.prefill_nodes", address) for address in config.peers.prefill_nodes),
    ]
    check_etcd(config.discovery, config.tls)
    leader, host = config.leader.address, config.server.advertised_host
    if leader is not None and is_loopback(host) and not is_loopback(leader):
        raise ConfigError(
            f"server.host is {host}, which the other hosts of the engine (leader.address: {leader}) cannot reach; set it, or "
            "server.advertise_host, to this host's address"
        )
    return security_of_tier(config.tls, other_tier="decode" if PREFILL in sides else "prefill", named=named)


def close_on(thread: LoopThread, closing: Coroutine[Any, Any, None]) -> None:
    """Run `closing` on the loop for at most `CLOSE_TIMEOUT_S`, because the engine has more to end, and release the thread."""
    try:
        thread.start(closing).result(CLOSE_TIMEOUT_S)
    except TimeoutError:
        log.warning("close_timed_out", seconds=CLOSE_TIMEOUT_S)
    finally:
        thread.release()
