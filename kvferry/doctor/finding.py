"""Findings of `kvferry doctor`: the subject, its state, and the command that fixes it."""

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
    """Result of one check. `fix` is a command or step, and empty if the state is OK.

    FAIL means that kvferry cannot run like this; WARN means that it runs slower, or not everywhere.
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
    """Return the stripped text of a file; None if it does not exist or must not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
