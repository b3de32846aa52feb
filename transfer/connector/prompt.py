"""Checks of prompts and end tokens, on either tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from transfer.errors import ConfigError

MAX_STOP_TOKENS: Final = 256
"""Token ids that may end one request. They are kept as long as the request; the longest lists in use have a few dozen."""

MAX_CACHE_SALT_CHARS: Final = 128


def checked_prompt(token_ids: Sequence[int], *, max_context_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Return the prompt, if the model can take it. The ids are not copied before their number is checked.

    Raises:
        ConfigError: It is empty, too long, or has an id out of range.
    """
    if not len(token_ids):
        raise ConfigError("prompt is empty; it must have at least one token")
    if len(token_ids) >= max_context_tokens:
        raise ConfigError(
            f"prompt has {len(token_ids)} tokens; a context of {max_context_tokens} (the model's, or limits.max_seq_len) "
            "must leave room for one more"
        )
    prompt = tuple(token_ids)
    worst = max(prompt)
    if worst >= vocab_size:
        raise ConfigError(f"token_ids has {worst} at {prompt.index(worst)}; ids must be below the vocabulary's {vocab_size}")
    return prompt


def checked_stop_tokens(token_ids: Sequence[int], *, vocab_size: int) -> frozenset[int]:
    """Return the token ids that end a generation.

    Raises:
        ConfigError: There are too many, or one is out of range.
    """
    if len(token_ids) > MAX_STOP_TOKENS:
        raise ConfigError(f"stop_token_ids has {len(token_ids)} entries; it can have at most {MAX_STOP_TOKENS}")
    stop = frozenset(token_ids)
    if stop and max(stop) >= vocab_size:
        raise ConfigError(f"stop_token_ids has {max(stop)}; ids must be below the vocabulary's {vocab_size}")
    return stop


def check_cache_salt(cache_salt: str) -> None:
    """Raise ConfigError if the salt is too long."""
    if len(cache_salt) > MAX_CACHE_SALT_CHARS:
        raise ConfigError(f"cache_salt has {len(cache_salt)} characters; it can have at most {MAX_CACHE_SALT_CHARS}")
