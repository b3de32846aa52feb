"""Set up a process of a node: environment, open files, freed memory, garbage collection, and copies past the cache.

This module is imported before torch and the settings. It imports the standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

MAX_OPEN_FILES: Final = 65_536

# Parameters of mallopt, from malloc.h of glibc. Set both thresholds: setting one of them stops glibc from adjusting the other.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD: Final = 32 << 20  # the maximum of glibc
KEPT_BYTES: Final = 256 << 20
"""Free bytes at the end of the heap that glibc keeps. It also keeps all free memory below a block in use."""

TUNABLES: Final = "GLIBC_TUNABLES"
THRESHOLD: Final = "glibc.cpu.x86_non_temporal_threshold"
MIN_BYTES: Final = 1 << 15
"""Smallest copy past the cache. Pages of 32 KiB gain a quarter, smaller ones pay for the fence. glibc's minimum is 16 KiB."""


def prepare_process() -> None:
    """Raise the limits of this process, and set environment variables that libraries read when they are loaded.

    Only a daemon may call this, and only before these libraries are loaded, here or in the fork server.
    """
    raise_open_files()
    # UCX logs to standard output, and warns about dead peers, which this node detects itself.
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    # gRPC's core logs errors to standard error in another format. Its callers receive these errors anyway.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard limit, at most `MAX_OPEN_FILES`.

    Each session of a rank takes some twenty files, and each connection to a leader takes one. The usual soft limit of 1024 is for
    programs that use select(), and nothing here does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_freed_memory() -> bool:
    """Keep freed memory for later allocations. Call this before other threads start.

    Each step of a model on a CPU allocates and frees tensors of some hundred KiB to some MiB. By default, glibc returns them to
    the system, and each page of the next step is a fault. The demo model takes 4.3 to 4.5 s for 64 tokens of 24 requests, with
    500,000 faults. After this call it takes 3.5 s, with 4,000 faults. Blocks of `_LARGEST_MMAP_THRESHOLD` or more, such as a
    pool, are still returned.

    Returns:
        Whether the C library supports it: glibc does, musl does not.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One heap for all threads: the heap of another thread has parts of 64 MiB, and each free part is returned.
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, KEPT_BYTES))
    return all([mallopt(name, value) == 1 for name, value in settings])


def import_before_forks(names: Iterable[str]) -> None:
    """Import modules in a fork server. Ignore import errors, because the ranks report them.

    A collection during imports examines every object and frees almost none. Collections take a quarter of the import time of
    torch and transformers (0.8 of 3.5 s on two cores of an EPYC). No collection precedes `gc.freeze`. It would leave free memory
    between the objects, and a rank that allocates there copies the page. Source: documentation of `gc.freeze`.
    """
    gc.disable()
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


def freeze_gc() -> None:
    """Exclude all present objects from later garbage collections. Call this once a process is set up.

    A full collection visits every object. With torch loaded it stops the process for 110 to 150 ms (two cores of a Xeon) and
    finds nothing. This happens at first once in some 150 requests. Heartbeats and all transfers wait for it. After this call, no
    round of 240 with 16 requests each had such a stop (benchmark `host`).
    """
    gc.collect()
    gc.freeze()


def tunables(environment: Mapping[str, str]) -> str:
    """Return the value of `TUNABLES` for a process that copies pages. A threshold that is set already stays."""
    old = environment.get(TUNABLES, "")
    if any(one.startswith(f"{THRESHOLD}=") for one in old.split(":")):
        return old
    return ":".join(filter(None, (old, f"{THRESHOLD}={MIN_BYTES:#x}")))


@contextlib.contextmanager
def streaming_copies() -> Iterator[None]:
    """Let processes that are started (not forked) inside copy with stores that bypass the cache, if their C library is glibc.

    A gather writes to staging memory that the peer reads next, and a scatter writes pages that attention reads much later. An
    ordinary store first loads the line into the cache and evicts another one. Copies of 64 KiB pages that are not cached ran at
    6.8 GB/s, and with non-temporal stores at 10.1. Copies of 64 MiB ran at 7.3 and 13.8. (One core of a Xeon with a shared cache
    of 480 MB, glibc 2.36.) glibc uses such stores above a threshold that follows the size of the last cache. Many virtual
    machines see all of that cache and own little of it, so there the threshold exceeds 100 MB. It can only be set at the start of
    a process.
    """
    old = os.environ.get(TUNABLES)
    os.environ[TUNABLES] = tunables(os.environ)
    try:
        yield
    finally:
        if old is None:
            del os.environ[TUNABLES]
        else:
            os.environ[TUNABLES] = old
