"""Whether this machine's clock is kept right: certificates, logs and traces of two machines go by it; the protocol does not."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from typing import Final

from kvferry.doctor.finding import Finding, ok, warn

NAME: Final = "clock"
MAX_ERROR_S: Final = 2.0
"""The kernel adds 0.5 ms for each second since the clock was set last (kernel/time/ntp.c, MAXFREQ), and timesyncd lets up to
2,048 s pass (PollIntervalMaxSec), chrony 1,024 s: of a clock that is kept well it is up to 1.1 s. Above this its keeper has been
silent for an hour."""

MAX_OFFSET_S: Final = 0.1
"""Logs of two machines that are further apart tell another story than what happened: a transfer takes less."""
_UNSYNCHRONISED: Final = 0x0040  # STA_UNSYNC
_NANOSECONDS: Final = 0x2000  # STA_NANO: `offset` is in ns, not in us
_ERROR: Final = 5  # TIME_ERROR
_FIX: Final = "timedatectl set-ntp true (or systemctl enable --now chrony); a container has its host's clock, fix it there"


class _Timex(ctypes.Structure):
    """struct timex of the kernel, with room for what it may have more."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockState:
    """What the kernel says of its clock.

    Args:
        is_synchronised: Somebody keeps it.
        offset_s: What it is still being moved by.
        max_error_s: Bound that whoever keeps it has given.
    """

    is_synchronised: bool
    offset_s: float
    max_error_s: float


def read_clock() -> ClockState | str:
    """Asked of the kernel, changing nothing; or why it does not say."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (AttributeError, OSError):
        return "this C library has no adjtimex"
    timex = _Timex()  # modes 0: only to be read
    state = adjtimex(ctypes.byref(timex))
    if state < 0:
        number = ctypes.get_errno()
        return f"adjtimex: {os.strerror(number)}" + (" (a container that forbids it)" if number == errno.EPERM else "")
    per_second = 1e9 if timex.status & _NANOSECONDS else 1e6
    return ClockState(
        is_synchronised=state != _ERROR and not timex.status & _UNSYNCHRONISED,
        offset_s=timex.offset / per_second,
        max_error_s=timex.maxerror / 1e6,
    )


def check_clock(found: ClockState | str) -> Finding:
    if isinstance(found, str):
        return warn(NAME, f"not known: {found}", "timedatectl timesync-status (or chronyc tracking), on the host")
    if not found.is_synchronised:
        return warn(NAME, "nobody keeps it right: the kernel calls it unsynchronised", _FIX)
    text = f"synchronised, being moved by {found.offset_s * 1e3:+.3f} ms, at most {found.max_error_s * 1e3:,.0f} ms wrong"
    if found.max_error_s > MAX_ERROR_S:
        return warn(
            NAME,
            f"{text}: it has not been set for long",
            "chronyc sources -v (or timedatectl timesync-status): is its time server still reached?",
        )
    if abs(found.offset_s) > MAX_OFFSET_S:
        return warn(
            NAME, text, "wait until it is there (chronyc tracking, or timedatectl timesync-status); times of logs and traces jump"
        )
    return ok(NAME, text)
