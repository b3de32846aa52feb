"""The two ends of a CUDA IPC session: the writer, who holds the mapping, and the target, who waits for it to be let go."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from transfer.errors import LocalProtocolError, TransportClosed, TransportError, WriteFailed
from transfer.transport.base import ByteRange, LocalMemory, check_key
from transfer.transport.cuda_ipc_driver import CopyStream, Cuda, CudaError, Mapped
from transfer.transport.liveness_pipe import LivenessPipe, PeerPipe
from transfer.transport.registered_memory import DeviceBuffer, DeviceSlice, check_range, check_write
from transfer.transport.waiting_thread import WaitingThread

log = logging.getLogger(__name__)


class CudaIpcSessionOwner(Protocol):
    """What a session asks of its transport."""

    @property
    def cuda(self) -> Cuda: ...

    @property
    def lane(self) -> str: ...

    @property
    def is_fused(self) -> bool: ...

    @property
    def waits(self) -> WaitingThread: ...

    def own(self, memory: LocalMemory) -> DeviceBuffer: ...

    def forget(self, session: TargetSession) -> None: ...


class CudaIpcHandle:
    """A write or a decline; settled exactly once."""

    __slots__ = ("_failure", "_is_settled", "key")

    def __init__(self, key: int, *, is_settled: bool = False) -> None:
        self.key = key
        self._is_settled = is_settled
        self._failure: TransportError | None = None

    def settle(self) -> None:
        self._is_settled = self._is_settled or self._failure is None

    def fail(self, failure: TransportError) -> None:
        if not self._is_settled:
            self._failure = failure

    def poll(self) -> bool:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return self._is_settled


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """A write that the device is at; `memory` must live until it is through, also when its handle has failed by then."""

    handle: CudaIpcHandle
    memory: DeviceBuffer
    mark: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMemory:
    """The target's memory as the writer's device sees it.

    Args:
        address: Of the first byte.
        mapped: The mapping that it lies in; None where both ends are one process, which needs none.
        keeps_alive: Memory of the same process.
    """

    address: int
    num_bytes: int
    mapped: Mapped | None
    keeps_alive: object = None


class WriterSession:
    """The writer's end: copies on a stream of its own, and kernels of the owner's, into the target's memory.

    `close()` returns at once. Behind it, on the transport's waiting thread: both end, the mapping is closed, and the target is
    told (`has_ended`).
    """

    def __init__(self, owner: CudaIpcSessionOwner, device: int, memory: TargetMemory, line: LivenessPipe, peer: PeerPipe) -> None:
        self._owner = owner
        self._device = device
        self._memory = memory
        self._line = line
        self._peer = peer
        self._stream: CopyStream = owner.cuda.open_stream(device)
        self._copies: deque[_Copy] = deque()
        self._pending: dict[int, CudaIpcHandle] = {}
        self._has_given_direct = False
        self._failure: str | None = None
        self._closed = False
        self._has_ended = False

    @property
    def lane(self) -> str:
        return self._owner.lane

    @property
    def obstacle(self) -> str:
        return ""

    @property
    def target_pid(self) -> int:
        return self._peer.pid

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> CudaIpcHandle:
        """As `Session.write`; the source's bytes must be there already, for the copy waits for no other stream."""
        memory = self._owner.own(source)
        check_write(memory.num_bytes, source_range, target_range, key)
        check_range(self._memory.num_bytes, target_range, f"target range of key {key}")
        if key in self._pending:
            raise LocalProtocolError(f"key {key} is on its way already; keys are unique in a session")
        handle = CudaIpcHandle(key)
        self._listen()
        if self._refuses(handle):
            return handle
        source_address = memory.address + source_range.begin
        try:
            mark = self._stream.copy(self._memory.address + target_range.begin, source_address, source_range.num_bytes)
        except CudaError as error:
            self._fail(str(error))
            self._refuses(handle)
            return handle
        self._pending[key] = handle
        self._copies.append(_Copy(handle=handle, memory=memory, mark=mark))
        return handle

    def decline(self, key: int) -> CudaIpcHandle:
        check_key(key)
        handle = CudaIpcHandle(key, is_settled=not self._closed)
        if self._closed:
            self._refuses(handle)
        return handle

    def expect(self, target: LocalMemory, target_range: ByteRange, key: int) -> NoReturn:
        raise _no_expect(key)

    def direct(self, target_range: ByteRange) -> DeviceSlice | None:
        """As `Session.direct`: what a kernel takes as its output in place of local staging memory.

        Gather straight into a peer's ring: give the returned memory to the kernel as `out` (it has `data_ptr()` and `numel()`),
        on any stream of device `device_index`, and wait for that stream's event: then the bytes lie in the ring. To time the way
        over the link is to time that kernel.
        None in mode "copy", and once the session has failed or was closed.
        """
        check_range(self._memory.num_bytes, target_range, "target range of direct memory")
        self._listen()
        if not self._owner.is_fused or self._closed or self._failure is not None:
            return None
        self._has_given_direct = True
        return DeviceSlice(
            owner=self._memory,
            address=self._memory.address + target_range.begin,
            num_bytes=target_range.num_bytes,
            device_index=self._device,
        )

    def fileno(self) -> None:
        return None

    def progress(self) -> bool:
        if self._closed:
            return False
        moved = False
        try:
            while self._copies and self._stream.is_done(self._copies[0].mark):
                done = self._copies.popleft()
                self._pending.pop(done.handle.key, None)
                done.handle.settle()
                moved = True
        except CudaError as error:
            moved |= self._fail(str(error))
        return self._listen() or moved

    def arm(self) -> bool:
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for handle in self._pending.values():
            handle.fail(TransportClosed(f"session {self.lane} was closed while key {handle.key} was pending"))
        self._pending.clear()
        self._peer.close()
        self._owner.waits.submit(self._let_go)  # stream, copies and liveness pipe are that thread's from here on

    @property
    def is_over(self) -> bool:
        """A writer offers no memory: nothing can land here."""
        return self._closed

    @property
    def has_ended(self) -> bool:
        """Behind `close()`: whether nothing that the session began is waited for any more."""
        return self._has_ended

    def uses(self, memory: LocalMemory) -> bool:
        """Whether a copy out of `memory` is under way."""
        self.progress()
        return any(copy.memory is memory for copy in self._copies)

    def _let_go(self) -> None:
        """On the waiting thread, behind everything that was queued before `close()`, by kernels on the owner's streams too."""
        cuda = self._owner.cuda
        try:
            self._stream.synchronize()
            if self._has_given_direct:
                cuda.synchronize(self._device)
            self._stream.close()
            if self._memory.mapped is not None:
                cuda.close(self._memory.mapped)
        except CudaError as error:
            # Nothing is said, so the target keeps its quarantine for as long as this process lives; the line stays open for that.
            log.warning("%s: access to the peer's memory cannot be shown to have ended: %s", self.lane, error)
        else:
            self._line.end()
        self._copies = deque()  # a new one: the owner may be looking at the old one
        self._has_ended = True

    def _listen(self) -> bool:
        """Fail when the target has left; True when a pending handle failed by it."""
        if self._closed or self._failure is not None or not self._peer.has_left:
            return False
        return self._fail(f"peer process {self._peer.pid} closed the session, or is gone")

    def _refuses(self, handle: CudaIpcHandle) -> bool:
        if self._closed:
            handle.fail(TransportClosed(f"session {self.lane} is closed; key {handle.key} cannot be sent"))
        elif self._failure is not None:
            handle.fail(WriteFailed(f"key {handle.key} on session {self.lane}: {self._failure}"))
        return self._closed or self._failure is not None

    def _fail(self, reason: str) -> bool:
        """The session cannot go on; copies that the device is at run on until `close()`."""
        self._failure = reason
        had_pending = bool(self._pending)
        for handle in self._pending.values():
            handle.fail(WriteFailed(f"key {handle.key} on session {self.lane}: {reason}"))
        self._pending.clear()
        return had_pending


class TargetSession:
    """The target's end: offers memory, and after `close()` keeps it alive until the writer has let go of it."""

    def __init__(self, owner: CudaIpcSessionOwner, memory: DeviceBuffer, line: LivenessPipe, peer: PeerPipe) -> None:
        self._owner = owner
        self._memory: DeviceBuffer | None = memory
        self._line = line
        self._peer = peer
        self._closed = False

    @property
    def lane(self) -> str:
        return self._owner.lane

    @property
    def obstacle(self) -> str:
        return ""

    @property
    def memory(self) -> DeviceBuffer | None:
        """What is offered; None when the session is over."""
        return self._memory

    @property
    def writer_pid(self) -> int:
        return self._peer.pid

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> NoReturn:
        raise LocalProtocolError(f"write of key {key}: the peer offered no memory; only the writer of a session can write")

    def decline(self, key: int) -> CudaIpcHandle:
        check_key(key)
        handle = CudaIpcHandle(key, is_settled=not self._closed)
        if self._closed:
            handle.fail(TransportClosed(f"session {self.lane} is closed; key {key} cannot be sent"))
        return handle

    def expect(self, target: LocalMemory, target_range: ByteRange, key: int) -> NoReturn:
        raise _no_expect(key)

    def direct(self, target_range: ByteRange) -> None:
        return None

    def fileno(self) -> None:
        return None

    def progress(self) -> bool:
        return False

    def arm(self) -> bool:
        return True

    def close(self) -> None:
        """Tell the writer; whether it has let go is `is_over`."""
        if not self._closed:
            self._closed = True
            self._line.end()
            _ = self.is_over  # lets go of everything at once where the writer was first

    @property
    def is_over(self) -> bool:
        if not self._closed:
            return False
        if self._memory is not None and self._peer.is_over:
            self._memory = None
            self._peer.close()
            self._owner.forget(self)
        return self._memory is None

    @property
    def has_ended(self) -> bool:
        return self.is_over

    def uses(self, memory: LocalMemory) -> bool:
        """Whether the writer may still reach `memory` through this session."""
        return not self.is_over and memory is self._memory


def _no_expect(key: int) -> LocalProtocolError:
    return LocalProtocolError(f"expect of key {key}: transport cuda_ipc is one-sided and expects nothing")
