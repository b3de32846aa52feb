"""The data plane's interface: bytes only, nothing of KV.

One `Session` joins a writer (a prefill rank) and a target (a decode rank). In a *one-sided* transport, a write lands without the
target's help. In a *two-sided* transport, a write lands only in a receive that the target has posted under the same key. So even
a wrong writer cannot land early. One owner thread drives a session, and nothing blocks. An operation returns a handle,
`Session.progress()` moves the session forward, and the handle's `poll()` returns the result.

Completion. A completed write means that the source may be reused. A completed receive means that it has settled. Neither proves
integrity or that the peer lives. A lane without peer-failure detection can settle a receive without an error although the sender
died in the middle. This was seen with UCX shared memory and a SIGKILLed sender. A write can complete before its bytes are
visible. So a receiver accepts bytes only with the writer's `ChunkReady` and an equal digest. A transport guarantees that a
receive touches no byte outside its range. It touches none before it is expected, after it was declined, or after `close()`. A
message of an unexpected length fails its receive; the bytes of that range are then undefined.

A lost peer. If the data plane detects it, every pending handle and every later one raise `WriteFailed`. If not, handles stay
pending until the owner closes the session. Deadlines and heartbeats belong to the owner.

Proof of death. When `Session.close()` has returned, no byte of that peer can land in any memory of this process any more. Every
unfinished handle of the session raises `TransportClosed`. The ring relies on exactly that to end a quarantine. If the target
cannot take the writer's access away, `Session.is_over` reports its end after `close()`. The proof covers bytes that land *here*.
The peer can still read a source range until its own side is closed. So a writer that closes and reuses its source can damage the
bytes of a transfer, which the digest detects, but never another transfer's memory.

On two-sided transports, bytes also travel from the target to the writer, which the link probe needs. Either end can `expect` in
its own memory and `write` to the other. The keys of the two directions are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transfer.errors import ConfigError, LocalProtocolError
from transfer.transport.signals import SignalReader, SignalWriter

MAX_KEY = 2**62 - 1
"""Largest key that every transport can carry. A UCX tag has 64 bits, and two of them are the kind of message."""

REGION_ALIGNMENT_BYTES = 4096
"""Alignment of registered memory and of staging slots: a page of host memory, the unit of registration and zero-copy sends."""

FIRST_PROBE_KEY = 2**61
"""First key of the link probe, which uses keys up to `MAX_KEY`. Grants use the keys below."""


def check_key(key: int) -> None:
    """Raise LocalProtocolError if `key` is not in [0, 2**62)."""
    if not 0 <= key <= MAX_KEY:
        raise LocalProtocolError(f"key {key} is out of range; keys are in [0, 2**62)")


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


class DirectMemory(Protocol):
    """A peer's memory that this process may store into: a uint8 tensor in host memory, or an address for a device's kernels.

    Memory with an address only has a `device_index`, the device whose kernels may use it. The memory may lie on another one.
    """

    def data_ptr(self) -> int: ...

    def numel(self) -> int:
        """Return the number of bytes."""
        ...


class Handle(Protocol):
    """A write, a decline, or a posted receive of a two-sided transport."""

    def poll(self) -> bool:
        """Return whether the source bytes may be reused, or the receive is settled: filled or declined.

        Raises:
            WriteFailed: The transport reported an error.
            TransportClosed: The session was closed first.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that arrived in a receive; 0 if the writer declined. Valid once `poll()` returned True."""
        ...


class Session(Protocol):
    """One attached peer. Owned by one thread."""

    @property
    def lane(self) -> str:
        """Name of the path that carries the bytes, for people (for example ``ucx/shm`` or ``ucx/net``)."""
        ...

    @property
    def is_one_sided(self) -> bool:
        """Whether writes need no receive posted by the target."""
        ...

    obstacle: str
    """Reason, at the target's end, why the session is slower than others could be: two processes of one machine use the network,
    or two GPUs use TCP. Empty without such a reason, or if the settings ask for it."""

    signal_writer: SignalWriter | None
    signal_reader: SignalReader | None
    """Ends of the session's signals; None at the other end, and without signals."""

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> Handle:
        """Start one bulk write into the memory that the target offered.

        Args:
            source_range: As long as `target_range`.
            key: Unique in the session, in [0, 2**62). A two-sided target expects the same key.

        Raises:
            LocalProtocolError: A range leaves its memory, the two differ in length, the key is out of range or pending already,
                or the source is not registered. A closed or failed session does not raise here: its handle does, when polled.
        """
        ...

    def decline(self, key: int) -> Handle:
        """Notify a two-sided target that no write follows for `key`. Its receive settles with 0 bytes and does not touch memory.

        On a one-sided transport the handle is settled at once.
        """
        ...

    def expect(self, target: LocalMemory, target_range: ByteRange, key: int) -> Handle:
        """Post the receive for `key`, before or after the peer's write.

        Raises:
            LocalProtocolError: The transport is one-sided, the range leaves its memory, the key is out of range or expected
                already, or the memory is not registered.
        """
        ...

    def direct(self, target_range: ByteRange) -> DirectMemory | None:
        """Return the place where this process may store into the target's memory; None if it cannot.

        Such bytes need no `write()`. They are there when the kernel, or the copy in host memory, has ended. Begin none after
        `close()`. An address is valid until then; a tensor keeps its mapping.

        Raises:
            LocalProtocolError: The range leaves the memory that the target offered.
        """
        ...

    def fileno(self) -> int | None:
        """Return a descriptor that becomes readable when there is something to progress, if `arm()` returned True.

        None means that the session has no descriptor, or is closed: call `progress()` while something is pending.
        """
        ...

    def progress(self) -> bool:
        """Move everything forward without blocking. Return whether something moved: call again. False on a closed session."""
        ...

    def arm(self) -> bool:
        """Ask `fileno()` to wake up; False when `progress()` must be called first."""
        ...

    @property
    def needs_polling(self) -> bool:
        """Whether `progress()` must be called from time to time although there is a descriptor, because `arm()` would delay what
        is under way."""
        ...

    def close(self) -> None:
        """End the session; see "Proof of death" above. May be called twice. May take tens of milliseconds."""
        ...

    @property
    def is_over(self) -> bool:
        """Return, after `close()`, whether it is proven that nothing of the peer can land here any more.

        It is True as soon as `close()` has returned, with one exception. If another process maps this device's memory, only the
        writer can end its access. Then it is True once the writer has reported the end, or its process is gone. Cheap to call
        often.
        """
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
            TransportClosed: The offer was completed or closed before.
        """
        ...

    def close(self) -> None:
        """Drop a session that was not completed; nothing after `complete()`. May be called twice."""
        ...


class Transport(Protocol):
    """One way to move bytes between processes."""

    @property
    def name(self) -> str: ...

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the transports that a session can use, preferred first."""
        ...

    @property
    def has_one_sided(self) -> bool:
        """Whether sessions can be one-sided."""
        ...

    @property
    def has_two_sided(self) -> bool:
        """Whether sessions can be two-sided."""
        ...

    def register(self, buffer: Any) -> LocalMemory:
        """Register a contiguous writable buffer (buffer protocol, or `__cuda_array_interface__`)."""
        ...

    def deregister(self, memory: LocalMemory) -> None:
        """Forget a memory.

        Raises:
            LocalProtocolError: It is not registered here, or a session offers or still uses it.
        """
        ...

    def offer(self) -> Offer:
        """Begin a session as the writer."""
        ...

    def offer_to(self, names: Sequence[str]) -> Offer:
        """Begin a session with a target that supports `names`, of which at least one is in `self.names`."""
        ...

    def distrust(self, session: Session) -> None:
        """Prefer another transport for the next session with this target, because the probe of this one failed."""
        ...

    def accept(self, blob: bytes, memory: LocalMemory) -> tuple[Session, bytes]:
        """Open a session as the target, offering `memory`. Return the session and the answer for the writer.

        Raises:
            PeerUnreachable: The writer cannot be reached over this transport.
            ConfigError: The blob is of another transport or version, both named.
        """
        ...

    def close(self) -> None:
        """Close every session and deregister everything."""
        ...
