"""Several transports as one: the target of each session takes the best one that reaches the writer.

The writer offers every transport that both ends can open. The target tries them in its order of preference and answers with the
first that works:

1. ``cuda_ipc``, for GPUs of one host.
2. ``shm``, for pools in host memory of one machine.
3. ``nixl``, if both hosts have RDMA devices.
4. ``ucx``: shared memory on one host, otherwise what UCX finds.
5. ``nixl`` over TCP.

Only the writer can find out that it cannot map the target's memory. Then opening the session fails, and the next offer names
that target process as unreachable over this transport. So the attempt that follows takes another one. The same holds if the
writer rejects the answer, or if the probe of the link fails. After a minute, the transport is offered again.

If only one transport is common, for example because the peer has a fixed one, the writer sends the offer of that transport alone.
The target then does not know whether both ends are on one host, and names every possible reason for a slow link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import structlog

from transfer.errors import ConfigError, PeerUnreachable, TransportError
from transfer.messages import clip_reason
from transfer.transport.base import LocalMemory, Offer, Session
from transfer.transport.peer import ProcessIdentity, blob_transport, field_of, pack_blob, unpack_blob
from transfer.transport.registered_memory import Memory
from transfer.transport.sessions import PeerTransport

AUTO: Final = "auto"
ORDER: Final = ("cuda_ipc", "shm", "nixl", "ucx")
_VERSION: Final = 1
_MOST_UNREACHABLE: Final = 16
"""Limit of remembered failures: a blob can list 32 entries. A new one replaces the oldest, whose transport is offered again."""
_FORGOTTEN_S: Final = 60.0
"""Seconds for which a failure is remembered: its reason can pass."""

log = structlog.get_logger(__name__)

_Failed = tuple[str, tuple[str, int, int]]
"""A transport, and the target process that was not reached over it."""


class AutoOffer:
    """The writer's half-open session over one of several transports."""

    def __init__(self, transport: AutoTransport, names: Sequence[str]) -> None:
        self._transport = transport
        self._offers: dict[str, Offer] = {}
        failed: dict[str, str] = {}
        for name in names:
            try:
                self._offers[name] = transport.members[name].offer()
            except (TransportError, ConfigError) as error:
                failed[name] = str(error)
                log.warning("transport_not_offered", transport=name, reason=str(error))
            except BaseException:
                self.close()
                raise
        if not self._offers:
            raise TransportError(f"no transport can be offered: {_shown(failed)}")
        fields = {
            "identity": ProcessIdentity.own().to_wire(),
            "has_rdma": transport.has_rdma,
            "is_device": transport.is_device,
            "offers": {name: offer.blob for name, offer in self._offers.items()},
            "unreachable": [[name, *process] for name, process in transport.unreachable()],
        }
        self.blob = pack_blob(AUTO, _VERSION, "offer", fields)

    def complete(self, answer: bytes) -> Session:
        fields = unpack_blob(answer, transport=AUTO, version=_VERSION, role="answer")
        name = field_of(fields, "name", str)
        chosen = self._offers.get(name)
        if chosen is None:
            raise ConfigError(f"field name of the peer's answer is {name[:32]!r}; expected one of {', '.join(self._offers)}")
        target, obstacle = ProcessIdentity.from_wire(fields.get("identity")), field_of(fields, "obstacle", str)
        own_answer = field_of(fields, "answer", bytes)
        try:
            session = chosen.complete(own_answer)
        except (TransportError, ConfigError) as error:
            self._transport.note_unreachable(name, target)
            raise PeerUnreachable(f"{name}: {error}; the next attempt takes another transport") from error
        del self._offers[name]
        self.close()
        session.obstacle = clip_reason(obstacle)
        self._transport.note_session(session, name, target)
        return session

    def close(self) -> None:
        for offer in self._offers.values():
            offer.close()


class AutoTransport:
    """Combine several transports, and choose one for each session.

    Args:
        members: The transports, by name. They share each registered memory.
        is_device: Whether the rank's memory is on a GPU.
        has_rdma: Whether this host has RDMA devices that NIXL may use.
        unusable: Reasons why other transports cannot be used, by name.

    Raises:
        ConfigError: `members` is empty.
    """

    def __init__(
        self,
        members: Mapping[str, PeerTransport[Any, Any]],
        *,
        is_device: bool,
        has_rdma: bool,
        unusable: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not members:
            raise ConfigError(f"transport.name is auto, and no transport can be used here: {_shown(unusable)}")
        self.members = {name: members[name] for name in ORDER if name in members}
        self.is_device = is_device
        self.has_rdma = has_rdma
        self.unusable = dict(unusable)
        self._clock = clock
        self._failed: dict[_Failed, float] = {}  # when it failed, oldest first
        self._of_session: WeakKeyDictionary[Session, _Failed] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        """Name that peers of release 0.1 compare with their own transport."""
        return "ucx" if "ucx" in self.members else next(iter(self.members))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.members)

    @property
    def has_one_sided(self) -> bool:
        return any(member.has_one_sided for member in self.members.values())

    @property
    def has_two_sided(self) -> bool:
        return any(member.has_two_sided for member in self.members.values())

    def offer_to(self, names: Sequence[str]) -> Offer:
        common = [name for name in self.members if name in names]
        return self.members[common[0]].offer() if len(common) == 1 else AutoOffer(self, common)

    def register(self, buffer: Any) -> Memory:
        memory: Memory | None = None
        for member in self.members.values():  # the first of them knows a GPU's index
            memory = member.register(buffer) if memory is None else member.share(memory)
        assert memory is not None
        return memory

    def deregister(self, memory: LocalMemory) -> None:
        members = self.members.values()
        for member in members:
            member.check_unused(member.own(memory))
        for member in members:
            member.deregister(memory)

    def offer(self) -> AutoOffer:
        return AutoOffer(self, self.names)

    def accept(self, blob: bytes, memory: LocalMemory) -> tuple[Session, bytes]:
        transport = blob_transport(blob)
        if transport in self.members:  # only this one is common to both ends
            session, answer = self.members[transport].accept(blob, memory)
            if self.is_device and not session.obstacle:
                obstacles = self._why_not_better(transport, {transport: blob}, {}, ())
                if session.lane.endswith("/net") and not self.has_rdma:
                    obstacles["RDMA"] = "this end has no device"
                session.obstacle = _shown(obstacles)
            return session, answer
        fields = unpack_blob(blob, transport=AUTO, version=_VERSION, role="offer")
        writer, own = ProcessIdentity.from_wire(fields.get("identity")), ProcessIdentity.own()
        has_rdma = field_of(fields, "has_rdma", bool) and self.has_rdma
        offers, unreachable = field_of(fields, "offers", dict), field_of(fields, "unreachable", list)
        is_alike = field_of(fields, "is_device", bool) == self.is_device
        reasons: dict[str, str] = {}
        names = self._by_preference(offers, has_rdma=has_rdma, is_alike=is_alike)
        skipped = [name for name in names if [name, *_process(own)] in unreachable]
        for name in (*(name for name in names if name not in skipped), *skipped):
            try:
                session, answer = self.members[name].accept(field_of(offers, name, bytes), memory)
            except (TransportError, ConfigError) as error:
                reasons[name] = str(error)
                continue
            session.obstacle = session.obstacle or obstacle_of(
                session.lane,
                self._why_not_better(name, offers, reasons, skipped),
                is_device=self.is_device,
                is_same_machine=writer.is_on_machine_of(own),
                has_rdma=has_rdma,
            )
            answered = {"name": name, "answer": answer, "identity": own.to_wire(), "obstacle": clip_reason(session.obstacle)}
            return session, pack_blob(AUTO, _VERSION, "answer", answered)
        shown = _shown(reasons) or "none of them is open on this rank"
        raise PeerUnreachable(f"none of the transports {', '.join(map(str, offers))} reaches the writer: {shown}")

    def close(self) -> None:
        for member in self.members.values():
            member.close()

    def unreachable(self) -> list[_Failed]:
        """Return the transports that failed lately, each with the target process."""
        now_s = self._clock()
        self._failed = {failed: at_s for failed, at_s in self._failed.items() if now_s - at_s < _FORGOTTEN_S}
        return list(self._failed)

    def note_unreachable(self, name: str, target: ProcessIdentity) -> None:
        """Prefer other transports in later offers to a target process."""
        self._note((name, _process(target)))

    def note_session(self, session: Session, name: str, target: ProcessIdentity) -> None:
        """Record the transport and the target of a session, for `distrust`."""
        self._of_session[session] = (name, _process(target))

    def distrust(self, session: Session) -> None:
        failed = self._of_session.get(session)
        if failed is not None:
            self._note(failed)

    def _note(self, failed: _Failed) -> None:
        self._failed.pop(failed, None)
        self._failed[failed] = self._clock()
        while len(self._failed) > _MOST_UNREACHABLE:
            del self._failed[next(iter(self._failed))]

    def _by_preference(self, offers: Mapping[str, object], *, has_rdma: bool, is_alike: bool) -> list[str]:
        """Return the common transports. NIXL is the last resort without RDMA, and between a GPU and host memory."""
        names = [name for name in self.members if name in offers]
        return names if has_rdma and is_alike else sorted(names, key=lambda name: name == "nixl")

    def _why_not_better(
        self, chosen: str, offers: Mapping[str, object], reasons: Mapping[str, str], skipped: Sequence[str]
    ) -> dict[str, str]:
        """Return why each transport before the chosen one was not taken."""
        found = {}
        for name in ORDER[: ORDER.index(chosen)]:
            if name == "shm" and self.is_device:
                continue  # host memory only
            if name in skipped:
                found[name] = "an earlier attempt over it failed"
            elif name in reasons:
                found[name] = reasons[name]
            elif name not in self.members:
                found[name] = self.unusable.get(name, "not installed")
            elif name not in offers:
                found[name] = "the writer does not offer it"
        return found


def obstacle_of(lane: str, reasons: Mapping[str, str], *, is_device: bool, is_same_machine: bool, has_rdma: bool) -> str:
    """Return why a session is slower than it could be; empty if it is not.

    Args:
        reasons: Why better transports were not taken, by name.
        is_device: Whether it moves memory of GPUs.
        is_same_machine: Whether both ends run on one machine.
        has_rdma: Whether both ends have RDMA devices.
    """
    if not is_device:
        return ""
    if lane.endswith("/net") and not is_same_machine and not has_rdma:
        return "no RDMA device at one of the ends: KV between these GPUs goes over TCP"
    found = {name: reason for name, reason in reasons.items() if is_same_machine or name != "cuda_ipc"}
    return _shown(found)


def _shown(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _process(identity: ProcessIdentity) -> tuple[str, int, int]:
    return identity.boot_id, identity.pid_namespace, identity.pid
