"""What a fuzz target is, and what is judged of each execution whatever the target: its errors, and its memory."""

from __future__ import annotations

import atexit
import importlib
import random
import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CORPUS: Final = Path(__file__).resolve().parent / "corpus"

GROWTH_BYTES: Final = 24 << 20
GROWTH_PER_BYTE: Final = 1024
"""How far one execution may raise this process's peak of resident memory: this much, and so much for each byte of its input. The
constant part is the noise of an allocator and of libraries that are loaded at their first use."""


class Finding(AssertionError):
    """The code under test did what it must never do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One thing that reads hostile input.

    Args:
        name: Also its folder in the corpus.
        about: What is read, for the table.
        modules: What is instrumented: the branches that guide the search.
        check: Reads one input; raises `Finding` where a property does not hold.
        refuses: The errors that are right answers to wrong input. Every other one is a finding.
        mutate: Another input that keeps most of the structure of the given one, which need not have any.
        seeds: Inputs to begin with, where there is no corpus.
        max_bytes: Longest input that is tried.
        max_line_chars: Longest line of a refusal.
        is_one_line: Whether a refusal is one line, as everywhere but where each of several problems has its own.
    """

    name: str
    about: str
    modules: tuple[str, ...]
    check: Callable[[bytes], None]
    refuses: tuple[type[Exception], ...] = ()
    mutate: Callable[[bytes, random.Random], bytes]
    seeds: Callable[[], Sequence[bytes]]
    max_bytes: int = 4096
    max_line_chars: int = 1500
    is_one_line: bool = True

    @property
    def corpus(self) -> Path:
        return CORPUS / self.name

    def execute(self, data: bytes) -> bool:
        """Read one input; whether it was taken.

        Raises:
            Finding, or whatever the code under test must not raise.
        """
        before = peak_bytes()
        try:
            self.check(data)
        except Finding:
            raise
        except self.refuses as error:
            self._judge(str(error))
            is_taken = False
        else:
            is_taken = True
        grown = peak_bytes() - before
        if grown > GROWTH_BYTES + GROWTH_PER_BYTE * len(data):
            raise Finding(f"{self.name}: an input of {len(data)} bytes took {grown} bytes of memory")
        return is_taken

    def _judge(self, message: str) -> None:
        lines = message.splitlines()
        if not message.strip() or max(map(len, lines)) > self.max_line_chars:
            raise Finding(f"{self.name}: a refusal of {len(message)} characters: {message[:200]!r}")
        if self.is_one_line and len(lines) != 1:
            raise Finding(f"{self.name}: a refusal of several lines: {message[:200]!r}")


def peak_bytes() -> int:
    """Most resident memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def require(holds: object, what: str) -> None:
    """Raises `Finding` with `what` where something does not hold."""
    if not holds:
        raise Finding(what)


def scratch_folder() -> Path:
    """A folder of this process, for targets that read files; gone when it ends."""
    folder = tempfile.mkdtemp(prefix="kvferry-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


NAMES: Final = (
    "messages",
    "registry",
    "handshake",
    "ucx_address",
    "nixl_metadata",
    "stored_page",
    "rank_link",
    "settings",
    "model_config",
    "weight_files",
    "plan_flags",
    "sender",
    "receiver",
)
"""Every target; each is `TARGET` of the module of that name in `fuzz.targets`."""


def load(name: str) -> Target:
    """The target of that name, imported only now: some need libraries that take seconds to load."""
    target = importlib.import_module(f"fuzz.targets.{name}").TARGET
    assert isinstance(target, Target) and target.name == name
    return target
