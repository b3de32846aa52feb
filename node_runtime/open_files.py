"""How many files a process of a node may have open."""

from __future__ import annotations

import resource

MAX_OPEN_FILES = 65_536


def raise_open_files() -> None:
    """Raise the limit of open files to what this process may have (at most `MAX_OPEN_FILES`).

    A rank's sessions take some twenty each, and whoever connects to a leader takes one. The soft limit is 1024 on most machines
    for the sake of programs that use select(), which nothing here does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
