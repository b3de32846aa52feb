"""Text that can leave the process."""

from __future__ import annotations


def is_utf8(text: str) -> bool:
    """Return whether the text can be written as UTF-8, as gRPC, JSON and a terminal need it.

    Invalid UTF-8 in an argument or environment variable reaches a process as lone surrogates, which cannot be written.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
