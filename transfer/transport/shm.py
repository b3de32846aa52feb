"""Transport over shared memory: between pools in host memory of one machine; one-sided.

The target's ring is a file without a name, which the writer maps. So the owner's gather stores straight into the ring
(`Session.direct`), and each byte is copied once at each end. Both processes need the same user and the same pid namespace.

The target cannot revoke a mapping. So after the target's `close()`, `Session.is_over` becomes True when the writer has unmapped
the ring, or when its process is gone (`liveness`). The writer unmaps it when the last gather into it has ended. Until then the
memory stays registered and alive at the target.

A writer checks the file that a target names: a file of another size or kind, one in huge pages, or one whose size can change, is
rejected.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from transfer.errors import ConfigError, PeerUnreachable
from transfer.transport.base import ByteRange, DirectMemory
from transfer.transport.liveness import LivenessPipe, PeerPipe
from transfer.transport.mapped_blob import MappedPlace
from transfer.transport.mapped_session import WriterSession
from transfer.transport.mapped_transport import MappedTransport
from transfer.transport.registered_memory import DeviceBuffer, HostMemory, memory_of
from transfer.transport.sessions import PeerTransport
from transfer.transport.shared_memory import map_shared, open_region, populate, region_of
from transfer.transport.shm_blob import NAME, ShmAnswer
from transfer.transport.signals import SignalReader
from transfer.transport.waiting_thread import WaitingThread

# A turn of the owner's loop copies the writes in order, up to the first one that is larger, and this much of that one.
_STEP_BYTES = 4 << 20  # half a millisecond


class ShmTransport(MappedTransport[HostMemory]):
    """Moves bytes between two processes of one machine. A target's memory must be a `transfer.transport.shared_memory`."""

    def __init__(self) -> None:
        super().__init__(NAME, lane=NAME)
        self._waits = WaitingThread(f"{NAME}-populating")

    def register(self, buffer: Any) -> HostMemory:
        """Register as `Transport.register` does. Raise ConfigError for memory of a GPU."""
        found = memory_of(buffer)
        if isinstance(found, DeviceBuffer):
            raise ConfigError("transport shm moves host memory, and this is memory of a GPU: choose transport: auto or cuda_ipc")
        return self._add(found)

    def _answer(self, memory: HostMemory, line: LivenessPipe, token: bytes, signals: SignalReader | None) -> bytes:
        address = memory.view.ctypes.data
        region = region_of(address, memory.num_bytes)
        if region is None:
            raise ConfigError(
                f"memory of {memory.num_bytes} bytes cannot be offered over transport shm: other processes cannot map it; "
                "allocate it with StagingBuffer(is_shared=True)"
            )
        place = MappedPlace(line=line.address, token=token, offset=address - region.address, num_bytes=memory.num_bytes)
        answer = ShmAnswer(place=place, fd=region.fd, inode=region.inode).to_blob()
        line.sign(answer)
        return answer

    def _open_writer(self, answer: bytes, token: bytes, line: LivenessPipe) -> ShmWriterSession:
        answered = ShmAnswer.from_blob(answer, token=token)
        peer = PeerPipe(answered.place.line)
        try:
            peer.check_signed(answer)  # a peer anywhere could name memory of another process of this user, also of this one
            fd = open_region(
                peer.pid, answered.fd, inode=answered.inode, num_bytes=answered.place.offset + answered.place.num_bytes
            )
            try:
                if peer.has_left:
                    raise PeerUnreachable(f"peer process {peer.pid} closed the session, or is gone")
                session = ShmWriterSession(self, fd, answered.place, line, peer)
            finally:
                os.close(fd)
        except BaseException:
            peer.close()
            raise
        self._waits.submit(session.populate)
        return session


@dataclass(slots=True, kw_only=True)
class _HostCopy:
    """The rest of a write, by addresses."""

    target: int
    source: int
    num_bytes: int


class ShmWriterSession(WriterSession[HostMemory]):
    """The writer's end: gathers of the owner, and writes that `progress()` copies, into the mapped memory of the target."""

    def __init__(
        self, transport: PeerTransport[HostMemory, Any], fd: int, place: MappedPlace, line: LivenessPipe, peer: PeerPipe
    ) -> None:
        super().__init__(transport, NAME, num_bytes=place.num_bytes, peer=peer)
        self._ended = threading.Event()
        # Without a reference to this session, so that a session that nobody closes lets go, too.
        on_unmapped = partial(_let_go, line, self._ended)
        try:
            self._mapped: Any = map_shared(fd, place.offset + place.num_bytes, on_unmapped)
        except OSError as error:
            raise PeerUnreachable(f"memory of peer process {peer.pid} cannot be mapped ({error.strerror})") from error
        self._offset = place.offset

    def populate(self) -> None:
        """Prepare the page table for stores. Takes tens of milliseconds for a large ring, on any thread."""
        mapped = self._mapped
        if mapped is not None:
            populate(mapped)

    def direct(self, target_range: ByteRange) -> DirectMemory | None:
        """Return a uint8 tensor over bytes of the target's memory, as `Session.direct` does. It keeps the mapping."""
        import torch  # only where there are gathers

        if not self._may_store(target_range):
            return None
        return torch.frombuffer(
            self._mapped, dtype=torch.uint8, count=target_range.num_bytes, offset=self._offset + target_range.begin
        )

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def _begin_copy(self, memory: HostMemory, source_range: ByteRange, target_range: ByteRange) -> _HostCopy:
        return _HostCopy(
            target=ctypes.addressof(self._mapped) + self._offset + target_range.begin,
            source=memory.view.ctypes.data + source_range.begin,
            num_bytes=source_range.num_bytes,
        )

    def _is_done(self, mark: _HostCopy) -> bool:
        size = min(mark.num_bytes, _STEP_BYTES)
        ctypes.memmove(mark.target, mark.source, size)
        mark.target, mark.source, mark.num_bytes = mark.target + size, mark.source + size, mark.num_bytes - size
        return mark.num_bytes == 0

    def _end_mapping(self) -> None:
        self._copies = deque()  # they are copied by `progress()` alone, so none is under way
        self._mapped = None


def _let_go(line: LivenessPipe, ended: threading.Event) -> None:
    line.end()
    ended.set()
