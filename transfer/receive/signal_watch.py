"""Signals of a rank's writers: which gathers have begun, and the scatters that are queued behind them (`_signals.c`)."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from transfer.copy.compiled_copy import load_compiled
from transfer.copy.piece_copier import ScatterLaunch
from transfer.transport.signals import SIGNAL_LIMIT_S, SignalReader

if TYPE_CHECKING:
    from transfer.receive._signals import Watch

log = structlog.get_logger(__name__)

# Without the compiled code there are no signals, because a thread with Python may need too long to end the wait of a stream.
_signals = load_compiled("transfer.receive._signals")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scattered:
    """The end of a scatter that was queued behind its gather.

    Args:
        is_intact: Whether the bytes have the digest of the gather. None means that the gather did not end in time.
        seconds: Time since the end of the gather, or since the scatter was queued if that is later.
    """

    grant: int
    is_intact: bool | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The end of a gather whose scatter was not armed."""

    session: int
    grant: int
    digest: int


class SignalWatch:
    """Look at the signals of sessions while granted pieces are expected. A grant is identified by its first position.

    A scatter that is armed is queued by a thread without Python when its gather begins. So it can be queued at any moment except
    inside `gate`.

    Args:
        on_report: Called on the loop when `take_ended` has reports, and when it will have some soon.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_report: Callable[[], None]) -> None:
        self._loop = loop
        self._on_report = on_report
        self._watch: Watch | None = None
        self._readers: dict[int, SignalReader] = {}
        self._armed: dict[int, int] = {}  # grant -> session
        # Of armed and queued scatters. The words stay mapped until no stream waits for them.
        self._launches: dict[int, tuple[ScatterLaunch, int, SignalReader]] = {}

    @property
    def num_armed(self) -> int:
        """Number of scatters that can be queued at any moment."""
        return len(self._armed)

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
        return self._watch is not None

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
        if self._watch.arm(session, grant, launch.stream, launch.sum_address, launch.cell_address, launch.kernels):
            self._armed[grant] = session
            self._launches[grant] = (launch, session, self._readers[session])
        else:
            launch.give_back()

    @contextlib.contextmanager
    def gate(self) -> Iterator[None]:
        """Block the thread meanwhile: it queues no scatter and reports no end."""
        assert self._watch is not None
        self._watch.enter()
        try:
            yield
        finally:
            self._watch.leave()

    def await_lone(self) -> None:
        """Wait for the end of a lone scatter that is about to end, without the GIL. A wake-up after a sleep would take longer."""
        assert self._watch is not None
        self._watch.await_lone()

    def take_queued(self) -> list[tuple[int, int]]:
        """Return the session and grant of each scatter that was queued since the last call."""
        assert self._watch is not None
        return [(self._armed.pop(grant), grant) for grant in self._watch.take_queued()]

    def disarm_unless(self, is_awaited: Callable[[int, int], bool]) -> None:
        """Disarm the scatters for whose session and grant the function returns False. Call it inside the gate, after
        `take_queued`."""
        assert self._watch is not None
        for grant, session in list(self._armed.items()):
            if not is_awaited(session, grant):
                self._watch.disarm(grant)
                del self._armed[grant]
                self._launches.pop(grant)[0].give_back()

    def take_ended(self) -> tuple[list[Scattered], list[Gathered]]:
        """Return the ends since the last call: of scatters that `take_queued` has returned, and of gathers without a scatter.

        The signals are closed, so their writers can reuse the entries.

        Raises:
            RuntimeError: A scatter could not be queued.
        """
        assert self._watch is not None
        scattered, gathered = self._watch.take_ended()
        ended = []
        for grant, number, is_intact, seconds in scattered:
            launch, session, _ = self._launches.pop(grant)
            launch.give_back()
            self._watch.close_entry(session, number)
            ended.append(Scattered(grant=grant, is_intact=is_intact, seconds=seconds))
        for session, _, number, _ in gathered:
            self._watch.close_entry(session, number)
        return ended, [Gathered(session=session, grant=grant, digest=digest) for session, grant, _, digest in gathered]

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
