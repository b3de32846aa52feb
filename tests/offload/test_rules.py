"""How much of a request lies where: what is promised is enough to go on with, and nothing leaves before it is saved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.offload.rules import StoreRules, TierRules
from transfer.errors import ConfigError


def rules(**changes: object) -> TierRules:
    given = {"page_size": 8, "pool_pages": 100, "stride_pages": 2, "window_tokens": 32, "high_water": 0.9, "low_water": 0.7}
    return TierRules(**given | changes)  # type: ignore[arg-type]


def test_pages_and_marks() -> None:
    found = rules()
    assert [found.num_pages(tokens) for tokens in (0, 1, 8, 9)] == [0, 1, 1, 2]
    assert (found.high_pages, found.low_pages) == (90, 70)
    assert [found.grid_pages(tokens) for tokens in (8, 32, 12, 4)] == [1, 4, 3, 1]


def test_the_least_share_is_the_window_and_three_strides() -> None:
    assert rules().least_share(50, 1) == 4 + 1 + 3 * 2
    assert rules().least_share(3, 1) == 3, "a request takes no more than it needs"
    assert rules().least_share(50, 20) == 5 + 19 + 2 * 2, "a part of a chunk lies in one tier alone"
    assert rules(pool_pages=25).least_share(50, 20) == 25, "as far as there is room"
    assert rules(pool_pages=20).least_share(50, 20) == 20 + 1 + 2, "without which it does not run"
    assert rules(window_tokens=0).least_share(50, 1) == 1 + 3 * 2


def test_without_early_release_all_of_it_is_on_the_device() -> None:
    found = rules(window_tokens=None)
    assert not found.has_early_release and rules().has_early_release
    assert found.least_share(50, 1) == 50
    assert found.first_boundary(300, total_pages=50, share=50, grid_pages=1) == 0


def test_a_pool_below_one_least_share_is_refused() -> None:
    rules(pool_pages=11)
    said = r"device_window is 32 tokens and offload.stride_tokens 16, which take 11 pages of 8 tokens of each request; .* has 10"
    with pytest.raises(ConfigError, match=said):
        rules(pool_pages=10)
    rules(pool_pages=10, window_tokens=None)


@given(
    prompt_tokens=st.integers(1, 2000),
    new_tokens=st.integers(1, 500),
    stride_pages=st.integers(1, 5),
    grid_pages=st.integers(1, 12),
    more=st.integers(0, 60),
)
def test_a_prompt_fits_behind_its_first_boundary(
    prompt_tokens: int, new_tokens: int, stride_pages: int, grid_pages: int, more: int
) -> None:
    """Whatever share it gets: at a place of the grid, of whole pages only, and with a stride to spare on the device."""
    found = rules(stride_pages=stride_pages, pool_pages=200)
    total = found.num_pages(prompt_tokens + new_tokens)
    share = min(total, found.least_share(total, grid_pages) + more)
    boundary = found.first_boundary(prompt_tokens, total_pages=total, share=share, grid_pages=grid_pages)
    assert boundary % grid_pages == 0 and 0 <= boundary * 8 <= prompt_tokens
    assert found.num_pages(prompt_tokens) - boundary <= share
    if share == total:
        assert boundary == 0


@given(
    prompt_tokens=st.integers(1, 2000),
    window_tokens=st.integers(0, 300),
    stride_pages=st.integers(1, 5),
    grid_pages=st.integers(1, 40),
    more=st.integers(0, 20),
)
def test_the_window_of_a_prompt_is_on_the_device_when_it_has_arrived(
    prompt_tokens: int, window_tokens: int, stride_pages: int, grid_pages: int, more: int
) -> None:
    found = rules(stride_pages=stride_pages, window_tokens=window_tokens, pool_pages=200)
    total = found.num_pages(prompt_tokens + 100)
    share = min(total, found.least_share(total, grid_pages) + more)
    boundary = found.first_boundary(prompt_tokens, total_pages=total, share=share, grid_pages=grid_pages)
    assert prompt_tokens - boundary * 8 >= min(prompt_tokens, window_tokens)


@given(
    boundary=st.integers(0, 50),
    length=st.integers(1, 60),
    share=st.integers(1, 60),
    saved=st.integers(0, 120),
    stride=st.integers(1, 4),
)
def test_a_boundary_moves_by_strides_as_far_as_is_saved(boundary: int, length: int, share: int, saved: int, stride: int) -> None:
    found, end = rules(stride_pages=stride), boundary + length
    then = found.next_boundary(boundary=boundary, end=end, share=share, saved_end=saved)
    assert then >= boundary and then <= max(boundary, saved)
    if length + stride <= share:
        assert then == boundary, "there is room for a stride more"
    if length + stride > share and then < saved:
        assert (then - boundary) % stride == 0
        assert end - then + stride <= share < end - then + 2 * stride, "as few strides as make room for one"


def test_a_request_that_uses_the_store_leaves_half_of_host_memory_to_others() -> None:
    found = StoreRules(block_pages=4, host_pages=100)
    assert (found.least_host_share(1, 2), found.least_host_share(16, 2)) == (2 * 4 + 2 * 2, 2 * 4 + 16)
    assert (found.host_share(16, 2), found.host_share(60, 2)) == (50, 68)


@given(st.integers(0, 500), st.integers(1, 9), st.integers(1, 50))
def test_as_few_whole_blocks_go_on_to_the_store_as_leave_the_share(boundary: int, block_pages: int, host_share: int) -> None:
    found = StoreRules(block_pages=block_pages, host_pages=100).num_stored(boundary, host_share)
    assert found % block_pages == 0 and boundary - found <= host_share
    assert not found or boundary - (found - block_pages) > host_share
