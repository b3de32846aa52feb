"""Text that can leave the process."""

from __future__ import annotations


def is_utf8(text: str) -> bool:
    """Whether it can be written as UTF-8, as gRPC, JSON and a terminal want it.

    What is no UTF-8 in an argument or a variable of the environment comes to a process as lone surrogates, which cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
