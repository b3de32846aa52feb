"""Transport on NIXL: one-sided writes of host and device memory through its UCX plugin (RDMA, TCP, one host) or another one.

One agent serves one session, at both ends. So the target's `close()` destroys everything through which a write could land: its
registrations (which voids an RDMA key), its connections, its worker. The proof of death differs between three lanes:

- ``nixl/net`` (RDMA between hosts, TCP): `close()` is enough.
- ``nixl/shm`` (host memory, both ends on one host): UCX writes straight into this process (process_vm_writev), registered or
not. So
  the ring is offered under a second mapping, which closing revokes (`nixl_revocation`). That needs memory that is one shared
  mapping; other host memory is reached over ``nixl/net``.
- ``nixl/ipc`` (device memory, both ends on one host): the writer maps it (CUDA IPC), and nothing here can end that. `is_over`
  follows the writer's liveness pipe.

A write is complete when its source may be reused and it was flushed to the target. Errors of NIXL are exceptions, and final. A
dead peer raises as soon as UCX detects it. With a frozen peer, writes stay pending over TCP, and complete over shared memory
and RDMA.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any, Literal

from transfer.errors import ConfigError, LocalProtocolError, PeerUnreachable
from transfer.transport.base import LocalMemory
from transfer.transport.liveness import LivenessPipe, PeerPipe, PipeAddress, PipeOffer
from transfer.transport.nixl_library import (
    UCX_BACKEND,
    Agent,
    address_of,
    device_of,
    has_only_tcp,
    load_nixl,
    version_of,
)
from transfer.transport.nixl_metadata import Region, check_metadata
from transfer.transport.nixl_revocation import CopyWatch, DeviceEnding, Ending, HostEnding, SharedAlias
from transfer.transport.nixl_session import NixlSession
from transfer.transport.peer import (
    ProcessIdentity,
    ReadableProof,
    can_read_memory_of,
    field_of,
    pack_blob,
    unpack_blob,
    wanted_lane,
)
from transfer.transport.registered_memory import HostMemory, Memory, memory_of
from transfer.transport.sessions import PeerTransport
from transfer.transport.ucx_library import allows_shared_memory, transports_without
from transfer.transport.waiting_thread import WaitingThread

Lane = Literal["auto", "shm", "net"]

_VERSION = 1
_CLOSE_WAIT_S = 1.0
_CLOSE_LOOK_S = 0.005
_SHM, _IPC, _NET = "shm", "ipc", "net"
# Transports of UCX that write into this process's memory without its help, registered or not. NIXL's wheel has the first two.
_UNREVOCABLE = ("cma", "cuda_ipc", "knem", "xpmem")

_log = logging.getLogger(__name__)
_kept: list[Ending] = []  # memory of closed transports that writers may still reach


class NixlTransport(PeerTransport[Memory, NixlSession]):
    """Moves bytes one-sidedly between processes and hosts through NIXL.

    Args:
        lane: "auto" takes shared memory between processes of one host if it works, and the network otherwise. "shm" takes only
            shared memory, "net" never. One end's "shm" and the other's "net" are an error.
        backend: NIXL's plugin; both ends need the same one. Only "UCX" is tested, and only it has lanes.
        options: UCX options without their ``UCX_`` prefix (``{"NET_DEVICES": "mlx5_0:1"}``); they override the environment.

    Raises:
        ConfigError: NIXL or the plugin is not installed, or a setting is wrong.
    """

    def __init__(self, *, lane: Lane = "auto", backend: str = UCX_BACKEND, options: Mapping[str, str] | None = None) -> None:
        if lane not in ("auto", _SHM, _NET):
            raise ConfigError(f"lane {lane!r} of transport nixl is unknown; use auto, shm or net")
        if backend != UCX_BACKEND and (options or lane != "auto"):
            raise ConfigError(f"backend {backend} of transport nixl takes no UCX options and no lane; they are for backend UCX")
        super().__init__("nixl")
        self._lib = load_nixl()
        self.version = version_of(self._lib)
        self.backend = backend
        self.wanted_lane: str = lane
        self._options = dict(options or {})
        self._endings: list[Ending] = []  # endings of closed sessions whose writers may still write
        self.waits = WaitingThread("nixl-closing")
        """Thread on which closed sessions wait for devices."""
        self._create_agent(_NET, is_target=False).close()  # detects a missing plugin, and loads it (0.4 s)

    def register(self, buffer: Any) -> Memory:
        return self._add(memory_of(buffer))

    def deregister(self, memory: LocalMemory) -> None:
        own = self.own(memory)
        self._sweep()
        super().deregister(own)
        for session in self._sessions:
            session.drop(own)

    def offer(self) -> PipeOffer[NixlSession]:
        self._check_open()
        line = LivenessPipe()
        fields = {"line": line.address.to_wire(), "nixl": self.version, "backend": self.backend, "lane": self.wanted_lane}
        return PipeOffer(line, pack_blob(self.name, _VERSION, "offer", fields), self._open_writer)

    def accept(self, blob: bytes, memory: LocalMemory) -> tuple[NixlSession, bytes]:
        self._check_open()
        self._sweep()
        own = self.own(memory)
        fields = unpack_blob(blob, transport=self.name, version=_VERSION, role="offer")
        if field_of(fields, "backend", str) != self.backend:
            raise ConfigError(
                f"backend of transport nixl is {fields['backend'][:32]} at the writer and {self.backend} at the target; "
                "both ends need the same one"
            )
        lane, address, ending, obstacle = self._choose_lane(fields, own)
        try:
            agent = self._create_agent(lane, is_target=True)
            agent.register(own, address)
        except Exception:
            if ending is not None:
                ending.revoke()
                self._keep(ending)
            raise
        proof = ReadableProof()
        session = NixlSession(
            self,
            self.waits,
            agent,
            lane,
            offered=own,
            ending=ending,
            keep=self._keep,
            proof=proof,
            obstacle=obstacle,
        )
        self._sessions.add(session)
        answer = {
            "identity": ProcessIdentity.own().to_wire(),
            "proof": proof.to_wire(),
            "nixl": self.version,
            "lane": lane,
            "metadata": agent.metadata(),
            "address": address,
            "num_bytes": own.num_bytes,
            "is_device": own.is_device,
            "device_index": device_of(own),
        }
        return session, pack_blob(self.name, _VERSION, "answer", answer)

    def close(self) -> None:
        super().close()
        ends_at = time.monotonic() + _CLOSE_WAIT_S
        if not self.waits.join(_CLOSE_WAIT_S):
            _log.warning("transport nixl is closed while copies on a device of this process have not ended: their memory is kept")
        self._sweep()
        while any(not ending.is_over for ending in self._endings) and time.monotonic() < ends_at:
            time.sleep(_CLOSE_LOOK_S)
        self._sweep()
        reachable = [ending for ending in self._endings if not ending.is_over]
        if reachable:
            _log.warning(
                "transport nixl is closed while %d peers may still write to its device memory: it is kept, not reused",
                len(reachable),
            )
        _kept.extend(self._endings)
        self._endings = []

    def _open_writer(self, blob: bytes, line: LivenessPipe) -> NixlSession:
        """Connect to the target of an answer. The session ends `line` when it is closed.

        Raises:
            ConfigError: The answer is not of this version.
            PeerUnreachable: The target cannot be reached.
        """
        answer = unpack_blob(blob, transport=self.name, version=_VERSION, role="answer")
        lane = field_of(answer, "lane", str)
        if lane not in (_SHM, _IPC, _NET):
            raise ConfigError(f"field lane of the peer's answer is {lane[:32]!r}; expected {_SHM}, {_IPC} or {_NET}")
        target = ProcessIdentity.from_wire(answer.get("identity"))
        address, num_bytes, device_index = (field_of(answer, name, int) for name in ("address", "num_bytes", "device_index"))
        if not (0 < address < 2**64 and 0 < num_bytes < 2**64 - address and 0 <= device_index < 2**16):
            raise ConfigError(
                f"peer's answer offers {num_bytes} bytes at {address:#x} of device {device_index}, which no memory has"
            )
        is_device = field_of(answer, "is_device", bool)
        peer = Region(address=address, num_bytes=num_bytes, device_index=device_index, is_device=is_device)
        if lane == _SHM and not can_read_memory_of(target.pid, answer.get("proof")):
            if self.wanted_lane == _SHM:
                raise PeerUnreachable(
                    f"lane shm of transport nixl is not possible: process_vm_writev into target pid {target.pid} is not allowed "
                    "(ptrace scope, seccomp, user); use lane auto or net"
                )
            lane = _NET
        metadata, version = field_of(answer, "metadata", bytes), field_of(answer, "nixl", str)[:32]
        self._sweep()
        agent = self._create_agent(lane, is_target=False)
        try:
            check_metadata(
                metadata,
                peer,
                own=agent.metadata(),
                peer_version=version,
                own_version=self.version,
                is_ucx=self.backend == UCX_BACKEND,
            )
            agent.connect(metadata)
        except PeerUnreachable as error:
            agent.close()
            raise PeerUnreachable(f"{error} (NIXL {version} there, {self.version} here)") from error
        except ConfigError:
            agent.close()
            raise
        is_over_tcp = lane == _NET and has_only_tcp(self._tls(), self._net_devices())
        session = NixlSession(self, self.waits, agent, lane, peer=peer, line=line, is_over_tcp=is_over_tcp)
        self._sessions.add(session)
        return session

    def _keep(self, ending: Ending) -> None:
        """Keep the addresses of a revoked mapping reserved while its writer may still write there."""
        self._endings.append(ending)
        self._sweep()

    def check_unused(self, memory: Memory) -> None:
        super().check_unused(memory)
        if any(ending.holds(memory) for ending in self._endings):
            raise LocalProtocolError(
                f"memory of {memory.num_bytes} bytes may still be written by a peer; wait for `is_over` first"
            )

    def _choose_lane(self, offer: dict[str, Any], memory: Memory) -> tuple[str, int, Ending | None, str]:
        """Return a session's lane, the address under which `memory` is offered, and how the writer's access ends.

        The last value is the obstacle to a faster lane between processes of one machine.
        """
        wanted = wanted_lane("nixl", offer, self.wanted_lane)
        writer, address = PipeAddress.from_wire(offer.get("line")), address_of(memory)
        obstacle = "lane net is set"
        if wanted != _NET:
            obstacle, ending = self._same_host_ending(writer, memory)
            if isinstance(ending, DeviceEnding):
                return _IPC, address, ending, ""
            if ending is not None:
                return _SHM, ending.address, ending, ""
        if wanted == _SHM:
            raise PeerUnreachable(f"lane shm of transport nixl is not possible: {obstacle}; use lane auto or net")
        has_fallen_back = wanted != _NET and writer.identity.is_on_machine_of(ProcessIdentity.own())
        return _NET, address, None, obstacle if has_fallen_back else ""

    def _same_host_ending(self, writer: PipeAddress, memory: Memory) -> tuple[str, Ending | None]:
        """Return how the access of a writer on this host will end; None, with the reason, if nothing can prove its end."""
        identity, here = writer.identity, ProcessIdentity.own()
        if not identity.shares_kernel_with(here):
            return f"writer runs on host {identity.host}, target on {here.host}, or in another pid namespace", None
        try:
            line = PeerPipe(writer)
        except PeerUnreachable as error:
            return str(error), None
        if not isinstance(memory, HostMemory):
            return "", DeviceEnding(line, memory)
        if not allows_shared_memory(self._tls()):
            obstacle = f"UCX_TLS={self._tls()} leaves out cma"
        elif not CopyWatch.is_possible(line.pid):
            obstacle = f"threads of writer pid {line.pid} may not be looked at (ptrace scope, seccomp, user)"
        elif (alias := SharedAlias.of(memory)) is None:
            obstacle = "the target's memory is not one shared mapping"
        else:
            return "", HostEnding(alias, line)
        line.close()
        return obstacle, None

    def _create_agent(self, lane: str, *, is_target: bool) -> Agent:
        options = dict(self._options)
        if lane == _NET and self.backend == UCX_BACKEND:
            options["TLS"] = transports_without(self._tls(), _UNREVOCABLE)
        return Agent(self._lib, self.backend, options, is_target=is_target)

    def _tls(self) -> str:
        return self._options.get("TLS") or os.environ.get("UCX_TLS") or "all"

    def _net_devices(self) -> str:
        return self._options.get("NET_DEVICES") or os.environ.get("UCX_NET_DEVICES") or "all"

    def _sweep(self) -> None:
        self._sessions = {session for session in self._sessions if not session.has_ended}
        self._endings = [ending for ending in self._endings if not ending.release()]
