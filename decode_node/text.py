"""Between text and token ids, without the libraries that a model's weights need."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from transfer.errors import ConfigError


class TextCodec:
    """A model directory's tokenizer.

    Raises:
        ConfigError: There is none, or it is damaged.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model is {directory}; {path} is missing: it must be a Hugging Face directory with its tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise ConfigError(f"model is {directory}; {path} cannot be read: {' '.join(str(error).split())[:200]}") from error

        # No token stands for more text than its own spelling, so much longer text cannot fit; found before it is tokenised.
        self._longest_token = max((len(token) for token in self._tokenizer.get_vocab()), default=1)

    async def encode(self, text: str, *, max_tokens: int) -> tuple[int, ...]:
        """The text's tokens; a long text is tokenised beside the loop.

        Args:
            max_tokens: More tokens than this cannot be served.

        Raises:
            ConfigError: The text is so long that it must have more.
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
        """For the tokens of one generation."""
        return TextStream(self._tokenizer)


class TextStream:
    """Turns tokens into the text that each of them adds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token_id: int) -> str:
        """Empty while a character is incomplete, and where the tokens spell none; it never fails for what they spell."""
        try:
            return self._step(token_id)
        except Exception:  # the library's only kind, "Invalid prefix encountered", e.g. for bytes that are no UTF-8
            # It says so at every later token as well, so the text goes on with this one, without what came before it.
            self._stream = DecodeStream(skip_special_tokens=True)
        try:
            return self._step(token_id)
        except Exception:
            self._stream = DecodeStream(skip_special_tokens=True)
            return ""

    def _step(self, token_id: int) -> str:
        return self._stream.step(self._tokenizer, token_id) or ""
