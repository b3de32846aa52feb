"""Place a request in the tiers, and find the pages of its prompt that are there already.

Known leading pages of a prompt need not come from prefill. A sliding window needs only the pages that the next tokens still
reach. If they are missing, prefill sends from an earlier token on.

A request that device and host memory together cannot hold moves pages on to the store (`rules.StoreRules`). It shares no pages
with other requests.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from decode_node.admission import Room
from decode_node.offload.context import FULL, TierContext
from decode_node.offload.host_tier import HostPage
from decode_node.offload.tiered_request import DeviceCopy, TieredRequest
from decode_node.offload.tiers import PlaceRequest
from decode_node.rank_messages import HostPageRun
from transfer.errors import LayoutError
from transfer.layer_groups import PageCounts
from transfer.storage.keys import PageHashes

MAX_HITS: Final = 48 << 10
"""Maximum pages of a prompt from host memory: 786,432 tokens in pages of 16. Each page takes 0.7 us of the leader's loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A request with its room in both tiers.

    Args:
        pages: Device pages of each group of layers.
        start_token: First token that has to come from prefill.
        loads: Pages to load onto the device before it may run.
        loaded_from: Host pages that are held only until they are loaded.
        copy: Pages of another request to copy before it may run.
        hits: Pages that were found in host memory, in the order of their tokens. Pages found on the device follow them.
    """

    request: TieredRequest
    pages: PageCounts
    start_token: int
    loads: tuple[HostPageRun, ...]
    loaded_from: tuple[HostPage, ...]
    copy: DeviceCopy | None
    hits: tuple[HostPage, ...]

    @property
    def num_device_hits(self) -> int:
        """Pages that were found on the device."""
        return self.start_token // self.request.rules.page_size - len(self.hits)


def refusal(context: TierContext, num_tokens: int) -> str | None:
    """Return why a request of so many tokens can never have a place, or None."""
    rules, admission = context.rules, context.admission
    total = rules.num_pages(num_tokens)
    least = _with_full(admission.needs.peak(num_tokens), rules.least_share(total, grid_pages=1))
    if not least.fit(admission.pool_pages):
        return f"need {admission.needs.shown(least)} pages; this decode node's pool has fewer"
    if fits_without_store(context, num_tokens):
        return None
    share = max(least.by_group[FULL], min(total, rules.high_pages))
    host_pages = context.tier.num_pages(FULL)
    reason = f"need {total} pages; this decode node has {share} on the device for one request and {host_pages} in host memory"
    if context.stores is None or not rules.has_early_release:
        return reason
    needed = context.stores.least_host_share(1, rules.stride_pages)
    if needed > host_pages:
        return f"{reason}, where a request that uses the store needs {needed}"
    most = context.stores.max_pages
    if most is not None and total - share > most:
        return f"{reason}, and storage.max_bytes has room for {most}"
    return None


def fits_without_store(context: TierContext, num_tokens: int) -> bool:
    """Return whether an empty device and empty host memory together can hold a request of `num_tokens` tokens."""
    rules = context.rules
    total = rules.num_pages(num_tokens)
    share = max(rules.least_share(total, grid_pages=1), min(total, rules.high_pages))
    return total - share <= context.tier.num_pages(FULL)


def matched(context: TierContext, chain: PageHashes, prompt_tokens: int) -> list[HostPage]:
    """Return the leading pages of a prompt that host memory has. At least one token is left to compute."""
    most = min((prompt_tokens - 1) // context.rules.page_size, MAX_HITS)
    found = context.tier.ready_beginning(FULL, chain.hashes[:most])
    for page in reversed(found):
        context.tier.touch(page)  # a prefix is evicted after its continuation
    return found[: _window_limit(context, chain, prompt_tokens, len(found))]


def _found_on_device(context: TierContext, request: TieredRequest, num_hits: int) -> DeviceCopy | None:
    """Return the pages after those in host memory that one other request has on the device, windows included."""
    index, chain, first = context.on_device, request.chain, num_hits
    most = (request.num_prompt_tokens - 1) // context.rules.page_size
    if first >= most or first < request.boundary:
        return None
    source = index.source_of(chain.hashes[first], first)
    end = first
    while source is not None and end < most and index.source_of(chain.hashes[end], end) is source:
        end += 1
    if source is None:
        return None
    runs = {FULL: (first, end)}
    for group in context.windows:
        begin = context.first_window_page(group, request.num_prompt_tokens)
        if begin < first:
            return None  # part of the window would have to come from elsewhere
        if begin < end and not index.has(source, group, begin):
            end = begin
        runs[group] = (begin, end)
    found = {group: (begin, end) for group, (begin, _) in runs.items() if begin < end}
    return DeviceCopy(source=source, runs=found) if found else None


def place(context: TierContext, wanted: PlaceRequest) -> Placement | None:
    """Take room in both tiers. None means "not yet"; the request then waits (`decode_node.admission`).

    Raises:
        LayoutError: See `Tiers.place`.
    """
    chain, request_id, accepted_s = wanted.prompt.chain, wanted.request_id, wanted.accepted_s
    assert chain is not None, "look_up has made it"
    prompt_tokens, total_tokens, chunk_tokens = len(wanted.prompt.token_ids), wanted.total_tokens, wanted.chunk_tokens
    rules, admission = context.rules, context.admission
    total, grid = rules.num_pages(total_tokens), rules.grid_pages(chunk_tokens)
    least = rules.least_share(total, grid)
    host_share = _host_share(context, total, least, prompt_tokens, chunk_tokens)

    def in_host_memory(share: int) -> int:
        """Return the host pages to promise if the request gets this share of the device."""
        if host_share is not None:
            return host_share
        boundary = rules.first_boundary(prompt_tokens, total_pages=total, share=share, grid_pages=grid)
        return max(total - share, boundary)

    # The least share whose remainder fits an empty host memory. With a smaller share the request would wait forever.
    shares = range(least, total)
    smallest = least + bisect_left(shares, True, key=lambda share: in_host_memory(share) <= context.tier.num_pages(FULL))
    others = admission.set_aside(request_id, accepted_s=accepted_s)
    share = _share_now(context, total, smallest, others.pages.by_group[FULL])
    promised, peak = in_host_memory(share), admission.needs.peak(total_tokens)
    pages = _with_full(peak, share)
    has_host_room = promised <= max(0, context.tier.spare(FULL) - others.host_pages)
    if not has_host_room:
        context.host_full(request_id)
    has_room = has_host_room and (host_share is None or _has_store_room(context, total))
    if not (has_room and admission.reserve(request_id, pages, accepted_s=accepted_s)):
        needed = Room(pages=_with_full(peak, smallest), host_pages=in_host_memory(smallest))
        admission.wait(request_id, needed, accepted_s=accepted_s)
        return None
    context.tier.promise(request_id, FULL, promised)
    boundary = rules.first_boundary(prompt_tokens, total_pages=total, share=share, grid_pages=grid)
    request = TieredRequest(
        request_id=request_id,
        rules=rules,
        chain=chain,
        num_prompt_tokens=prompt_tokens,
        total_pages=total,
        share=share,
        least_share=least,
        guaranteed=max(total - share, boundary),
        boundary=boundary,
        host_share=host_share,
    )
    if host_share is None:
        return _with_hits(context, request, pages, may_skip=wanted.may_skip)
    return _with_store(context, request, pages, host_share)


def _share_now(context: TierContext, total: int, least: int, set_aside: int) -> int:
    """Return as many device pages as there are below the high-water mark, and at least `least`."""
    rules, admission = context.rules, context.admission
    used = rules.pool_pages - admission.free_pages.by_group[FULL] + set_aside
    return min(total, max(least, rules.high_pages - used))


def _host_share(context: TierContext, total: int, least: int, prompt_tokens: int, chunk_tokens: int) -> int | None:
    """Return the host share of a request that has to move pages on to the store; None if all of its pages fit without the store.

    Raises:
        LayoutError: See `Tiers.place`.
    """
    rules, host_pages, stores = context.rules, context.tier.num_pages(FULL), context.stores
    share, grid = min(total, max(least, rules.high_pages)), rules.grid_pages(chunk_tokens)
    boundary = rules.first_boundary(prompt_tokens, total_pages=total, share=share, grid_pages=grid)
    needed = max(total - share, boundary)
    if least <= rules.pool_pages and needed <= host_pages:
        return None
    if stores is not None and rules.has_early_release:
        needed = stores.least_host_share(grid, rules.stride_pages)
    if least > rules.pool_pages or needed > host_pages:
        raise LayoutError(
            f"{total} pages in chunks of {chunk_tokens} tokens need {least} pages of {rules.page_size} tokens on the device and "
            f"{needed} in host memory; this decode node has {rules.pool_pages} and {host_pages}"
        )
    assert stores is not None
    return stores.host_share(grid, rules.stride_pages)


def _has_store_room(context: TierContext, total: int) -> bool:
    assert context.stores is not None
    most = context.stores.max_pages
    return most is None or sum(context.stored.values()) + total <= most or not context.stored


def _with_store(context: TierContext, request: TieredRequest, pages: PageCounts, host_share: int) -> Placement:
    """Allocate host pages for the part of the prompt that stays there. Pages on their way to the store also arrive in them."""
    assert context.stores is not None
    context.stored[request.request_id] = request.total_pages
    request.num_stored = context.stores.num_stored(request.boundary, host_share)
    while request.host_end < request.boundary:
        taken = context.tier.take(FULL, None, owner=request.request_id, depth=request.host_end)
        assert taken is not None  # promised
        request.host.append(taken)
    request.next_save = request.boundary
    return Placement(request=request, pages=pages, start_token=0, loads=(), loaded_from=(), copy=None, hits=())


def _with_hits(context: TierContext, request: TieredRequest, pages: PageCounts, *, may_skip: bool) -> Placement:
    """Hold the pages that are found of the prompt, and take pages for KV that arrives in host memory."""
    tier, boundary = context.tier, request.boundary
    transient: list[HostPage] = []
    for page in matched(context, request.chain, request.num_prompt_tokens) if may_skip else ():
        is_kept = len(request.host) < request.guaranteed
        if not tier.hold(page, owner=request.request_id if is_kept else None):
            break
        (request.host if is_kept else transient).append(page)
    hits = (*request.host, *transient)
    request.next_save = len(hits)
    loads = [HostPageRun(group=FULL, first_entry=boundary, host_pages=_numbers(hits[boundary:]))] if len(hits) > boundary else []
    for group in context.windows:
        first = context.first_window_page(group, request.num_prompt_tokens)
        reached = [tier.find(group, page_hash) for page_hash in request.chain.hashes[first : len(hits)]]
        held = [page for page in reached if page is not None and tier.hold(page)]
        assert len(held) == len(reached)  # _window_limit ensures it
        transient += held
        if held:
            loads.append(HostPageRun(group=group, first_entry=first, host_pages=_numbers(held)))
    copy = _found_on_device(context, request, len(hits)) if may_skip else None
    num_found = len(hits) if copy is None else copy.runs[FULL][1]
    request.next_save = max(request.next_save, boundary)
    while len(request.host) < boundary:
        entry = len(request.host)
        taken = tier.take(FULL, request.chain.hashes[entry], owner=request.request_id, depth=entry)
        assert taken is not None  # promised
        request.host.append(taken)
    return Placement(
        request=request,
        pages=pages,
        start_token=num_found * context.rules.page_size,
        loads=tuple(loads),
        loaded_from=tuple(transient),
        copy=copy,
        hits=hits,
    )


def _window_limit(context: TierContext, chain: PageHashes, prompt_tokens: int, num_pages: int) -> int:
    """Return how many leading pages of a prompt are usable, because its windows, as far as still reached, are there too."""
    limit = num_pages
    for group in context.windows:
        first = context.first_window_page(group, prompt_tokens)
        for entry in range(first, limit):
            page = context.tier.find(group, chain.hashes[entry])
            if page is None or not page.is_ready:
                limit = entry
                break
        if limit - first > context.tier.spare(group):
            limit = min(limit, first)
    return limit


def _numbers(pages: list[HostPage] | tuple[HostPage, ...]) -> tuple[int, ...]:
    return tuple(page.number for page in pages)


def _with_full(pages: PageCounts, count: int) -> PageCounts:
    """Return the same counts, with `count` pages of the layers that keep every token."""
    return PageCounts((count, *pages.by_group[FULL + 1 :]))
