"""Transport within one process: for tests of what stands above, and for embedding both tiers in one process.

It keeps the habits of real transports on purpose: nothing moves before `progress()`, handles are pending until then, and in
its two-sided mode the *target's* progress copies, once write and receive are both there, while early writes wait.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass
from typing import Any

from transfer.errors import (
    ConfigError,
    LocalProtocolError,
    PeerUnreachable,
    TransportClosed,
    TransportError,
    WriteFailed,
)
from transfer.transport.base import ByteRange, LocalMemory, check_key
from transfer.transport.peer import ProcessIdentity, field_of, pack_blob, unpack_blob
from transfer.transport.registered_memory import HostMemory, check_range, check_write, memory_of

_VERSION = 1


class InprocHub:
    """Joins the in-process transports that were made with it; transports of different hubs do not see each other."""

    def __init__(self) -> None:
        self._token = secrets.token_bytes(8)
        self._numbers = itertools.count()
        self._offers: dict[int, InprocOffer] = {}

    @property
    def token(self) -> bytes:
        """Tells this hub from every other one."""
        return self._token

    def add(self, offer: InprocOffer) -> int:
        number = next(self._numbers)
        self._offers[number] = offer
        return number

    def find(self, number: int) -> InprocOffer | None:
        return self._offers.get(number)

    def remove(self, number: int) -> None:
        self._offers.pop(number, None)


class _Handle:
    """A write, a decline or a receive; settled exactly once."""

    __slots__ = ("_failure", "_num_bytes", "_settled", "key", "memory", "target_range", "view")

    def __init__(self, key: int, *, memory: HostMemory | None, view: Any, target_range: ByteRange | None) -> None:
        self.key = key
        self.memory = memory
        self.view = view  # None: a decline
        self.target_range = target_range
        self._settled = False
        self._num_bytes = 0
        self._failure: TransportError | None = None

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def settle(self, num_bytes: int) -> None:
        if not self._settled:
            self._settled, self._num_bytes = True, num_bytes
            self.memory = self.view = None

    def fail(self, failure: TransportError) -> None:
        if not self._settled:
            self._settled, self._failure = True, failure
            self.memory = self.view = None

    def poll(self) -> bool:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return self._settled


@dataclass(slots=True, kw_only=True)
class _Link:
    """The two sessions of one pair; both ends live in this process, so either may look at the other."""

    writer: InprocSession | None = None
    target: InprocSession | None = None

    def peer_of(self, session: InprocSession) -> InprocSession | None:
        return self.target if session is self.writer else self.writer


class InprocSession:
    """One end of an in-process pair."""

    def __init__(
        self, transport: InprocTransport, link: _Link, *, offered: HostMemory | None, peer_num_bytes: int | None
    ) -> None:
        self._transport = transport
        self._link = link
        self._offered = offered
        self._peer_num_bytes = peer_num_bytes
        self._sends: dict[int, _Handle] = {}
        self._receives: dict[int, _Handle] = {}
        self._closed = False

    @property
    def lane(self) -> str:
        return self._transport.name

    @property
    def obstacle(self) -> str:
        return ""

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> _Handle:
        memory = self._transport.own(source)
        check_write(memory.num_bytes, source_range, target_range, key)
        if self._peer_num_bytes is not None:
            check_range(self._peer_num_bytes, target_range, f"target range of key {key}")
        elif self._transport.is_one_sided:
            raise LocalProtocolError(f"write of key {key}: the peer offered no memory; only the writer of a session can write")
        return self._start(_Handle(key, memory=memory, view=memory.part(source_range), target_range=target_range))

    def decline(self, key: int) -> _Handle:
        check_key(key)
        handle = _Handle(key, memory=None, view=None, target_range=None)
        if self._transport.is_one_sided and not self._closed:
            handle.settle(0)
            return handle
        return self._start(handle)

    def expect(self, target: LocalMemory, target_range: ByteRange, key: int) -> _Handle:
        if self._transport.is_one_sided:
            raise LocalProtocolError(f"expect of key {key}: transport {self._transport.name} is one-sided and expects nothing")
        memory = self._transport.own(target)
        check_key(key)
        check_range(memory.num_bytes, target_range, f"target range of key {key}")
        handle = _Handle(key, memory=memory, view=memory.part(target_range), target_range=target_range)
        if self._closed:
            handle.fail(TransportClosed(f"session {self.lane} is closed; key {key} cannot be expected"))
            return handle
        if key in self._receives:
            raise LocalProtocolError(f"key {key} is expected already; keys are unique in a session")
        self._receives[key] = handle
        return handle

    def direct(self, target_range: ByteRange) -> None:
        return None

    def fileno(self) -> int | None:
        return None

    def progress(self) -> bool:
        if self._closed:
            return False
        peer = self._link.peer_of(self)
        if peer is None or peer._closed:
            return self._fail_all("the peer closed the session")
        return self._land(peer) if self._transport.is_one_sided else self._take(peer)

    def arm(self) -> bool:
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for handle in (*self._sends.values(), *self._receives.values()):
            handle.fail(TransportClosed(f"session {self.lane} was closed while key {handle.key} was pending"))
        self._sends.clear()
        self._receives.clear()
        self._offered = None
        self._transport.forget(self)

    @property
    def is_over(self) -> bool:
        return self._closed

    def uses(self, memory: LocalMemory) -> bool:
        """Whether an unfinished operation, or the offer of this session, needs `memory`."""
        pending = (*self._sends.values(), *self._receives.values())
        return memory is self._offered or any(handle.memory is memory for handle in pending)

    def _start(self, handle: _Handle) -> _Handle:
        if self._closed:
            handle.fail(TransportClosed(f"session {self.lane} is closed; key {handle.key} cannot be sent"))
            return handle
        if handle.key in self._sends:
            raise LocalProtocolError(f"key {handle.key} is on its way already; keys are unique in a session")
        self._sends[handle.key] = handle
        return handle

    def _land(self, peer: InprocSession) -> bool:
        """One-sided: the writer's progress copies, without the target."""
        landed = list(self._sends.values())
        for handle in landed:
            if peer._offered is not None and handle.target_range is not None:
                peer._offered.part(handle.target_range)[:] = handle.view
                handle.settle(handle.target_range.num_bytes)
        self._sends.clear()
        return bool(landed)

    def _take(self, peer: InprocSession) -> bool:
        """Two-sided: the receiver's progress copies what is both sent and expected."""
        ready = [key for key in peer._sends if key in self._receives]
        for key in ready:
            sent, receive = peer._sends.pop(key), self._receives.pop(key)
            if sent.view is None:
                receive.settle(0)
            elif sent.view.nbytes != receive.view.nbytes:
                receive.fail(WriteFailed(f"peer sent {sent.view.nbytes} bytes for key {key}; {receive.view.nbytes} expected"))
            else:
                receive.view[:] = sent.view
                receive.settle(receive.view.nbytes)
            sent.settle(0)
        return bool(ready)

    def _fail_all(self, reason: str) -> bool:
        pending = (*self._sends.values(), *self._receives.values())
        for handle in pending:
            handle.fail(WriteFailed(f"key {handle.key} on session {self.lane}: {reason}"))
        self._sends.clear()
        self._receives.clear()
        return bool(pending)


class InprocOffer:
    """The writer's half-open in-process session."""

    def __init__(self, transport: InprocTransport, hub: InprocHub) -> None:
        self._transport = transport
        self._hub = hub
        self._link = _Link()
        self._number = hub.add(self)
        fields = {"identity": ProcessIdentity.own().to_wire(), "hub": hub.token, "offer": self._number}
        self._blob = pack_blob(transport.name, _VERSION, "offer", fields)

    @property
    def transport(self) -> InprocTransport:
        return self._transport

    @property
    def blob(self) -> bytes:
        return self._blob

    def join(self, target: InprocTransport, memory: HostMemory) -> InprocSession:
        """Give the target its end; it exists before the writer's."""
        self._link.target = InprocSession(target, self._link, offered=memory, peer_num_bytes=None)
        self._link.writer = InprocSession(self._transport, self._link, offered=None, peer_num_bytes=memory.num_bytes)
        return self._link.target

    def complete(self, answer: bytes) -> InprocSession:
        fields = unpack_blob(answer, transport=self._transport.name, version=_VERSION, role="answer")
        if (fields.get("hub"), fields.get("offer")) != (self._hub.token, self._number) or self._link.writer is None:
            raise ConfigError(f"answer names offer {fields.get('offer')!r}; this is offer {self._number} of another hub or time")
        self._hub.remove(self._number)
        self._transport.remember(self._link.writer)
        return self._link.writer

    def close(self) -> None:
        self._hub.remove(self._number)
        writer = self._link.writer
        if writer is not None and not self._transport.knows(writer):
            writer.close()


class InprocTransport:
    """Moves bytes between two ends of one process.

    Args:
        hub: Connects the transports that can reach each other.
        one_sided: True behaves like RDMA writes (the writer's progress lands them); False like tag matching, where the target
            must expect each key. Both ends of a session must agree.
    """

    def __init__(self, hub: InprocHub, *, one_sided: bool = False) -> None:
        self._hub = hub
        self._one_sided = one_sided
        self._memories: dict[int, HostMemory] = {}
        self._sessions: set[InprocSession] = set()
        self._closed = False

    @property
    def name(self) -> str:
        return "inproc"

    @property
    def is_one_sided(self) -> bool:
        return self._one_sided

    def register(self, buffer: Any) -> HostMemory:
        memory = memory_of(buffer)
        if not isinstance(memory, HostMemory):
            raise ConfigError("transport inproc moves host memory only; choose transport: ucx for device memory")
        self._memories[id(memory)] = memory
        return memory

    def deregister(self, memory: LocalMemory) -> None:
        own = self.own(memory)
        if any(session.uses(own) for session in self._sessions):
            raise LocalProtocolError(f"memory of {own.num_bytes} bytes is in use by an open session; close the session first")
        del self._memories[id(own)]

    def offer(self) -> InprocOffer:
        self._check_open()
        return InprocOffer(self, self._hub)

    def accept(self, blob: bytes, memory: LocalMemory) -> tuple[InprocSession, bytes]:
        self._check_open()
        own = self.own(memory)
        fields = unpack_blob(blob, transport=self.name, version=_VERSION, role="offer")
        writer, here = ProcessIdentity.from_wire(fields.get("identity")), ProcessIdentity.own()
        if writer != here:
            raise ConfigError(
                f"transport inproc joins two ends of one process; writer runs in pid {writer.pid} on host {writer.host}, "
                f"target in pid {here.pid}: choose transport: ucx"
            )
        if field_of(fields, "hub", bytes) != self._hub.token:
            raise ConfigError("transport inproc joins two ends of one hub; the writer's transport was made with another hub")
        offer = self._hub.find(field_of(fields, "offer", int))
        if offer is None:
            raise PeerUnreachable("the writer closed its offer before the target accepted it")
        if offer.transport.is_one_sided != self._one_sided:
            raise ConfigError(
                f"writer's inproc transport has one_sided={offer.transport.is_one_sided}, target's has {self._one_sided}: "
                "both ends must agree"
            )
        session = offer.join(self, own)
        self._sessions.add(session)
        fields = {"hub": self._hub.token, "offer": fields["offer"]}
        return session, pack_blob(self.name, _VERSION, "answer", fields)

    def close(self) -> None:
        self._closed = True
        for session in list(self._sessions):
            session.close()
        self._memories.clear()

    def own(self, memory: LocalMemory) -> HostMemory:
        """The memory, if this transport registered it and has not deregistered it since.

        Raises:
            LocalProtocolError: It did not.
        """
        found = self._memories.get(id(memory))
        if found is None:
            raise LocalProtocolError(f"memory of {memory.num_bytes} bytes is not registered with this inproc transport")
        return found

    def remember(self, session: InprocSession) -> None:
        self._sessions.add(session)

    def knows(self, session: InprocSession) -> bool:
        return session in self._sessions

    def forget(self, session: InprocSession) -> None:
        self._sessions.discard(session)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosed("transport inproc is closed")
