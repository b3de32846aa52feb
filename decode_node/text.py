"""Between text and token ids, without the libraries that a model's weights need."""

from __future__ import annotations

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

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text).ids)

    def stream(self) -> TextStream:
        """For the tokens of one generation."""
        return TextStream(self._tokenizer)


class TextStream:
    """Turns tokens into the text that each of them adds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token_id: int) -> str:
        """Empty while a character is incomplete."""
        return self._stream.step(self._tokenizer, token_id) or ""
