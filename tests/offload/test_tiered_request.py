"""What the leader remembers of a request, and what follows from it."""

from __future__ import annotations

from typing import Any

from decode_node.offload.host_tier import HostPage
from decode_node.offload.rules import TierRules
from decode_node.offload.tiered_request import DeviceIndex, TieredRequest
from tests.offload.tier_contexts import FULL, GROUPS, PAGE, WINDOW, chain

RULES = TierRules(page_size=PAGE, pool_pages=50, stride_pages=1, window_tokens=4, high_water=0.9, low_water=0.5)


def request(num_tokens: int = 30, name: str = "a", **changes: Any) -> TieredRequest:
    """All of its prompt is computed."""
    sizes = {"total_pages": 20, "share": 6, "least_share": 5, "guaranteed": 14, "boundary": 0} | changes
    found = TieredRequest(request_id=name, rules=RULES, chain=chain(num_tokens), num_prompt_tokens=num_tokens, **sizes)
    found.num_computed = num_tokens
    return found


def host_pages(count: int, *, num_ready: int) -> list[HostPage]:
    return [HostPage(group=FULL, number=number, page_hash=None, is_ready=number < num_ready) for number in range(count)]


def test_only_the_leading_ready_pages_count() -> None:
    one = request()
    assert (one.num_whole, one.num_ready) == (7, 0)
    one.host = host_pages(4, num_ready=2)
    one.host[3].is_ready = True
    assert one.num_ready == 2
    one.host[2].is_ready = True
    assert one.num_ready == 4


def test_the_boundary_waits_for_saved_pages_and_stays_within_the_guaranteed() -> None:
    one = request(share=6)
    assert one.wanted_boundary() == 0, "nothing is saved"
    one.host = host_pages(7, num_ready=7)
    assert one.wanted_boundary() == 8 + 1 - 6
    one.shrinks_to = 5
    assert (one.target_share, one.wanted_boundary()) == (5, 4)
    one.guaranteed = 2
    assert one.wanted_boundary() == 2


def test_a_step_needs_its_page() -> None:
    one = request(share=8)
    assert one.may_step(31, GROUPS, 2) and not one.may_step(32, GROUPS, 2), "the ninth page"
    one.boundary = 1
    assert one.may_step(32, GROUPS, 2)
    one.returns_to = 0
    assert not one.may_step(32, GROUPS, 2), "the pages that come back take the room"
    one.returns_to = None
    one.share, one.leaves_to, one.shrinks_to = 20, 3, 6
    assert one.may_step(35, GROUPS, 2) and not one.may_step(36, GROUPS, 2), "as if its share were the smaller one"


def test_a_step_waits_for_a_save_that_reads_what_the_window_has_left() -> None:
    one = request(share=20)
    one.saving = {7: {WINDOW: 3}}
    assert one.may_step(27, GROUPS, 2) and one.may_step(30, GROUPS, 2)
    assert not one.may_step(31, GROUPS, 0)
    assert one.may_step(31, GROUPS, 3)


def test_windows_are_saved_from_their_first_whole_page() -> None:
    one = request(30)
    one.whole_windows(GROUPS)
    assert one.first_window_page == {WINDOW: 6}  # tokens 22 and later travel; page 5 begins with 20
    one.next_window_save[WINDOW] = 9
    assert one.first_window_page == {WINDOW: 6}


def test_the_device_index_names_who_was_first_and_only_what_it_has() -> None:
    index, first, second = DeviceIndex(GROUPS), request(name="a", boundary=2), request(name="b")
    for one in (first, second):
        one.whole_windows(GROUPS)
        index.add(one, one.boundary)
    hashes = first.chain.hashes
    assert index.source_of(hashes[1], 1) is second and index.source_of(hashes[2], 2) is first
    first.boundary = 4
    assert index.source_of(hashes[2], 2) is None and index.source_of(hashes[4], 4) is first
    first.is_moving = True
    assert index.source_of(hashes[4], 4) is None
    assert [index.has(first, WINDOW, entry) for entry in (5, 6)] == [False, True]
    first.num_computed = 60
    assert not index.has(first, WINDOW, 6), "the window has passed it"
    index.remove(first)
    index.remove(first)
    assert index.source_of(hashes[4], 4) is None, "the other one's copy was not remembered"
    index.remove(second)
    assert index.source_of(hashes[1], 1) is None


def test_damaged_pages_are_never_shared() -> None:
    index, first = DeviceIndex(GROUPS), request(name="a")
    first.whole_windows(GROUPS)
    index.add(first, 0)
    hashes = first.chain.hashes
    index.forget([*hashes[:2], b"unknown"])
    assert [index.source_of(hashes[entry], entry) for entry in range(3)] == [None, None, first]
    second = request(name="b")
    second.is_damaged = True
    index.add(second, 0)
    assert index.source_of(hashes[0], 0) is None


def test_pages_in_the_store_are_ready_and_those_in_host_memory_follow_them() -> None:
    one = request()
    one.num_stored, one.host = 6, host_pages(4, num_ready=2)
    assert (one.host_end, one.num_ready) == (10, 8)
    assert [page.number for page in one.host_pages(7, 9)] == [1, 2]
