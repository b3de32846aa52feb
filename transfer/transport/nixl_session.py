"""One attached peer over NIXL: writes, their handles, and the end of it all.

Between processes of one host NIXL's UCX copies in the calling thread, and returns only when all of a request is done. So a bulk
write goes in pieces there, one for each `progress()`; on every other lane it is one request from the start. Where UCX has
only TCP, it gets one write at a time: UCX 1.23 may kill the process when a peer leaves, and does so far more often with several.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any, Protocol

from transfer.errors import ConfigError, LocalProtocolError, TransportClosed, TransportError, WriteFailed
from transfer.transport.base import ByteRange, LocalMemory, check_key
from transfer.transport.liveness_pipe import LivenessPipe
from transfer.transport.nixl_library import Agent, address_of, device_of, in_words
from transfer.transport.nixl_revocation import Ending
from transfer.transport.peer import ReadableProof
from transfer.transport.registered_memory import HostMemory, Memory, check_range, check_write, wait_for_devices
from transfer.transport.waiting_thread import WaitingThread

# 1 to 2 ms of copying. The interpreter starts each piece with cold caches (0.1 ms): pieces of 4 MiB took 12 % longer for 64 MiB.
_PIECE_BYTES = 16 * 2**20
_INLINE_BYTES = 64 * 2**10  # below this a copy takes less than a turn of the loop
_CLOSE_WAIT_S = 0.02
_CLOSE_LOOK_S = 0.0005
_DRAIN_S = 1.0
"""How long a closed session waits for NIXL to notice that the copies on its device have ended, off the owner's loop."""

_log = logging.getLogger(__name__)


class NixlHandle:
    """A write or a decline on its way; keeps the source alive until it is settled."""

    __slots__ = ("_failure", "_request", "_settled", "key", "memory", "next_byte", "source_range", "target_range")

    def __init__(self, key: int, memory: Memory | None, source_range: ByteRange | None, target_range: ByteRange | None) -> None:
        self.key = key
        self.memory = memory
        self.source_range = source_range
        self.target_range = target_range
        self.next_byte = 0
        self._request: Any = None
        self._settled = False
        self._failure: TransportError | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that were written, once it is settled."""
        return self.target_range.num_bytes if self._settled and self.target_range is not None else 0

    @property
    def request(self) -> Any:
        """NIXL's pending request, or None."""
        return self._request

    @request.setter
    def request(self, request: Any) -> None:
        self._request = request

    @property
    def is_posted(self) -> bool:
        """Whether all its bytes have been given to NIXL."""
        return self.source_range is None or self.next_byte == self.source_range.num_bytes

    def settle(self) -> None:
        self._settled = True
        self.memory = self._request = None

    def fail(self, failure: TransportError) -> None:
        if not self._settled and self._failure is None:
            self._failure = failure
            self.memory = self._request = None

    def poll(self) -> bool:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return self._settled


class NixlSessionOwner(Protocol):
    """What a session asks of its transport."""

    @property
    def waits(self) -> WaitingThread: ...

    def own(self, memory: LocalMemory) -> Memory: ...

    def keep(self, ending: Ending) -> None: ...


class PeerMemory:
    """The memory that the target offered, as the writer's NIXL addresses it."""

    __slots__ = ("address", "device_index", "is_device", "num_bytes")

    def __init__(self, *, address: int, num_bytes: int, device_index: int, is_device: bool) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.device_index = device_index
        self.is_device = is_device


class NixlSession:
    """One attached peer over NIXL: one agent.

    Args:
        owner: The transport.
        agent: Its own agent, closed with it.
        lane: "shm", "ipc" or "net".
        peer: The writer's end: what it may write to.
        offered: The target's end: what it offers.
        ending: The target's end, where closing the agent alone does not end the writer's access.
        proof: The target's end: what the writer reads to see that it may write here directly.
        line: The writer's end: ended when this process cannot write any more.
        is_over_tcp: Whether NIXL may have no more than one write of this session at once.
    """

    def __init__(
        self,
        owner: NixlSessionOwner,
        agent: Agent,
        lane: str,
        *,
        peer: PeerMemory | None = None,
        offered: Memory | None = None,
        ending: Ending | None = None,
        proof: ReadableProof | None = None,
        line: LivenessPipe | None = None,
        is_over_tcp: bool = False,
        obstacle: str = "",
    ) -> None:
        self._owner = owner
        self._agent: Agent | None = agent
        self._lane = lane
        self._obstacle = obstacle
        self._peer = peer
        self._offered = offered
        self._ending = ending
        self.proof = proof
        self._line = line
        self._in_pieces = lane == "shm"
        self._is_over_tcp = is_over_tcp
        self._pending: dict[int, NixlHandle] = {}
        self._registered: dict[int, Memory] = {}
        self._abandoned: list[Memory] = []  # sources of failed writes that NIXL may still be at
        self._unfinished: list[Any] = []  # NIXL's requests of those
        self._closing: Agent | None = None  # a writer's agent that waits for its device's copies
        self._failure: str | None = None
        self._has_ended = False

    @property
    def lane(self) -> str:
        return f"nixl/{self._lane}"

    @property
    def obstacle(self) -> str:
        return self._obstacle

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> NixlHandle:
        memory = self._owner.own(source)
        check_write(memory.num_bytes, source_range, target_range, key)
        if self._peer is None:
            raise LocalProtocolError(f"write of key {key}: the peer offered no memory; only the writer of a session can write")
        check_range(self._peer.num_bytes, target_range, f"target range of key {key}")
        if key in self._pending:
            raise LocalProtocolError(f"key {key} is on its way already; keys are unique in a session")
        handle = NixlHandle(key, memory, source_range, target_range)
        if self._refuses(handle):
            return handle
        is_first = not self._pending
        self._pending[key] = handle
        is_bulk = self._in_pieces and source_range.num_bytes > _INLINE_BYTES
        if not is_bulk and (is_first or not (self._in_pieces or self._is_over_tcp)):
            self._step(handle, self._peer)
        return handle

    def decline(self, key: int) -> NixlHandle:
        check_key(key)
        handle = NixlHandle(key, None, None, None)
        if not self._refuses(handle):
            handle.settle()
        return handle

    def expect(self, target: LocalMemory, target_range: ByteRange, key: int) -> NixlHandle:
        raise LocalProtocolError(f"expect of key {key}: transport nixl is one-sided and expects nothing")

    def direct(self, target_range: ByteRange) -> None:
        return None

    def fileno(self) -> int | None:
        return None

    def progress(self) -> bool:
        if self._agent is None or self._peer is None or not self._pending:
            return False
        if self._in_pieces:
            return self._step(next(iter(self._pending.values())), self._peer)
        moved = False
        if self._is_over_tcp:
            while self._pending and self._step(next(iter(self._pending.values())), self._peer):
                moved = True  # and the next one is posted at once
            return moved
        for handle in list(self._pending.values()):
            moved |= self._step(handle, self._peer)
            if self._failure is not None:
                break
        return moved

    def arm(self) -> bool:
        return not self._pending

    def close(self) -> None:
        if self._agent is None:
            return
        agent, self._agent = self._agent, None
        has_device = self._touches_device()
        self._unfinished += [handle.request for handle in self._pending.values() if handle.request is not None]
        if self._lane == "ipc" and self._peer is not None:
            self._closing = agent
        else:
            self._destroy(agent)
        for handle in self._pending.values():
            if handle.memory is not None and handle.memory.is_device:
                self._abandoned.append(handle.memory)
            handle.fail(TransportClosed(f"session {self.lane} was closed while key {handle.key} was pending"))
        self._pending.clear()
        self._registered.clear()
        if self._ending is not None:
            self._ending.revoke()
            ends_at = time.monotonic() + _CLOSE_WAIT_S
            while isinstance(self._offered, HostMemory) and not self._ending.is_over and time.monotonic() < ends_at:
                time.sleep(_CLOSE_LOOK_S)
            self._owner.keep(self._ending)
        if has_device:
            self._owner.waits.submit(self._let_go_behind_devices)
        else:
            self._let_go()

    @property
    def is_over(self) -> bool:
        return self._has_ended and (self._ending is None or self._ending.is_over)

    @property
    def has_ended(self) -> bool:
        """Behind `close()`: whether nothing that this end began can run any more."""
        return self._has_ended

    def uses(self, memory: LocalMemory) -> bool:
        """Whether an unfinished write, or the offer of this session, needs `memory`."""
        pending = (handle.memory for handle in self._pending.values())
        return any(used is memory for used in (self._offered, *pending, *self._abandoned))

    def drop(self, memory: Memory) -> None:
        """`memory` is no longer registered with the transport; nothing of this session uses it."""
        if self._registered.pop(id(memory), None) is not None and self._agent is not None:
            self._agent.deregister(memory, address_of(memory))

    def _step(self, handle: NixlHandle, peer: PeerMemory) -> bool:
        """Look at the pending request, or post the next one; True when something moved."""
        assert self._agent is not None and handle.memory is not None
        assert handle.source_range is not None and handle.target_range is not None  # it is a write
        try:
            if handle.request is None:
                self._register(handle.memory)
        except ConfigError as error:  # of this end, and of this source: the peer and other writes have no part in it
            handle.fail(WriteFailed(f"key {handle.key} on session {self.lane}: {error}"))
            del self._pending[handle.key]
            return True
        try:
            if handle.request is not None:
                if not self._agent.is_done(handle.request):
                    return False
                self._agent.release(handle.request)
                handle.request = None
            else:
                self._post(handle, handle.memory, handle.source_range, handle.target_range, peer)
        except Exception as error:
            self._fail(f"peer disconnected or its memory is gone ({in_words(error)})")
            return True
        if handle.request is None and handle.is_posted:
            handle.settle()
            del self._pending[handle.key]
        return True

    def _register(self, memory: Memory) -> None:
        assert self._agent is not None
        if id(memory) not in self._registered:
            self._agent.register(memory, address_of(memory))
            self._registered[id(memory)] = memory

    def _post(self, handle: NixlHandle, memory: Memory, source: ByteRange, target: ByteRange, peer: PeerMemory) -> None:
        assert self._agent is not None
        left = source.num_bytes - handle.next_byte
        num_bytes = min(left, _PIECE_BYTES) if self._in_pieces else left
        address = address_of(memory) + source.begin + handle.next_byte
        target_address = peer.address + target.begin + handle.next_byte
        handle.next_byte += num_bytes
        handle.request = self._agent.start(
            (address, num_bytes, device_of(memory)),
            (target_address, num_bytes, peer.device_index),
            source_on_device=memory.is_device,
            target_on_device=peer.is_device,
        )

    def _refuses(self, handle: NixlHandle) -> bool:
        if self._agent is None:
            handle.fail(TransportClosed(f"session {self.lane} is closed; key {handle.key} cannot be used"))
        elif self._failure is not None:
            handle.fail(WriteFailed(f"key {handle.key} on session {self.lane}: {self._failure}"))
        return self._agent is None or self._failure is not None

    def _fail(self, reason: str) -> None:
        """Mark the session as failed. `close()` releases the resources that NIXL still holds."""
        self._failure = reason
        for handle in self._pending.values():
            if handle.request is not None and handle.memory is not None:
                self._unfinished.append(handle.request)
                self._abandoned.append(handle.memory)
            handle.fail(WriteFailed(f"key {handle.key} on session {self.lane}: {reason}"))
        self._pending.clear()

    def _let_go_behind_devices(self) -> None:
        """On the waiting thread: behind copies that NIXL left on a device of this process."""
        try:
            wait_for_devices()
        except Exception as error:  # torch's and ours: an error of a device stays, so the copies cannot be ruled out, ever
            _log.warning("%s: copies on a device of this process cannot be shown to have ended: %s", self.lane, in_words(error))
            return
        if self._closing is not None:
            self._drain(self._closing)
            self._destroy(self._closing)
            self._closing = None
        self._let_go()

    def _drain(self, agent: Agent) -> None:
        """Let NIXL record the copies that have ended. Otherwise UCX 1.23 crashes when the worker is destroyed."""
        ends_at = time.monotonic() + _DRAIN_S
        for request in self._unfinished:
            with contextlib.suppress(Exception):  # from NIXL; a failed write is not under way either
                while not agent.is_done(request) and time.monotonic() < ends_at:
                    time.sleep(_CLOSE_LOOK_S)

    def _destroy(self, agent: Agent) -> None:
        for request in self._unfinished:
            agent.release(request)
        self._unfinished.clear()
        agent.close()

    def _let_go(self) -> None:
        if self._line is not None:
            self._line.end()  # without that the target waits for the end of this process
        self._offered = None
        self._abandoned = []  # a new one: the owner may be looking at the old one
        self._has_ended = True

    def _touches_device(self) -> bool:
        memories = [self._offered, *self._registered.values()]
        return any(memory is not None and memory.is_device for memory in memories)
