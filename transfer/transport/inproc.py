"""Transport within one process: for tests of the layers above, and for both tiers in one process.

It behaves like real transports: nothing moves before `progress()`, and handles are pending until then. In its two-sided mode the
*target's* progress copies when both write and receive have been started; early writes wait.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from transfer.errors import ConfigError, LocalProtocolError, PeerUnreachable, TransportClosed, WriteFailed
from transfer.transport.base import ByteRange, LocalMemory, check_key
from transfer.transport.peer import ProcessIdentity, field_of, pack_blob, unpack_blob
from transfer.transport.registered_memory import HostMemory, memory_of
from transfer.transport.sessions import Operation, PeerSession, PeerTransport

_VERSION = 1


class InprocHub:
    """Joins the in-process transports that were made with it; transports of different hubs do not see each other."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(8)
        """Distinguishes this hub from every other one."""
        self.offers: dict[int, InprocOffer] = {}
        self.numbers = itertools.count()


class _InprocOperation(Operation):
    """An operation, with the place of its bytes in this end's memory and in the peer's. A decline has neither."""

    __slots__ = ("own_range", "target_range")

    def __init__(
        self,
        key: int,
        memory: HostMemory | None = None,
        own_range: ByteRange | None = None,
        target_range: ByteRange | None = None,
    ) -> None:
        super().__init__(key, memory)
        self.own_range = own_range
        self.target_range = target_range

    @property
    def view(self) -> npt.NDArray[np.uint8] | None:
        """The bytes in this end's memory."""
        memory = self.memory
        return memory.part(self.own_range) if isinstance(memory, HostMemory) and self.own_range is not None else None


@dataclass(slots=True, kw_only=True)
class _Link:
    """The two sessions of one pair; both ends live in this process, so either may look at the other."""

    writer: InprocSession | None = None
    target: InprocSession | None = None

    def peer_of(self, session: InprocSession) -> InprocSession | None:
        return self.target if session is self.writer else self.writer


class InprocSession(PeerSession[HostMemory]):
    """One end of an in-process pair."""

    def __init__(
        self, transport: InprocTransport, link: _Link, *, offered: HostMemory | None = None, peer_num_bytes: int | None = None
    ) -> None:
        super().__init__(transport, transport.name, offered=offered, peer_num_bytes=peer_num_bytes)
        self._link = link
        self._sends: dict[int, _InprocOperation] = {}
        self._receives: dict[int, _InprocOperation] = {}

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> Operation:
        memory = self._checked_source(source, source_range, target_range, key)
        return self._start(_InprocOperation(key, memory, source_range, target_range))

    def decline(self, key: int) -> Operation:
        if self._transport.is_one_sided:
            return super().decline(key)
        check_key(key)
        return self._start(_InprocOperation(key))

    def expect(self, target: LocalMemory, target_range: ByteRange, key: int) -> Operation:
        if self._transport.is_one_sided:
            return super().expect(target, target_range, key)
        memory = self._checked_target(target, target_range, key)
        receive = _InprocOperation(key, memory, target_range)
        if not self._refuses(receive):
            if key in self._receives:
                raise LocalProtocolError(f"key {key} is expected already; keys are unique in a session")
            self._receives[key] = receive
        return receive

    def progress(self) -> bool:
        if self._is_closed or self._failure is not None:
            return False
        peer = self._link.peer_of(self)
        if peer is None or peer._is_closed:
            self._fail_pending(self._pending, "the peer closed the session")
            return True
        return self._land(peer) if self._transport.is_one_sided else self._take(peer)

    def close(self) -> None:
        self._close_pending(self._pending)
        self._sends.clear()
        self._receives.clear()
        self._offered = None
        self._transport.forget(self)

    def uses(self, memory: LocalMemory) -> bool:
        return memory is self._offered or any(operation.memory is memory for operation in self._pending)

    @property
    def _pending(self) -> tuple[_InprocOperation, ...]:
        return (*self._sends.values(), *self._receives.values())

    def _start(self, send: _InprocOperation) -> Operation:
        if not self._refuses(send):
            if send.key in self._sends:
                raise LocalProtocolError(f"key {send.key} is on its way already; keys are unique in a session")
            self._sends[send.key] = send
        return send

    def _land(self, peer: InprocSession) -> bool:
        """Copy all writes of a one-sided session, in the writer's progress and without the target."""
        landed = list(self._sends.values())
        for send in landed:
            source = send.view
            assert source is not None and peer._offered is not None and send.target_range is not None
            peer._offered.part(send.target_range)[:] = source
            send.settle(send.target_range.num_bytes)
        self._sends.clear()
        return bool(landed)

    def _take(self, peer: InprocSession) -> bool:
        """Copy the bytes of keys that are both sent and expected, in the receiver's progress of a two-sided session."""
        ready = [key for key in peer._sends if key in self._receives]
        for key in ready:
            sent, receive = peer._sends.pop(key), self._receives.pop(key)
            source, target = sent.view, receive.view
            assert target is not None  # a receive has bytes
            if source is None:
                receive.settle()
            elif source.nbytes != target.nbytes:
                receive.fail(WriteFailed(f"peer sent {source.nbytes} bytes for key {key}; {target.nbytes} expected"))
            else:
                target[:] = source
                receive.settle(target.nbytes)
            sent.settle()
        return bool(ready)


class InprocOffer:
    """The writer's half-open in-process session."""

    def __init__(self, transport: InprocTransport, hub: InprocHub) -> None:
        self.transport = transport
        self.link = _Link()
        self._hub = hub
        self._number = next(hub.numbers)
        hub.offers[self._number] = self
        fields = {"identity": ProcessIdentity.own().to_wire(), "hub": hub.token, "offer": self._number}
        self.blob = pack_blob(transport.name, _VERSION, "offer", fields)

    def complete(self, answer: bytes) -> InprocSession:
        fields = unpack_blob(answer, transport=self.transport.name, version=_VERSION, role="answer")
        writer = self.link.writer
        if (fields.get("hub"), fields.get("offer")) != (self._hub.token, self._number) or writer is None:
            raise ConfigError(f"answer names offer {fields.get('offer')!r}; this is offer {self._number} of another hub or time")
        if self._hub.offers.pop(self._number, None) is None:
            raise TransportClosed("this offer was completed or closed before")
        self.transport.open(writer)
        return writer

    def close(self) -> None:
        if self._hub.offers.pop(self._number, None) is not None and self.link.writer is not None:
            self.link.writer.close()


class InprocTransport(PeerTransport[HostMemory, InprocSession]):
    """Moves bytes between two ends of one process.

    Args:
        hub: Connects the transports that can reach each other.
        one_sided: True behaves like RDMA writes (the writer's progress lands them); False like tag matching, where the target
            must expect each key. Both ends of a session must agree.
    """

    def __init__(self, hub: InprocHub, *, one_sided: bool = False) -> None:
        super().__init__("inproc", is_one_sided=one_sided)
        self._hub = hub

    def register(self, buffer: Any) -> HostMemory:
        memory = memory_of(buffer)
        if not isinstance(memory, HostMemory):
            raise ConfigError("transport inproc moves host memory only; choose transport: ucx for device memory")
        return self._add(memory)

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
        offer = self._hub.offers.get(field_of(fields, "offer", int))
        if offer is None:
            raise PeerUnreachable("the writer closed its offer before the target accepted it")
        if offer.transport.is_one_sided != self.is_one_sided:
            raise ConfigError(
                f"writer's inproc transport has one_sided={offer.transport.is_one_sided}, target's has {self.is_one_sided}: "
                "both ends must agree"
            )
        link = offer.link
        link.target = InprocSession(self, link, offered=own)
        link.writer = InprocSession(offer.transport, link, peer_num_bytes=own.num_bytes)
        self.open(link.target)
        fields = {"hub": self._hub.token, "offer": fields["offer"]}
        return link.target, pack_blob(self.name, _VERSION, "answer", fields)

    def open(self, session: InprocSession) -> None:
        """Count a session among the open ones."""
        self._sessions.add(session)
