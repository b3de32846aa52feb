"""A one-shot timer of an asyncio loop, exact to tens of microseconds; `call_later` rounds up to epoll's whole milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


_libc = ctypes.CDLL(None, use_errno=True)


class FineTimer:
    """Calls `callback` once for each `start()`, from the loop. Source: timerfd_create(2); Python has it from 3.13 on.

    Args:
        loop: The loop; it must watch descriptors.
        callback: Called without arguments.

    Raises:
        OSError: Out of descriptors.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._fd = int(_libc.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._loop = loop
        self._callback = callback
        loop.add_reader(self._fd, self._fire)

    def start(self, delay_s: float) -> None:
        """Fire once, `delay_s` from now, in place of what was started before; at least a nanosecond."""
        seconds, nanoseconds = divmod(max(int(delay_s * 1e9), 1), 10**9)
        setting = _Setting(first=_Timespec(seconds, nanoseconds))
        _libc.timerfd_settime(self._fd, 0, ctypes.byref(setting), None)

    def cancel(self) -> None:
        """Do not fire."""
        _libc.timerfd_settime(self._fd, 0, ctypes.byref(_Setting()), None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # started anew, or cancelled, since the loop saw it
        self._callback()
