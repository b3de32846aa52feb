"""The data plane's interface: bytes only, nothing of KV.

One `Session` joins one writer (a prefill rank) to one target (a decode rank). A transport is either *one-sided* (a write
lands without the target's help) or *two-sided* (a write lands only in a receive that the target has posted with the same
key, so even a wrong writer cannot land early). Everything here is driven by one owner thread and never blocks: an
operation returns a handle, `Session.progress()` moves the session forward, `poll()` of a handle says what came of it.

What completion means: the source may be reused, or the receive is settled. It is **not** proof of integrity and says nothing
of the peer process: a lane without peer-failure detection can settle a receive without an error although the sender died
in the middle (seen with UCX shared memory and a SIGKILLed sender), and a write may be done before its bytes are visible. So
a receiver believes bytes only with the writer's `ChunkReady` and a digest that agrees. What a transport does promise: a receive
touches no byte outside its range, none before it is expected, none after it was declined, and none after `close()`; a message
of another length than expected fails its receive (the range's bytes are then undefined, the others untouched).

A peer that is gone may or may not be noticed by the data plane. Where it is noticed, every pending handle raises `WriteFailed`
and so does every later one; where it is not, handles stay pending until the owner closes the session: deadlines and heartbeats
are the owner's.

Proof of death: when `Session.close()` has returned, no byte of that peer can land in any memory of this process any more,
and every unfinished handle of the session raises `TransportClosed`. The ring relies on exactly that to end a quarantine. Where
the target cannot take the writer's access away, `Session.is_over` says later than `close()` that it has ended.
It holds for what lands *here*: the peer may still read a source range until its own side is closed, so a writer that closes and
reuses its source can spoil a transfer's bytes (the digest notices), never another transfer's memory.

Bytes also travel from the target to the writer on two-sided transports (the link probe's ping-pong needs it): either end may
`expect` in its own memory and `write` to the other; keys of the two directions are independent of each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from transfer.errors import ConfigError, LocalProtocolError

MAX_KEY = 2**62 - 1
"""The largest key that every transport can carry (UCX tags have 64 bits, two of them say what the message is)."""

REGION_ALIGNMENT_BYTES = 4096
"""Of registered memory and of each staging slot: a page of host memory, what registration and zero-copy sends work in."""

FIRST_PROBE_KEY = 2**61
"""Keys from here to `MAX_KEY` belong to the link probe; grants use keys below."""


def check_key(key: int) -> None:
    """Refuse a key that no transport can carry.

    Raises:
        LocalProtocolError: `key` is not in [0, 2**62).
    """
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
    """A peer's memory that kernels of one device of this process may store into; known by address only."""

    @property
    def device_index(self) -> int:
        """The device whose kernels may use the address; not the one that the memory lies on."""
        ...

    def data_ptr(self) -> int: ...

    def numel(self) -> int:
        """Bytes."""
        ...


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

    @property
    def obstacle(self) -> str:
        """Why two processes of one machine go over the network, at the target's end. Empty: they do not, or are told to."""
        ...

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> WriteHandle:
        """Start one bulk write into the memory that the target offered.

        Args:
            source: Registered memory of this process.
            source_range: What to send; as long as `target_range`.
            target_range: Where it goes in the target's memory.
            key: Names the write; a two-sided target expects the same key. Unique in the session, in [0, 2**62).

        Raises:
            LocalProtocolError: A range leaves its memory, the two differ in length, the key is out of range or pending already,
                or the source is not registered. A closed or failed session does not raise here: its handle does, when polled.
        """
        ...

    def decline(self, key: int) -> WriteHandle:
        """Tell a two-sided target that nothing will come for `key`; its receive settles with 0 bytes, its memory untouched.

        On a one-sided transport there is nobody to tell: the handle is done at once.
        """
        ...

    def expect(self, target: LocalMemory, target_range: ByteRange, key: int) -> ReceiveHandle:
        """Post the receive for `key`, before or after the peer's write.

        Raises:
            LocalProtocolError: The transport is one-sided, the range leaves its memory, the key is out of range or expected
                already, or the memory is not registered.
        """
        ...

    def direct(self, target_range: ByteRange) -> DirectMemory | None:
        """Where kernels of this process may store so that the bytes lie in the target's memory at once; None: not possible here.

        Such bytes need no `write()`. They are there once the kernel is done; the mapping is valid until `close()`.

        Raises:
            LocalProtocolError: The range leaves the memory that the target offered.
        """
        ...

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when there is something to progress, if `arm()` returned True.

        None: the session has no descriptor (or is closed), call `progress()` while something is pending.
        """
        ...

    def progress(self) -> bool:
        """Move everything forward without blocking; True when something moved (call again). False on a closed session."""
        ...

    def arm(self) -> bool:
        """Ask `fileno()` to wake up; False when `progress()` must be called first."""
        ...

    def close(self) -> None:
        """End the session; see "proof of death" above. May be called twice. May take tens of milliseconds."""
        ...

    @property
    def is_over(self) -> bool:
        """After `close()`: whether it is proven that nothing of the peer can land here any more.

        True as soon as `close()` has returned, except where only the writer can end its own access (a mapping of this device's
        memory in another process): then True once it has said so, or its process is gone. Cheap, to be asked now and then.
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
        """
        ...

    def close(self) -> None:
        """Give up a session that was not completed; nothing after `complete()`. May be called twice."""
        ...


class Transport(Protocol):
    """One way to move bytes between processes."""

    @property
    def name(self) -> str: ...

    @property
    def is_one_sided(self) -> bool: ...

    def register(self, buffer: Any) -> LocalMemory:
        """Register a contiguous writable buffer (buffer protocol, or `__cuda_array_interface__`)."""
        ...

    def deregister(self, memory: LocalMemory) -> None:
        """Forget a memory.

        Raises:
            LocalProtocolError: It is not registered here, or an open session offers or still uses it.
        """
        ...

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
