"""Convert between text and token ids, without the libraries that a model's weights need."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from transfer.errors import ConfigError


class TextCodec:
    """The tokenizer of a model directory.

    Raises:
        ConfigError: It is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model is {directory}; {path} is missing: it must be a Hugging Face directory with its tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise ConfigError(f"model is {directory}; {path} cannot be read: {' '.join(str(error).split())[:200]}") from error

        # No token stands for more text than its own spelling, which rejects a text that is too long before it is tokenised.
        self._longest_token = max((len(token) for token in self._tokenizer.get_vocab()), default=1)

    async def encode(self, text: str, *, max_tokens: int) -> tuple[int, ...]:
        """Return the text's tokens. A thread tokenises it.

        Raises:
            ConfigError: The text is so long that it must have more than `max_tokens`.
        """
        if len(text) > max_tokens * self._longest_token:
            raise ConfigError(
                f"prompt has {len(text)} characters; a context of {max_tokens} tokens has at most "
                f"{max_tokens * self._longest_token}"
            )
        # As a batch of one, because only a batch gives up the interpreter lock.
        (encoding,) = await asyncio.to_thread(self._tokenizer.encode_batch, [text])
        return tuple(encoding.ids)

    def stream(self) -> TextStream:
        """Return the decoder of one generation's tokens."""
        return TextStream(self._tokenizer)


class TextStream:
    """Convert tokens into the text that each of them adds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token_id: int) -> str:
        """Return the text that a token adds: empty if a character is incomplete or the tokens spell none. Never fails."""
        try:
            return self._step(token_id)
        except Exception:  # the library's only kind, "Invalid prefix encountered", e.g. for bytes that are no UTF-8
            # It would fail at every later token, too. So begin a new text with this token.
            self._stream = DecodeStream(skip_special_tokens=True)
        try:
            return self._step(token_id)
        except Exception:
            self._stream = DecodeStream(skip_special_tokens=True)
            return ""

    def _step(self, token_id: int) -> str:
        return self._stream.step(self._tokenizer, token_id) or ""
