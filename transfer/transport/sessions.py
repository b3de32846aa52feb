"""State that all transports share: registered memories, open sessions, and the operations that are pending in them.

A transport registers memories and opens sessions. A session starts operations under keys. Each operation settles or fails once.

    open ── _fail(reason) ──► failed          Pending operations fail with WriteFailed, and so do later ones.
    open, failed ── close() ──► closed        Pending operations fail with TransportClosed, and so do later ones.

A subclass moves the bytes. It decides when a memory is still in use (`uses`) and when nothing can land any more (`is_over`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from transfer.errors import LocalProtocolError, TransportClosed, TransportError, WriteFailed
from transfer.transport.base import ByteRange, DirectMemory, LocalMemory, Offer, check_key
from transfer.transport.registered_memory import Memory, wait_for_devices
from transfer.transport.signals import SignalReader, SignalWriter

_log = logging.getLogger(__name__)
_MemoryT = TypeVar("_MemoryT", bound=Memory)
_SessionT = TypeVar("_SessionT", bound="PeerSession[Any]")


class Operation:
    """A write, a decline or a receive. It keeps its memory alive until it settles or fails."""

    __slots__ = ("_failure", "_is_settled", "_num_bytes", "key", "memory")

    def __init__(self, key: int, memory: Memory | None = None) -> None:
        self.key = key
        self.memory = memory
        self._is_settled = False
        self._num_bytes = 0
        self._failure: TransportError | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that arrived or left; 0 for a decline, and until the operation settles."""
        return self._num_bytes

    def settle(self, num_bytes: int = 0) -> None:
        if self._failure is None and not self._is_settled:
            self._is_settled, self._num_bytes = True, num_bytes
            self.memory = None

    def fail(self, failure: TransportError) -> None:
        if self._failure is None and not self._is_settled:
            self._failure = failure
            self.memory = None

    def poll(self) -> bool:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return self._is_settled


class PeerSession(Generic[_MemoryT]):
    """The state of one session, and the checks of its operations.

    By default a session is one-sided, needs no `progress()` and has no descriptor.

    Args:
        transport: Has registered the memories of the session's operations.
        lane: What carries the bytes.
        offered: Memory into which the peer may write; only at the target's end.
        peer_num_bytes: Size of the memory that the peer offered; only at the writer's end.
        obstacle: As `Session.obstacle`.
    """

    def __init__(
        self,
        transport: PeerTransport[_MemoryT, Any],
        lane: str,
        *,
        offered: _MemoryT | None = None,
        peer_num_bytes: int | None = None,
        obstacle: str = "",
    ) -> None:
        self.lane = lane
        self.obstacle = obstacle
        self.signal_writer: SignalWriter | None = None
        self.signal_reader: SignalReader | None = None
        self._transport = transport
        self._offered = offered
        self._peer_num_bytes = peer_num_bytes
        self._failure: str | None = None
        self._is_closed = False

    @property
    def is_one_sided(self) -> bool:
        return self._transport.is_one_sided

    @property
    def user(self) -> str:
        """The part of the session that may still reach a memory for which `uses` is true; for an error message."""
        return "the session"

    @property
    def is_over(self) -> bool:
        return self._is_closed

    @property
    def has_ended(self) -> bool:
        """Whether, after `close()`, the session waits for nothing any more that this end began."""
        return self.is_over

    def decline(self, key: int) -> Operation:
        check_key(key)
        operation = Operation(key)
        if not self._refuses(operation):
            operation.settle()
        return operation

    def expect(self, target: LocalMemory, target_range: ByteRange, key: int) -> Operation:
        raise LocalProtocolError(f"expect of key {key}: transport {self._transport.name} is one-sided and expects nothing")

    def direct(self, target_range: ByteRange) -> DirectMemory | None:
        return None

    def fileno(self) -> int | None:
        return None

    def progress(self) -> bool:
        return False

    def arm(self) -> bool:
        return True

    @property
    def needs_polling(self) -> bool:
        return False

    def _checked_source(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> _MemoryT:
        """Return the source of a write.

        Raises:
            LocalProtocolError: As `Session.write`.
        """
        memory = self._transport.own(source)
        check_key(key)
        _check_range(memory.num_bytes, source_range, f"source range of key {key}")
        if source_range.num_bytes != target_range.num_bytes:
            raise LocalProtocolError(
                f"source range of key {key} has {source_range.num_bytes} bytes, target range {target_range.num_bytes}; "
                "both must be equally long"
            )
        if self._peer_num_bytes is not None or self._transport.is_one_sided:
            self._check_target_range(target_range, f"key {key}")
        return memory

    def _checked_target(self, target: LocalMemory, target_range: ByteRange, key: int) -> _MemoryT:
        """Return the memory of a receive.

        Raises:
            LocalProtocolError: As `Session.expect`.
        """
        memory = self._transport.own(target)
        check_key(key)
        _check_range(memory.num_bytes, target_range, f"target range of key {key}")
        return memory

    def _check_target_range(self, target_range: ByteRange, what: str) -> None:
        """Raise LocalProtocolError if a range leaves the memory that the peer offered, or if it offered none."""
        if self._peer_num_bytes is None:
            raise LocalProtocolError(f"write of {what}: the peer offered no memory; only the writer of a session can write")
        _check_range(self._peer_num_bytes, target_range, f"target range of {what}")

    def _refuses(self, operation: Operation) -> bool:
        """Fail an operation, and return True, if the session has failed or is closed."""
        if self._is_closed:
            operation.fail(TransportClosed(f"session {self.lane} is closed; key {operation.key} cannot be used"))
        elif self._failure is not None:
            operation.fail(WriteFailed(f"key {operation.key} on session {self.lane}: {self._failure}"))
        return self._is_closed or self._failure is not None

    def _fail_pending(self, pending: Iterable[Operation], reason: str) -> None:
        """Fail the session, with its pending operations."""
        self._failure = reason
        for operation in pending:
            operation.fail(WriteFailed(f"key {operation.key} on session {self.lane}: {reason}"))

    def _close_pending(self, pending: Iterable[Operation]) -> None:
        """Close the session, and fail its pending operations."""
        self._is_closed = True
        for operation in pending:
            operation.fail(TransportClosed(f"session {self.lane} was closed while key {operation.key} was pending"))

    def uses(self, memory: LocalMemory) -> bool:
        """Return whether `memory` must stay registered, because the peer, or an operation of this end, may still reach it."""
        return memory is self._offered

    def close(self) -> None:
        self._close_pending(())


class PeerTransport(ABC, Generic[_MemoryT, _SessionT]):
    """The registered memories and the open sessions of a transport.

    Args:
        name: As in settings and blobs.
    """

    def __init__(self, name: str, *, is_one_sided: bool = True) -> None:
        self.name = name
        self.is_one_sided = is_one_sided
        self.has_one_sided, self.has_two_sided = is_one_sided, not is_one_sided
        self._memories: dict[int, _MemoryT] = {}
        self._sessions: set[_SessionT] = set()
        self._is_closed = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @abstractmethod
    def offer(self) -> Offer: ...

    def offer_to(self, names: Sequence[str]) -> Offer:
        return self.offer()

    def distrust(self, session: object) -> None:
        """Do nothing: there is no other transport."""

    @abstractmethod
    def accept(self, blob: bytes, memory: LocalMemory) -> tuple[_SessionT, bytes]: ...

    @abstractmethod
    def register(self, buffer: Any) -> _MemoryT: ...

    def check_devices(self) -> None:
        """Raise ConfigError if memory of GPUs cannot be registered."""

    def share(self, memory: _MemoryT) -> _MemoryT:
        """Register a memory that another transport of this process has registered."""
        return self._add(memory)

    def own(self, memory: LocalMemory) -> _MemoryT:
        """Return the memory if it is registered here.

        Raises:
            LocalProtocolError: It is not.
        """
        found = self._memories.get(id(memory))
        if found is None:
            raise LocalProtocolError(f"memory of {memory.num_bytes} bytes is not registered with this {self.name} transport")
        return found

    def deregister(self, memory: LocalMemory) -> None:
        own = self.own(memory)
        self.check_unused(own)
        del self._memories[id(own)]

    def close(self) -> None:
        self._is_closed = True
        for session in list(self._sessions):
            session.close()
        self._memories.clear()

    def forget(self, session: _SessionT) -> None:
        """Drop a session that uses no memory any more."""
        self._sessions.discard(session)

    def _add(self, memory: _MemoryT) -> _MemoryT:
        self._memories[id(memory)] = memory
        return memory

    def check_unused(self, memory: _MemoryT) -> None:
        """Raise LocalProtocolError if a session or a peer may still reach the memory."""
        for session in list(self._sessions):
            if session.uses(memory):
                raise LocalProtocolError(
                    f"memory of {memory.num_bytes} bytes is in use by {session.lane}: {session.user} may still reach it; "
                    "close the session and wait until it is over"
                )

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportClosed(f"transport {self.name} is closed")


def _check_range(memory_num_bytes: int, byte_range: ByteRange, name: str) -> None:
    if byte_range.end > memory_num_bytes:
        raise LocalProtocolError(f"{name} [{byte_range.begin}, {byte_range.end}) leaves its memory of {memory_num_bytes} bytes")


def have_devices_ended(lane: str) -> bool:
    """Wait for the copies that this process queued on its devices. Return False, with a warning, if a device has failed.

    An error of a device is final. So such copies can never be ruled out, and their memory must not be used again.
    """
    try:
        wait_for_devices()
    except Exception as error:  # torch's and ours
        text = " ".join(f"{type(error).__name__}: {error}".split())
        _log.warning("%s: copies on a device of this process cannot be shown to have ended: %s", lane, text)
        return False
    return True
