"""Transport on UCX (RDMA, shared memory, TCP) through UCXX's low-level API; two-sided.

For a write, the writer tag-sends the source range under its key. The target posts nothing in advance. It looks at each message
that has arrived (tag, length). It starts the receive, straight into the granted range, only when the key is expected and the
length is right. So no posted receive exists that could be neither cancelled nor trusted. A decline, a wrong length or an unknown
key never touches the range. Above the rendezvous threshold, no payload travels before the receive.

One UCX worker serves one session. UCX cannot cancel a request that has begun, but `close()` destroys the worker, and a destroyed
worker moves nothing. This takes 5 ms, and the context stays.

Lanes: ``ucx/shm`` is cross-memory attach (one copy, memcpy speed) between processes of one host. It is used only if the target
has proven that it can read the writer's memory. ``ucx/net`` is everything else (RDMA between hosts, TCP).

The structure of a peer's address is checked before UCX sees it (`ucx_address`), because UCX follows it unchecked, and a broken
one aborts the process. A hostile address with a correct structure still reaches UCX's parser.

UCX always reports peer failure (endpoint error handling is on). With it off, UCX aborts the *surviving* process when a
cross-memory read fails because the writer was killed. This was seen: exit status 134, process_vm_readv: No such process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from transfer.errors import ConfigError, PeerUnreachable, TransportClosed
from transfer.transport.base import LocalMemory
from transfer.transport.peer import (
    ProcessIdentity,
    ReadableProof,
    can_read_memory_of,
    field_of,
    pack_blob,
    unpack_blob,
    wanted_lane,
)
from transfer.transport.registered_memory import Memory, memory_of
from transfer.transport.sessions import PeerTransport
from transfer.transport.ucx_address import AddressCheck
from transfer.transport.ucx_library import Ucx, allows_shared_memory, in_words, load_ucxx, transport_error, transports_without
from transfer.transport.ucx_session import UcxSession

Lane = Literal["auto", "shm", "net"]

_VERSION = 1
_SHM, _NET = "shm", "net"
# UCX's TCP segments of 8 KiB give 1.0 GB/s on loopback, these 2.7 (64 MB, two cores).
_OPTIONS = {"TCP_TX_SEG_SIZE": "64K", "TCP_RX_SEG_SIZE": "256K"}
# On the shared-memory lane only the receiver copies, in its own progress(): a put of the peer could land after close(). The
# offering worker is made before the lane is known, and keeps UCX's own choice, which is get, too. It only receives the probe's
# answers, in the probe's scratch memory.
_SHM_OPTIONS = {"RNDV_SCHEME": "get_zcopy"}
# Without its registration cache, UCX before 1.22.0 ends the process when a peer leaves in the middle of a write. The cause is a
# null pointer in ucp_request_memh_invalidate (openucx/ucx pull request 11485). The default "try" continues without a cache in two
# cases: UCX_MEM_EVENTS=n is set, or a second UCX in the process took over the memory hooks. "y" fails then.
_CACHE = {"RCACHE_ENABLE": "y"}
_NO_CACHE_HINT = (
    "; its registration cache needs its memory hooks: take UCX_MEM_EVENTS and UCX_MEM_MMAP_HOOK_MODE out of the environment, and "
    "let no other UCX hook in this process"
)


class UcxOffer:
    """The writer's half-open UCX session."""

    def __init__(self, transport: UcxTransport) -> None:
        self._transport = transport
        self._proof = ReadableProof()
        self._worker: Any = transport.create_worker("offer")
        fields = {
            "identity": ProcessIdentity.own().to_wire(),
            "address": self._worker.address.tobytes(),
            "ucx": transport.ucx.version,
            "proof": self._proof.to_wire(),
            "shared_memory": transport.allows_shared_memory,
            "lane": transport.wanted_lane,
        }
        self.blob = pack_blob(transport.name, _VERSION, "offer", fields)

    def complete(self, answer: bytes) -> UcxSession:
        if self._worker is None:
            raise TransportClosed("this offer was completed or closed before")
        fields = unpack_blob(answer, transport=self._transport.name, version=_VERSION, role="answer")
        lane, address = field_of(fields, "lane", str), field_of(fields, "address", bytes)
        if lane not in (_SHM, _NET):
            raise ConfigError(f"field lane of the peer's answer is {lane[:32]!r}; expected {_SHM} or {_NET}")
        num_bytes = field_of(fields, "num_bytes", int)
        self._transport.check_address(self._worker, address, field_of(fields, "ucx", str))
        session = self._transport.open_session(self._worker, address, lane, peer_num_bytes=num_bytes)
        self._worker = None
        return session

    def close(self) -> None:
        self._worker = None


class UcxTransport(PeerTransport[Memory, UcxSession]):
    """Moves bytes between processes and hosts over whatever UCX finds there.

    Args:
        lane: "auto" takes shared memory if it is proven to work, and the network otherwise. "shm" takes only shared memory, "net"
            never. One end's "shm" and the other's "net" are an error.
        options: UCX options without their ``UCX_`` prefix (``{"TLS": "rc,sm"}``). They override the environment, which overrides
            the defaults of this module. Do not set ``RNDV_SCHEME`` to a put scheme: the proof of death on one host needs get.

    Raises:
        ConfigError: ucxx is not installed or too old, or a setting is wrong.
    """

    def __init__(self, *, lane: Lane = "auto", options: Mapping[str, str] | None = None) -> None:
        if lane not in ("auto", _SHM, _NET):
            raise ConfigError(f"lane {lane!r} of transport ucx is unknown; use auto, shm or net")
        super().__init__("ucx", is_one_sided=False)
        self.ucx = Ucx(load_ucxx())
        self.wanted_lane: str = lane
        self._options = dict(options or {})
        self._contexts: dict[str, Any] = {}
        self.allows_shared_memory = allows_shared_memory(self._context("offer").config.get("TLS", "all"))

    def register(self, buffer: Any) -> Memory:
        memory = memory_of(buffer)
        if memory.is_device:
            self.check_devices()
        return self._add(memory)

    def check_devices(self) -> None:
        if not self._context("offer").cuda_support:
            raise ConfigError("device memory needs a UCX with CUDA support, and this one has none: install kvferry[ucx-cu13]")

    def offer(self) -> UcxOffer:
        self._check_open()
        return UcxOffer(self)

    def accept(self, blob: bytes, memory: LocalMemory) -> tuple[UcxSession, bytes]:
        self._check_open()
        own = self.own(memory)
        fields = unpack_blob(blob, transport=self.name, version=_VERSION, role="offer")
        lane, obstacle = self._choose_lane(fields)
        worker = self.create_worker(lane)
        address = field_of(fields, "address", bytes)
        self.check_address(worker, address, field_of(fields, "ucx", str))
        session = self.open_session(worker, address, lane, offered=own, obstacle=obstacle)
        answer = {"address": worker.address.tobytes(), "ucx": self.ucx.version, "lane": lane, "num_bytes": own.num_bytes}
        return session, pack_blob(self.name, _VERSION, "answer", answer)

    def close(self) -> None:
        super().close()
        self._contexts.clear()

    def create_worker(self, purpose: str) -> Any:
        """Return a worker for one session, with a descriptor to wait on; `purpose` is "offer" or the target's lane."""
        try:
            worker = self.ucx.Worker(self._context(purpose), enable_delayed_submission=False, enable_python_future=False)
            worker.init_blocking_progress_mode()
        except Exception as error:
            raise transport_error(error, "a UCX worker") from error
        return worker

    def check_address(self, worker: Any, address: bytes, peer_version: str) -> None:
        """Raise ConfigError, with the UCX versions of both ends, if this is no address of a UCX like that of `worker`."""
        AddressCheck(worker.address.tobytes()).check(address, peer=peer_version[:32], own=self.ucx.version)

    def open_session(
        self,
        worker: Any,
        address: bytes,
        lane: str,
        *,
        offered: Memory | None = None,
        peer_num_bytes: int | None = None,
        obstacle: str = "",
    ) -> UcxSession:
        """Connect `worker` to the peer's address.

        Raises:
            PeerUnreachable: UCX has no way to that address.
        """
        try:
            peer = self.ucx.Address.create_from_buffer(address)
            endpoint = worker.create_endpoint_from_worker_address(peer, endpoint_error_handling=True)
        except Exception as error:
            raise PeerUnreachable(f"no ucx/{lane} endpoint to the peer: {in_words(error)}") from error
        session = UcxSession(
            self, self.ucx, worker, endpoint, lane, offered=offered, peer_num_bytes=peer_num_bytes, obstacle=obstacle
        )
        self._sessions.add(session)
        return session

    def _choose_lane(self, offer: dict[str, Any]) -> tuple[str, str]:
        """Return the lane of both ends of a session, and the obstacle to a faster lane between processes of one machine."""
        wanted = wanted_lane("ucx", offer, self.wanted_lane)
        if wanted == _NET:
            return _NET, ""
        writer, here = ProcessIdentity.from_wire(offer.get("identity")), ProcessIdentity.own()
        if not (self.allows_shared_memory and field_of(offer, "shared_memory", bool)):
            obstacle = "UCX_TLS of one end leaves out cma"
        elif not writer.shares_kernel_with(here):
            obstacle = f"writer runs on host {writer.host}, target on {here.host}, or in another pid namespace"
        elif not can_read_memory_of(writer.pid, offer.get("proof")):
            obstacle = f"process_vm_readv of writer pid {writer.pid} is not permitted (ptrace scope, seccomp, user)"
        else:
            return _SHM, ""
        if wanted == _SHM:
            raise PeerUnreachable(f"lane shm of transport ucx is not possible: {obstacle}; use lane auto or net")
        return _NET, obstacle if writer.is_on_machine_of(here) else ""

    def _context(self, purpose: str) -> Any:
        if purpose not in self._contexts:
            options = {name: value for name, value in _OPTIONS.items() if f"UCX_{name}" not in os.environ}
            if purpose == _SHM:
                options |= _SHM_OPTIONS
            options |= self._options | _CACHE
            if self.wanted_lane == _NET or purpose == _NET:
                options["TLS"] = transports_without(options.get("TLS") or os.environ.get("UCX_TLS") or "all", ("cma",))
            else:
                # With error handling, UCX excludes cross-memory attach, because it cannot revoke a peer's access to memory. Here
                # no process writes into a peer's memory, and nothing needs revoking. So this option declares that it can.
                options["CMA_MEMORY_INVALIDATE"] = "y"
            features = (self.ucx.Feature.TAG, self.ucx.Feature.WAKEUP)
            try:
                self._contexts[purpose] = self.ucx.Context(options, features)
            except Exception as error:
                hint = _NO_CACHE_HINT if "Unsupported" in type(error).__name__ else ""
                raise ConfigError(f"UCX refused the options {options}: {in_words(error)}{hint}") from error
        return self._contexts[purpose]
