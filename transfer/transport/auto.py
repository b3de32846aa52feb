"""Several transports as one: the target of each session takes the best one that reaches the writer.

The writer offers every transport that both ends can open. The target tries them in its order of preference and answers with the
first that works:

1. ``cuda_ipc``, for GPUs of one host.
2. ``nixl``, if both hosts have RDMA devices.
3. ``ucx``: shared memory on one host, otherwise what UCX finds.
4. ``nixl`` over TCP.

Only the writer can find out that its GPU cannot map the target's memory. Then opening the session fails, and the next offer names
that target process as unreachable over this transport. So the attempt that follows takes another one.

If only one transport is common, for example because the peer has a fixed one, the writer sends the offer of that transport alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from transfer.errors import ConfigError, PeerUnreachable, TransportError
from transfer.messages import clip_reason
from transfer.transport.base import LocalMemory, Offer, Session
from transfer.transport.peer import ProcessIdentity, blob_transport, field_of, pack_blob, unpack_blob
from transfer.transport.registered_memory import Memory
from transfer.transport.sessions import PeerTransport

AUTO: Final = "auto"
ORDER: Final = ("cuda_ipc", "nixl", "ucx")
_VERSION: Final = 1
_MOST_UNREACHABLE: Final = 16
"""Limit of remembered failures: a blob can list 32 entries. A new one replaces the oldest, whose transport is offered again."""


class AutoOffer:
    """The writer's half-open session over one of several transports."""

    def __init__(self, transport: AutoTransport, names: Sequence[str]) -> None:
        self._transport = transport
        self._offers: dict[str, Offer] = {}
        try:
            for name in names:
                self._offers[name] = transport.members[name].offer()
        except BaseException:
            self.close()
            raise
        fields = {
            "identity": ProcessIdentity.own().to_wire(),
            "has_rdma": transport.has_rdma,
            "offers": {name: offer.blob for name, offer in self._offers.items()},
            "unreachable": [[name, *process] for name, process in transport.unreachable],
        }
        self.blob = pack_blob(AUTO, _VERSION, "offer", fields)

    def complete(self, answer: bytes) -> Session:
        fields = unpack_blob(answer, transport=AUTO, version=_VERSION, role="answer")
        name = field_of(fields, "name", str)
        chosen = self._offers.get(name)
        if chosen is None:
            raise ConfigError(f"field name of the peer's answer is {name[:32]!r}; expected one of {', '.join(self._offers)}")
        target, obstacle = ProcessIdentity.from_wire(fields.get("identity")), field_of(fields, "obstacle", str)
        try:
            session = chosen.complete(field_of(fields, "answer", bytes))
        except PeerUnreachable as error:
            self._transport.note_unreachable(name, target)
            raise PeerUnreachable(f"{name}: {error}; the next attempt takes another transport") from error
        del self._offers[name]
        self.close()
        session.obstacle = clip_reason(obstacle)
        return session

    def close(self) -> None:
        for offer in self._offers.values():
            offer.close()


class AutoTransport:
    """Combine several transports, and choose one for each session.

    Args:
        members: The transports, by name. They share each registered memory.
        has_rdma: Whether this host has RDMA devices that NIXL may use.
        unusable: Reasons why other transports cannot be used, by name.

    Raises:
        ConfigError: `members` is empty.
    """

    def __init__(self, members: Mapping[str, PeerTransport[Any, Any]], *, has_rdma: bool, unusable: Mapping[str, str]) -> None:
        if not members:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in unusable.items())
            raise ConfigError(f"transport.name is auto, and no transport can be used here: {reasons}")
        self.members = {name: members[name] for name in ORDER if name in members}
        self.has_rdma = has_rdma
        self.unusable = dict(unusable)
        self.unreachable: dict[tuple[str, tuple[str, int, int]], None] = {}
        """Transports over which the memory of a target process cannot be reached, oldest first."""

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
        if transport in self.members:
            return self.members[transport].accept(blob, memory)
        fields = unpack_blob(blob, transport=AUTO, version=_VERSION, role="offer")
        writer, own = ProcessIdentity.from_wire(fields.get("identity")), ProcessIdentity.own()
        has_rdma = field_of(fields, "has_rdma", bool) and self.has_rdma
        offers, unreachable = field_of(fields, "offers", dict), field_of(fields, "unreachable", list)
        reasons = {name: reason for name, reason in self.unusable.items() if name in offers}
        for name in self._by_preference(offers, has_rdma):
            if [name, *_process(own)] in unreachable:
                reasons[name] = "an earlier attempt could not map this process's memory"
                continue
            try:
                session, answer = self.members[name].accept(field_of(offers, name, bytes), memory)
            except (TransportError, ConfigError) as error:
                reasons[name] = str(error)
                continue
            session.obstacle = session.obstacle or obstacle_of(
                session.lane,
                reasons,
                is_device=getattr(memory, "is_device", False),
                is_same_machine=writer.is_on_machine_of(own),
                has_rdma=has_rdma,
            )
            answered = {"name": name, "answer": answer, "identity": own.to_wire(), "obstacle": clip_reason(session.obstacle)}
            return session, pack_blob(AUTO, _VERSION, "answer", answered)
        shown = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "none of them is open on this rank"
        raise PeerUnreachable(f"none of the transports {', '.join(map(str, offers))} reaches the writer: {shown}")

    def close(self) -> None:
        for member in self.members.values():
            member.close()

    def note_unreachable(self, name: str, target: ProcessIdentity) -> None:
        """Leave out a transport in later offers to a target process."""
        self.unreachable[name, _process(target)] = None
        while len(self.unreachable) > _MOST_UNREACHABLE:
            del self.unreachable[next(iter(self.unreachable))]

    def _by_preference(self, offers: Mapping[str, object], has_rdma: bool) -> list[str]:
        names = [name for name in self.members if name in offers]
        return names if has_rdma else sorted(names, key=lambda name: name == "nixl")  # the last resort without RDMA


def obstacle_of(lane: str, reasons: Mapping[str, str], *, is_device: bool, is_same_machine: bool, has_rdma: bool) -> str:
    """Return why a session is slower than it could be; empty if it is not.

    Args:
        reasons: Why better transports were not taken, by name.
        is_device: Whether it moves memory of GPUs.
        is_same_machine: Whether both ends run on one machine.
        has_rdma: Whether both ends have RDMA devices.
    """
    if is_device and is_same_machine:
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    if is_device and lane.endswith("/net") and not has_rdma:
        return "no RDMA device at one of the ends: KV between these GPUs goes over TCP"
    return ""


def _process(identity: ProcessIdentity) -> tuple[str, int, int]:
    return identity.boot_id, identity.pid_namespace, identity.pid
