"""Reads what a node of a local cluster has written: its JSON log lines, and whatever else reached its standard error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_HIDDEN: Final = {"event", "level", "logger", "timestamp", "role", "incarnation", "exception"}
_REASONS: Final = {"start_failed": "error", "rank_start_failed": "error", "too_many_restarts": "reason"}
"""Events that say why a node ended, the best first, and the field that says it."""


class NodeLog:
    """One node's log file, which may still grow.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[str]:
        """All lines that are complete."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        return text.split("\n")[:-1]

    def events(self, name: str) -> Iterator[dict[str, Any]]:
        """Log events of that name, oldest first."""
        for line in self.lines():
            event = _event_of(line)
            if event is not None and event.get("event") == name:
                yield event

    def tail(self, num_lines: int = 15) -> list[str]:
        """The last lines, for people."""
        return [_readable(line) for line in self.lines() if line.strip()][-num_lines:]

    def reason(self, role: str) -> str:
        """One line on why the node has ended, as well as its log tells."""
        lines = [line for line in self.lines() if line.strip()]
        own = [line for line in lines if line.startswith(f"{role}-node: ")]
        if own:
            return own[0].removeprefix(f"{role}-node: ")
        for name, key in _REASONS.items():
            for event in self.events(name):
                return str(event.get(key, name))
        return _readable(lines[-1]) if lines else "it wrote nothing"


def _event_of(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _readable(line: str) -> str:
    event = _event_of(line)
    if event is None:
        return line
    fields = " ".join(f"{name}={value}" for name, value in event.items() if name not in _HIDDEN)
    return f"{event.get('level', ''):<7} {event.get('event', '')} {fields}".rstrip()
