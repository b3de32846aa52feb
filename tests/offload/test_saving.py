"""Which pages are saved next: whole ones, a stride at a time, what is known not twice, and no more than there is room for."""

from __future__ import annotations

from structlog.testing import capture_logs

from decode_node.offload.context import FULL, TierContext
from decode_node.offload.rules import StoreRules
from decode_node.offload.saving import next_save
from decode_node.offload.tiered_request import TieredRequest
from tests.offload.tier_contexts import WINDOW, chain, context, keep, placed


def running(where: TierContext, num_tokens: int, *, new: int = 8, name: str = "a") -> TieredRequest:
    found = placed(where, name, chain(num_tokens), new=new, may_skip=False)
    assert found is not None
    request: TieredRequest = found.request
    request.is_running, request.num_computed = True, num_tokens
    request.whole_windows(where.groups)
    return request


def saved(where: TierContext, request: TieredRequest, *, is_last: bool = False) -> list[tuple[int, int, int]] | None:
    """(group, first entry, pages) of the next save; None where there is none."""
    save = next_save(where, request, is_last=is_last)
    if save is None:
        return None
    for page in save.pages:
        where.tier.ready(page)
    for page in save.transient:
        where.tier.let_go(page)
    return [(run.group, run.first_entry, len(run.host_pages)) for run in save.runs]


def test_whole_strides_are_saved_and_the_rest_at_the_end() -> None:
    where = context(stride_pages=2, device_pages=40)
    request = running(where, 7)
    assert saved(where, request) is None, "one whole page is less than a stride"
    request.chain.extend(range(7, 12))
    request.num_computed = 12
    assert saved(where, request) == [(FULL, 0, 1)], "of the prompt first"
    assert next_save(where, request, is_last=False).source == "generated"  # type: ignore[union-attr]
    assert saved(where, request, is_last=True) is None


def test_known_pages_are_not_copied_again() -> None:
    where = context()
    keep(where, chain(30), range(3))
    keep(where, chain(30), range(5, 6))
    request = running(where, 30)
    assert saved(where, request) == [(FULL, 3, 2), (FULL, 6, 1)]
    assert saved(where, request) is None


def test_what_may_be_left_behind_is_held_for_the_requests_life() -> None:
    where = context()
    keep(where, chain(60), range(2))
    request = running(where, 60, new=30)
    assert (request.total_pages, request.guaranteed, request.boundary) == (23, 5, 0)
    assert saved(where, request) == [(FULL, 2, 13)]
    assert len(request.host) == 5 and request.num_ready == 5 and where.tier.counts(FULL).promised == 0
    assert where.tier.counts(FULL).held == 5


def test_without_room_it_goes_on_without() -> None:
    where = context(host_pages=3)
    assert where.tier.promise("other", FULL, 1)
    request = running(where, 30)
    assert saved(where, request) == [(FULL, 0, 2)]
    save_of_all = [page for page in chain(30).hashes if where.tier.find(FULL, page)]
    assert len(save_of_all) == 2
    for page_hash in save_of_all:
        page = where.tier.find(FULL, page_hash)
        assert page is not None and where.tier.hold(page)
    assert saved(where, request) is None and request.next_save == 2


def test_requests_without_room_are_counted_once_each_and_logged_together() -> None:
    where = context(host_pages=2)
    with capture_logs() as logs:
        for name in "aab":
            where.host_full(name)
    assert where.metrics.counter("offload_host_full").value == 2
    said = [(entry["event"], entry["pages"], entry["advice"]) for entry in logs]
    assert said == [("host_memory_full", 2, "raise offload.host_memory (now 1.0 GiB)")]


def test_what_may_be_damaged_is_saved_for_its_request_alone() -> None:
    """Its room on the device is no larger for that; a page that another one has computed is not mixed with it."""
    where = context(has_window=True)
    keep(where, chain(60), range(2))
    request = running(where, 60, new=30)
    request.is_damaged = True
    assert request.guaranteed == 5 and saved(where, request) == [(FULL, 0, 5)]
    assert [page.page_hash for page in request.host] == [None] * 5 and request.num_ready == 5
    assert saved(where, request) is None and request.next_save == 15
    assert where.tier.counts(FULL).held == 5 and where.tier.counts(WINDOW).held == 0


def test_pages_left_in_a_window_are_saved_once() -> None:
    where = context(has_window=True)
    request = running(where, 24)
    assert saved(where, request) == [(FULL, 0, 6), (WINDOW, 4, 2)]
    request.chain.extend(range(24, 28))
    request.num_computed = 28
    assert saved(where, request) == [(FULL, 6, 1), (WINDOW, 6, 1)]
    assert request.next_window_save == {WINDOW: 7}


def test_a_request_that_uses_the_store_saves_what_its_share_holds_and_nothing_for_others() -> None:
    where = context(host_pages=20, stores=StoreRules(block_pages=3, host_pages=20))
    request = running(where, 60 * 4, new=80)
    assert request.host_share == 10 and len(request.host) == 8 and request.next_save == request.boundary == 44
    assert saved(where, request) == [(FULL, 44, 2)] and len(request.host) == 10
    assert saved(where, request) is None, "until a block has moved on"
    del request.host[:3]
    request.num_stored += 3
    assert where.tier.promise("a", FULL, 3)
    assert saved(where, request) == [(FULL, 46, 3)]
    assert not where.short, "others have room"
