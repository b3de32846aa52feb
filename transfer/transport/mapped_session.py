"""The two ends of a session whose writer maps the target's memory: the target waits for the end of the mapping.

No target can take a mapping back. So the writer reports when it has closed it, or its process is gone (`liveness`). A subclass
of `WriterSession` copies the bytes and ends the mapping.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from transfer.errors import LocalProtocolError, TransportError
from transfer.transport.base import ByteRange, LocalMemory
from transfer.transport.liveness import LivenessPipe, PeerPipe
from transfer.transport.registered_memory import Memory
from transfer.transport.sessions import Operation, PeerSession, PeerTransport
from transfer.transport.signals import SignalReader

_MemoryT = TypeVar("_MemoryT", bound=Memory)


class CopyError(TransportError):
    """A copy, or the end of a mapping, failed. The message names the failed call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedCopy(Generic[_MemoryT]):
    """A write under way. `memory` must live until the copy has ended, also if the operation has failed by then."""

    operation: Operation
    memory: _MemoryT
    mark: Any


class WriterSession(PeerSession[_MemoryT]):
    """The writer's end: its own copies, and stores of the owner, into the target's memory.

    `close()` returns at once. After it, the mapping ends as soon as all stores have ended, and the target is notified
    (`has_ended`).
    """

    def __init__(self, transport: PeerTransport[_MemoryT, Any], lane: str, *, num_bytes: int, peer: PeerPipe) -> None:
        super().__init__(transport, lane, peer_num_bytes=num_bytes)
        self._peer = peer
        self._copies: deque[MappedCopy[_MemoryT]] = deque()
        self._pending: dict[int, Operation] = {}

    @property
    def target_pid(self) -> int:
        return self._peer.pid

    @property
    def user(self) -> str:
        return "a copy"

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> Operation:
        """Write as `Session.write` does. The source's bytes must be there already: the copy waits for no other work."""
        memory = self._checked_source(source, source_range, target_range, key)
        if key in self._pending:
            raise LocalProtocolError(f"key {key} is on its way already; keys are unique in a session")
        write = Operation(key, memory)
        self._listen()
        if self._refuses(write):
            return write
        try:
            mark = self._begin_copy(memory, source_range, target_range)
        except CopyError as error:
            self._fail(str(error))
            self._refuses(write)
            return write
        self._pending[key] = write
        self._copies.append(MappedCopy(operation=write, memory=memory, mark=mark))
        return write

    def progress(self) -> bool:
        if self._is_closed:
            return False
        moved = False
        try:
            while self._copies and self._is_done(self._copies[0].mark):
                done = self._copies.popleft().operation
                self._pending.pop(done.key, None)
                done.settle()
                moved = True
        except CopyError as error:
            moved |= self._fail(str(error))
        return self._listen() or moved

    def close(self) -> None:
        if self._is_closed:
            return
        self._close_pending(self._pending.values())
        self._pending.clear()
        self._peer.close()
        self._end_mapping()

    @property
    @abstractmethod
    def has_ended(self) -> bool: ...

    def uses(self, memory: LocalMemory) -> bool:
        return any(copy.memory is memory for copy in self._copies)

    @abstractmethod
    def _begin_copy(self, memory: _MemoryT, source_range: ByteRange, target_range: ByteRange) -> Any:
        """Begin to copy checked ranges. Return the argument of `_is_done`. Raise CopyError if it cannot begin."""

    @abstractmethod
    def _is_done(self, mark: Any) -> bool:
        """Move the oldest copy forward. Return whether it has ended. Raise CopyError if it failed."""

    @abstractmethod
    def _end_mapping(self) -> None:
        """After `close()`: end the mapping when all copies and stores have ended, and end this end's liveness pipe then."""

    def _may_store(self, target_range: ByteRange) -> bool:
        """Return whether `direct` may return memory. Raise LocalProtocolError if the range leaves the target's memory."""
        self._check_target_range(target_range, "direct memory")
        self._listen()
        return not self._is_closed and self._failure is None

    def _listen(self) -> bool:
        """Fail if the target has left. Return whether a pending write failed."""
        if self._is_closed or self._failure is not None or not self._peer.has_left:
            return False
        return self._fail(f"peer process {self._peer.pid} closed the session, or is gone")

    def _fail(self, reason: str) -> bool:
        """Fail the session. Copies under way continue until `close()`. Return whether a pending write failed."""
        had_pending = bool(self._pending)
        self._fail_pending(self._pending.values(), reason)
        self._pending.clear()
        return had_pending


class TargetSession(PeerSession[_MemoryT]):
    """The target's end: it offers memory, and after `close()` keeps the memory alive until the writer has let go of it."""

    def __init__(
        self,
        transport: PeerTransport[_MemoryT, Any],
        lane: str,
        memory: _MemoryT,
        line: LivenessPipe,
        peer: PeerPipe,
        signals: SignalReader | None,
    ) -> None:
        super().__init__(transport, lane, offered=memory)
        self.signal_reader = signals
        self._line = line
        self._peer = peer

    @property
    def memory(self) -> _MemoryT | None:
        """The offered memory; None when the session is over."""
        return self._offered

    @property
    def writer_pid(self) -> int:
        return self._peer.pid

    @property
    def user(self) -> str:
        return f"its writer, process {self.writer_pid},"

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> NoReturn:
        raise LocalProtocolError(f"write of key {key}: the peer offered no memory; only the writer of a session can write")

    def close(self) -> None:
        """Notify the writer. `is_over` shows whether it has closed its mapping."""
        if not self._is_closed:
            self._is_closed = True
            self._line.end()
            _ = self.is_over  # drops everything at once if the writer was first

    @property
    def is_over(self) -> bool:
        if not self._is_closed:
            return False
        if self._offered is not None and self._peer.is_over:
            self._offered = None
            self.signal_reader = None
            self._peer.close()
            self._transport.forget(self)
        return self._offered is None

    def uses(self, memory: LocalMemory) -> bool:
        return not self.is_over and memory is self._offered
