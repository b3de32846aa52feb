"""What `kvferry doctor` finds: one thing that was looked at, how it is, and the command that fixes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from transfer.errors import ConfigError


class State(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Args:
        name: What.
        state: `FAIL`: kvferry cannot run like this; `WARN`: it can, slower or not everywhere.
        text: What was found.
        fix: Command or step that fixes it; empty when it is ok.
    """

    name: str
    state: State
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        if (self.state is State.OK) == bool(self.fix):
            raise ConfigError(f"finding {self.name} is {self.state} and its fix is {self.fix!r}; what is not ok needs one")


def ok(name: str, text: str) -> Finding:
    return Finding(name=name, state=State.OK, text=text)


def warn(name: str, text: str, fix: str) -> Finding:
    return Finding(name=name, state=State.WARN, text=text, fix=fix)


def fail(name: str, text: str, fix: str) -> Finding:
    return Finding(name=name, state=State.FAIL, text=text, fix=fix)


def read_line(path: Path) -> str | None:
    """What a small file of the kernel says; None: there is none, or it may not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
