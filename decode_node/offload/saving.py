"""Which pages of a request are saved next.

The prompt's pages and those of generated tokens alike, once every token of them is computed, a stride at a time. Leading pages
that the device may have to leave behind are held in host memory for the request's life, in room that was promised. The others are
a cache for later requests: where there is no room they are not saved, and the request goes on without. Of a request whose KV
may be damaged only the former are saved, and nobody else finds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from decode_node.offload.context import FULL, TierContext
from decode_node.offload.host_tier import HostPage
from decode_node.offload.tiered_request import TieredRequest
from decode_node.rank_messages import HostPageRun

MAX_SAVED_PAGES: Final = 256
"""Pages of a save: large enough for the link, small enough that other requests have their turn."""


@dataclass(slots=True, kw_only=True)
class Save:
    """Pages that are about to be copied.

    Args:
        source: "prompt" or "generated", of the first of them.
        pages: To be filled.
        transient: Of these, those that nobody holds any more once they are.
        runs: Where they are on the device.
        first_window_pages: First entry that is read of each window.
    """

    source: str
    pages: list[HostPage] = field(default_factory=list)
    transient: list[HostPage] = field(default_factory=list)
    entries: dict[int, list[tuple[int, HostPage]]] = field(default_factory=dict)

    def add(self, group: int, entry: int, page: HostPage, *, is_kept: bool) -> None:
        """One page more; entries of a group ascend."""
        self.pages.append(page)
        if not is_kept:
            self.transient.append(page)
        self.entries.setdefault(group, []).append((entry, page))

    @property
    def runs(self) -> tuple[HostPageRun, ...]:
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
        return {group: of_group[0][0] for group, of_group in self.entries.items() if group != FULL}


def next_save(context: TierContext, request: TieredRequest, *, is_last: bool) -> Save | None:
    """Take host pages for what of the request can be saved now; None when that is nothing.

    A page that host memory has already is held, where it has to be, and not copied.

    Args:
        is_last: The request is at its end: less than a stride is worth a save.
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
    """Pages up to `end` of the layers that keep every token; False where host memory is full."""
    tier = context.tier
    for entry in range(request.next_save, end):
        page_hash = None if request.is_damaged else request.chain.hashes[entry]
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
    """What is still on the device of each window's whole pages, up to where the other layers are saved."""
    for group in () if request.is_damaged else context.windows:
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
