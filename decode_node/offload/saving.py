"""Choose the pages of a request that are saved next.

Pages of the prompt and of generated tokens are saved alike, a stride at a time, when all their tokens are computed.
Leading pages that may leave the device are held in host memory for the request's life, in room that was promised.
The others are a cache for later requests; without room they are not saved.
A request that moves pages on to the store keeps nothing for others, and saves as many pages as its share of host memory holds.
If the request's KV may be damaged, only the former are saved, and no other request finds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from decode_node.offload.context import FULL, TierContext
from decode_node.offload.host_tier import HostPage
from decode_node.offload.tiered_request import TieredRequest
from decode_node.rank_messages import HostPageRun

MAX_SAVED_PAGES: Final = 256
"""Maximum pages of a save: enough to fill the link, few enough that other requests have their turn."""


@dataclass(slots=True, kw_only=True)
class Save:
    """Pages that are about to be copied.

    Args:
        source: "prompt" or "generated", for the first page.
        pages: Host pages to fill.
        transient: Those of `pages` that the request does not hold afterwards.
        entries: By group, each page with its entry in the page table, in ascending order.
    """

    source: str
    pages: list[HostPage] = field(default_factory=list)
    transient: list[HostPage] = field(default_factory=list)
    entries: dict[int, list[tuple[int, HostPage]]] = field(default_factory=dict)

    def add(self, group: int, entry: int, page: HostPage, *, is_kept: bool) -> None:
        self.pages.append(page)
        if not is_kept:
            self.transient.append(page)
        self.entries.setdefault(group, []).append((entry, page))

    @property
    def runs(self) -> tuple[HostPageRun, ...]:
        """The pages as runs of adjacent entries."""
        found: list[HostPageRun] = []
        for group, of_group in self.entries.items():
            begin = 0
            for index in range(1, len(of_group) + 1):
                if index == len(of_group) or of_group[index][0] != of_group[index - 1][0] + 1:
                    numbers = tuple(page.number for _, page in of_group[begin:index])
                    found.append(HostPageRun(group=group, first_entry=of_group[begin][0], host_pages=numbers))
                    begin = index
        return tuple(found)

    @property
    def first_window_pages(self) -> dict[int, int]:
        """First entry of each window that is read, by group."""
        return {group: of_group[0][0] for group, of_group in self.entries.items() if group != FULL}


def next_save(context: TierContext, request: TieredRequest, *, is_last: bool) -> Save | None:
    """Take host pages for the pages that can be saved now, or return None.

    A page that host memory already has is not copied, but held if the request needs it.

    Args:
        is_last: The request ends, so even less than a stride is saved.
    """
    whole = request.num_whole
    least = 1 if is_last else request.rules.stride_pages
    prompt_pages = request.num_prompt_tokens // request.rules.page_size
    while whole - request.next_save >= least:
        begin = request.next_save
        source, end = ("prompt", min(whole, prompt_pages)) if begin < prompt_pages else ("generated", whole)
        save = Save(source=source)
        is_full = not _add_full(context, request, save, min(end, begin + MAX_SAVED_PAGES))
        _add_windows(context, request, save)
        if save.pages:
            return save
        if is_full:
            return None
    return None


def _add_full(context: TierContext, request: TieredRequest, save: Save, end: int) -> bool:
    """Add pages up to `end` of the layers that keep every token. Return False if host memory, or the request's share, is full."""
    tier = context.tier
    if request.host_share is not None:
        end = min(end, request.guaranteed, request.num_stored + request.host_share)
        if request.next_save >= end:
            return False
    for entry in range(request.next_save, end):
        page_hash = None if request.is_damaged or request.host_share is not None else request.chain.hashes[entry]
        known = None if page_hash is None else tier.find(FULL, page_hash)
        is_kept = entry < request.guaranteed
        owner = request.request_id if is_kept else None
        if known is not None and (not is_kept or known.is_ready):
            if is_kept:
                tier.hold(known, owner=owner)
                request.host.append(known)
        elif is_kept or not request.is_damaged:
            page = tier.take(FULL, page_hash, owner=owner, depth=entry)
            if page is None:
                context.host_full(request.request_id)
                return False
            if is_kept:
                request.host.append(page)
            save.add(FULL, entry, page, is_kept=is_kept)
        request.next_save = entry + 1
    return True


def _add_windows(context: TierContext, request: TieredRequest, save: Save) -> None:
    """Add the whole pages of each window that are still on the device, up to where the other layers are saved."""
    for group in () if request.is_damaged or request.host_share is not None else context.windows:
        first = max(request.next_window_save[group], context.first_window_page(group, request.num_computed))
        for entry in range(first, request.next_save):
            page_hash = request.chain.hashes[entry]
            if context.tier.find(group, page_hash) is None:
                page = context.tier.take(group, page_hash, depth=entry)
                if page is None:
                    context.host_full(request.request_id)
                    break
                save.add(group, entry, page, is_kept=False)
        request.next_window_save[group] = max(first, request.next_save)
