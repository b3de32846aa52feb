"""A port for a server that has to know its own address before it starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def free_port() -> Iterator[int]:
    """A port that nobody else gets meanwhile, for a server that has to know its own address before it starts."""
    with socket.socket() as held:  # bound, not listening, and with SO_REUSEADDR, so that the server can have it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
