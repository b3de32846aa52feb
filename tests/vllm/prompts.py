"""Twenty prompts of 10 to 600 tokens: lengths around vLLM's blocks of 128 among them, no two that begin alike."""

from __future__ import annotations

import random
import re
from pathlib import Path

from tokenizers import Tokenizer

from kvferry.demo.model import TRAINING_TEXT

LENGTHS = (10, 13, 31, 32, 33, 64, 100, 127, 128, 129, 130, 200, 255, 256, 257, 300, 384, 450, 513, 600)


def make_prompts(model: Path) -> dict[int, str]:
    """Prompts by their number of tokens, the one at the beginning included; the same ones every time."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = sorted(set(re.findall(r"[a-z]+", TRAINING_TEXT)))
    size = {word: len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) for word in words}
    short = [word for word in words if size[word] == 1]
    prompts = {}
    for length in LENGTHS:
        chance = random.Random(length)
        text: list[str] = []
        left = length - 1
        while left:
            word = chance.choice(words if left >= max(size.values()) else short)
            text.append(word)
            left -= size[word]
        prompts[length] = " ".join(text)
        assert len(tokenizer.encode(prompts[length]).ids) == length
    return prompts
