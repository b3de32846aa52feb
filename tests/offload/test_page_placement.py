"""A request's place in both tiers: all of its room at once, and of its prompt what is there already."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_node.admission import Room
from decode_node.offload.context import FULL
from decode_node.offload.page_placement import refusal
from decode_node.offload.rules import StoreRules
from tests.offload.tier_contexts import PAGE, WINDOW, chain, context, keep, placed
from transfer.errors import LayoutError
from transfer.layer_groups import PageCounts


def numbers(pages: list) -> list[int]:
    return [page.number for page in pages]


def test_a_prompt_that_fits_the_device_uses_no_host_pages() -> None:
    where = context()
    found = placed(where, "a", chain(30))
    assert found.pages.by_group == (9,) and found.start_token == 0
    assert (found.request.boundary, found.request.guaranteed, found.request.host) == (0, 0, [])
    assert not found.loads and found.copy is None


def test_a_long_prompt_has_all_its_room_at_once() -> None:
    """Eighteen device pages below the mark; what does not fit is promised in host memory, and taken where it arrives there."""
    where = context()
    found = placed(where, "a", chain(100), new=20)
    request = found.request
    assert found.pages.by_group == (18,) and request.total_pages == 30 and request.guaranteed == 12
    assert len(request.host) == request.boundary == 25 - (18 - 2)
    assert where.tier.counts(FULL).promised == 12 - request.boundary
    assert [where.tier.find(FULL, one) for one in chain(100).hashes[: request.boundary]] == request.host


def test_not_yet_takes_nothing() -> None:
    where = context(host_pages=13)
    assert where.tier.promise("other", FULL, 2)
    assert placed(where, "a", chain(100), new=20) is None, "host memory"
    assert where.tier.counts(FULL).promised == 2 and not where.admission.holds("a")

    where = context()
    assert placed(where, "b", chain(64), new=4) is not None
    assert placed(where, "a", chain(100), new=20) is None, "the device"
    assert where.tier.counts(FULL).promised == 0 and not where.admission.holds("a")


def test_host_memory_is_set_aside_for_the_oldest_as_well() -> None:
    where = context(device_pages=40, host_pages=30)
    assert where.tier.promise("other", FULL, 20)
    assert placed(where, "long", chain(160), new=40, accepted_s=1.0) is None, "14 of its 50 pages do not fit host memory"
    assert where.admission.wanted == Room(pages=PageCounts((20,)), host_pages=30), "with fewer device pages it can never start"
    assert placed(where, "young", chain(140), new=20, accepted_s=2.0) is None, "4 of its 40 pages would fit"
    assert placed(where, "short", chain(8), accepted_s=2.0).pages.by_group == (3,), "it needs no host memory"
    where.tier.forget("other")
    assert placed(where, "young", chain(140), new=20, accepted_s=2.0) is None, "all that came free is for the oldest"
    found = placed(where, "long", chain(160), new=40, accepted_s=1.0)
    assert found.pages.by_group == (33,) and found.request.guaranteed == 17


def test_what_never_fits_is_refused_with_numbers() -> None:
    where = context(host_pages=10)
    assert refusal(where, 28 * PAGE) is None
    said = "need 29 pages; this decode node has 18 on the device for one request and 10 in host memory"
    assert refusal(where, 29 * PAGE) == said
    assert "need 21 pages" in (refusal(context(window_tokens=None), 21 * PAGE) or "")
    with pytest.raises(LayoutError, match=r"29 pages in chunks of 4 tokens need 5 pages .* 12 in host memory; .* has 20 and 10"):
        placed(where, "a", chain(28 * PAGE))
    with pytest.raises(LayoutError, match=r"in chunks of 100 tokens need 27 pages of 4 tokens on the device"):
        placed(where, "a", chain(110), chunk=100)


def test_hits_are_the_leading_ready_pages_and_leave_a_token() -> None:
    where, hashes = context(), chain(24)
    pages = keep(where, hashes, range(6))
    found = placed(where, "a", hashes)
    assert found.start_token == 5 * PAGE and numbers(found.hits) == numbers(pages[:5])
    assert [(run.first_entry, run.host_pages) for run in found.loads] == [(0, tuple(numbers(pages[:5])))]
    assert where.tier.counts(FULL).held == 5 and list(found.loaded_from) == pages[:5]
    assert found.num_device_hits == 0


def test_a_page_that_is_being_filled_ends_the_hits() -> None:
    where, hashes = context(), chain(24)
    keep(where, hashes, range(2))
    keep(where, hashes, range(2, 3), is_ready=False)
    keep(where, hashes, range(3, 5))
    assert placed(where, "a", hashes).start_token == 2 * PAGE
    assert placed(where, "b", hashes, may_skip=False).start_token == 0, "prefill can leave nothing out"


def test_hits_of_a_long_prompt_stay_where_they_are_read() -> None:
    where, hashes = context(), chain(100)
    pages = keep(where, hashes, range(12))
    found = placed(where, "a", hashes, new=20)
    request = found.request
    assert request.boundary == 9 and request.host == pages[:12] == list(found.hits)
    assert [(run.first_entry, len(run.host_pages)) for run in found.loads] == [(9, 3)]
    assert not found.loaded_from and where.tier.counts(FULL).promised == 0


def test_a_window_that_is_not_there_shortens_the_hits() -> None:
    where, hashes = context(has_window=True), chain(24)
    keep(where, hashes, range(6))
    assert placed(where, "a", hashes).start_token == 4 * PAGE, "pages 4 and later are reached, and are not there"
    keep(where, hashes, range(4, 5), group=WINDOW)
    found = placed(where, "b", hashes)
    assert found.start_token == 5 * PAGE
    assert [(run.group, run.first_entry, len(run.host_pages)) for run in found.loads] == [(FULL, 0, 5), (WINDOW, 4, 1)]


def test_pages_on_another_requests_device_are_copied() -> None:
    where, hashes = context(), chain(24)
    source = placed(where, "a", hashes).request
    source.num_computed, source.is_running = 24, True
    where.on_device.add(source, 0)
    keep(where, hashes, range(2))
    found = placed(where, "b", hashes)
    assert found.start_token == 5 * PAGE and found.num_device_hits == 3
    assert found.copy.source is source and found.copy.runs == {FULL: (2, 5)}
    source.is_moving = True
    assert placed(where, "c", hashes).copy is None, "its pages may go meanwhile"


def test_of_windows_too_and_only_where_they_are() -> None:
    where, hashes = context(has_window=True, device_pages=40), chain(24)
    source = placed(where, "a", hashes).request
    source.num_computed, source.is_running = 24, True
    source.whole_windows(where.groups)
    where.on_device.add(source, 0)
    assert placed(where, "b", hashes).copy.runs == {FULL: (0, 5), WINDOW: (4, 5)}
    source.first_window_page[WINDOW] = 5
    assert placed(where, "c", hashes).copy.runs == {FULL: (0, 4)}, "up to where the window would be reached"


def test_a_window_of_which_a_part_lies_elsewhere_is_not_copied() -> None:
    where, hashes = context(has_window=True), chain(24)
    source = placed(where, "a", hashes).request
    source.num_computed, source.is_running = 24, True
    source.whole_windows(where.groups)
    where.on_device.add(source, 0)
    keep(where, hashes, range(5))
    keep(where, hashes, range(4, 5), group=WINDOW)
    assert placed(where, "b", chain(26)).copy is None


def test_a_cached_page_that_is_reserved_for_another_request_is_no_hit() -> None:
    where, hashes = context(host_pages=4), chain(24)
    keep(where, hashes, range(4))
    assert where.tier.promise("other", FULL, 2)
    assert placed(where, "a", hashes).start_token == 2 * PAGE
    where = context(has_window=True, window_pages=1)
    keep(where, hashes, range(6))
    keep(where, hashes, range(4, 5), group=WINDOW)
    assert where.tier.promise("other", WINDOW, 1)
    assert placed(where, "a", hashes).start_token == 4 * PAGE


STORES = StoreRules(block_pages=3, host_pages=20)


def test_what_device_and_host_memory_cannot_hold_goes_on_to_the_store() -> None:
    """Ten pages of host memory are its own, half of them all. The last of its prompt stay there, in whole blocks."""
    where, hashes = context(host_pages=20, stores=STORES), chain(60 * PAGE)
    keep(where, hashes, range(4))
    assert refusal(where, 64 * PAGE) is None
    found = placed(where, "a", hashes, new=4 * PAGE)
    request = found.request
    assert (request.host_share, request.share, request.guaranteed, request.boundary) == (10, 18, 46, 44)
    assert request.num_stored == 36 and len(request.host) == 44 - 36 and request.host_end == request.next_save == 44
    assert where.tier.counts(FULL).promised == 10 - 8 and where.stored == {"a": 64}
    assert found.start_token == 0 and not found.hits, "it shares nothing"
    assert [page.page_hash for page in request.host] == [None] * 8
    assert placed(where, "b", chain(60 * PAGE), new=4 * PAGE, accepted_s=1.0) is None, "the device has 2 pages left"


def test_what_fits_uses_no_store() -> None:
    where = context(host_pages=20, stores=STORES)
    assert placed(where, "a", chain(30 * PAGE), new=4).request.host_share is None and not where.stored


def test_the_room_in_the_store_is_shared() -> None:
    where = context(device_pages=60, host_pages=20, stores=replace(STORES, max_pages=150))
    assert refusal(where, 300 * PAGE) is not None
    assert (refusal(where, 300 * PAGE) or "").endswith("in host memory, and storage.max_bytes has room for 150")
    where.admission.reserve("other", PageCounts((54 - 18,)), accepted_s=0.0)
    assert placed(where, "a", chain(96 * PAGE), new=4 * PAGE).request.host_share == 10
    where.admission.release("other")
    assert placed(where, "b", chain(96 * PAGE), new=4 * PAGE, accepted_s=1.0) is None, "of 150 pages, 100 are taken"
    where.stored.clear()
    assert placed(where, "b", chain(96 * PAGE), new=4 * PAGE, accepted_s=1.0) is not None


def test_host_memory_without_room_for_blocks_is_refused() -> None:
    small = context(host_pages=6, stores=StoreRules(block_pages=3, host_pages=6))
    assert (refusal(small, 64 * PAGE) or "").endswith("6 in host memory, where a request that uses the store needs 8")
    where = context(host_pages=20, stores=STORES)
    with pytest.raises(LayoutError, match=r"in chunks of 80 tokens need 22 pages .* and 26 in host memory; .* has 20 and 20"):
        placed(where, "a", chain(60 * PAGE), chunk=80)
    assert (refusal(context(window_tokens=None, stores=STORES), 64 * PAGE) or "").startswith("need 64 pages")
