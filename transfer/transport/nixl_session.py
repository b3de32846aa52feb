"""One attached peer over NIXL: its writes, their handles, and its end.

Between processes of one host NIXL's UCX copies in the calling thread, and returns only when all of a request is done. So a bulk
write goes in pieces there, one for each `progress()`; on every other lane it is one request from the start. If UCX has only TCP,
it gets one write at a time. UCX 1.23 may kill the process when a peer leaves, far more often with several writes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from transfer.errors import ConfigError, LocalProtocolError, TransportError, WriteFailed
from transfer.transport.base import ByteRange, LocalMemory
from transfer.transport.liveness import LivenessPipe
from transfer.transport.nixl_library import Agent, address_of, device_of
from transfer.transport.nixl_metadata import Region
from transfer.transport.nixl_revocation import Ending
from transfer.transport.peer import ReadableProof
from transfer.transport.registered_memory import HostMemory, Memory
from transfer.transport.sessions import Operation, PeerSession, PeerTransport, have_devices_ended
from transfer.transport.ucx_library import in_words
from transfer.transport.waiting_thread import WaitingThread

# 1 to 2 ms of copying. The interpreter starts each piece with cold caches (0.1 ms): pieces of 4 MiB took 12 % longer for 64 MiB.
_PIECE_BYTES = 16 * 2**20
_INLINE_BYTES = 64 * 2**10  # below this a copy takes less than a turn of the loop
_CLOSE_WAIT_S = 0.02
_CLOSE_LOOK_S = 0.0005
_DRAIN_S = 1.0
"""Longest wait of a closed session for NIXL to notice the end of copies on its device. The owner's loop does not wait."""


class NixlOperation(Operation):
    """A write under way.

    Attributes:
        next_byte: First byte of the source range that was not posted to NIXL yet.
        request: NIXL's pending request, or None.
    """

    __slots__ = ("next_byte", "request", "source_range", "target_range")

    def __init__(self, key: int, memory: Memory, source_range: ByteRange, target_range: ByteRange) -> None:
        super().__init__(key, memory)
        self.source_range = source_range
        self.target_range = target_range
        self.next_byte = 0
        self.request: Any = None

    def fail(self, failure: TransportError) -> None:
        super().fail(failure)
        self.request = None


class NixlSession(PeerSession[Memory]):
    """One attached peer over NIXL: one agent.

    Args:
        waits: Thread on which a closed session waits for devices.
        agent: Its own agent, closed with it.
        lane: "shm", "ipc" or "net".
        peer: The writer's end: the memory that it may write to.
        offered: The target's end: the memory that it offers.
        ending: The target's end, if closing the agent alone does not end the writer's access.
        keep: Called with a revoked `ending`.
        proof: The target's end: bytes that the writer reads to see that it may write here directly.
        line: The writer's end: ended when this process cannot write any more.
        is_over_tcp: Whether NIXL may have no more than one write of this session at once.
    """

    def __init__(
        self,
        transport: PeerTransport[Memory, NixlSession],
        waits: WaitingThread,
        agent: Agent,
        lane: str,
        *,
        peer: Region | None = None,
        offered: Memory | None = None,
        ending: Ending | None = None,
        keep: Callable[[Ending], None] | None = None,
        proof: ReadableProof | None = None,
        line: LivenessPipe | None = None,
        is_over_tcp: bool = False,
        obstacle: str = "",
    ) -> None:
        peer_num_bytes = None if peer is None else peer.num_bytes
        super().__init__(transport, f"nixl/{lane}", offered=offered, peer_num_bytes=peer_num_bytes, obstacle=obstacle)
        self._waits = waits
        self._agent = agent
        self._peer = peer
        self._ending = ending
        self._keep = keep
        self._proof = proof  # alive for as long as the writer may read it
        self._line = line
        self._in_pieces = lane == "shm"
        self._is_ipc_writer = lane == "ipc" and peer is not None
        self._is_over_tcp = is_over_tcp
        self._pending: dict[int, NixlOperation] = {}
        self._registered: dict[int, Memory] = {}
        self._abandoned: list[Memory] = []  # sources of failed writes that NIXL may still use
        self._unfinished: list[Any] = []  # NIXL's requests of these writes
        self._has_ended = False

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> NixlOperation:
        memory = self._checked_source(source, source_range, target_range, key)
        if key in self._pending:
            raise LocalProtocolError(f"key {key} is on its way already; keys are unique in a session")
        write = NixlOperation(key, memory, source_range, target_range)
        if self._refuses(write):
            return write
        is_first = not self._pending
        self._pending[key] = write
        is_bulk = self._in_pieces and source_range.num_bytes > _INLINE_BYTES
        if not is_bulk and (is_first or not (self._in_pieces or self._is_over_tcp)):
            self._step(write)
        return write

    def progress(self) -> bool:
        if self._in_pieces:
            return bool(self._pending) and self._step(next(iter(self._pending.values())))
        moved = False
        if self._is_over_tcp:
            while self._pending and self._step(next(iter(self._pending.values()))):
                moved = True  # the next write is posted at once
            return moved
        for write in list(self._pending.values()):
            if self._failure is None:
                moved |= self._step(write)
        return moved

    def arm(self) -> bool:
        return not self._pending

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        has_device = self._touches_device()
        pending = list(self._pending.values())
        self._unfinished += [write.request for write in pending if write.request is not None]
        if not self._is_ipc_writer:
            self._destroy_agent()
        self._abandoned += [write.memory for write in pending if write.memory is not None and write.memory.is_device]
        self._close_pending(pending)
        self._pending.clear()
        self._registered.clear()
        if self._ending is not None:
            self._ending.revoke()
            ends_at = time.monotonic() + _CLOSE_WAIT_S
            while isinstance(self._offered, HostMemory) and not self._ending.is_over and time.monotonic() < ends_at:
                time.sleep(_CLOSE_LOOK_S)
            assert self._keep is not None
            self._keep(self._ending)
        if has_device:
            self._waits.submit(self._let_go_behind_devices)
        else:
            self._let_go()

    @property
    def is_over(self) -> bool:
        return self._has_ended and (self._ending is None or self._ending.is_over)

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def uses(self, memory: LocalMemory) -> bool:
        pending = (write.memory for write in self._pending.values())
        return any(used is memory for used in (self._offered, *pending, *self._abandoned))

    def drop(self, memory: Memory) -> None:
        """Deregister a memory that nothing of this session uses, because the transport does so."""
        if self._registered.pop(id(memory), None) is not None:
            self._agent.deregister(memory, address_of(memory))

    def _step(self, write: NixlOperation) -> bool:
        """Look at the pending request, or post the next one. Return whether something moved."""
        memory = write.memory
        assert memory is not None  # it is pending
        try:
            if write.request is None and id(memory) not in self._registered:
                self._agent.register(memory, address_of(memory))
                self._registered[id(memory)] = memory
        except ConfigError as error:  # an error of this source alone: the peer and the other writes continue
            write.fail(WriteFailed(f"key {write.key} on session {self.lane}: {error}"))
            del self._pending[write.key]
            return True
        try:
            if write.request is None:
                self._post(write, memory)
            elif self._agent.is_done(write.request):
                self._agent.release(write.request)
                write.request = None
            else:
                return False
        except Exception as error:
            self._fail(f"peer disconnected or its memory is gone ({in_words(error)})")
            return True
        if write.request is None and write.next_byte == write.source_range.num_bytes:
            write.settle(write.next_byte)
            del self._pending[write.key]
        return True

    def _post(self, write: NixlOperation, memory: Memory) -> None:
        assert self._peer is not None  # it is the writer's end
        left = write.source_range.num_bytes - write.next_byte
        num_bytes = min(left, _PIECE_BYTES) if self._in_pieces else left
        address = address_of(memory) + write.source_range.begin + write.next_byte
        target_address = self._peer.address + write.target_range.begin + write.next_byte
        write.next_byte += num_bytes
        write.request = self._agent.start(
            (address, num_bytes, device_of(memory)),
            (target_address, num_bytes, self._peer.device_index),
            source_on_device=memory.is_device,
            target_on_device=self._peer.is_device,
        )

    def _fail(self, reason: str) -> None:
        """Fail the session. `close()` releases the resources that NIXL still holds."""
        for write in self._pending.values():
            if write.request is not None and write.memory is not None:
                self._unfinished.append(write.request)
                self._abandoned.append(write.memory)
        self._fail_pending(self._pending.values(), reason)
        self._pending.clear()

    def _let_go_behind_devices(self) -> None:
        """End the session on the waiting thread, after the copies that NIXL left on a device of this process."""
        if not have_devices_ended(self.lane):
            return
        if self._is_ipc_writer:
            self._drain()
            self._destroy_agent()
        self._let_go()

    def _drain(self) -> None:
        """Let NIXL record the copies that have ended. Otherwise UCX 1.23 crashes when the worker is destroyed."""
        ends_at = time.monotonic() + _DRAIN_S
        for request in self._unfinished:
            with contextlib.suppress(Exception):  # from NIXL; a failed write is not under way either
                while not self._agent.is_done(request) and time.monotonic() < ends_at:
                    time.sleep(_CLOSE_LOOK_S)

    def _destroy_agent(self) -> None:
        for request in self._unfinished:
            self._agent.release(request)
        self._unfinished.clear()
        self._agent.close()

    def _let_go(self) -> None:
        if self._line is not None:
            self._line.end()  # otherwise the target waits for the end of this process
        self._offered = None
        self._abandoned = []  # replaced, because the owner may be reading the old list
        self._has_ended = True

    def _touches_device(self) -> bool:
        memories = [self._offered, *self._registered.values()]
        return any(memory is not None and memory.is_device for memory in memories)
