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
import os
from dataclasses import replace
from typing import Any, Literal

from transfer.errors import ConfigError, PeerUnreachable
from transfer.transport.cuda_ipc_blob import NAME, Answered
from transfer.transport.cuda_ipc_driver import Cuda, CudaError, process_cuda
from transfer.transport.cuda_ipc_session import CudaWriterSession, TargetMemory, WriterDevice
from transfer.transport.liveness import LivenessPipe, PeerPipe
from transfer.transport.mapped_blob import MappedPlace
from transfer.transport.mapped_session import TargetSession
from transfer.transport.mapped_transport import MappedTransport, target_of
from transfer.transport.registered_memory import DeviceBuffer, memory_of
from transfer.transport.shared_memory import map_shared, open_region, region_of, shared_memory
from transfer.transport.signals import NUM_BYTES as SIGNAL_BYTES
from transfer.transport.signals import SignalReader, SignalWriter
from transfer.transport.waiting_thread import WaitingThread

log = logging.getLogger(__name__)

Mode = Literal["fused", "copy"]


class CudaIpcTransport(MappedTransport[DeviceBuffer]):
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
        super().__init__(NAME, lane=f"{NAME}/{mode}")
        self._cuda: Cuda = process_cuda() if cuda is None else cuda
        self._is_fused = self._has_signals = mode == "fused"
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

    def _open_signals(self, memory: DeviceBuffer) -> SignalReader | None:
        try:
            shared = shared_memory(SIGNAL_BYTES)
        except OSError as error:
            log.info("%s: signals cannot be used: %s", self._lane, error)
            return None
        shared[:] = bytes(SIGNAL_BYTES)  # so that its pages exist, as the writer requires
        words = self._cuda.open_words(memory.device_index, shared, self._waits.submit)
        return None if words is None else SignalReader(words)

    def _answer(self, memory: DeviceBuffer, line: LivenessPipe, token: bytes, signals: SignalReader | None) -> bytes:
        exported = self._cuda.export(memory.device_index, memory.address)
        place = MappedPlace(line=line.address, token=token, offset=exported.offset, num_bytes=memory.num_bytes)
        region = None if signals is None else region_of(signals.words.address, SIGNAL_BYTES)
        answer = Answered(
            place=place,
            device=self._cuda.uuid_of(memory.device_index),
            handle=exported.handle,
            signals=None if region is None else (region.fd, region.inode),
        ).to_blob()
        if region is not None:  # otherwise the writer does not read the signature
            line.sign(answer)
        return answer

    def _map_signals(self, answered: Answered, answer: bytes, peer: PeerPipe, device: int) -> SignalWriter | None:
        """Return the writer's end of the signals that the target offers. Without them, messages do their work.

        Raises:
            PeerUnreachable: The answer was not written by the process that it names.
        """
        if answered.signals is None:
            return None
        peer.check_signed(answer)  # a peer anywhere could name memory of another process of this user
        fd, inode = answered.signals
        try:
            opened = open_region(peer.pid, fd, inode=inode, num_bytes=SIGNAL_BYTES)
            try:
                memory = map_shared(opened, SIGNAL_BYTES, lambda: None)
            finally:
                os.close(opened)
        except (OSError, ConfigError, PeerUnreachable) as error:
            log.info("%s: signals cannot be used: %s", self._lane, error)
            return None
        words = self._cuda.open_words(device, memory, self._waits.submit)
        return None if words is None else SignalWriter(words)

    def _open_writer(self, answer: bytes, token: bytes, line: LivenessPipe) -> CudaWriterSession:
        answered = Answered.from_blob(answer, token=token)
        if self._device is None:
            raise ConfigError(
                "transport cuda_ipc does not know its device: register memory before attaching, or give it a device_index"
            )
        peer = PeerPipe(answered.place.line)
        memory: TargetMemory | None = None
        try:
            signals = self._map_signals(answered, answer, peer, self._device)
            memory = self._target_memory(answered, self._device)
            device = WriterDevice(
                cuda=self._cuda, index=self._device, lane=self._lane, is_fused=self._is_fused, waits=self._waits
            )
            return CudaWriterSession(self, device, memory, line, peer, signals)
        except BaseException:
            if memory is not None and memory.mapped is not None:
                self._cuda.close(memory.mapped)
            peer.close()
            raise

    def _target_memory(self, answered: Answered, device: int) -> TargetMemory:
        peer_device = self._cuda.device_with(answered.device)
        if peer_device is not None and not self._cuda.can_access(device, peer_device):
            raise PeerUnreachable(
                f"device {self._cuda.uuid_of(device)} cannot reach the peer's device {answered.device}: the host provides no "
                "peer access (see nvidia-smi topo -p2p w); choose transport: ucx or nixl"
            )
        session = target_of(answered.place.token)  # CUDA opens no handle in the process that made it, and none is needed
        if session is not None:
            return self._memory_of_this_process(session, device)
        try:
            mapped = self._cuda.open(device, answered.handle)
        except CudaError as error:
            raise PeerUnreachable(
                f"device {self._cuda.uuid_of(device)} cannot map memory of the peer's device {answered.device} ({error}): they "
                "need peer access, and containers one IPC namespace (docker --ipc=host); or choose transport: ucx or nixl"
            ) from error
        offset, num_bytes = answered.place.offset, answered.place.num_bytes
        if offset + num_bytes > mapped.num_bytes:
            self._cuda.close(mapped)
            raise ConfigError(
                f"the peer offers bytes [{offset}, {offset + num_bytes}) of an allocation that has {mapped.num_bytes}"
            )
        return TargetMemory(address=mapped.address + offset, num_bytes=num_bytes, mapped=mapped)

    def _memory_of_this_process(self, session: TargetSession[DeviceBuffer], device: int) -> TargetMemory:
        memory = session.memory
        if memory is None:
            raise PeerUnreachable("the target closed the session before the writer completed it")
        self._cuda.enable_access(device, memory.device_index)
        return TargetMemory(address=memory.address, num_bytes=memory.num_bytes, mapped=None, keeps_alive=memory)
