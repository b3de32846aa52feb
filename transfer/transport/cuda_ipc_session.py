"""The two ends of a CUDA IPC session: the writer holds the mapping, and the target waits for the end of the mapping."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn

from transfer.errors import LocalProtocolError
from transfer.transport.base import ByteRange, LocalMemory
from transfer.transport.cuda_ipc_driver import CopyStream, Cuda, CudaError, Mapped
from transfer.transport.liveness import LivenessPipe, PeerPipe
from transfer.transport.registered_memory import DeviceBuffer
from transfer.transport.sessions import Operation, PeerSession, PeerTransport
from transfer.transport.waiting_thread import WaitingThread

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterDevice:
    """The device of this process that copies and stores into the memory of peers.

    Args:
        lane: Of its sessions.
        is_fused: Whether kernels may store into a peer's memory.
        waits: Thread on which closed sessions wait for the device.
    """

    cuda: Cuda
    index: int
    lane: str
    is_fused: bool
    waits: WaitingThread


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """A write under way on the device. `memory` must live until the copy has ended, also if the operation has failed by then."""

    operation: Operation
    memory: DeviceBuffer
    mark: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMemory:
    """The target's memory as the writer's device sees it.

    Args:
        address: Of the first byte.
        mapped: The mapping that it lies in; None if both ends are one process, which needs none.
        keeps_alive: Memory of the same process.
    """

    address: int
    num_bytes: int
    mapped: Mapped | None
    keeps_alive: object = None


class WriterSession(PeerSession[DeviceBuffer]):
    """The writer's end: copies on a stream of its own, and kernels of the owner's, into the target's memory.

    `close()` returns at once. Afterwards the transport's waiting thread waits for both to end, closes the mapping, and notifies
    the target (`has_ended`).
    """

    def __init__(
        self,
        transport: PeerTransport[DeviceBuffer, Any],
        device: WriterDevice,
        memory: TargetMemory,
        line: LivenessPipe,
        peer: PeerPipe,
    ) -> None:
        super().__init__(transport, device.lane, peer_num_bytes=memory.num_bytes)
        self._device = device
        self._memory = memory
        self._line = line
        self._peer = peer
        self._stream: CopyStream = device.cuda.open_stream(device.index)
        self._copies: deque[_Copy] = deque()
        self._pending: dict[int, Operation] = {}
        self._has_given_direct = False
        self._has_ended = False

    @property
    def target_pid(self) -> int:
        return self._peer.pid

    @property
    def user(self) -> str:
        return "a copy"

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> Operation:
        """Write as `Session.write` does. The source's bytes must be there already: the copy waits for no other stream."""
        memory = self._checked_source(source, source_range, target_range, key)
        if key in self._pending:
            raise LocalProtocolError(f"key {key} is on its way already; keys are unique in a session")
        write = Operation(key, memory)
        self._listen()
        if self._refuses(write):
            return write
        source_address = memory.address + source_range.begin
        try:
            mark = self._stream.copy(self._memory.address + target_range.begin, source_address, source_range.num_bytes)
        except CudaError as error:
            self._fail(str(error))
            self._refuses(write)
            return write
        self._pending[key] = write
        self._copies.append(_Copy(operation=write, memory=memory, mark=mark))
        return write

    def direct(self, target_range: ByteRange) -> DeviceBuffer | None:
        """Return the output of a kernel, instead of local staging memory, as `Session.direct` does.

        To gather straight into a peer's ring, pass the returned memory to the kernel as `out`, on any stream of device
        `device_index`. It has `data_ptr()` and `numel()`. The bytes lie in the ring when that stream's event has fired. The
        kernel's time is the time of the link. The result is None in mode "copy", and once the session has failed or was closed.
        """
        self._check_target_range(target_range, "direct memory")
        self._listen()
        if not self._device.is_fused or self._is_closed or self._failure is not None:
            return None
        self._has_given_direct = True
        return DeviceBuffer(
            owner=self._memory,
            address=self._memory.address + target_range.begin,
            num_bytes=target_range.num_bytes,
            device_index=self._device.index,
        )

    def progress(self) -> bool:
        if self._is_closed:
            return False
        moved = False
        try:
            while self._copies and self._stream.is_done(self._copies[0].mark):
                done = self._copies.popleft().operation
                self._pending.pop(done.key, None)
                done.settle()
                moved = True
        except CudaError as error:
            moved |= self._fail(str(error))
        return self._listen() or moved

    def close(self) -> None:
        if self._is_closed:
            return
        self._close_pending(self._pending.values())
        self._pending.clear()
        self._peer.close()
        self._device.waits.submit(self._let_go)  # from now on stream, copies and liveness pipe belong to that thread

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def uses(self, memory: LocalMemory) -> bool:
        self.progress()
        return any(copy.memory is memory for copy in self._copies)

    def _let_go(self) -> None:
        """Wait, on the waiting thread, for all work queued before `close()`, also by kernels on the owner's streams."""
        try:
            self._stream.synchronize()
            if self._has_given_direct:
                self._device.cuda.synchronize(self._device.index)
            self._stream.close()
            if self._memory.mapped is not None:
                self._device.cuda.close(self._memory.mapped)
        except CudaError as error:
            # The line stays open, so the target keeps its quarantine for as long as this process lives.
            log.warning("%s: access to the peer's memory cannot be shown to have ended: %s", self.lane, error)
        else:
            self._line.end()
        self._copies = deque()  # replaced, because the owner may be reading the old one
        self._has_ended = True

    def _listen(self) -> bool:
        """Fail if the target has left. Return whether a pending write failed."""
        if self._is_closed or self._failure is not None or not self._peer.has_left:
            return False
        return self._fail(f"peer process {self._peer.pid} closed the session, or is gone")

    def _fail(self, reason: str) -> bool:
        """Fail the session. Copies under way continue until `close()`. Return whether a pending write failed."""
        had_pending = bool(self._pending)
        self._fail_pending(self._pending.values(), reason)
        self._pending.clear()
        return had_pending


class TargetSession(PeerSession[DeviceBuffer]):
    """The target's end: it offers memory, and after `close()` keeps the memory alive until the writer has let go of it."""

    def __init__(
        self, transport: PeerTransport[DeviceBuffer, Any], lane: str, memory: DeviceBuffer, line: LivenessPipe, peer: PeerPipe
    ) -> None:
        super().__init__(transport, lane, offered=memory)
        self._line = line
        self._peer = peer

    @property
    def memory(self) -> DeviceBuffer | None:
        """The offered memory; None when the session is over."""
        return self._offered

    @property
    def writer_pid(self) -> int:
        return self._peer.pid

    @property
    def user(self) -> str:
        return f"its writer, process {self.writer_pid},"

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> NoReturn:
        raise LocalProtocolError(f"write of key {key}: the peer offered no memory; only the writer of a session can write")

    def close(self) -> None:
        """Notify the writer. `is_over` shows whether it has closed its mapping."""
        if not self._is_closed:
            self._is_closed = True
            self._line.end()
            _ = self.is_over  # drops everything at once if the writer was first

    @property
    def is_over(self) -> bool:
        if not self._is_closed:
            return False
        if self._offered is not None and self._peer.is_over:
            self._offered = None
            self._peer.close()
            self._transport.forget(self)
        return self._offered is None

    def uses(self, memory: LocalMemory) -> bool:
        return not self.is_over and memory is self._offered
