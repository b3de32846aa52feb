"""Decide in which tier the pages of each request lie. The decode leader orders, and its ranks carry out.

Theory of operation. A request passes through these stages:

1. `look_up` hashes the prompt, and fetches pages that only the store has into host memory, in bounded time.
2. `place` takes all of its room in both tiers at once (`page_placement`), or answers "not yet".
   Known leading pages of the prompt are held, so that prefill can leave them out.
3. `begin_loading` copies known pages onto the device: from host memory, or from another request that runs.
4. `begin` follows when the whole prompt is on every rank. From then on, whole pages are saved into host memory a stride at a time
   (`saving`), and put into the store. Later prompts find them by the hash of their tokens.
   If device and host memory cannot hold the request, its oldest pages move on to the store, from where steps read them.
5. `finish` or `give_up` ends it. `gone` follows when every rank has given its pages back.

With early release, a running request has a share of the device (`rules`). When its share is used up, saved leading pages leave
the device, and steps read them in host memory. The share shrinks while others wait for room, and grows when there is plenty.

Nothing here waits. Every order is a job (`jobs`), and the next decision follows the last rank's answer. A page is used only after
every rank has filled it, and freed only after every rank has stopped using it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from decode_node.offload.context import FULL, TierContext
from decode_node.offload.host_tier import HostPage
from decode_node.offload.page_placement import Placement, fits_without_store, place, refusal
from decode_node.offload.saving import next_save
from decode_node.offload.store_leader import StoreLeader
from decode_node.offload.tiered_request import DeviceCopy, TieredRequest
from decode_node.offload.tiers import Place, PlaceRequest, Prompt, Tiers
from decode_node.rank_messages import CopyPages, EntryRun, HostPageRun, JobDone, LoadPages, MoveBoundary, SavePages, StoreBlock
from transfer.instance import Instance
from transfer.storage.hashing import HashingTurns
from transfer.storage.keys import PageHashes

MAX_SAVES: Final = 4
"""Saves in flight over all requests, so that one is copied while the ranks answer another."""

MAX_LAST_SAVES: Final = 48
"""Saves when a request ends; its other pages are not kept. All saves of a long prompt in pages of one token took 0.4 s."""

MAX_BROUGHT_BACK: Final = 256
"""Pages that are brought back at a time, so that saves have their turn."""


class OffloadLeader(Tiers):
    """Tiers with host memory and, if there is one, a store; see the module's docstring.

    Args:
        slack_pages: Pages of a window that are set aside, see `TieredRequest.may_step`.
        seed_of: Returns the seed of the hashes, given a request's salt and the instance that computes its prompt.
        store: The third tier, or None.
    """

    def __init__(
        self,
        context: TierContext,
        *,
        slack_pages: int,
        seed_of: Callable[[str, Instance], bytes],
        store: StoreLeader | None,
    ) -> None:
        super().__init__(context.admission)
        self.context = context
        self._rules = context.rules
        self._tier = context.tier
        self._slack_pages = slack_pages
        self._seed_of = seed_of
        self._store = store
        self._turns = HashingTurns()
        self._on_loaded: Callable[[str], None] = lambda request_id: None
        self._on_room: Callable[[], None] = lambda: None
        self._on_lost: Callable[[str, str], None] = lambda request_id, reason: None
        self._requests: dict[str, TieredRequest] = {}
        self._to_load: dict[str, Placement] = {}  # placed, and not known to the ranks yet
        self._saving: dict[str, None] = {}  # requests with something to save, the longest waiting first
        self._num_saves = 0
        self._has_stalled = False

    def listen(
        self, *, on_loaded: Callable[[str], None], on_room: Callable[[], None], on_lost: Callable[[str, str], None]
    ) -> None:
        self._on_loaded, self._on_room, self._on_lost = on_loaded, on_room, on_lost

    # A request's life

    async def look_up(self, token_ids: Sequence[int], salt: str, *, prefill: Instance, may_skip: bool) -> Prompt:
        """Bring the prompt's pages that only the store has into host memory."""
        chain = PageHashes(page_size=self._rules.page_size, seed=self._seed_of(salt, prefill))
        await self._turns.extend(chain, token_ids)
        now_ns, fetched = time.time_ns(), frozenset[bytes]()
        # A prompt that does not fit loads nothing that is kept, see `page_placement`.
        if may_skip and self._store is not None and fits_without_store(self.context, len(token_ids)):
            fetched = await self._store.fetch(chain, len(token_ids), asked_ns=now_ns)
        return Prompt(token_ids=token_ids, chain=chain, fetched=fetched, asked_ns=now_ns)

    def refusal(self, num_tokens: int) -> str | None:
        return refusal(self.context, num_tokens)

    def place(self, wanted: PlaceRequest) -> Place | None:
        found = place(self.context, wanted)
        if found is None:
            self._go_on()  # others give up pages for the oldest request that waits
            return None
        request_id, prompt = wanted.request_id, wanted.prompt
        request = self._requests[request_id] = found.request
        request.asked_ns = prompt.asked_ns
        request.num_loading = bool(found.loads) + (found.copy is not None)
        if request.num_loading:
            self._to_load[request_id] = found
        self.context.metrics.counter("offload_prompt_tokens").inc(len(prompt.token_ids))
        self._count_hits(found, prompt.fetched)
        if self._store is not None:
            # The store may have been unreachable when they were saved, or may have evicted them.
            self._store.back_up((*found.hits, *found.loaded_from), asked_ns=prompt.asked_ns)
        return Place(
            pages=found.pages,
            start_token=found.start_token,
            host_pages=_in_turns(request),
            num_stored=request.num_stored,
        )

    def _count_hits(self, found: Placement, fetched: frozenset[bytes]) -> None:
        num_fetched = sum(page.page_hash in fetched for page in found.hits)
        hits = {"device": found.num_device_hits, "host": len(found.hits) - num_fetched, "storage": num_fetched}
        for tier, num_pages in hits.items():
            self.context.metrics.counter("offload_hit_tokens", tier=tier).inc(num_pages * self._rules.page_size)

    def begin_loading(self, request_id: str) -> None:
        found = self._to_load.pop(request_id, None)
        if found is None:
            return

        def done(_: frozenset[int]) -> None:
            for page in reversed(found.loaded_from):
                self._tier.let_go(page)
            self._loaded(found.request)

        if found.loads:
            job = self.context.jobs.begin(done)
            self.context.broadcast(LoadPages(job=job, request_id=request_id, runs=found.loads))
        if found.copy is not None:
            self._copy(found.request, found.copy)

    def _copy(self, request: TieredRequest, copy: DeviceCopy) -> None:
        """Copy pages of another request, which keeps them meanwhile."""
        source = copy.source

        def done(_: frozenset[int]) -> None:
            source.num_copied_from -= 1
            source.saving.pop(job, None)
            self._loaded(request)
            self._on_job_over()

        job = self.context.jobs.begin(done)
        source.num_copied_from += 1
        source.saving[job] = {group: begin for group, (begin, _) in copy.runs.items() if group != FULL}
        runs = tuple(EntryRun(group=group, first_entry=begin, count=end - begin) for group, (begin, end) in copy.runs.items())
        self.context.broadcast(CopyPages(job=job, source_id=source.request_id, request_id=request.request_id, runs=runs))

    def _loaded(self, request: TieredRequest) -> None:
        request.num_loading -= 1
        if not request.num_loading and request.request_id in self._requests:
            self._on_loaded(request.request_id)

    def is_loading(self, request_id: str) -> bool:
        request = self._requests.get(request_id)
        return request is not None and request.num_loading > 0

    def begin(self, request_id: str) -> None:
        request = self._requests[request_id]
        self.context.metrics.counter("offload_stored_pages").inc(request.num_stored)
        arrived = [page for page in request.host_pages(request.num_stored, request.boundary) if not page.is_ready]
        self._filled(request, arrived, "prompt")
        request.is_running = True
        request.num_computed = request.num_prompt_tokens
        request.whole_windows(self.context.groups)
        self.context.on_device.add(request, request.boundary)
        self._saving[request_id] = None
        self._go_on()

    def computed(self, request_id: str, token_id: int) -> None:
        request = self._requests.get(request_id)
        if request is None or not request.is_running:
            return
        request.num_computed += 1
        if request.chain.extend((token_id,)):
            self.context.on_device.add(request, request.num_whole - 1)
            self._saving[request_id] = None

    def may_step(self, request_id: str, position: int) -> bool:
        request = self._requests[request_id]
        may = request.may_step(position, self.context.groups, self._slack_pages)
        if not may:
            self._has_stalled = True
            if request.stalled_at != position:  # it is asked again after every step of another request
                request.stalled_at = position
                self.context.metrics.counter("offload_stalls").inc()
        return may

    def draft_room(self, request_id: str, position: int, num_tokens: int) -> int:
        """With early release, stay within the newest page: the other rules count pages up to the newest token.

        A request with pages in host memory has no draft tokens, because each row of a step reads all of those pages.
        """
        if not self._rules.has_early_release:
            return num_tokens
        request = self._requests[request_id]
        if request.boundary or request.is_moving:
            return 0
        return min(num_tokens, self._rules.page_size - 1 - position % self._rules.page_size)

    def step_over(self) -> None:
        self._go_on()

    def reads_store(self, request_id: str) -> bool:
        request = self._requests[request_id]
        return request.num_stored > 0 or request.is_storing  # a rank reads a block as soon as its own part is there

    def finish(self, request_id: str) -> None:
        """Save its whole pages before the ranks give them back."""
        request = self._requests[request_id]
        self._saving.pop(request_id, None)
        keeps_nothing = request.is_damaged or request.host_share is not None
        for _ in range(0 if keeps_nothing else MAX_LAST_SAVES):
            if not self._save(request, is_last=True):
                break
        self._end(request)

    def give_up(self, request_id: str) -> None:
        self._saving.pop(request_id, None)
        super().give_up(request_id)
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request)
        else:
            self.context.short.discard(request_id)

    def _end(self, request: TieredRequest) -> None:
        request.is_running = False
        self.context.on_device.remove(request)

    def damaged(self, prompt: Prompt) -> None:
        """Hide all pages of its chain from lookups in every tier, because the damaged one is not known.

        The same applies to running requests that begin alike: they may have copied the page from this one, or this one from them.
        """
        if prompt.chain is None:
            return
        chains = [prompt.chain]
        for request in self._requests.values():
            if request.chain.hashes[:1] == prompt.chain.hashes[:1] != []:  # otherwise they have no page in common
                request.is_damaged = True
                chains.append(request.chain)
        hashes = list(dict.fromkeys(page_hash for chain in chains for page_hash in chain.hashes))
        self.context.on_device.forget(hashes)
        kept = [index for index in range(len(self.context.groups)) if self._tier.num_pages(index)]
        pages = [(group, page_hash) for group in kept for page_hash in hashes]
        for group, page_hash in pages:
            page = self._tier.find(group, page_hash)
            if page is not None:
                self._tier.unname(page)
        if self._store is not None:
            self._store.delete(pages)

    def gone(self, request_id: str) -> None:
        """Release its pages. The ranks have done all jobs for it."""
        request = self._requests.pop(request_id)
        super().gone(request_id)
        self.context.short.discard(request_id)
        self.context.stored.pop(request_id, None)
        self._tier.forget(request_id)
        for page in request.host:
            if not page.is_ready:
                self._tier.discard(page)
            self._tier.let_go(page)
        self.context.touch(request.chain.hashes)  # the pages were saved in any order
        self._go_on()
        self.check_idle()

    def check_idle(self) -> None:
        """Raise LocalProtocolError if no request and no job is left, but host pages are held or promised."""
        if not self._requests and not len(self.context.jobs):
            self._tier.check_idle()

    def job_done(self, rank: int, message: JobDone) -> None:
        self.context.jobs.done(rank, message.job, message.failed)
        self.check_idle()

    def show(self) -> None:
        metrics = self.context.metrics
        for index, group in enumerate(self.context.groups):
            counts = self._tier.counts(index)
            for state, pages in (("free", counts.free), ("cached", counts.cached), ("held", counts.held)):
                metrics.gauge("host_pages", group=group.name, state=state).set(pages)
        metrics.gauge("offload_backup_queue").set(0 if self._store is None else self._store.num_queued)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()

    # Saving

    def _go_on(self) -> None:
        while self._saving and self._num_saves < MAX_SAVES:
            request_id = next(iter(self._saving))
            del self._saving[request_id]
            if self._save(self._requests[request_id], is_last=False):
                self._saving[request_id] = None  # behind the others
        if self._rules.has_early_release:
            self._shrink()
            for request in self._movable():
                self._move(request)
            for request in list(self._requests.values()):
                self._move_on(request)
            self._bring_back()

    def _save(self, request: TieredRequest, *, is_last: bool) -> bool:
        """Order the next save of a request. Return False if there is none."""
        save = next_save(self.context, request, is_last=is_last)
        if save is None:
            return False
        self._num_saves += 1

        def done(_: frozenset[int]) -> None:
            self._num_saves -= 1
            request.saving.pop(job, None)
            self._filled(request, save.pages, save.source)
            for page in save.transient:
                self._tier.let_go(page)
            self._on_job_over()

        job = self.context.jobs.begin(done)
        request.saving[job] = save.first_window_pages
        self.context.broadcast(SavePages(job=job, request_id=request.request_id, runs=save.runs))
        return True

    def _filled(self, request: TieredRequest, pages: Sequence[HostPage], source: str) -> None:
        for page in pages:
            self._tier.ready(page)
        if pages:
            self.context.metrics.counter("offload_saved_pages", source=source).inc(sum(page.group == FULL for page in pages))
            if self._store is not None:
                self._store.back_up(pages, asked_ns=request.asked_ns)

    def _on_job_over(self) -> None:
        self._go_on()
        if self._has_stalled:
            self._has_stalled = False
            self._on_room()

    # Early release

    def _movable(self) -> Iterator[TieredRequest]:
        return (
            request
            for request in list(self._requests.values())
            if request.is_running and not request.is_moving and not request.num_copied_from
        )

    def _move(self, request: TieredRequest) -> None:
        """Give up device pages that are saved, as far as the request's share asks for it."""
        boundary = request.wanted_boundary()
        give_back = 0
        target = request.shrinks_to
        if target is not None and request.num_whole + 1 - boundary <= target:
            give_back = request.share - target
        if boundary == request.boundary and not give_back:
            return
        request.is_moving, request.leaves_to = True, boundary if give_back else None
        pages = tuple(page.number for page in request.host_pages(request.boundary, boundary))

        def done(_: frozenset[int]) -> None:
            request.is_moving, request.leaves_to = False, None
            if request.request_id not in self._requests:
                return
            self.context.metrics.counter("offload_released_pages").inc(boundary - request.boundary)
            request.boundary = boundary
            if give_back:
                self._resize(request, -give_back)
                request.shrinks_to = None
            self._on_job_over()

        job = self.context.jobs.begin(done)
        self.context.broadcast(
            MoveBoundary(job=job, request_id=request.request_id, boundary=boundary, host_pages=pages, give_back=give_back)
        )

    def _shrink(self) -> None:
        """Ask the request with most to spare for device pages, if others wait for them or too many are in use."""
        free = self._free_pages()
        wanted = self._num_wanted()
        short = max(wanted - free, self._rules.pool_pages - free - self._rules.high_pages)
        short -= sum(request.share - request.target_share for request in self._requests.values())  # already asked for
        if short <= 0:
            return
        spare = max(self._movable(), key=lambda one: one.target_share - one.least_share, default=None)
        if spare is None or spare.shrinks_to is not None or spare.share <= spare.least_share:
            return
        target = max(spare.least_share, spare.share - short)
        more = max(0, spare.total_pages - target - spare.guaranteed)
        if spare.host_share is None and not self._tier.promise(spare.request_id, FULL, more):
            self.context.host_full(spare.request_id)
            return
        spare.guaranteed += more
        spare.shrinks_to = target
        spare.next_save = min(spare.next_save, spare.host_end)
        self._saving[spare.request_id] = None

    def _bring_back(self) -> None:
        """Load pages that left the device early, while there is plenty of room. The request that lacks the fewest goes first."""
        room = self._rules.low_pages - (self._rules.pool_pages - self._free_pages()) - self._num_wanted()
        behind = [request for request in self._movable() if request.boundary > request.num_stored and request.shrinks_to is None]
        if room <= 0 or not behind:
            return
        request = min(behind, key=lambda one: one.boundary)
        in_host = request.boundary - request.num_stored
        if request.is_storing:
            in_host -= self._block_pages
        count = min(room, in_host, MAX_BROUGHT_BACK)
        if count < max(1, min(self._rules.stride_pages, in_host)) or not self._resize(request, count):
            return
        boundary = request.boundary - count
        request.is_moving, request.returns_to = True, boundary

        def done(_: frozenset[int]) -> None:
            request.is_moving, request.returns_to = False, None
            if not request.is_running:
                return  # a rank may have forgotten it
            request.boundary = boundary
            self.context.broadcast(MoveBoundary(job=None, request_id=request.request_id, boundary=boundary))
            self.context.metrics.counter("offload_restored_pages").inc(count)
            self._on_job_over()

        pages = tuple(page.number for page in request.host_pages(boundary, request.boundary))
        run = HostPageRun(group=FULL, first_entry=boundary, host_pages=pages)
        job = self.context.jobs.begin(done)
        self.context.broadcast(LoadPages(job=job, request_id=request.request_id, runs=(run,), grow=count))

    # The store as the place of a running request's pages

    @property
    def _block_pages(self) -> int:
        return 0 if self.context.stores is None else self.context.stores.block_pages

    def _move_on(self, request: TieredRequest) -> None:
        """Order the next block into the store, if the request's share of host memory is nearly used up."""
        if request.host_share is None or not request.is_running or request.is_storing:
            return
        size, end = self._block_pages, request.num_stored + self._block_pages
        left_device = request.boundary if request.returns_to is None else request.returns_to
        has_room = len(request.host) + size + 2 * self._rules.stride_pages <= request.host_share
        if has_room or left_device < end or request.num_ready < end:
            return
        request.is_storing = True
        pages = request.host[:size]

        def done(failed: frozenset[int]) -> None:
            request.is_storing = False
            if request.request_id not in self._requests or not request.is_running:
                return
            if failed:
                self._on_lost(request.request_id, "the store failed to write KV of the request")
                return
            del request.host[:size]
            request.num_stored = end
            for page in pages:
                self._tier.let_go(page)
            is_kept = self._tier.promise(request.request_id, FULL, size)
            assert is_kept, "nothing else uses these pages, so they are free again"
            self.context.metrics.counter("offload_stored_pages").inc(size)
            self._saving[request.request_id] = None
            self._on_job_over()

        job = self.context.jobs.begin(done)
        numbers = tuple(page.number for page in pages)
        self.context.broadcast(StoreBlock(job=job, request_id=request.request_id, index=end // size - 1, host_pages=numbers))

    def _num_wanted(self) -> int:
        """Return the device pages that the oldest waiting request needs."""
        return self._admission.wanted.pages.by_group[FULL]

    def _free_pages(self) -> int:
        return self._admission.free_pages.by_group[FULL]

    def _resize(self, request: TieredRequest, count: int) -> bool:
        is_done = self._admission.resize(request.request_id, FULL, count)
        if is_done:
            request.share += count
        return is_done


def _in_turns(request: TieredRequest) -> tuple[int, ...]:
    """Return the host pages in which the leading pages of an arriving prompt take turns, see `ExpectRequest`."""
    size = request.boundary - request.num_stored
    numbers = {entry % size: page.number for entry, page in enumerate(request.host[:size], start=request.num_stored)}
    return tuple(numbers[place] for place in range(size))
