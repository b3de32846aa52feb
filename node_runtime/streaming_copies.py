"""Lets rank processes copy pages with stores that bypass the cache, by telling the C library.

A gather writes to staging what the peer reads next, and a scatter writes pages that attention reads much later. An ordinary store
first brings the line that it overwrites into the cache, and pushes another one out: copies of 64 KiB pages between places that
are not cached ran at 6.8 GB/s, with non-temporal stores at 10.1, and copies of 64 MiB at 7.3 and 13.8 (one core of a Xeon with a
shared cache of 480 MB, glibc 2.36). glibc uses such stores from a size on that follows the size of the last cache, which many
guests see whole and have little of: there, that is above 100 MB and so never.

Only at a process's start can it be told otherwise, through its environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

TUNABLES = "GLIBC_TUNABLES"
THRESHOLD = "glibc.cpu.x86_non_temporal_threshold"

MIN_BYTES = 1 << 15
"""Pages of 32 KiB gain a quarter; what is smaller pays for the fence behind each copy. glibc takes nothing below 16 KiB."""


def tunables(environment: Mapping[str, str]) -> str:
    """Value of `TUNABLES` for a process that copies pages; what the environment says of the same already stays."""
    old = environment.get(TUNABLES, "")
    if any(one.startswith(f"{THRESHOLD}=") for one in old.split(":")):
        return old
    return ":".join(filter(None, (old, f"{THRESHOLD}={MIN_BYTES:#x}")))


@contextlib.contextmanager
def streaming_copies() -> Iterator[None]:
    """Processes that are started (not forked) inside copy so; where the C library is another one, nothing changes."""
    old = os.environ.get(TUNABLES)
    os.environ[TUNABLES] = tunables(os.environ)
    try:
        yield
    finally:
        if old is None:
            del os.environ[TUNABLES]
        else:
            os.environ[TUNABLES] = old
