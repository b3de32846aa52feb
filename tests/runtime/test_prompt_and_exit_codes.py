"""Valid prompts, exit codes, and the pause before a restart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from node_runtime import exit_codes
from node_runtime.daemon import restart_pause_s
from transfer import errors
from transfer.config import RestartConfig
from transfer.connector.prompt import MAX_STOP_TOKENS, checked_prompt, checked_stop_tokens

CONTEXT, VOCABULARY = 8, 100


@pytest.mark.parametrize(
    ("token_ids", "complaint"),
    [
        ((), "prompt is empty; it must have at least one token"),
        (tuple(range(8)), "prompt has 8 tokens; a context of 8"),
        ((1, 100, 7), "token_ids has 100 at 1; ids must be below the vocabulary's 100"),
        ((1, 2, 2**32 - 1), "token_ids has 4294967295 at 2"),
    ],
)
def test_a_bad_prompt_is_refused_with_what_would_be_right(token_ids: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(errors.ConfigError) as refusal:
        checked_prompt(token_ids, max_context_tokens=CONTEXT, vocab_size=VOCABULARY)
    assert complaint in str(refusal.value)


class Endless(list[int]):
    """A list whose elements must not be read."""

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("copied before its length was looked at")


def test_a_prompt_that_is_far_too_long_is_not_even_copied() -> None:
    with pytest.raises(errors.ConfigError, match="prompt has 1000000000 tokens"):
        checked_prompt(Endless(), max_context_tokens=CONTEXT, vocab_size=VOCABULARY)


def test_stop_tokens_are_few_and_of_the_vocabulary() -> None:
    assert checked_stop_tokens([3, 99, 3], vocab_size=VOCABULARY) == {3, 99}
    assert checked_stop_tokens([], vocab_size=VOCABULARY) == frozenset()
    with pytest.raises(errors.ConfigError, match="stop_token_ids has 257 entries; it can have at most 256"):
        checked_stop_tokens([1] * (MAX_STOP_TOKENS + 1), vocab_size=VOCABULARY)
    with pytest.raises(errors.ConfigError, match="stop_token_ids has 100; ids must be below the vocabulary's 100"):
        checked_stop_tokens([5, 100], vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 2),
        (errors.LayoutError("x"), 8),
        (errors.MemoryPlanError("x"), 8),
        (errors.OutOfMemory("x"), 8),
        (errors.EngineError("x"), 9),
        (errors.PeerUnreachable("x"), 4),
        (RuntimeError("x"), 1),
    ],
)
def test_each_error_has_its_exit_code(error: Exception, code: int) -> None:
    assert exit_codes.exit_code_of(error) == code


def test_a_call_without_memory_may_succeed_later() -> None:
    assert exit_codes.exit_code_of(errors.OutOfMemory("x"), is_call=True) == exit_codes.NO_ROOM
    assert exit_codes.exit_code_of(errors.MemoryPlanError("x"), is_call=True) == exit_codes.DOES_NOT_FIT


def test_the_pause_before_a_restart_doubles_up_to_its_limit() -> None:
    """Also after so many failures that 2 to their power is more than a float holds."""
    restart = RestartConfig(backoff_s=0.5, max_backoff_s=3.0)
    assert [restart_pause_s(restart, failures) for failures in (1, 2, 3, 4, 9999)] == [0.5, 1.0, 2.0, 3.0, 3.0]
