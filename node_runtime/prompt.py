"""What a prompt must be, on either tier."""

from __future__ import annotations

from transfer.errors import ConfigError


def check_prompt(token_ids: tuple[int, ...], *, max_context_tokens: int, vocab_size: int) -> None:
    """Refuse a prompt that the model cannot take.

    Raises:
        ConfigError: It is empty, too long, or has an id out of range.
    """
    if not token_ids:
        raise ConfigError("prompt is empty; it must have at least one token")
    if len(token_ids) >= max_context_tokens:
        raise ConfigError(
            f"prompt has {len(token_ids)} tokens; the model's context of {max_context_tokens} must leave room for one more"
        )
    worst = max(token_ids)
    if worst >= vocab_size:
        raise ConfigError(f"token_ids has {worst} at {token_ids.index(worst)}; ids must be below the vocabulary's {vocab_size}")
