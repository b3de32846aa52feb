"""What every transport must do, whatever carries the bytes: tests/transport/test_contract.py runs it over each one.

A new transport is one entry in `KINDS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.transport.host_cuda import HostCuda, TwinTransport
from tests.transport.payload import Bytes, noise, ring_of
from transfer.transport.base import ByteRange, LocalMemory, Session, Transport
from transfer.transport.inproc import InprocHub, InprocTransport
from transfer.transport.nixl import NixlTransport
from transfer.transport.shm import ShmTransport
from transfer.transport.ucx import UcxTransport


def _inproc(one_sided: bool) -> tuple[Transport, Transport]:
    hub = InprocHub()
    return InprocTransport(hub, one_sided=one_sided), InprocTransport(hub, one_sided=one_sided)


def _twin() -> tuple[Transport, Transport]:
    cuda = HostCuda()
    return TwinTransport(cuda), TwinTransport(cuda)


KINDS: dict[str, Callable[[], tuple[Transport, Transport]]] = {
    "inproc-one-sided": lambda: _inproc(True),
    "inproc-two-sided": lambda: _inproc(False),
    "ucx-shm": lambda: (UcxTransport(lane="shm"), UcxTransport(lane="shm")),
    "ucx-net": lambda: (UcxTransport(lane="net"), UcxTransport(lane="net")),
    "nixl-shm": lambda: (NixlTransport(lane="shm"), NixlTransport(lane="shm")),
    "nixl-net": lambda: (NixlTransport(lane="net"), NixlTransport(lane="net")),
    "cuda_ipc-twin": _twin,
    "shm": lambda: (ShmTransport(), ShmTransport()),
}
UCX = [kind for kind in KINDS if kind.startswith("ucx")]
NIXL = [kind for kind in KINDS if kind.startswith("nixl")]
ONE_SIDED = ["inproc-one-sided", *NIXL, "cuda_ipc-twin", "shm"]
TWO_SIDED = [kind for kind in KINDS if kind not in ONE_SIDED]


@dataclass(slots=True, kw_only=True)
class Pair:
    """A writer and a target in this process, with one memory each."""

    writer_transport: Any
    target_transport: Any
    writer: Session
    target: Session
    source: Bytes
    ring: Bytes
    source_memory: LocalMemory
    ring_memory: LocalMemory

    @property
    def is_one_sided(self) -> bool:
        return bool(self.writer_transport.is_one_sided)

    def turn(self, times: int = 20) -> None:
        for _ in range(times):
            self.writer.progress()
            self.target.progress()

    def drive(self, *handles: Any, deadline_s: float = 60.0) -> None:
        """Until all are settled; raises what their polls raise."""
        ends_at = time.monotonic() + deadline_s
        while not all([handle.poll() for handle in handles]):
            self.turn(1)
            assert time.monotonic() < ends_at, f"{sum(not h.poll() for h in handles)} of {len(handles)} handles still pending"

    def move(self, source_range: ByteRange, target_range: ByteRange, key: int) -> None:
        """One whole transfer."""
        handles: list[Any] = []
        if not self.is_one_sided:
            handles.append(self.target.expect(self.ring_memory, target_range, key))
        handles.append(self.writer.write(self.source_memory, source_range, target_range, key))
        self.drive(*handles)

    def end_writer(self) -> None:
        """After the target's close: until the session is over, which on some transports takes the writer's close."""
        if not self.target.is_over:
            self.writer.close()
        ends_at = time.monotonic() + 60  # the writer says so when its device is through
        while not (self.target.is_over and self._writer_has_ended()) and time.monotonic() < ends_at:
            time.sleep(0.001)
        assert self.target.is_over

    def _writer_has_ended(self) -> bool:
        return not self.writer.is_over or bool(getattr(self.writer, "has_ended", True))

    def close(self) -> None:
        self.writer_transport.close()
        self.target_transport.close()


def open_sessions(
    writer: Transport, target: Transport, ring_memory: LocalMemory, turn: Callable[[], None] | None = None
) -> tuple[Session, Session]:
    offer = writer.offer()
    target_session, answer = target.accept(offer.blob, ring_memory)
    return offer.complete(answer), target_session


def open_pair(kind: str, *, source_bytes: int = 1 << 20, ring_bytes: int = 1 << 20) -> Pair:
    writer_transport, target_transport = KINDS[kind]()
    source, ring = noise(source_bytes), ring_of(ring_bytes)
    source_memory, ring_memory = writer_transport.register(source), target_transport.register(ring)
    writer, target = open_sessions(writer_transport, target_transport, ring_memory)
    return Pair(
        writer_transport=writer_transport,
        target_transport=target_transport,
        writer=writer,
        target=target,
        source=source,
        ring=ring,
        source_memory=source_memory,
        ring_memory=ring_memory,
    )
