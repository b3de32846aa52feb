"""What the parts of the leader's offload share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from decode_node.admission import Admission
from decode_node.offload.device_index import DeviceIndex
from decode_node.offload.host_tier import HostTier
from decode_node.offload.jobs import Jobs
from decode_node.offload.rules import TierRules
from transfer.layer_groups import GroupKind, LayerGroup

FULL: Final = 0
"""Index of the group of layers that keep every token, which comes first."""


class TierObserver(Protocol):
    """Hears what becomes of pages, each of which is counted once and not for every rank."""

    def looked_for(self, num_tokens: int) -> None:
        """A try's prompt of so many tokens was looked for in the tiers, and has its place; what was found follows as hits."""
        ...

    def hit(self, tier: str, num_tokens: int) -> None:
        """Tokens of a prompt were found in "device", "host" or "storage", and did not come from prefill."""
        ...

    def saved(self, source: str, num_pages: int) -> None:
        """Pages of a "prompt", or "generated" ones, are in host memory on every rank."""
        ...

    def released_early(self, num_pages: int) -> None:
        """Device pages were given back before their request ended."""
        ...

    def brought_back(self, num_pages: int) -> None:
        """Pages are on the device again."""
        ...

    def host_full(self) -> None:
        """Host memory had no room for a request: its pages stay on the device alone, or it has to wait. Heard once of each."""
        ...

    def stalled(self) -> None:
        """A request's next step has to wait, because its copies have not come far enough. Heard once of each step."""
        ...

    def backed_up(self, num_pages: int, num_failed: int) -> None:
        """So many pages are in the store on every rank, and so many could not be put there."""
        ...

    def host_pages(self, group: str, *, free: int, cached: int, held: int) -> None:
        """Host pages of a group of layers now, by what they are."""
        ...

    def backup_queue(self, num_pages: int) -> None:
        """So many pages wait to be put into the store now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContext:
    """Args:
    rules: The settings, in pages.
    groups: The model's groups of layers.
    tier: Index of the host pools.
    on_device: Pages of running requests.
    admission: Who has what of the device pools.
    jobs: What the ranks have been given to do.
    broadcast: Sends a message to every rank.
    observer: Hears of what happens.
    short: Requests that have found host memory full, until they are gone.
    """

    rules: TierRules
    groups: tuple[LayerGroup, ...]
    tier: HostTier
    on_device: DeviceIndex
    admission: Admission
    jobs: Jobs
    broadcast: Callable[[object], None]
    observer: TierObserver
    short: set[str] = field(default_factory=set)

    def host_full(self, request_id: str) -> None:
        """Host memory has no room for what a request asks of it, however often it asks: that counts once."""
        if request_id not in self.short:
            self.short.add(request_id)
            self.observer.host_full()

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
