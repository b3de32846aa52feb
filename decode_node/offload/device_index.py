"""Which pages of running requests are on the device. Pure; owned by the leader.

A page that host memory has no room for, or has not got yet, can be had from another request's copy, for as long as that is there.
Equal hashes mean equal tokens from the prompt's first on, so a page is the same entry of both requests' tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode_node.offload.tiered_request import TieredRequest
from transfer.layer_groups import GroupKind, LayerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCopy:
    """Pages that one request has on the device and another is to have, too.

    Args:
        source: Who has them.
        runs: By the index of a group of layers, the entries [begin, end) that are copied.
    """

    source: TieredRequest
    runs: dict[int, tuple[int, int]]


class DeviceIndex:
    """See the module's docstring.

    Args:
        groups: The model's groups of layers.
    """

    def __init__(self, groups: Sequence[LayerGroup]) -> None:
        self._groups = groups
        self._by_hash: dict[bytes, TieredRequest] = {}

    def add(self, request: TieredRequest, first_entry: int) -> None:
        """The request's whole pages from that entry on are on the device, and may be had; one that another has is its."""
        if request.is_damaged:
            return
        for page_hash in request.chain.hashes[first_entry : request.num_whole]:
            self._by_hash.setdefault(page_hash, request)

    def remove(self, request: TieredRequest) -> None:
        """The request's pages are about to go. Does nothing twice."""
        for page_hash in request.chain.hashes:
            if self._by_hash.get(page_hash) is request:
                del self._by_hash[page_hash]

    def forget(self, page_hashes: Sequence[bytes]) -> None:
        """Nobody is to have these pages from anybody."""
        for page_hash in page_hashes:
            self._by_hash.pop(page_hash, None)

    def has(self, source: TieredRequest, group: int, entry: int) -> bool:
        """Whether the page is on the device, as far as the leader has ordered."""
        if self._groups[group].kind is GroupKind.FULL:
            return entry >= source.boundary
        reached = self._groups[group].first_needed_token(source.num_computed) // source.rules.page_size
        return entry >= max(reached, source.first_window_page[group])

    def source_of(self, page_hash: bytes, entry: int) -> TieredRequest | None:
        """Who has that page on the device, and will not leave it behind meanwhile."""
        source = self._by_hash.get(page_hash)
        if source is None or source.is_moving or not self.has(source, 0, entry):
            return None
        return source
