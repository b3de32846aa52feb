"""Signals of a rank's writers: which gathers have begun, and the scatters that are queued behind them (`_signals.c`)."""

from __future__ import annotations

import asyncio
import atexit
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import structlog

from transfer.copy.compiled_copy import load_compiled
from transfer.copy.piece_copier import ScatterLaunch
from transfer.loop_turns import MeasuredLoop
from transfer.transport.signals import SIGNAL_LIMIT_S, SignalReader

if TYPE_CHECKING:
    from transfer.receive._signals import Watch

log = structlog.get_logger(__name__)

# Without the compiled code there are no signals, because a thread with Python may need too long to end the wait of a stream.
_signals = load_compiled("transfer.receive._signals")


class Scattered(NamedTuple):
    """The end of a scatter that was queued behind its gather.

    Attributes:
        is_intact: Whether the bytes have the digest of the gather. None means that the gather did not end in time.
        seconds: Time since the end of the gather, or since the scatter was queued if that is later.
    """

    grant: int
    is_intact: bool | None
    seconds: float


class Gathered(NamedTuple):
    """The end of a gather whose scatter was not armed."""

    session: int
    grant: int
    digest: int


class SignalWatch:
    """Look at the signals of sessions while granted pieces are expected. A grant is identified by its first position.

    A scatter that is armed is queued when its gather begins: by a thread without Python, or by a `MeasuredLoop` that waits for
    events. So it can be queued at any moment except inside `gate`.

    Args:
        on_report: Called on the loop when `take_ended` has reports, and when it will have some soon.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_report: Callable[[], None]) -> None:
        self._loop = loop
        self._on_report = on_report
        self._watch: Watch | None = None
        self._readers: dict[int, SignalReader] = {}
        self.armed: dict[int, int] = {}
        """By grant, the session of each scatter that can be queued at any moment."""
        # Of armed and queued scatters. The words stay mapped until no stream waits for them.
        self._launches: dict[int, tuple[ScatterLaunch, SignalReader]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no scatter is armed or under way."""
        return not self._launches

    @property
    def is_open(self) -> bool:
        """Whether sessions can be watched."""
        return self._watch is not None

    def open(self, reader: SignalReader) -> bool:
        """Start the thread before the first session with signals. Return False if there can be none."""
        if self._watch is None and _signals is not None:
            try:
                self._watch = _signals.Watch(reader.words.functions, SIGNAL_LIMIT_S)
            except OSError as error:  # of descriptors or threads
                log.warning("signals_unavailable", reason=str(error))
                return False
            _watches.add(self)
            self._loop.add_reader(self._watch.fileno(), self._on_report)
            if isinstance(self._loop, MeasuredLoop):
                self._loop.pollers.append(self)
        return self._watch is not None

    def wait(self, fd: int, timeout_s: float | None) -> bool:
        """Look at the signals in place of the thread, see `transfer.loop_turns.Poller`."""
        assert self._watch is not None
        return self._watch.poll(fd, timeout_s)

    def handle(self) -> None:
        """Call `on_report` at once if there are reports."""
        assert self._watch is not None
        if self._watch.has_reports():
            self._on_report()

    def begin(self, session: int, reader: SignalReader) -> None:
        """Watch a session until `end` was called as often as `begin`."""
        assert self._watch is not None
        if session not in self._readers:
            self._readers[session] = reader
            words = reader.words
            self._watch.add(session, words.address, words.device_address, words.context)
        self._watch.expect(session, 1)

    def end(self, session: int) -> None:
        """Undo one `begin`."""
        if self._watch is not None:
            self._watch.expect(session, -1)

    def remove(self, session: int) -> None:
        """Forget a session that is being closed. Its scatters under way still end. Its armed scatters are not queued any more."""
        if self._watch is not None:
            self._watch.remove(session)
        self._readers.pop(session, None)  # after the watch has forgotten the words, because this can unmap them

    def arm(self, session: int, grant: int, launch: ScatterLaunch) -> None:
        """Queue a scatter when the gather into the grant begins. `begin` was called for the grant."""
        assert self._watch is not None
        places = launch.stream, launch.sum_address, launch.cell_address
        if self._watch.arm(session, grant, *places, launch.kernels, launch.num_first):
            self.armed[grant] = session
            self._launches[grant] = (launch, self._readers[session])
        else:
            launch.give_back()

    @property
    def gate(self) -> AbstractContextManager[None]:
        """Blocks the thread inside `with`: it queues no scatter and reports no end."""
        assert self._watch is not None
        return self._watch

    def take_queued(self) -> list[tuple[int, int]]:
        """Return the session and grant of each scatter that was queued since the last call."""
        assert self._watch is not None
        return [(self.armed.pop(grant), grant) for grant in self._watch.take_queued()]

    def disarm_unless(self, is_awaited: Callable[[int, int], bool]) -> None:
        """Disarm the scatters for whose session and grant the function returns False. Call it inside the gate, after
        `take_queued`."""
        assert self._watch is not None
        for grant, session in list(self.armed.items()):
            if not is_awaited(session, grant):
                self._watch.disarm(grant)
                del self.armed[grant]
                self._launches.pop(grant)[0].give_back()

    def take_ended(self) -> tuple[list[Scattered], list[Gathered]]:
        """Return the ends since the last call: of scatters that `take_queued` has returned, and of gathers without a scatter.

        Raises:
            RuntimeError: A scatter could not be queued.
        """
        assert self._watch is not None
        scattered, gathered = self._watch.take_ended()
        for grant, _, _ in scattered:
            self._launches.pop(grant)[0].give_back()
        return [Scattered(*one) for one in scattered], [Gathered(*one) for one in gathered]

    def stop(self, session: int) -> bool:
        """Ignore the signals of a session. Return whether they were accepted before."""
        return self._watch is not None and self._watch.stop(session)

    def resume(self, session: int) -> None:
        """Accept the signals of a session again, unless its writer has broken the rules."""
        if self._watch is not None:
            self._watch.resume(session)

    def close(self, *, is_idle: bool) -> None:
        """End the thread.

        Args:
            is_idle: Whether no stream runs a scatter. If not, the memory that the stream writes is never freed.
        """
        if self._watch is None:
            return
        self._loop.remove_reader(self._watch.fileno())
        if isinstance(self._loop, MeasuredLoop):
            self._loop.pollers.remove(self)
        self.end_thread()
        if not is_idle:
            _kept.append(self._launches)
        self._watch = None

    def end_thread(self) -> None:
        """End the thread only, at the end of the process."""
        if self._watch is not None:
            self._watch.close()


_watches: weakref.WeakSet[SignalWatch] = weakref.WeakSet()
_kept: list[object] = []


@atexit.register
def _end_all() -> None:
    """End the threads before their words are unmapped at the end of the process."""
    for watch in list(_watches):
        watch.end_thread()
