"""Several transports as one, with the real ones of this host."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.transport.payload import ring_of
from transfer.errors import ConfigError, LocalProtocolError, PeerUnreachable, TransportError
from transfer.transport.auto import AutoTransport, obstacle_of
from transfer.transport.base import ByteRange, Session
from transfer.transport.nixl import NixlTransport
from transfer.transport.peer import pack_blob, unpack_blob
from transfer.transport.sessions import PeerTransport
from transfer.transport.shm import ShmTransport
from transfer.transport.ucx import UcxTransport

HAS_BOTH = all(importlib.util.find_spec(name) for name in ("ucxx", "nixl_cu13"))
pytestmark = pytest.mark.skipif(not HAS_BOTH, reason="needs ucx and nixl")
SIZE = 1 << 16
WHOLE = ByteRange(begin=0, end=SIZE)
LOOPBACK = {"NET_DEVICES": "lo"}


class Unmappable(UcxTransport):
    """A transport whose writer cannot reach the target's memory, as CUDA IPC without peer access."""

    def __init__(self) -> None:
        super().__init__(options=LOOPBACK)
        self.name = "cuda_ipc"

    def offer(self) -> Any:
        offer = super().offer()
        offer.complete = self._fail  # type: ignore[method-assign]
        return offer

    def _fail(self, answer: bytes) -> Any:
        raise PeerUnreachable("no peer access")


def ucx() -> UcxTransport:
    return UcxTransport(options=LOOPBACK)


def nixl() -> NixlTransport:
    return NixlTransport(options=LOOPBACK)


def auto(*members: PeerTransport[Any, Any], has_rdma: bool = False, **unusable: str) -> AutoTransport:
    return AutoTransport({member.name: member for member in members}, is_device=False, has_rdma=has_rdma, unusable=unusable)


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Transports to close."""
    found: list[Any] = []
    yield found
    for one in found:
        one.close()
    gc.collect()


def moved(writer: Any, target: Any, *, is_mappable: bool = False) -> tuple[Session, Session]:
    """Attach, move bytes, and return both sessions."""
    source, ring = np.arange(SIZE, dtype=np.uint8), ring_of(SIZE) if is_mappable else np.zeros(SIZE, dtype=np.uint8)
    source_memory, ring_memory = writer.register(source), target.register(ring)
    offer = writer.offer_to(target.names)
    at_target, answer = target.accept(offer.blob, ring_memory)
    at_writer = offer.complete(answer)
    handles = [] if at_target.is_one_sided else [at_target.expect(ring_memory, WHOLE, 1)]
    handles.append(at_writer.write(source_memory, WHOLE, WHOLE, 1))
    while not all(handle.poll() for handle in handles):
        at_writer.progress()
        at_target.progress()
    assert (ring == source).all()
    return at_writer, at_target


@pytest.mark.parametrize(("has_rdma", "chosen"), [(False, "ucx"), (True, "nixl")])
def test_both_ends_take_the_best_transport(has_rdma: bool, chosen: str, opened: list[Any]) -> None:
    writer, target = auto(ucx(), nixl(), has_rdma=True), auto(ucx(), nixl(), has_rdma=has_rdma)
    opened += [writer, target]
    at_writer, at_target = moved(writer, target)
    assert at_writer.lane == at_target.lane and at_writer.lane.startswith(f"{chosen}/")
    assert at_target.is_one_sided is (chosen == "nixl")
    assert target.has_one_sided and target.has_two_sided


@pytest.mark.parametrize("make", [ucx, nixl])
def test_a_peer_with_one_transport_needs_no_auto(make: Any, opened: list[Any]) -> None:
    one, several = make(), auto(ucx(), nixl())
    opened += [one, several]
    assert moved(one, several)[0].lane.startswith(one.name)
    assert moved(several, one)[0].lane.startswith(one.name)


def test_a_slow_link_to_a_peer_with_one_transport_names_the_reason(opened: list[Any]) -> None:
    one, several = ucx(), auto(nixl(), ucx(), cuda_ipc="no driver")
    opened += [one, several]
    several.is_device = True  # host memory here, but GPUs are judged
    assert moved(one, several)[1].obstacle == "cuda_ipc: no driver; nixl: the writer does not offer it"


def test_a_failed_offer_does_not_prevent_the_others(opened: list[Any]) -> None:
    broken, works = Unmappable(), ucx()
    writer, target = auto(broken, works, nixl()), auto(Unmappable(), ucx())
    opened += [writer, target]

    def fail() -> Any:
        raise TransportError("out of handles")

    broken.offer = fail  # type: ignore[method-assign]
    assert moved(writer, target)[0].lane == "ucx/shm"
    works.offer = fail  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="no transport can be offered: cuda_ipc: out of handles; ucx: out of handles"):
        writer.offer_to(target.names)


def test_host_memory_of_one_machine_is_mapped_and_ucx_carries_what_cannot_be(opened: list[Any]) -> None:
    writer, target = auto(ShmTransport(), ucx()), auto(ucx(), ShmTransport())
    old = auto(ucx())  # as of a release that does not know shm
    opened += [writer, target, old]
    assert moved(writer, target, is_mappable=True)[0].lane == "shm"
    assert moved(writer, target)[0].lane == "ucx/shm"
    assert moved(writer, old)[0].lane == moved(old, target)[0].lane == "ucx/shm"


def test_after_a_failed_attach_the_next_attempt_uses_another_transport(opened: list[Any]) -> None:
    writer, target = auto(Unmappable(), ucx()), auto(Unmappable(), ucx())
    opened += [writer, target]
    with pytest.raises(PeerUnreachable, match="cuda_ipc: no peer access; the next attempt takes another transport"):
        moved(writer, target)
    at_writer, at_target = moved(writer, target)
    assert at_writer.lane == at_target.lane == "ucx/shm"
    assert at_writer.obstacle == at_target.obstacle == "", "host memory has no faster transport here"


def test_the_slower_transport_of_a_gpu_names_the_reason() -> None:
    why = partial(obstacle_of, reasons={"cuda_ipc": "no peer access"}, is_device=True)
    assert why("ucx/shm", is_same_machine=True, has_rdma=False) == "cuda_ipc: no peer access"
    assert "goes over TCP" in why("ucx/net", is_same_machine=False, has_rdma=False)
    assert not why("nixl/net", is_same_machine=False, has_rdma=True)
    assert not why("ucx/shm", is_same_machine=True, has_rdma=False, is_device=False)


def test_only_registered_memory_is_used(opened: list[Any]) -> None:
    writer, target = auto(ucx(), nixl()), auto(ucx(), nixl())
    opened += [writer, target]
    ring = target.register(np.zeros(SIZE, dtype=np.uint8))
    target.deregister(ring)
    with pytest.raises(LocalProtocolError, match="memory of 65536 bytes is not registered"):
        target.accept(writer.offer().blob, ring)
    with pytest.raises(LocalProtocolError, match="not registered"):
        target.deregister(ring)


def test_memory_in_use_stays_registered(opened: list[Any]) -> None:
    writer, target = auto(nixl(), ucx()), auto(nixl(), ucx())
    opened += [writer, target]
    ring = target.register(np.zeros(SIZE, dtype=np.uint8))
    offer = writer.offer()
    session, _ = target.accept(offer.blob, ring)
    for _ in range(2):  # also a second time
        with pytest.raises(LocalProtocolError, match="in use by ucx"):
            target.deregister(ring)
    session.close()
    target.deregister(ring)
    offer.close()


def test_nothing_usable_names_each_transport_and_its_reason() -> None:
    with pytest.raises(ConfigError, match="no transport can be used here: cuda_ipc: no driver; ucx: not installed"):
        auto(cuda_ipc="no driver", ucx="not installed")


def test_invalid_offers_are_rejected(opened: list[Any]) -> None:
    target = auto(ucx(), nixl())
    opened.append(target)
    ring = target.register(np.zeros(SIZE, dtype=np.uint8))
    blob = auto(ucx(), nixl()).offer().blob
    fields = unpack_blob(blob, transport="auto", version=1, role="offer")
    for name, value in (("offers", [1]), ("offers", 1), ("has_rdma", 1), ("unreachable", None), ("identity", "x")):
        with pytest.raises(ConfigError):
            target.accept(pack_blob("auto", 1, "offer", fields | {name: value}), ring)
    for offers in ({}, {"x": b""}, {"ucx": b"\x00", "nixl": 3}):
        with pytest.raises(PeerUnreachable, match="none of the transports"):
            target.accept(pack_blob("auto", 1, "offer", fields | {"offers": offers}), ring)
    for noise in (b"", b"\xc1", b"\x93", blob[:-1], blob[1:]):
        with pytest.raises(ConfigError):
            target.accept(noise, ring)


def test_invalid_answers_are_rejected(opened: list[Any]) -> None:
    writer, target = auto(ucx(), nixl()), auto(ucx(), nixl())
    opened += [writer, target]
    offer = writer.offer()
    _, answer = target.accept(offer.blob, target.register(np.zeros(SIZE, dtype=np.uint8)))
    fields = unpack_blob(answer, transport="auto", version=1, role="answer")
    for change in ({"name": "cuda_ipc"}, {"name": 1}, {"answer": "x"}, {"identity": 3}, {"obstacle": 1}):
        with pytest.raises(ConfigError):
            offer.complete(pack_blob("auto", 1, "answer", fields | change))
    with pytest.raises(PeerUnreachable, match=r"ucx: .*the next attempt takes another transport"):
        offer.complete(pack_blob("auto", 1, "answer", fields | {"answer": b"x"}))
    assert offer.complete(answer).lane == "ucx/shm"


def test_a_failure_is_remembered_for_a_minute(opened: list[Any]) -> None:
    clock = SimpleNamespace(now_s=0.0)
    members = {"cuda_ipc": Unmappable(), "ucx": ucx()}
    writer = AutoTransport(members, is_device=False, has_rdma=False, unusable={}, clock=lambda: clock.now_s)
    target = auto(Unmappable(), ucx())
    opened += [writer, target]
    with pytest.raises(PeerUnreachable):
        moved(writer, target)
    assert [name for name, _ in writer.unreachable()] == ["cuda_ipc"]
    clock.now_s = 61.0
    with pytest.raises(PeerUnreachable, match="cuda_ipc: no peer access"):
        moved(writer, target)


def test_a_link_whose_probe_failed_gets_another_transport(opened: list[Any]) -> None:
    writer, target = auto(ucx(), nixl(), has_rdma=True), auto(ucx(), nixl(), has_rdma=True)
    opened += [writer, target]
    session, _ = moved(writer, target)
    assert session.lane.startswith("nixl/")
    writer.distrust(session)
    session, _ = moved(writer, target)
    assert session.lane.startswith("ucx/")
    writer.distrust(session)
    assert moved(writer, target)[0].lane.startswith("nixl/"), "if all have failed, they are tried again"


def test_a_gpu_and_host_memory_do_not_prefer_nixl(opened: list[Any]) -> None:
    members = {"ucx": ucx(), "nixl": nixl()}
    writer = AutoTransport(members, is_device=True, has_rdma=True, unusable={})
    target = auto(ucx(), nixl(), has_rdma=True)
    opened += [writer, target]
    assert moved(writer, target)[0].lane.startswith("ucx/")
