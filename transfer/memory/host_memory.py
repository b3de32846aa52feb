"""How much memory this host has, and how much of it a process may still take. Standard library only."""

from __future__ import annotations

from pathlib import Path

from transfer.errors import ConfigError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def host_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> tuple[int, int]:
    """Bytes of the host's memory, and bytes that are available; of a container that is limited, its own.

    Args:
        meminfo: Linux's account of the machine.
        cgroup: The container's own control group, version 2.

    Raises:
        ConfigError: This system has no such account.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"the host's memory cannot be read from {meminfo}: {error}; it must be given") from error
    limit = _number(cgroup / "memory.max")
    if limit is None or limit >= total:
        return total, available
    used = _number(cgroup / "memory.current") or 0
    reclaimable = _reclaimable(cgroup / "memory.stat")
    return limit, max(0, min(available, limit - max(0, used - reclaimable)))


def _number(path: Path) -> int | None:
    """The number in a control file; None where there is none, or it says ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(path: Path) -> int:
    """Page cache that the kernel gives back before it refuses memory."""
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        return int(fields.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0
