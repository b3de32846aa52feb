"""The data plane's interface: bytes only, nothing of KV.

One `Session` joins one writer (a prefill rank) to one target (a decode rank). A transport is either *one-sided* (a write
lands without the target's help) or *two-sided* (a write lands only in a receive that the target has posted with the same
key, so even a wrong writer cannot land early). Everything here is driven by one owner thread and never blocks: an
operation returns a handle, `Session.progress()` moves the session forward, `poll()` of a handle says what came of it.

Proof of death: when `Session.close()` has returned, no byte of that peer can land in any memory of this process any more,
and every unfinished handle of the session raises `TransportClosed`. The ring relies on exactly that to end a quarantine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from transfer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Half-open range of bytes, relative to the start of a registered memory."""

    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end:
            raise ConfigError(f"byte range [{self.begin}, {self.end}) is empty or negative")

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


class LocalMemory(Protocol):
    """Memory of this process, registered with a transport."""

    @property
    def num_bytes(self) -> int: ...


class WriteHandle(Protocol):
    """A write, or a decline, on its way."""

    def poll(self) -> bool:
        """True when the source bytes may be reused, False while pending.

        Raises:
            WriteFailed: The transport reported an error.
            TransportClosed: The session was closed first.
        """
        ...


class ReceiveHandle(Protocol):
    """A posted receive of a two-sided transport."""

    def poll(self) -> bool:
        """True when it is settled (filled or declined), False while pending.

        Raises:
            WriteFailed: The transport reported an error.
            TransportClosed: The session was closed first.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that arrived; 0 when the writer declined. Meaningful once `poll()` returned True."""
        ...


class Session(Protocol):
    """One attached peer. Owned by one thread."""

    @property
    def lane(self) -> str:
        """What carries the bytes, for people (for example ``ucx/shm`` or ``ucx/net``)."""
        ...

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> WriteHandle:
        """Start one bulk write into the memory that the target offered.

        Args:
            source: Registered memory of this process.
            source_range: What to send; as long as `target_range`.
            target_range: Where it goes in the target's memory.
            key: Names the write; a two-sided target expects the same key. Unique in the session, in [0, 2**62).
        """
        ...

    def decline(self, key: int) -> WriteHandle:
        """Tell a two-sided target that nothing will come for `key`; its receive settles with 0 bytes."""
        ...

    def expect(self, target: LocalMemory, target_range: ByteRange, key: int) -> ReceiveHandle:
        """Post the receive for `key` (two-sided transports only; a one-sided one raises `LocalProtocolError`)."""
        ...

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when there is something to progress, if `arm()` returned True."""
        ...

    def progress(self) -> bool:
        """Move everything forward without blocking; True when something moved."""
        ...

    def arm(self) -> bool:
        """Ask `fileno()` to wake up; False when `progress()` must be called first."""
        ...

    def close(self) -> None:
        """End the session; see "proof of death" above. May be called twice."""
        ...


class Offer(Protocol):
    """The writer's half-open session."""

    @property
    def blob(self) -> bytes:
        """Goes to the target inside Attach."""
        ...

    def complete(self, answer: bytes) -> Session:
        """Open the session with the target's answer.

        Raises:
            PeerUnreachable: The target cannot be reached over this transport.
            ConfigError: The answer is of another transport or version.
        """
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """One way to move bytes between processes."""

    @property
    def name(self) -> str: ...

    @property
    def is_one_sided(self) -> bool: ...

    def register(self, buffer: Any) -> LocalMemory:
        """Register a contiguous writable buffer (buffer protocol, or `__cuda_array_interface__`)."""
        ...

    def deregister(self, memory: LocalMemory) -> None: ...

    def offer(self) -> Offer:
        """Begin a session as the writer."""
        ...

    def accept(self, blob: bytes, memory: LocalMemory) -> tuple[Session, bytes]:
        """Open a session as the target, offering `memory`; returns the session and the answer for the writer.

        Raises:
            PeerUnreachable: The writer cannot be reached over this transport.
            ConfigError: The blob is of another transport or version, both named.
        """
        ...

    def close(self) -> None:
        """Close every session and deregister everything."""
        ...
