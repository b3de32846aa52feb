"""What device a plan is for, where nobody says: the GPUs that `nvidia-smi` finds, or else this host's memory."""

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
        text: What it is and how that is known, for people.
        total_bytes: Its size; None where only what is free was given.
        free_bytes: What is free of it; None: all.
        is_cpu: Whether it is host memory.
    """

    text: str
    total_bytes: int | None
    free_bytes: int | None
    is_cpu: bool = False


def given_device(device_bytes: int | None, free_bytes: int | None) -> Device | None:
    """The device of the flags; None where they say nothing."""
    if device_bytes is None and free_bytes is None:
        return None
    text = f"{shown(device_bytes)}, as given" if device_bytes is not None else "of unknown size"
    if free_bytes is not None:
        text += f", {shown(free_bytes)} of it free, as given"
    return Device(text=text, total_bytes=device_bytes, free_bytes=free_bytes)


def detect_device(num_ranks: int, query: Callable[[], str | None] | None = None, root: Path = Path("/")) -> Device:
    """The least of the GPUs that the ranks would take, or this rank's part of what the host has available.

    Args:
        num_ranks: Ranks on this machine.
        query: Asks for the GPUs, one line each: name, MiB in all, MiB free; None asks nvidia-smi.
        root: Where /proc and /sys lie.
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
    """Its answer; None where there is no such program, no driver, or no answer in time."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _parse(line: str) -> tuple[str, int, int] | None:
    """Name, bytes in all and bytes free; None for a GPU that does not say, for example one that is cut in instances."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 3 or not (fields[1].isdecimal() and fields[2].isdecimal()):
        return None
    return fields[0], int(fields[1]) * MB, int(fields[2]) * MB
