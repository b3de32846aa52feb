"""Remember how far one request's pages are computed, saved, and given up by the device; and which of them others can copy.

Holds data and values derived from it. `decode_node.offload.leader` makes every decision. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from decode_node.offload.host_tier import HostPage
from decode_node.offload.rules import TierRules
from transfer.layer_groups import GroupKind, LayerGroup
from transfer.storage.keys import PageHashes


@dataclass(slots=True, kw_only=True, eq=False)
class TieredRequest:
    """One attempt of a request, from its place in both tiers until every rank has given its pages back.

    Pages are those of the layers that keep every token, unless stated otherwise.

    Args:
        request_id: Id of the attempt.
        chain: Hashes of its whole pages, prompt first.
        total_pages: Pages of prompt and new tokens.
        share: Device pages that it may have.
        least_share: The smallest share with which it can continue.
        guaranteed: Leading pages that can leave the device: they have room in host memory or in the store.
        boundary: Leading pages that are read in host memory or in the store.
        host: Pages that are held in host memory for the request's life, or until they move on to the store. They are the leading
            ones after those in the store.
        host_share: Most pages of `host`, if the request may move pages on to the store; None if it may not.
        num_stored: Leading pages in the store on every rank.
        is_storing: The next block is on its way into the store.
        next_save: First page that was not considered for saving; never before the boundary.
        first_window_page: First page of each sliding window that came whole with the prompt, by group.
        next_window_save: First page of each window that was not considered for saving.
        num_computed: Tokens whose KV is in the pool.
        num_loading: Jobs that bring known pages of its prompt onto the device, before it may run.
        is_moving: The boundary moves, or pages are brought back.
        shrinks_to: Requested share, while the device is short of pages.
        leaves_to: Boundary to which the ranks move it, when they also take the difference in shares.
        returns_to: Boundary down to which pages are brought back; they have their device pages already.
        saving: First window entry that a copy in flight still reads, by job and group.
        num_copied_from: Requests that copy pages of this one.
        stalled_at: Position of the last step that had to wait.
        is_damaged: Its KV may be damaged. It continues, but no other request gets any of its KV.
        asked_ns: See `Prompt`.
    """

    request_id: str
    rules: TierRules
    chain: PageHashes
    num_prompt_tokens: int
    total_pages: int
    share: int
    least_share: int
    guaranteed: int
    boundary: int
    host: list[HostPage] = field(default_factory=list)
    host_share: int | None = None
    num_stored: int = 0
    is_storing: bool = False
    next_save: int = 0
    first_window_page: dict[int, int] = field(default_factory=dict)
    next_window_save: dict[int, int] = field(default_factory=dict)
    num_computed: int = 0
    num_loading: int = 0
    is_running: bool = False
    is_moving: bool = False
    shrinks_to: int | None = None
    leaves_to: int | None = None
    returns_to: int | None = None
    saving: dict[int, dict[int, int]] = field(default_factory=dict)
    num_copied_from: int = 0
    stalled_at: int | None = None
    is_damaged: bool = False
    asked_ns: int = 0
    _num_ready: int = 0

    @property
    def target_share(self) -> int:
        """Share that the request should reach."""
        return self.share if self.shrinks_to is None else self.shrinks_to

    @property
    def num_whole(self) -> int:
        """Pages whose tokens are all computed."""
        return self.num_computed // self.rules.page_size

    @property
    def num_ready(self) -> int:
        """Leading pages that every rank has in host memory or in the store for the request's life."""
        self._num_ready = max(self._num_ready, self.num_stored)
        while self._num_ready < self.host_end and self.host[self._num_ready - self.num_stored].is_ready:
            self._num_ready += 1
        return self._num_ready

    @property
    def host_end(self) -> int:
        """Leading pages that have a place in host memory or in the store."""
        return self.num_stored + len(self.host)

    def host_pages(self, begin: int, end: int) -> list[HostPage]:
        """Return the host pages of some entries, none of which is in the store."""
        return self.host[begin - self.num_stored : end - self.num_stored]

    def wanted_boundary(self) -> int:
        """Return where its boundary should be for the next token."""
        return self.rules.next_boundary(
            boundary=self.boundary,
            end=self.num_whole + 1,
            share=self.target_share,
            saved_end=min(self.num_ready, self.guaranteed),
        )

    def may_step(self, position: int, groups: Sequence[LayerGroup], slack_pages: int) -> bool:
        """Return whether a step needs no more device pages than the request has.

        Args:
            slack_pages: Pages of a window that are set aside for those that a save still reads when the window has passed them.
        """
        end = position // self.rules.page_size + 1
        if end - (self.boundary if self.returns_to is None else self.returns_to) > self.share:
            return False
        if self.leaves_to is not None and end - self.leaves_to > self.target_share:
            return False
        for of_job in self.saving.values():
            for index, entry in of_job.items():
                if groups[index].first_needed_token(position) // self.rules.page_size - entry > slack_pages:
                    return False
        return True

    def whole_windows(self, groups: Sequence[LayerGroup]) -> None:
        """Begin to save each window with the first page that came whole with the prompt."""
        for index, group in enumerate(groups):
            if group.kind is GroupKind.WINDOW:
                self.first_window_page[index] = self.rules.num_pages(group.first_travelling_token(self.num_prompt_tokens))
        self.next_window_save = dict(self.first_window_page)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCopy:
    """Pages of one request on the device that another request copies.

    Args:
        runs: Entries [begin, end) to copy, by the index of a group of layers.
    """

    source: TieredRequest
    runs: dict[int, tuple[int, int]]


class DeviceIndex:
    """Find pages of running requests on the device, to copy those that host memory does not have. Owned by the leader.

    Equal hashes mean equal tokens from the prompt's first token on, so a page is the same entry of both requests' tables.
    """

    def __init__(self, groups: Sequence[LayerGroup]) -> None:
        self._groups = groups
        self._by_hash: dict[bytes, TieredRequest] = {}

    def add(self, request: TieredRequest, first_entry: int) -> None:
        """Add the request's whole pages from that entry on. The first request that has a page stays its source."""
        if request.is_damaged:
            return
        for page_hash in request.chain.hashes[first_entry : request.num_whole]:
            self._by_hash.setdefault(page_hash, request)

    def remove(self, request: TieredRequest) -> None:
        """Remove a request whose pages are about to be freed. Idempotent."""
        for page_hash in request.chain.hashes:
            if self._by_hash.get(page_hash) is request:
                del self._by_hash[page_hash]

    def forget(self, page_hashes: Sequence[bytes]) -> None:
        """Remove pages, whichever request has them."""
        for page_hash in page_hashes:
            self._by_hash.pop(page_hash, None)

    def has(self, source: TieredRequest, group: int, entry: int) -> bool:
        """Return whether the page is on the device, as far as the leader has ordered."""
        if self._groups[group].kind is GroupKind.FULL:
            return entry >= source.boundary
        reached = self._groups[group].first_needed_token(source.num_computed) // source.rules.page_size
        return entry >= max(reached, source.first_window_page[group])

    def source_of(self, page_hash: bytes, entry: int) -> TieredRequest | None:
        """Return the request that has the page on the device and keeps it there for now."""
        source = self._by_hash.get(page_hash)
        if source is None or source.is_moving or not self.has(source, 0, entry):
            return None
        return source
