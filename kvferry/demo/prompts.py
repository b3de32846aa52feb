"""The input of the demo: built-in prompts or a text file with one prompt a line, and the model directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from decode_node.text import TextCodec
from kvferry.bench_serve.workload import MAX_REQUESTS
from kvferry.demo.reference import EXACT_DTYPE
from planner import model_directory
from transfer.errors import ConfigError

_COMPUTABLE: Final = ("float32", "bfloat16", "float16")
_PASSAGE: Final = (
    "The ferry left at dawn with forty crates on board, and every crate had a number that the crew read aloud. "
    "On the far shore the pages are larger, so two of them fit where four were before, and still no line is lost. "
    "A small boat came late; the harbour kept its place free and sent the others on. "
    "When the tide fell, the keeper marked the wall and told the captain how much room there was. "
)

BUILT_IN: Final = (
    "The captain counts the crates.",
    "Why does a ferry wait for the tide?",
    "Tell me what the second machine does with the cache of the first one, in one sentence.",
    "A storm came in the night. " * 4,
    "The engineers drew a map of two cities with four towers on the left and two on the right, and one bridge for every floor.",
    _PASSAGE,
    "Once more, slowly: " + _PASSAGE,
    _PASSAGE + "What happened to the small boat?",
    "Read this twice. " + _PASSAGE * 2,
    _PASSAGE * 2 + "Then the first bell rang, and a new day began. " * 3,
    "Notes of the harbour master. " + _PASSAGE * 4,
    _PASSAGE * 5 + "Who read the numbers aloud, and why did nobody leave before the quay had room?",
)
"""About 10 to 600 tokens of the demo model each."""


def load_prompts(file: Path | None, num_requests: int | None) -> list[str]:
    """Return the prompts of a run.

    Args:
        file: Text file with one prompt a line; empty lines are ignored. None means the built-in prompts.
        num_requests: Number of prompts. If it is larger than their number, they repeat with a number before them, so that no two
            are equal. None means each once.

    Raises:
        ConfigError: The file cannot be read or holds no prompt, or the number is out of range.
    """
    if num_requests is not None and not 1 <= num_requests <= MAX_REQUESTS:
        raise ConfigError(f"--requests is {num_requests}; it must be in [1, {MAX_REQUESTS}]")
    prompts = list(BUILT_IN) if file is None else _read(file)
    if num_requests is None:
        return prompts
    return [
        prompts[index] if index < len(prompts) else f"{index + 1}. {prompts[index % len(prompts)]}"
        for index in range(num_requests)
    ]


async def check_prompts_fit(model: Path, prompts: Sequence[str], max_new_tokens: int) -> None:
    """Check that each prompt and its output fit the model's context, which the nodes would check only after they have started.

    It does nothing if the model's configuration has no context length: the nodes check model directories.

    Raises:
        ConfigError: They do not; the message names the longest prompt.
    """
    max_tokens = read_config(model).get("max_position_embeddings")
    if not isinstance(max_tokens, int):
        return
    codec = TextCodec(model)
    lengths = [len(await codec.encode(prompt, max_tokens=max_tokens)) for prompt in prompts]
    longest = max(lengths)
    if longest + max_new_tokens > max_tokens:
        raise ConfigError(
            f"prompt {lengths.index(longest) + 1} has {longest} tokens and --max-new-tokens is {max_new_tokens}, "
            f"together {longest + max_new_tokens}; the model's context is {max_tokens} tokens"
        )


def read_config(model: Path) -> dict[str, Any]:
    """Return the model's configuration; empty if it cannot be read, which the nodes report."""
    try:
        return model_directory.read_config(model)
    except ConfigError:
        return {}


def chosen_dtype(option: str, model: Path) -> str | None:
    """Return the type for the nodes and the single process; None means that the directory decides.

    Args:
        option: "float32" or "model".
    """
    return EXACT_DTYPE if option == EXACT_DTYPE else model_dtype(model)


def model_dtype(model: Path) -> str | None:
    """Return the model's own dtype from its configuration; None if the model cannot be computed in it."""
    config = read_config(model)
    found = config.get("dtype", config.get("torch_dtype"))
    return found if found in _COMPUTABLE else None


def architecture(model: Path) -> str:
    """Return the model's architecture from its configuration; empty if it has none."""
    named = read_config(model).get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _read(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--prompts is {file}, which cannot be read ({error}); it must be a text file, one prompt a line"
        ) from None
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts is {file}, which holds no prompt; it must have one a line")
    return prompts
