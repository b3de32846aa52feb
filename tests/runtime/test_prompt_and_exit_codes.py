"""What a prompt must be, and what a process's end tells whoever started it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_runtime import exit_codes
from node_runtime.prompt import check_prompt
from transfer import errors

CONTEXT, VOCABULARY = 8, 100


@pytest.mark.parametrize(
    ("token_ids", "complaint"),
    [
        ((), "prompt is empty; it must have at least one token"),
        (tuple(range(8)), "prompt has 8 tokens; the model's context of 8"),
        ((1, 100, 7), "token_ids has 100 at 1; ids must be below the vocabulary's 100"),
        ((1, 2, 2**32 - 1), "token_ids has 4294967295 at 2"),
    ],
)
def test_a_bad_prompt_is_refused_with_what_would_be_right(token_ids: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(errors.ConfigError) as refusal:
        check_prompt(token_ids, max_context_tokens=CONTEXT, vocab_size=VOCABULARY)
    assert complaint in str(refusal.value)


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=CONTEXT - 1))
def test_every_other_prompt_is_taken(token_ids: list[int]) -> None:
    check_prompt(tuple(token_ids), max_context_tokens=CONTEXT, vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 2),
        (errors.LayoutError("x"), 2),
        (errors.MemoryPlanError("x"), 3),
        (errors.EngineError("x"), 4),
        (errors.PeerUnreachable("x"), 1),
        (RuntimeError("x"), 1),
    ],
)
def test_each_error_has_its_exit_code(error: Exception, code: int) -> None:
    assert exit_codes.exit_code_of(error) == code


def test_exit_codes_differ() -> None:
    codes = [value for name, value in vars(exit_codes).items() if name.isupper()]
    assert sorted(codes) == list(range(7))
