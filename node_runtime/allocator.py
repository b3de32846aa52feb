"""What the C library's allocator does with memory that was freed, in a process that computes on CPUs."""

from __future__ import annotations

import ctypes
from typing import Final

# mallopt's parameters, malloc.h of glibc. Set together: either alone ends what glibc learns by itself of both, and is worse.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD: Final = 32 << 20  # glibc takes no larger one
KEPT_BYTES: Final = 256 << 20
"""At the heap's end. What is free below a block that lives is kept, however much it is: the most that steps had at one time."""


def keep_freed_memory() -> bool:
    """Keep freed memory for what is allocated next; before other threads begin.

    Each step of a model on a CPU makes and frees tensors of some hundred KiB to some MiB, and those of the contexts grow from
    step to step. glibc gives them back to the system, and the next step gets new pages, each with a fault: 64 tokens of 24
    requests take the demo model 4.3 to 4.5 s and 500,000 faults, and 3.5 s and 4,000 with this. What is allocated in one piece of
    `_LARGEST_MMAP_THRESHOLD` or more, as a pool is, is given back as before.

    Returns:
        Whether the C library can be told so: glibc can, musl cannot.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One heap for all threads: another thread's consists of parts of 64 MiB, and each part that is free is given back.
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, KEPT_BYTES))
    return all([mallopt(name, value) == 1 for name, value in settings])
