"""The memory of this host: its size, its available part, and sizes as text. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from transfer.errors import ConfigError

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """File names of a version of control groups, and the field of ``memory.stat`` that counts inactive page cache."""

    limit: str
    used: str
    inactive: str


_V1: Final = _Files(limit="memory.limit_in_bytes", used="memory.usage_in_bytes", inactive="total_inactive_file")
_V2: Final = _Files(limit="memory.max", used="memory.current", inactive="inactive_file")


def host_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> tuple[int, int]:
    """Return the host's memory and its available part in bytes, or those of a limited control group.

    Any group above this process's may be limited, as a systemd unit is by its slice, so the smallest limit counts.

    Args:
        meminfo: Linux's account of the machine.
        cgroup: Mount point of the control groups, version 2 or 1. In a container the root is often its own group.
        membership: Linux's account of the groups that this process is in.

    Raises:
        ConfigError: This system has no such account.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, LookupError, ValueError) as error:
        raise ConfigError(
            f"the host's memory cannot be read from {meminfo}: {error}; set memory.device_memory (--device-memory)"
        ) from error
    for group, files in _groups(cgroup, membership):
        limit = _number(group / files.limit)
        if limit is None:
            continue
        used = (_number(group / files.used) or 0) - _reclaimable(group / "memory.stat", files.inactive)
        total, available = min(total, limit), min(available, limit - max(0, used))
    return total, max(0, available)


def _groups(cgroup: Path, membership: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the groups of this process, from its own up to the root, with their file names.

    A container sees the mount begin at its own group, although its path may be the host's. Readers skip missing levels.
    """
    roots = {"memory": (cgroup / "memory", _V1), "": (cgroup, _V2)}
    paths = dict.fromkeys(roots, PurePosixPath())
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except (OSError, ValueError):
        lines = []
    for fields in lines:
        for controller in fields[1].split(",") if len(fields) == 3 else ():
            if controller in paths:
                paths[controller] = PurePosixPath(fields[2].lstrip("/"))
    for controller, (root, files) in roots.items():
        own = paths[controller]
        for level in (own, *own.parents) if ".." not in own.parts else (PurePosixPath(),):
            yield root / level, files


def _number(path: Path) -> int | None:
    """Return the number in a control file; None if there is none, or if it is ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(path: Path, name: str) -> int:
    """Return the page cache that the kernel frees before it refuses memory."""
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        return int(fields.get(name, 0))
    except (OSError, ValueError):
        return 0


def shown(num_bytes: int) -> str:
    """Return bytes as text for people: ``140.4 GiB``, ``64.0 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes} B"
