"""The device of a plan: from flags, else the GPUs that `nvidia-smi` finds, else this host's memory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from planner.plan_inputs import MB
from transfer.host_memory import host_memory, shown

QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
_QUERY_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A rank's device.

    Args:
        text: Description with the source of the sizes.
        total_bytes: Its size; None if only the free memory was given.
        free_bytes: Its free memory; None means all.
        is_cpu: Whether it is host memory.
    """

    text: str
    total_bytes: int | None
    free_bytes: int | None
    is_cpu: bool = False


def given_device(device_bytes: int | None, free_bytes: int | None) -> Device | None:
    """Return the device of the flags; None if they give no size."""
    if device_bytes is None and free_bytes is None:
        return None
    text = f"{shown(device_bytes)}, as given" if device_bytes is not None else "of unknown size"
    if free_bytes is not None:
        text += f", {shown(free_bytes)} of it free, as given"
    return Device(text=text, total_bytes=device_bytes, free_bytes=free_bytes)


def detect_device(num_ranks: int, query: Callable[[], str | None] | None = None, root: Path = Path("/")) -> Device:
    """Return the smallest of the GPUs that the ranks would use, or this rank's part of the host's available memory.

    Args:
        num_ranks: Ranks on this machine.
        query: Returns a line for each GPU: name, total MiB, free MiB; None asks nvidia-smi.
        root: Directory of /proc and /sys.
    """
    gpus = [_parse(line) for line in ((query or ask_nvidia_smi)() or "").splitlines() if line.strip()]
    found = [gpu for gpu in gpus if gpu is not None]
    if found:
        emptiest = sorted(found, key=lambda gpu: gpu[2], reverse=True)[:num_ranks]
        total, free = min(gpu[1] for gpu in emptiest), min(gpu[2] for gpu in emptiest)
        names = ", ".join(dict.fromkeys(gpu[0] for gpu in emptiest))
        text = f"{names}, {shown(total)}, {shown(free)} of it free: the least of the {len(emptiest)} emptiest, by nvidia-smi"
        return Device(text=text, total_bytes=total, free_bytes=free)
    total, free = host_memory(meminfo=root / "proc/meminfo", cgroup=root / "sys/fs/cgroup", membership=root / "proc/self/cgroup")
    text = f"what this host has available, no GPU found: {shown(free)} of {shown(total)}"
    if num_ranks > 1:
        text += f", shared by {num_ranks} ranks"
    part = max(1, free // num_ranks)
    return Device(text=text, total_bytes=part, free_bytes=part, is_cpu=True)


def ask_nvidia_smi() -> str | None:
    """Return the output of nvidia-smi; None without the program, without a driver, or after a time-out."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _parse(line: str) -> tuple[str, int, int] | None:
    """Return name, total and free bytes; None for a GPU without numbers, such as one in MIG mode."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 3 or not (fields[1].isdecimal() and fields[2].isdecimal()):
        return None
    return fields[0], int(fields[1]) * MB, int(fields[2]) * MB
