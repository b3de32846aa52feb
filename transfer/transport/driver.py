"""Drive sessions from an asyncio loop: sleep on their descriptors, and call back when a handle settles.

The loop is the only owner of the sessions. Nothing is polled while a session's descriptor is armed, so an idle session costs
nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from transfer.errors import LocalProtocolError, TransferError, TransportClosed, TransportTimeout
from transfer.transport.base import Handle, Session

Callback = Callable[[Handle, TransferError | None], None]

_MAX_ROUNDS = 16  # rounds of one session before the loop serves others
_MAX_TURN_S = 0.001  # longest time for these rounds
# A session without a descriptor that has pending handles is checked in each turn of the loop at first, because small writes need
# it. Later the pause is a share of the time that it has waited already, so that no write takes longer by more than that share.
_EAGER_S = 50e-6
_LOOK_SHARE = 1 / 40
_MIN_PAUSE_S = 20e-6
_MAX_PAUSE_S = 0.01


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


_libc = ctypes.CDLL(None, use_errno=True)


class _FineTimer:
    """A one-shot timer of a loop, exact to tens of microseconds; `call_later` rounds up to epoll's whole milliseconds.

    Source: timerfd_create(2); Python has it from 3.13 on.

    Raises:
        OSError: Out of descriptors.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._fd = int(_libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._loop = loop
        self._callback = callback
        loop.add_reader(self._fd, self._fire)

    def start(self, delay_s: float) -> None:
        """Fire once, at least a nanosecond from now. A timer that was started before does not fire any more."""
        seconds, nanoseconds = divmod(max(int(delay_s * 1e9), 1), 10**9)
        setting = _Setting(first=_Timespec(seconds, nanoseconds))
        _libc.timerfd_settime(self._fd, 0, ctypes.byref(setting), None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # started again since the loop saw it
        self._callback()


@dataclass(slots=True, kw_only=True, eq=False)
class Watch:
    """One callback that waits for one handle."""

    handle: Handle
    callback: Callback
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass(slots=True, kw_only=True, eq=False)
class _Driven:
    """A session, its descriptor as registered with the loop, and the callbacks that wait for it."""

    session: Session
    fd: int | None
    is_listening: bool = False  # whether the loop waits for the descriptor
    watches: list[Watch] = field(default_factory=list)
    is_scheduled: bool = False
    timer: _FineTimer | None = None  # timer of a session without a descriptor
    waiting_since: float | None = None


class SessionDriver:
    """Move sessions forward, and call the callbacks of their handles.

    Args:
        loop: The loop that owns the sessions; every method is called from it.
        spin_s: Time for which a session with pending handles is polled before the loop sleeps on its descriptor. By default 0,
            because polling takes the core from others. If every rank has a core of its own, 50 us help. 4 KiB and an answer took
            220 us without and 95 us with it (bench_link, two cores, two processes). 20 us gained nothing.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, spin_s: float = 0.0) -> None:
        self._loop = loop
        self._spin_s = spin_s
        self._driven: dict[int, _Driven] = {}

    def add(self, session: Session) -> None:
        """Begin to drive a session.

        Raises:
            LocalProtocolError: It is driven already.
        """
        if id(session) in self._driven:
            raise LocalProtocolError(f"session {session.lane} is driven already")
        driven = _Driven(session=session, fd=session.fileno())
        self._driven[id(session)] = driven
        if driven.fd is not None:
            # If the loop knows the number already, its session was closed before it was removed. The loop would mistake the new
            # descriptor for the old one, and never wake up.
            for other in self._driven.values():
                if other is not driven and other.fd == driven.fd:
                    other.fd, other.is_listening = None, False
            self._loop.remove_reader(driven.fd)
            self._listen(driven, driven.fd)
        self._schedule(driven)

    @property
    def num_watches(self) -> int:
        """Number of pending writes, receives and declines with a callback."""
        return sum(len(driven.watches) for driven in self._driven.values())

    def remove(self, session: Session) -> None:
        """Stop driving a session, before or after its `close()`. An unknown session is ignored.

        Callbacks that still wait get the session's error, or `TransportClosed`.
        """
        driven = self._driven.pop(id(session), None)
        if driven is None:
            return
        self._stop_listening(driven)
        driven.fd = None
        if driven.timer is not None:
            driven.timer.close()
            driven.timer = None
        self._settle(driven)
        for watch in driven.watches:
            self._call(watch, TransportClosed(f"session {session.lane} was removed from its driver while a handle was pending"))
        driven.watches = []

    def watch(self, session: Session, handle: Handle, callback: Callback) -> Watch:
        """Call `callback(handle, error)` once, from the loop, when `handle` is settled (error None) or failed.

        Raises:
            LocalProtocolError: The session is not driven here.
        """
        driven = self._find(session)
        watch = Watch(handle=handle, callback=callback)
        driven.watches.append(watch)
        driven.waiting_since = None
        self._schedule(driven)
        return watch

    async def wait(self, session: Session, handle: Handle, *, deadline_s: float) -> None:
        """Wait until `handle` is settled.

        Raises:
            TransportTimeout: `deadline_s` seconds passed; the handle stays pending.
            TransportError: As the handle's `poll()`.
        """
        settled: asyncio.Future[None] = self._loop.create_future()

        def finish(_: Handle, error: TransferError | None) -> None:
            if settled.done():
                return
            if error is None:
                settled.set_result(None)
            else:
                settled.set_exception(error)

        watch = self.watch(session, handle, finish)
        try:
            async with asyncio.timeout(deadline_s):
                await settled
        except TimeoutError:
            raise TransportTimeout(f"a handle of session {session.lane} did not settle within {deadline_s} s") from None
        finally:
            watch.cancel()

    def _find(self, session: Session) -> _Driven:
        driven = self._driven.get(id(session))
        if driven is None:
            raise LocalProtocolError(f"session {session.lane} is not driven here; add() it first")
        return driven

    def _listen(self, driven: _Driven, fd: int) -> None:
        self._loop.add_reader(fd, self._pump, driven)
        driven.is_listening = True

    def _stop_listening(self, driven: _Driven) -> None:
        """Remove the descriptor from the loop; no-op if it is not there. If its session is closed, others can have its number."""
        if driven.is_listening and driven.fd is not None:
            self._loop.remove_reader(driven.fd)
        driven.is_listening = False

    def _schedule(self, driven: _Driven) -> None:
        if not driven.is_scheduled:
            driven.is_scheduled = True
            self._loop.call_soon(self._run_scheduled, driven)

    def _run_scheduled(self, driven: _Driven) -> None:
        driven.is_scheduled = False
        if self._driven.get(id(driven.session)) is driven:
            self._pump(driven)

    def _pump(self, driven: _Driven) -> None:
        """Make progress until nothing moves and the descriptor is armed, in turns with the rest of the loop."""
        session = driven.session
        spin_until: float | None = None
        rounds, ends_at = 0, time.perf_counter() + _MAX_TURN_S
        while True:
            moved = session.progress()
            # Not `or`: callbacks usually start the next operation, which needs progress before the loop sleeps.
            moved |= self._settle(driven)
            if id(session) not in self._driven:
                return  # removed by a callback
            if driven.fd is not None and session.fileno() != driven.fd:
                self._stop_listening(driven)  # closed by its owner, perhaps in a callback, without remove()
                driven.fd = None
            if moved:
                driven.waiting_since, spin_until = None, None
                rounds += 1
                if rounds >= _MAX_ROUNDS or time.perf_counter() >= ends_at:
                    self._schedule(driven)
                    return
                continue
            if driven.fd is None or (driven.watches and session.needs_polling):
                self._stop_listening(driven)  # until it is armed again, the descriptor can stay readable
                self._look_again_later(driven)
                return
            if self._spin_s > 0.0 and driven.watches:
                now = time.perf_counter()
                spin_until = now + self._spin_s if spin_until is None else spin_until
                if now < spin_until:
                    continue
            if session.arm():
                if not driven.is_listening:
                    self._listen(driven, driven.fd)
                return
            if time.perf_counter() >= ends_at:
                self._schedule(driven)  # a descriptor that cannot be armed must not hold the loop
                return

    def _look_again_later(self, driven: _Driven) -> None:
        """Schedule the next look at a session that is polled: at once at first, then after growing pauses."""
        if not driven.watches:
            driven.waiting_since = None
            return
        now = time.perf_counter()
        if driven.waiting_since is None:
            driven.waiting_since = now
        waited_s = now - driven.waiting_since
        if waited_s < _EAGER_S:
            self._schedule(driven)
            return
        pause_s = min(max(waited_s * _LOOK_SHARE, _MIN_PAUSE_S), _MAX_PAUSE_S)
        if driven.timer is None:
            try:
                driven.timer = _FineTimer(self._loop, lambda: self._run_scheduled(driven))
            except OSError:  # out of descriptors: the callbacks are called later
                self._loop.call_later(pause_s, self._run_scheduled, driven)
                return
        driven.timer.start(pause_s)

    def _settle(self, driven: _Driven) -> bool:
        """Call the callbacks of settled handles. Return whether there was one."""
        if not driven.watches:
            return False
        watches, driven.watches = driven.watches, []
        done: list[tuple[Watch, TransferError | None]] = []
        for watch in watches:
            if watch.is_cancelled:
                continue
            try:
                is_settled, error = watch.handle.poll(), None
            except TransferError as failure:
                is_settled, error = True, failure
            if is_settled:
                done.append((watch, error))
            else:
                driven.watches.append(watch)
        for watch, error in done:
            self._call(watch, error)
        return bool(done)

    def _call(self, watch: Watch, error: TransferError | None) -> None:
        if watch.is_cancelled:
            return
        watch.is_cancelled = True
        try:
            watch.callback(watch.handle, error)
        except Exception as failure:
            # The others must still be called. The loop's handler, which is the node's, decides how to react.
            self._loop.call_exception_handler({"message": "callback of a transport handle failed", "exception": failure})
