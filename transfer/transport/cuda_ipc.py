"""Transport over CUDA IPC: between GPUs of one host (NVLink, PCIe), or within one GPU; one-sided.

The target exports its ring once per session, and the writer maps it for its own device. Then a write is a device copy
(`Session.write`). In mode "fused" no write is needed. The owner's gather kernel stores straight into the mapped ring
(`Session.direct`), and reads, moves and digests every byte exactly once.

The target cannot revoke a mapping. So after the target's `close()`, `Session.is_over` becomes True when the writer has reported
that its mapping is closed, or when its process is gone (`liveness`). A frozen writer keeps the quarantine. Until then the memory
stays registered and alive here.

A mapping holds the whole allocation that the ring lies in, because CUDA shares nothing smaller. So a `StagingBuffer` is an
allocation of its own, and the writer checks every range against the offered memory.

Processes may differ in CUDA_VISIBLE_DEVICES: CUDA opens handles of devices that a process does not see (since 10.1; NCCL relies
on it). So devices are named by their UUIDs.
"""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from dataclasses import replace
from typing import Any, Literal

from transfer.errors import ConfigError, PeerUnreachable
from transfer.transport.base import LocalMemory
from transfer.transport.cuda_ipc_blob import NAME, TOKEN_BYTES, Answered, Offered
from transfer.transport.cuda_ipc_driver import Cuda, CudaError, process_cuda
from transfer.transport.cuda_ipc_session import TargetMemory, TargetSession, WriterDevice, WriterSession
from transfer.transport.liveness import LivenessPipe, PeerPipe, PipeOffer
from transfer.transport.registered_memory import DeviceBuffer, memory_of
from transfer.transport.sessions import PeerTransport
from transfer.transport.waiting_thread import WaitingThread

Mode = Literal["fused", "copy"]

_CLOSE_WAIT_S = 1.0  # limit for writers of this transport and of its peers to let go, which takes milliseconds
_CLOSE_STEP_S = 0.001

log = logging.getLogger(__name__)

# Targets of this process by the offer that they answered. CUDA opens no handle in the process that made it, and none is needed.
_targets: weakref.WeakValueDictionary[bytes, TargetSession] = weakref.WeakValueDictionary()
# Sessions whose transport was closed before their writer let go. They keep the memory that the writer can still change.
_left_behind: list[TargetSession] = []


class CudaIpcTransport(PeerTransport[DeviceBuffer, WriterSession | TargetSession]):
    """Moves bytes between devices of one host.

    Args:
        mode: "fused" lets kernels store into the peer's memory (`Session.direct`); "copy" only copies. Each end may choose.
        device_index: The device of this process that copies and stores; by default that of the first registered memory. All
            memory must lie on it.
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
        """Register as `Transport.register` does, for memory of the transport's device.

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

    def offer(self) -> PipeOffer[WriterSession]:
        self._check_open()
        line, token = LivenessPipe(), secrets.token_bytes(TOKEN_BYTES)

        def open_writer(answer: bytes, line: LivenessPipe) -> WriterSession:
            return self._open_writer(Answered.from_blob(answer, token=token), line)

        return PipeOffer(line, Offered(line=line.address, token=token).to_blob(), open_writer)

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
        """Close every session. Wait up to a second until all writers have let go. Memory that a writer still maps is kept."""
        super().close()
        ends_at = time.monotonic() + _CLOSE_WAIT_S
        while not all([session.has_ended for session in list(self._sessions)]) and time.monotonic() < ends_at:
            time.sleep(_CLOSE_STEP_S)
        for session in list(self._sessions):
            if isinstance(session, WriterSession):
                if not session.has_ended:  # its thread keeps the objects that it needs
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

    def _open_writer(self, answered: Answered, line: LivenessPipe) -> WriterSession:
        """Map the offered memory. `line` notifies the target when the mapping has ended.

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
        """Drop closed sessions that are over, with the memory that they kept."""
        self._sessions = {session for session in list(self._sessions) if not session.has_ended}
        _left_behind[:] = [session for session in _left_behind if not session.is_over]
