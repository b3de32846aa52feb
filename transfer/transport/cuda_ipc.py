"""Transport over CUDA IPC: between GPUs of one host (NVLink, PCIe), or within one GPU; one-sided.

The target exports its ring once per session; the writer maps it for its own device. From there on a write is a device copy
(`Session.write`), or, in mode "fused", no write at all: the owner's gather kernel stores straight into the mapped ring
(`Session.direct`), and reads, moves and digests every byte exactly once.

The target cannot take a mapping back. So `close()` of the target is not the end: `Session.is_over` becomes True when the writer
has said that its mapping is closed, or when its process is gone (`liveness`). A frozen writer keeps the quarantine up. Until
then the memory stays registered and alive here.

What a mapping holds is the whole allocation that the ring lies in: CUDA shares nothing smaller. So a `StagingBuffer` is an
allocation of its own; and the writer checks every range against what was offered.

Processes may differ in CUDA_VISIBLE_DEVICES: CUDA opens handles of devices that a process does not see (since 10.1; NCCL relies
on it). Devices are therefore named by their UUIDs.
"""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from dataclasses import replace
from typing import Any, Literal

from transfer.errors import ConfigError, PeerUnreachable, TransportClosed
from transfer.transport.base import LocalMemory
from transfer.transport.cuda_ipc_blob import NAME, TOKEN_BYTES, Answered, Offered
from transfer.transport.cuda_ipc_driver import Cuda, CudaError, process_cuda
from transfer.transport.cuda_ipc_session import TargetMemory, TargetSession, WriterDevice, WriterSession
from transfer.transport.liveness import LivenessPipe, PeerPipe
from transfer.transport.registered_memory import DeviceBuffer, memory_of
from transfer.transport.sessions import PeerTransport
from transfer.transport.waiting_thread import WaitingThread

Mode = Literal["fused", "copy"]

_CLOSE_WAIT_S = 1.0  # of a transport, for writers to let go, its own and its peers'; it takes milliseconds
_CLOSE_STEP_S = 0.001

log = logging.getLogger(__name__)

# Targets of this process by the offer that they answered: CUDA opens no handle in the process that made it, and none is needed.
_targets: weakref.WeakValueDictionary[bytes, TargetSession] = weakref.WeakValueDictionary()
# Sessions whose transport was closed before their writer let go. They keep the memory that the writer may still write into.
_left_behind: list[TargetSession] = []


class CudaIpcOffer:
    """The writer's half-open session."""

    def __init__(self, transport: CudaIpcTransport) -> None:
        self._transport = transport
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._line: LivenessPipe | None = LivenessPipe()
        self.blob = Offered(line=self._line.address, token=self._token).to_blob()

    def complete(self, answer: bytes) -> WriterSession:
        if self._line is None:
            raise TransportClosed("this offer was completed or closed before")
        session = self._transport.open_writer(Answered.from_blob(answer, token=self._token), self._line)
        self._line = None
        return session

    def close(self) -> None:
        if self._line is not None:
            self._line.end()
            self._line = None


class CudaIpcTransport(PeerTransport[DeviceBuffer, WriterSession | TargetSession]):
    """Moves bytes between devices of one host.

    Args:
        mode: "fused" lets kernels store into the peer's memory (`Session.direct`); "copy" only copies. Each end may choose.
        device_index: The device of this process that copies and stores, as this process counts them. By default the one that the
            first registered memory lies on. All memory must lie on it.
        cuda: By default the process's own.

    Raises:
        ConfigError: cuda-bindings, the driver or a device is missing, or a setting is wrong.
    """

    def __init__(self, *, mode: Mode = "fused", device_index: int | None = None, cuda: Cuda | None = None) -> None:
        if mode not in ("fused", "copy"):
            raise ConfigError(f"mode {mode!r} of transport cuda_ipc is unknown; use fused or copy")
        super().__init__(NAME)
        self._cuda: Cuda = process_cuda() if cuda is None else cuda
        self._is_fused = mode == "fused"
        self._lane = f"{NAME}/{mode}"
        self._device = device_index
        self._waits = WaitingThread(f"{NAME}-closing")

    def register(self, buffer: Any) -> DeviceBuffer:
        """As `Transport.register`, for memory of the transport's device.

        Raises:
            ConfigError: It is host memory, or of another device.
        """
        found = memory_of(buffer)
        device = self._cuda.device_of(found.address) if isinstance(found, DeviceBuffer) else None
        if device is None or not isinstance(found, DeviceBuffer):
            raise ConfigError(
                f"transport cuda_ipc moves memory of a GPU; this {type(buffer).__name__} is host memory: put it on device cuda, "
                "or choose transport: ucx"
            )
        if self._device is None:
            self._device = device
        if device != self._device:
            raise ConfigError(
                f"memory lies on device {device} ({self._cuda.uuid_of(device)}), and this cuda_ipc transport serves device "
                f"{self._device} ({self._cuda.uuid_of(self._device)}): use one transport for each device"
            )
        return self._add(replace(found, device_index=device))

    def offer(self) -> CudaIpcOffer:
        self._check_open()
        return CudaIpcOffer(self)

    def accept(self, blob: bytes, memory: LocalMemory) -> tuple[TargetSession, bytes]:
        self._check_open()
        own = self.own(memory)
        offered = Offered.from_blob(blob)
        self._let_go()
        exported = self._cuda.export(own.device_index, own.address)
        device = self._cuda.uuid_of(own.device_index)
        line = LivenessPipe()
        try:
            peer = PeerPipe(offered.line)
        except BaseException:
            line.end()
            raise
        session = TargetSession(self, self._lane, own, line, peer)
        self._sessions.add(session)
        _targets[offered.token] = session
        answered = Answered(
            line=line.address,
            token=offered.token,
            device=device,
            handle=exported.handle,
            offset=exported.offset,
            num_bytes=own.num_bytes,
        )
        return session, answered.to_blob()

    def close(self) -> None:
        """Close every session. Waits up to a second for writers, its own and its peers', to let go; what they hold is kept."""
        self._is_closed = True
        for session in list(self._sessions):
            session.close()
        ends_at = time.monotonic() + _CLOSE_WAIT_S
        while not all([session.has_ended for session in list(self._sessions)]) and time.monotonic() < ends_at:
            time.sleep(_CLOSE_STEP_S)
        for session in list(self._sessions):
            if isinstance(session, WriterSession):
                if not session.has_ended:  # its thread keeps what it needs
                    log.warning(
                        "%s: copies or kernels into memory of process %d have not ended; its mapping stays open until they have, "
                        "or this process has ended",
                        self._lane,
                        session.target_pid,
                    )
            else:
                log.warning(
                    "%s: writer process %d has not closed its mapping; %d bytes stay allocated until it has, or has ended",
                    self._lane,
                    session.writer_pid,
                    0 if session.memory is None else session.memory.num_bytes,
                )
                _left_behind.append(session)
        self._sessions.clear()
        self._memories.clear()

    def open_writer(self, answered: Answered, line: LivenessPipe) -> WriterSession:
        """Map what the target offered; `line` says to it when that has ended.

        Raises:
            PeerUnreachable: The two devices, or the two processes, have no way to each other.
            ConfigError: The answer does not fit the memory that it names.
        """
        self._check_open()
        self._let_go()
        if self._device is None:
            raise ConfigError(
                "transport cuda_ipc does not know its device: register memory before attaching, or give it a device_index"
            )
        peer = PeerPipe(answered.line)
        memory: TargetMemory | None = None
        try:
            memory = self._target_memory(answered, self._device)
            device = WriterDevice(
                cuda=self._cuda, index=self._device, lane=self._lane, is_fused=self._is_fused, waits=self._waits
            )
            session = WriterSession(self, device, memory, line, peer)
        except BaseException:
            if memory is not None and memory.mapped is not None:
                self._cuda.close(memory.mapped)
            peer.close()
            raise
        self._sessions.add(session)
        return session

    def _target_memory(self, answered: Answered, device: int) -> TargetMemory:
        peer_device = self._cuda.device_with(answered.device)
        if peer_device is not None and not self._cuda.can_access(device, peer_device):
            raise PeerUnreachable(
                f"device {self._cuda.uuid_of(device)} cannot reach the peer's device {answered.device}: the host gives them no "
                "peer access (see nvidia-smi topo -p2p w); choose transport: ucx or nixl"
            )
        session = _targets.get(answered.token)
        if session is not None:
            return self._memory_of_this_process(session, device)
        try:
            mapped = self._cuda.open(device, answered.handle)
        except CudaError as error:
            raise PeerUnreachable(
                f"device {self._cuda.uuid_of(device)} cannot map memory of the peer's device {answered.device} ({error}): they "
                "need peer access, and containers one IPC namespace (docker --ipc=host); or choose transport: ucx or nixl"
            ) from error
        if answered.offset + answered.num_bytes > mapped.num_bytes:
            self._cuda.close(mapped)
            raise ConfigError(
                f"the peer offers bytes [{answered.offset}, {answered.offset + answered.num_bytes}) of an allocation that has "
                f"{mapped.num_bytes}"
            )
        return TargetMemory(address=mapped.address + answered.offset, num_bytes=answered.num_bytes, mapped=mapped)

    def _memory_of_this_process(self, session: TargetSession, device: int) -> TargetMemory:
        memory = session.memory
        if memory is None:
            raise PeerUnreachable("the target closed the session before the writer completed it")
        self._cuda.enable_access(device, memory.device_index)
        return TargetMemory(address=memory.address, num_bytes=memory.num_bytes, mapped=None, keeps_alive=memory)

    def _let_go(self) -> None:
        """Of what closed sessions kept, where they are over and nobody asked."""
        self._sessions = {session for session in list(self._sessions) if not session.has_ended}
        _left_behind[:] = [session for session in _left_behind if not session.is_over]
