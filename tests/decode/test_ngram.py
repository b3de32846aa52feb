"""Draft tokens by lookup in the request's own tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode_node.ngram import NgramDrafts


def drafts(*token_ids: int, most: int = 4, min_tokens: int = 2, max_tokens: int = 3) -> tuple[int, ...]:
    return NgramDrafts(token_ids, min_tokens=min_tokens, max_tokens=max_tokens).propose(most)


def test_the_tokens_behind_an_earlier_match_are_proposed() -> None:
    assert drafts(1, 2, 3, 4, 5, 9, 1, 2) == (3, 4, 5, 9)
    assert drafts(1, 2, 3, 4, 5, 9, 1, 2, most=2) == (3, 4)
    assert drafts(1, 2, 3, 4, 5, 9, 1, 2, most=0) == ()


def test_a_longer_match_wins_and_then_the_newest() -> None:
    assert drafts(7, 1, 2, 30, 1, 2, 40, 7, 1, 2, most=1) == (30,), "three tokens match"
    assert drafts(7, 1, 2, 30, 1, 2, 40, 8, 1, 2, most=1) == (40,)
    assert drafts(6, 7, 1, 2, 30, 7, 1, 2, 40, 6, 7, 1, 2, most=1) == (40,), "no more than max_tokens are compared"


def test_too_short_a_match_is_none() -> None:
    assert drafts(2, 5, 6, 7, 2) == ()
    assert drafts(2, 5, 6, 7, 2, min_tokens=1, most=2) == (5, 6)
    assert drafts(4) == drafts(4, 4) == ()


def test_a_period_goes_on_behind_the_end() -> None:
    assert drafts(1, 2, 1, 2) == (1, 2, 1, 2)
    assert drafts(8, 5, 5, 5) == (5, 5, 5, 5)


def test_new_tokens_are_found_too() -> None:
    one = NgramDrafts((1, 2, 3), min_tokens=2, max_tokens=3)
    assert one.propose(2) == ()
    one.extend((9, 2))
    one.extend((3,))
    assert one.propose(2) == (9, 2)


def test_bytes_of_two_tokens_are_no_token() -> None:
    """In bytes, 256 times a token is the token shifted by one byte."""
    assert drafts(256 * 5, 5, 7, 256 * 7, 5, 7, 5 << 24, 7 << 24 | 5, 7, most=1) == ()


TOKENS = st.lists(st.integers(0, 3) | st.sampled_from([256, 1 << 16, 1 << 24]), min_size=1, max_size=30)


@given(TOKENS, st.integers(1, 3), st.integers(0, 3))
def test_it_is_the_newest_of_the_longest_matches(tokens: list[int], min_tokens: int, more: int) -> None:
    """The same as by comparing all places, the largest size first."""
    expected: tuple[int, ...] = ()
    for size in range(min(min_tokens + more, len(tokens) - 1), min_tokens - 1, -1):
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]
        if ends:
            following = tokens[ends[-1] :]
            expected = tuple((following * 6)[:6])
            break
    assert drafts(*tokens, most=6, min_tokens=min_tokens, max_tokens=min_tokens + more) == expected
