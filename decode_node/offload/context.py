"""What the parts of the leader's offload share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from decode_node.admission import Admission
from decode_node.offload.device_index import DeviceIndex
from decode_node.offload.host_tier import HostTier
from decode_node.offload.jobs import Jobs
from decode_node.offload.rules import TierRules
from transfer.layer_groups import GroupKind, LayerGroup
from transfer.metrics import NodeMetrics

FULL: Final = 0
"""Index of the group of layers that keep every token, which comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContext:
    """Args:
    rules: The settings, in pages.
    groups: The model's groups of layers.
    tier: Index of the host pools.
    on_device: Pages of running requests.
    admission: Tracks the pages of the device pools that each request holds.
    jobs: Work that was sent to the ranks.
    broadcast: Sends a message to every rank.
    metrics: Metrics of the leader. Pages count once, not once per rank.
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
    short: set[str] = field(default_factory=set)

    def host_full(self, request_id: str) -> None:
        """Host memory has no room for what a request asks of it, however often it asks: that counts once."""
        if request_id not in self.short:
            self.short.add(request_id)
            self.metrics.counter("offload_host_full").inc()

    @property
    def windows(self) -> tuple[int, ...]:
        """Indices of the sliding windows."""
        return tuple(index for index, group in enumerate(self.groups) if group.kind is GroupKind.WINDOW)

    def touch(self, page_hashes: Sequence[bytes]) -> None:
        """A prompt's pages were used: of those in host memory the first goes last, for the others are of no use without it."""
        for group in range(len(self.groups)):
            for page_hash in reversed(page_hashes):
                if (page := self.tier.find(group, page_hash)) is not None:
                    self.tier.touch(page)

    def first_window_page(self, group: int, next_token: int) -> int:
        """The first page of a window that is still read when `next_token` is computed."""
        return self.groups[group].first_needed_token(next_token) // self.rules.page_size
