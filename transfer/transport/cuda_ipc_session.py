"""The writer's end of a CUDA IPC session: it holds the mapping of the target's memory."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from transfer.transport.base import ByteRange, LocalMemory
from transfer.transport.cuda_ipc_driver import CopyStream, Cuda, CudaError, Mapped
from transfer.transport.liveness import LivenessPipe, PeerPipe
from transfer.transport.mapped_session import WriterSession
from transfer.transport.registered_memory import DeviceBuffer
from transfer.transport.sessions import PeerTransport
from transfer.transport.signals import SignalWriter
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


class CudaWriterSession(WriterSession[DeviceBuffer]):
    """The writer's end: copies on a stream of its own, and kernels of the owner's, into the target's memory.

    After `close()`, the transport's waiting thread waits for both to end, closes the mapping, and notifies the target.
    """

    def __init__(
        self,
        transport: PeerTransport[DeviceBuffer, Any],
        device: WriterDevice,
        memory: TargetMemory,
        line: LivenessPipe,
        peer: PeerPipe,
        signals: SignalWriter | None,
    ) -> None:
        super().__init__(transport, device.lane, num_bytes=memory.num_bytes, peer=peer)
        self.signal_writer = signals
        self._device = device
        self._memory = memory
        self._line = line
        self._stream: CopyStream = device.cuda.open_stream(device.index)
        self._has_given_direct = False
        self._has_ended = False

    def direct(self, target_range: ByteRange) -> DeviceBuffer | None:
        """Return the output of a kernel, instead of local staging memory, as `Session.direct` does.

        To gather straight into a peer's ring, pass the returned memory to the kernel as `out`, on any stream of device
        `device_index`. It has `data_ptr()` and `numel()`. The bytes lie in the ring when that stream's event has fired. The
        kernel's time is the time of the link. The result is None in mode "copy", and once the session has failed or was closed.
        """
        if not self._may_store(target_range) or not self._device.is_fused:
            return None
        self._has_given_direct = True
        return DeviceBuffer(
            owner=self._memory,
            address=self._memory.address + target_range.begin,
            num_bytes=target_range.num_bytes,
            device_index=self._device.index,
        )

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def uses(self, memory: LocalMemory) -> bool:
        self.progress()  # copies end by themselves
        return super().uses(memory)

    def _begin_copy(self, memory: DeviceBuffer, source_range: ByteRange, target_range: ByteRange) -> Any:
        source_address = memory.address + source_range.begin
        return self._stream.copy(self._memory.address + target_range.begin, source_address, source_range.num_bytes)

    def _is_done(self, mark: Any) -> bool:
        return self._stream.is_done(mark)

    def _end_mapping(self) -> None:
        self._device.waits.submit(self._let_go)  # from now on stream, copies and liveness pipe belong to that thread

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
        self.signal_writer = None
        self._has_ended = True
