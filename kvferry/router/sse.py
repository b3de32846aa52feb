"""Server-sent events, as far as a router must understand what passes through it. Pure.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

MAX_EVENT_BYTES: Final = 64 << 20
"""Of one event: its sender has gone mad above that, and no memory is kept for it."""

DONE: Final = b"[DONE]"

_END: Final = re.compile(rb"\r?\n\r?\n")


class EventBuffer:
    """Cuts bytes into whole events. An event keeps its bytes, the empty line at its end included."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """The events that are whole now.

        Raises:
            ValueError: One has no end within `MAX_EVENT_BYTES`.
        """
        # An end may lie across the border; nothing before it is looked at twice.
        searched = max(0, len(self._rest) - 3)
        self._rest += received
        events, start = [], 0
        for end in _END.finditer(self._rest, searched):
            events.append(self._rest[start : end.end()])
            start = end.end()
        self._rest = self._rest[start:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        return events


def data_of(event: bytes) -> bytes:
    """What an event carries; empty for comments."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def object_of(event: bytes) -> dict[str, Any] | None:
    """The JSON object that it carries; None where it carries another thing."""
    try:
        found = json.loads(data_of(event))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def error_of(content: dict[str, Any]) -> tuple[int, str] | None:
    """Status and message of an error object; None where it is none. Status 500 where it says none."""
    error = content.get("error")
    if error is None:
        return None
    if not isinstance(error, dict):
        return 500, str(error)
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500, str(error.get("message", ""))


def is_empty(content: dict[str, Any]) -> bool:
    """Whether an event of a stream of tokens carries nothing of the answer yet: a chat begins with the role alone."""
    choices = content.get("choices")
    if not isinstance(choices, list) or not choices or content.get("usage"):
        return False
    return all(isinstance(choice, dict) and _is_empty_choice(choice) for choice in choices)


def _is_empty_choice(choice: dict[str, Any]) -> bool:
    if choice.get("finish_reason") is not None or choice.get("token_ids"):
        return False
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return not any(value for name, value in delta.items() if name != "role")
    return choice.get("text") == ""
