"""A transport whose writers map the target's memory: the handshake, and the end of the transport."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
import weakref
from abc import abstractmethod
from typing import Any, TypeVar

from transfer.transport.base import LocalMemory
from transfer.transport.liveness import LivenessPipe, PeerPipe, PipeOffer
from transfer.transport.mapped_blob import TOKEN_BYTES, Offered
from transfer.transport.mapped_session import TargetSession, WriterSession
from transfer.transport.registered_memory import Memory
from transfer.transport.sessions import PeerTransport
from transfer.transport.signals import SignalReader

_CLOSE_WAIT_S = 1.0  # limit for writers of this transport and of its peers to let go, which takes milliseconds
_CLOSE_STEP_S = 0.001
_MemoryT = TypeVar("_MemoryT", bound=Memory)

log = logging.getLogger(__name__)

# Targets of this process by the offer that they answered.
_targets: weakref.WeakValueDictionary[bytes, TargetSession[Any]] = weakref.WeakValueDictionary()
# Sessions whose transport was closed before their writer let go. They keep the memory that the writer can still change.
_left_behind: list[TargetSession[Any]] = []


def target_of(token: bytes) -> TargetSession[Any] | None:
    """Return the session that answered an offer; None if another process did."""
    return _targets.get(token)


class MappedTransport(PeerTransport[_MemoryT, WriterSession[_MemoryT] | TargetSession[_MemoryT]]):
    """See the module's docstring. `lane` names the sessions."""

    _has_signals = False
    """Whether sessions can use `transfer.transport.signals`."""

    def __init__(self, name: str, lane: str) -> None:
        super().__init__(name)
        self._lane = lane

    def offer(self) -> PipeOffer[WriterSession[_MemoryT]]:
        self._check_open()
        line, token = LivenessPipe(), secrets.token_bytes(TOKEN_BYTES)

        def open_writer(answer: bytes, line: LivenessPipe) -> WriterSession[_MemoryT]:
            self._check_open()
            self._let_go()
            session = self._open_writer(answer, token, line)
            self._sessions.add(session)
            return session

        offered = Offered(transport=self.name, line=line.address, token=token, has_signals=self._has_signals)
        return PipeOffer(line, offered.to_blob(), open_writer)

    def accept(self, blob: bytes, memory: LocalMemory) -> tuple[TargetSession[_MemoryT], bytes]:
        self._check_open()
        own = self.own(memory)
        offered = Offered.from_blob(blob, transport=self.name)
        self._let_go()
        with contextlib.ExitStack() as undo:
            peer = PeerPipe(offered.line)
            undo.callback(peer.close)
            line = LivenessPipe()
            undo.callback(line.end)
            signals = self._open_signals(own) if offered.has_signals else None
            answer = self._answer(own, line, offered.token, signals)
            undo.pop_all()
        session = TargetSession(self, self._lane, own, line, peer, signals)
        self._sessions.add(session)
        _targets[offered.token] = session
        return session, answer

    def close(self) -> None:
        """Close every session. Wait up to a second until all writers have let go. Memory that a writer still maps is kept."""
        super().close()
        ends_at = time.monotonic() + _CLOSE_WAIT_S
        while not all([session.has_ended for session in list(self._sessions)]) and time.monotonic() < ends_at:
            time.sleep(_CLOSE_STEP_S)
        for session in list(self._sessions):
            if isinstance(session, WriterSession):
                if not session.has_ended:
                    log.warning(
                        "%s: stores into memory of process %d have not ended; its mapping stays open until they have, or this "
                        "process has ended",
                        self._lane,
                        session.target_pid,
                    )
            else:
                log.warning(
                    "%s: writer process %d has not closed its mapping; %d bytes stay allocated until it has, or has ended",
                    self._lane,
                    session.writer_pid,
                    0 if session.memory is None else session.memory.num_bytes,
                )
                _left_behind.append(session)
        self._sessions.clear()

    def _open_signals(self, memory: _MemoryT) -> SignalReader | None:
        """Return the target's end of a new session's signals; None if there can be none."""
        return None

    @abstractmethod
    def _answer(self, memory: _MemoryT, line: LivenessPipe, token: bytes, signals: SignalReader | None) -> bytes:
        """Return the answer to an offer. It names this end's pipe.

        Raises:
            ConfigError: Other processes cannot map the memory.
        """

    @abstractmethod
    def _open_writer(self, answer: bytes, token: bytes, line: LivenessPipe) -> WriterSession[_MemoryT]:
        """Map the offered memory. `line` notifies the target when the mapping has ended.

        Raises:
            PeerUnreachable: The two processes have no way to each other.
            ConfigError: The answer does not fit the memory that it names.
        """

    def _let_go(self) -> None:
        """Drop closed sessions that are over, with the memory that they kept."""
        self._sessions = {session for session in list(self._sessions) if not session.has_ended}
        _left_behind[:] = [session for session in _left_behind if not session.is_over]
