"""State that the parts of the leader's offload share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from decode_node.admission import Admission
from decode_node.offload.host_tier import HostTier
from decode_node.offload.jobs import Jobs
from decode_node.offload.rules import StoreRules, TierRules
from decode_node.offload.tiered_request import DeviceIndex
from transfer.layer_groups import GroupKind, LayerGroup
from transfer.log_rate_limiter import LogRateLimiter
from transfer.metrics import NodeMetrics

FULL: Final = 0
"""Index of the group of layers that keep every token. It is always the first group."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContext:
    """Args:
    groups: The model's groups of layers.
    tier: Index of the host pools.
    on_device: Pages of running requests.
    admission: Counts the device pages that each request holds.
    broadcast: Sends a message to every rank.
    metrics: Metrics of the leader. Pages count once, not once per rank.
    advice: The settings to change if host memory is full.
    stores: Rules for requests that device and host memory cannot hold; None if these are refused.
    stored: Pages that such requests may have in the store, by request.
    short: Requests that found host memory full, until they end.
    """

    rules: TierRules
    groups: tuple[LayerGroup, ...]
    tier: HostTier
    on_device: DeviceIndex
    admission: Admission
    jobs: Jobs
    broadcast: Callable[[object], None]
    metrics: NodeMetrics
    advice: str
    stores: StoreRules | None = None
    stored: dict[str, int] = field(default_factory=dict)
    short: set[str] = field(default_factory=set)
    _log_limiter: LogRateLimiter = field(default_factory=LogRateLimiter)

    def host_full(self, request_id: str) -> None:
        """Count a request that found no room in host memory, once."""
        if request_id not in self.short:
            self.short.add(request_id)
            self.count_host_full()

    def count_host_full(self) -> None:
        """Count an attempt that found no room in host memory, and log a warning at most once a minute."""
        self.metrics.counter("offload_host_full").inc()
        if self._log_limiter.is_due("host_memory_full"):
            log.warning("host_memory_full", pages=self.tier.num_pages(FULL), advice=self.advice)

    @property
    def windows(self) -> tuple[int, ...]:
        """Indices of the sliding windows."""
        return tuple(index for index, group in enumerate(self.groups) if group.kind is GroupKind.WINDOW)

    def touch(self, page_hashes: Sequence[bytes]) -> None:
        """Record the use of a prompt's pages. The first page in host memory goes last, because the others need it."""
        for group in range(len(self.groups)):
            for page_hash in reversed(page_hashes):
                if (page := self.tier.find(group, page_hash)) is not None:
                    self.tier.touch(page)

    def first_window_page(self, group: int, next_token: int) -> int:
        """Return the first page of a window that is still read when `next_token` is computed."""
        return self.groups[group].first_needed_token(next_token) // self.rules.page_size
