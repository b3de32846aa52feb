"""Text of generated tokens: whatever they spell, a generation goes on."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from decode_node.text import TextCodec
from transfer.errors import ConfigError

WORDS = ("▁hello", "▁world", "é", "a")


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """A tokenizer in the manner of Llama 2: bytes that are no character become one replacement each, and later none."""
    vocabulary = {name: number for number, name in enumerate(("<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder: Path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


def byte(value: int) -> int:
    return 1 + value


def word(text: str) -> int:
    return 257 + WORDS.index(text)


def test_a_character_comes_with_its_last_byte(byte_fallback: TextCodec) -> None:
    stream = byte_fallback.stream()
    assert [stream.add(token) for token in (word("▁hello"), byte(0xC3), byte(0xA9), word("a"))] == ["hello", "", "é", "a"]


def test_no_sequence_of_tokens_makes_it_fail_and_text_goes_on_after_each(byte_fallback: TextCodec) -> None:
    for seed in range(300):
        choose, stream = random.Random(seed), byte_fallback.stream()
        for _ in range(60):
            assert isinstance(stream.add(choose.randrange(257 + len(WORDS))), str)
        # The first ends whatever was incomplete, the second is text by itself.
        assert "hello" in stream.add(word("▁hello")) + stream.add(word("▁hello"))


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    byte_fallback: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_now(*_: object) -> None:
        pytest.fail("it was tokenised")

    longest = len("▁hello")
    monkeypatch.setattr(asyncio, "to_thread", not_now)
    with pytest.raises(
        ConfigError, match=f"prompt has {3 * longest + 1} characters; a context of 3 tokens has at most {3 * longest}"
    ):
        await byte_fallback.encode("x" * (3 * longest + 1), max_tokens=3)
