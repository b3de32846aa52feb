"""How the rows of a decode step are put together: every order of lengths must give each row its own context."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from embedded_engine.paged_attention import rows_of_similar_length


@given(st.lists(st.integers(min_value=1, max_value=5000), min_size=1, max_size=20))
def test_groups_hold_each_row_once_in_order_and_of_similar_length(lengths: list[int]) -> None:
    groups = rows_of_similar_length(lengths)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        assert group == sorted(group)
        own = [lengths[row] for row in group]
        assert max(own) <= 2 * min(own)


def test_one_group_of_rows_of_rising_length_keeps_the_steps_order() -> None:
    assert rows_of_similar_length([100, 120, 130]) == [[0, 1, 2]]
