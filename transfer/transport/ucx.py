"""Transport on UCX (RDMA, shared memory, TCP) through UCXX's low-level API; two-sided.

How a write travels: the writer tag-sends the source range under its key. The target posts nothing in advance. It looks at each
message that has arrived (tag, length) and starts the receive only when the key is expected and the length fits, straight into
the granted range. So no posted receive exists that could be neither cancelled nor trusted; a decline, a wrong length or an
unknown key never touches the range; and for messages above the rendezvous threshold no payload travels before that.

One UCX worker serves one session, so `close()` can destroy it and everything that it might still do: UCX cannot cancel a single
request once it has begun, but a destroyed worker moves nothing (5 ms; the context serves on).

Lanes: ``ucx/shm`` is cross-memory attach (one copy, memcpy speed) between processes of one host; it is taken only where the
target has proven that it can read the writer's memory. ``ucx/net`` is everything else (RDMA between hosts, TCP).

Peer failure is always reported by UCX (endpoint error handling on). Off is no choice: UCX then aborts the *surviving* process
when a cross-memory read fails because the writer was killed (seen: exit status 134, process_vm_readv: No such process).
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from transfer.errors import (
    ConfigError,
    LocalProtocolError,
    PeerUnreachable,
    TransportClosed,
    TransportError,
    WriteFailed,
)
from transfer.transport.base import MAX_KEY, ByteRange, LocalMemory, check_key
from transfer.transport.memory import Memory, check_range, memory_of, wait_for_devices
from transfer.transport.peer import ProcessIdentity, ReadableProof, can_read_memory_of, field_of, pack_blob, unpack_blob

Lane = Literal["auto", "shm", "net"]

_VERSION = 1
_SHM, _NET = "shm", "net"
_KIND_SHIFT = 62
_PROGRESS_STEPS = 64  # of one `progress()`: bounds the time for which one busy session holds its owner
_CLOSE_STEPS = 10_000  # of `close()`: UCX settles what it cancelled within a few
_MAX_UNEXPECTED = 4096  # messages nobody expects; a right writer sends what was granted, so this is a broken or hostile one

# UCX's TCP segments of 8 KiB give 1.0 GB/s on loopback, these 2.7 (64 MB, two cores).
_OPTIONS = {"TCP_TX_SEG_SIZE": "64K", "TCP_RX_SEG_SIZE": "256K"}
# On the shared-memory lane only the receiver copies, in its own progress(): a put of the peer could land after close().
_SHM_OPTIONS = {"RNDV_SCHEME": "get_zcopy"}
_CMA_NAMES = {"cma", "sm", "shm"}  # in UCX_TLS; the last two are aliases that hold cma

_log = logging.getLogger(__name__)


class _Kind(IntEnum):
    """Top bits of a tag: what a message is."""

    WRITE = 0
    DECLINE = 1


class UcxHandle:
    """A write, a decline or a receive on its way; keeps the memory and the UCX request alive until it is settled."""

    __slots__ = ("_array", "_done_bytes", "_failure", "_request", "_settled", "byte_range", "key", "memory")

    def __init__(self, key: int, memory: Memory | None, byte_range: ByteRange | None) -> None:
        self.key = key
        self.memory = memory
        self.byte_range = byte_range
        self._request: Any = None
        self._array: Any = None
        self._settled = False
        self._done_bytes = 0
        self._failure: TransportError | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that arrived (0: declined) or left; meaningful once `poll()` returned True."""
        return self._done_bytes if self._settled else 0

    def start(self, request: Any, array: Any, num_bytes: int) -> None:
        self._request, self._array, self._done_bytes = request, array, num_bytes

    @property
    def is_active(self) -> bool:
        """Whether UCX still works on it."""
        return self._request is not None and not self._request.completed

    def settle(self) -> None:
        """Settled without UCX (a decline)."""
        self._settled = True
        self.memory = None

    def fail(self, failure: TransportError) -> None:
        """Report `failure`; memory that UCX may still touch stays referenced until its request ends or `detach()`."""
        if not self._settled and self._failure is None:
            self._failure = failure

    def poll(self) -> bool:
        if self._failure is None and not self._settled:
            self.advance()
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return self._settled

    def advance(self) -> bool:
        """Take over the result of a completed request; True when UCX has nothing of it any more."""
        if self._request is None:
            return self._settled or self._failure is not None
        if not self._request.completed:
            return False
        try:
            self._request.check_error()
        except Exception as error:
            self.fail(_transport_error(error, f"key {self.key}"))
        else:
            self._settled = self._failure is None
        self.detach()
        return True

    def detach(self) -> tuple[Any, Memory | None]:
        """Give up the request; returns what must stay alive until no worker can touch it."""
        kept = (self._array, self.memory)
        self._request = self._array = self.memory = None
        return kept


class UcxSession:
    """One attached peer over UCX: one worker, one endpoint."""

    def __init__(self, transport: UcxTransport, worker: Any, endpoint: Any, lane: str, offered: Memory | None) -> None:
        self._transport = transport
        self._ucx = transport.ucx
        self._worker = worker
        self._endpoint = endpoint
        self._fd: int | None = worker.epoll_file_descriptor
        self._lane = lane
        self._offered = offered
        self._peer_num_bytes: int | None = None
        self._sends: dict[int, UcxHandle] = {}
        self._expected: dict[int, UcxHandle] = {}
        self._receives: list[UcxHandle] = []
        self._unexpected: dict[int, Any] = {}
        self._sink = np.zeros(1, dtype=np.uint8)
        self._sink_requests: list[Any] = []
        self._failure: str | None = None

    @property
    def lane(self) -> str:
        return f"ucx/{self._lane}"

    def bound_writes(self, peer_num_bytes: int) -> None:
        """Refuse writes behind the memory that the peer offered."""
        self._peer_num_bytes = peer_num_bytes

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> UcxHandle:
        memory = self._transport.own(source)
        check_range(memory.num_bytes, source_range, f"source range of key {key}")
        if source_range.num_bytes != target_range.num_bytes:
            raise LocalProtocolError(
                f"source range of key {key} has {source_range.num_bytes} bytes, target range {target_range.num_bytes}; "
                "both must be equally long"
            )
        if self._peer_num_bytes is not None:
            check_range(self._peer_num_bytes, target_range, f"target range of key {key}")
        return self._send(UcxHandle(key, memory, source_range), _Kind.WRITE, memory.part(source_range))

    def decline(self, key: int) -> UcxHandle:
        return self._send(UcxHandle(key, None, None), _Kind.DECLINE, self._sink)

    def expect(self, target: LocalMemory, target_range: ByteRange, key: int) -> UcxHandle:
        memory = self._transport.own(target)
        check_key(key)
        check_range(memory.num_bytes, target_range, f"target range of key {key}")
        if key in self._expected:
            raise LocalProtocolError(f"key {key} is expected already; keys are unique in a session")
        handle = UcxHandle(key, memory, target_range)
        if self._refuses(handle):
            return handle
        self._expected[key] = handle
        found = self._unexpected.pop(key, None)
        if found is not None:
            self._receive(found)
        return handle

    def fileno(self) -> int | None:
        return self._fd

    def progress(self) -> bool:
        if self._worker is None:
            return False
        steps = 0
        while steps < _PROGRESS_STEPS and self._worker.progress_once():
            steps += 1
        matched = self._match()
        self._sweep()
        if self._failure is None and not self._endpoint.alive:
            self._fail(self._death_of_endpoint())
            return True
        return steps > 0 or matched

    def arm(self) -> bool:
        return self._worker is None or bool(self._worker.arm())

    def close(self) -> None:
        if self._worker is None:
            return
        handles = [*self._sends.values(), *self._expected.values(), *self._receives]
        for handle in handles:
            handle.fail(TransportClosed(f"session {self.lane} was closed while key {handle.key} was pending"))
        for found in self._unexpected.values():
            self._discard(found)  # UCX complains about every message that was taken and not received
        self._endpoint.close_blocking()  # forced, as errors are handled: waits for no peer
        for _ in range(_CLOSE_STEPS):
            self._worker.progress()  # at least once: it frees what UCXX scheduled for cancelling when the peer died
            if not any(handle.is_active for handle in handles):
                break
        self._ucx.drop_cancelled(self._endpoint)
        # `kept` outlives the worker, which may touch that memory until it is destroyed with the last of these references.
        kept = [handle.detach() for handle in handles]
        for container in (self._sends, self._expected, self._receives, self._unexpected, self._sink_requests):
            container.clear()
        self._endpoint = None
        self._worker = None
        self._fd = None
        if any(memory is not None and memory.is_device for _, memory in kept):
            wait_for_devices()
        self._offered = None
        self._transport.forget(self)

    def uses(self, memory: LocalMemory) -> bool:
        """Whether an unfinished operation, or the offer of this session, needs `memory`."""
        self._sweep()
        pending = (*self._sends.values(), *self._expected.values(), *self._receives)
        return memory is self._offered or any(handle.memory is memory for handle in pending)

    def _send(self, handle: UcxHandle, kind: _Kind, part: Any) -> UcxHandle:
        check_key(handle.key)
        old = self._sends.get(handle.key)
        if old is not None and not old.advance():
            raise LocalProtocolError(f"key {handle.key} is on its way already; keys are unique in a session")
        if self._refuses(handle):
            return handle
        array = self._ucx.Array(part)
        try:
            request = self._endpoint.tag_send(array, self._ucx.Tag(kind << _KIND_SHIFT | handle.key))
        except Exception as error:
            handle.fail(_transport_error(error, f"key {handle.key}"))
            return handle
        handle.start(request, array, array.nbytes if kind is _Kind.WRITE else 0)
        if not handle.advance():
            self._sends[handle.key] = handle
        return handle

    def _refuses(self, handle: UcxHandle) -> bool:
        if self._worker is None:
            handle.fail(TransportClosed(f"session {self.lane} is closed; key {handle.key} cannot be used"))
        elif self._failure is not None:
            handle.fail(WriteFailed(f"key {handle.key} on session {self.lane}: {self._failure}"))
        return self._worker is None or self._failure is not None

    def _match(self) -> bool:
        """Take every message that has arrived; receive the expected ones, keep the others."""
        matched = False
        while self._failure is None:
            found = self._worker.tag_probe(self._ucx.any_tag, self._ucx.any_mask, remove=True)
            if not found.matched:
                break
            matched = True
            key = _tag_value(found) & MAX_KEY
            if key in self._expected:
                self._receive(found)
            elif key in self._unexpected:
                self._fail(f"peer sent key {key} twice before it was expected")
            elif len(self._unexpected) >= _MAX_UNEXPECTED:
                self._fail(f"peer sent {_MAX_UNEXPECTED} messages that nobody expects")
            else:
                self._unexpected[key] = found
        return matched

    def _receive(self, found: Any) -> None:
        """Start the receive of a message whose key is expected."""
        kind, key = divmod(_tag_value(found), MAX_KEY + 1)
        handle = self._expected.pop(key)
        memory, byte_range = handle.memory, handle.byte_range
        assert memory is not None and byte_range is not None  # an expected handle is pending
        if kind == _Kind.WRITE and found.length == byte_range.num_bytes:
            array = self._ucx.Array(memory.part(byte_range))
            try:
                handle.start(self._worker.tag_recv_with_handle(array, found), array, byte_range.num_bytes)
            except Exception as error:
                handle.fail(_transport_error(error, f"key {key}"))
                return
            if not handle.advance():
                self._receives.append(handle)
            return
        if kind == _Kind.DECLINE:
            handle.settle()
        elif kind == _Kind.WRITE:
            handle.fail(WriteFailed(f"peer sent {found.length} bytes for key {key}; {byte_range.num_bytes} expected"))
        else:
            handle.fail(WriteFailed(f"peer sent a message of unknown kind {kind} for key {key}"))
        self._discard(found)

    def _discard(self, found: Any) -> None:
        """Receive into the sink, truncated where it is longer: no payload lands and the sender settles; the result is no news."""
        self._sink_requests.append(self._worker.tag_recv_with_handle(self._ucx.Array(self._sink), found))

    def _sweep(self) -> None:
        """Let go of what is settled."""
        for key in [key for key, handle in self._sends.items() if handle.advance()]:
            del self._sends[key]
        if self._receives:
            self._receives = [handle for handle in self._receives if not handle.advance()]
        if self._sink_requests:
            self._sink_requests = [request for request in self._sink_requests if not request.completed]

    def _fail(self, reason: str) -> None:
        """The session cannot go on; what UCX still holds of it dies with the worker in `close()`."""
        self._failure = reason
        for handle in (*self._sends.values(), *self._expected.values(), *self._receives):
            handle.fail(WriteFailed(f"key {handle.key} on session {self.lane}: {reason}"))
        self._expected.clear()

    def _death_of_endpoint(self) -> str:
        try:
            self._endpoint.raise_on_error()
        except Exception as error:
            return f"peer disconnected ({_in_words(error)})"
        return "peer disconnected"


class UcxOffer:
    """The writer's half-open UCX session."""

    def __init__(self, transport: UcxTransport) -> None:
        self._transport = transport
        self._proof = ReadableProof()
        self._worker: Any = transport.create_worker("offer")
        fields = {
            "identity": ProcessIdentity.own().to_wire(),
            "address": self._worker.address.tobytes(),
            "proof": self._proof.to_wire(),
            "shared_memory": transport.allows_shared_memory,
            "lane": transport.wanted_lane,
        }
        self._blob = pack_blob(transport.name, _VERSION, "offer", fields)

    @property
    def blob(self) -> bytes:
        return self._blob

    def complete(self, answer: bytes) -> UcxSession:
        if self._worker is None:
            raise TransportClosed("this offer was completed or closed before")
        fields = unpack_blob(answer, transport=self._transport.name, version=_VERSION, role="answer")
        lane, address = field_of(fields, "lane", str), field_of(fields, "address", bytes)
        if lane not in (_SHM, _NET):
            raise ConfigError(f"field lane of the peer's answer is {lane[:32]!r}; expected {_SHM} or {_NET}")
        num_bytes = field_of(fields, "num_bytes", int)
        session = self._transport.open_session(self._worker, address, lane, None)
        self._worker = None
        session.bound_writes(num_bytes)
        return session

    def close(self) -> None:
        self._worker = None


class UcxTransport:
    """Moves bytes between processes and hosts over whatever UCX finds there.

    Args:
        lane: "auto" takes shared memory where it is proven to work, the network elsewhere. "shm": only shared memory, and a peer
            that is elsewhere is refused. "net": never shared memory. The two ends may not ask for opposite things.
        options: UCX options without their ``UCX_`` prefix (``{"TLS": "rc,sm"}``); they win over the environment, which wins over
            what this module tunes. Do not set ``RNDV_SCHEME`` to a put scheme: the proof of death on one host needs get.

    Raises:
        ConfigError: ucxx is not installed or too old, or a setting is wrong.
    """

    def __init__(self, *, lane: Lane = "auto", options: Mapping[str, str] | None = None) -> None:
        if lane not in ("auto", _SHM, _NET):
            raise ConfigError(f"lane {lane!r} of transport ucx is unknown; use auto, shm or net")
        self.ucx = _Ucx(_load_ucxx())
        self.wanted_lane: str = lane
        self._options = dict(options or {})
        self._contexts: dict[str, Any] = {}
        self._memories: dict[int, Memory] = {}
        self._sessions: set[UcxSession] = set()
        self._closed = False
        self.allows_shared_memory = _allows_shared_memory(self._context("offer").config.get("TLS", "all"))

    @property
    def name(self) -> str:
        return "ucx"

    @property
    def is_one_sided(self) -> bool:
        return False

    def register(self, buffer: Any) -> Memory:
        memory = memory_of(buffer)
        if memory.is_device and not self._context("offer").cuda_support:
            raise ConfigError("device memory needs a UCX with CUDA support, and this one has none: install kvferry[ucx-cu13]")
        self._memories[id(memory)] = memory
        return memory

    def deregister(self, memory: LocalMemory) -> None:
        own = self.own(memory)
        if any(session.uses(own) for session in self._sessions):
            raise LocalProtocolError(f"memory of {own.num_bytes} bytes is in use by an open session; close the session first")
        del self._memories[id(own)]

    def offer(self) -> UcxOffer:
        self._check_open()
        return UcxOffer(self)

    def accept(self, blob: bytes, memory: LocalMemory) -> tuple[UcxSession, bytes]:
        self._check_open()
        own = self.own(memory)
        fields = unpack_blob(blob, transport=self.name, version=_VERSION, role="offer")
        lane = self._choose_lane(fields)
        worker = self.create_worker(lane)
        session = self.open_session(worker, field_of(fields, "address", bytes), lane, own)
        answer = {"address": worker.address.tobytes(), "lane": lane, "num_bytes": own.num_bytes}
        return session, pack_blob(self.name, _VERSION, "answer", answer)

    def close(self) -> None:
        self._closed = True
        for session in list(self._sessions):
            session.close()
        self._memories.clear()
        self._contexts.clear()

    def own(self, memory: LocalMemory) -> Memory:
        """The memory, if this transport registered it and has not deregistered it since.

        Raises:
            LocalProtocolError: It did not.
        """
        found = self._memories.get(id(memory))
        if found is None:
            raise LocalProtocolError(f"memory of {memory.num_bytes} bytes is not registered with this ucx transport")
        return found

    def create_worker(self, purpose: str) -> Any:
        """A worker for one session, ready to be waited for through its descriptor; `purpose` is "offer" or the target's lane."""
        try:
            worker = self.ucx.Worker(self._context(purpose), enable_delayed_submission=False, enable_python_future=False)
            worker.init_blocking_progress_mode()
        except Exception as error:
            raise _transport_error(error, "a UCX worker") from error
        return worker

    def open_session(self, worker: Any, address: bytes, lane: str, offered: Memory | None) -> UcxSession:
        """Connect `worker` to the peer's address.

        Raises:
            PeerUnreachable: UCX has no way to that address.
        """
        try:
            peer = self.ucx.Address.create_from_buffer(address)
            endpoint = worker.create_endpoint_from_worker_address(peer, endpoint_error_handling=True)
        except Exception as error:
            raise PeerUnreachable(f"no ucx/{lane} endpoint to the peer: {_in_words(error)}") from error
        session = UcxSession(self, worker, endpoint, lane, offered)
        self._sessions.add(session)
        return session

    def forget(self, session: UcxSession) -> None:
        self._sessions.discard(session)

    def _choose_lane(self, offer: dict[str, Any]) -> str:
        """The lane of a session; the target decides for both ends."""
        wanted = {self.wanted_lane, field_of(offer, "lane", str)} - {"auto"}
        if len(wanted) > 1:
            raise ConfigError(
                f"lane of transport ucx is {offer['lane'][:32]} at the writer and {self.wanted_lane} at the target; "
                "set both alike, or one to auto"
            )
        if wanted == {_NET}:
            return _NET
        writer, here = ProcessIdentity.from_wire(offer.get("identity")), ProcessIdentity.own()
        if not (self.allows_shared_memory and field_of(offer, "shared_memory", bool)):
            obstacle = "UCX_TLS of one end leaves out cma"
        elif not writer.shares_kernel_with(here):
            obstacle = f"writer runs on host {writer.host}, target on {here.host}, or in another pid namespace"
        elif not can_read_memory_of(writer.pid, offer.get("proof")):
            obstacle = f"process_vm_readv of writer pid {writer.pid} is not permitted (ptrace scope, seccomp, user)"
        else:
            return _SHM
        if wanted == {_SHM}:
            raise PeerUnreachable(f"lane shm of transport ucx is not possible: {obstacle}; use lane auto or net")
        return _NET

    def _context(self, purpose: str) -> Any:
        if purpose not in self._contexts:
            options = {name: value for name, value in _OPTIONS.items() if f"UCX_{name}" not in os.environ}
            if purpose == _SHM:
                options |= _SHM_OPTIONS
            options |= self._options
            if self.wanted_lane == _NET or purpose == _NET:
                options["TLS"] = _without_shared_memory(options.get("TLS") or os.environ.get("UCX_TLS") or "all")
            else:
                # Where errors are handled UCX leaves cross-memory attach out, as it cannot revoke a peer's access to memory. Here
                # nobody writes into a peer's memory, so nothing needs revoking: say that it could.
                options["CMA_MEMORY_INVALIDATE"] = "y"
            features = (self.ucx.Feature.TAG, self.ucx.Feature.WAKEUP)
            try:
                self._contexts[purpose] = self.ucx.Context(options, features)
            except Exception as error:
                raise ConfigError(f"UCX refused the options {options}: {_in_words(error)}") from error
        return self._contexts[purpose]

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosed("transport ucx is closed")


class _Ucx:
    """The few names of UCXX that are used here."""

    def __init__(self, lib: ModuleType) -> None:
        self.Context, self.Worker, self.Address, self.Feature = lib.UCXContext, lib.UCXWorker, lib.UCXAddress, lib.Feature
        self.Tag = lib.UCXXTag
        self.Array = importlib.import_module("ucxx._lib.arr").Array
        self.any_tag, self.any_mask = lib.UCXXTag(0), lib.UCXXTagMask(0)
        self._canceling_size = _find_canceling_size()

    def drop_cancelled(self, endpoint: Any) -> None:
        """Make a closed endpoint let go of the requests that its closing cancelled.

        UCXX 0.52 keeps them in the endpoint, they keep the endpoint, and so the worker with its descriptor and memory is never
        freed, unless a progress thread runs or somebody asks for the number of requests that are being cancelled: that drops
        the finished ones. The method is public in C++ and missing in Python.
        """
        if self._canceling_size is not None:
            self._canceling_size(endpoint.ucxx_ptr)


def _find_canceling_size() -> Any:
    """``ucxx::Endpoint::getCancelingSize`` of the library that is loaded, or None."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        if path[2].rpartition("/")[2].startswith("libucxx.so"):
            function = getattr(ctypes.CDLL("/" + path[2]), "_ZNK4ucxx8Endpoint16getCancelingSizeEv", None)
            if function is not None:
                function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_size_t
                return function
    _log.warning("this libucxx has no Endpoint::getCancelingSize: a session closed with writes pending keeps its descriptor")
    return None


def _load_ucxx() -> ModuleType:
    """Import UCXX's bindings and undo what their import writes into this process's environment.

    Raises:
        ConfigError: ucxx is missing or too old.
    """
    before = set(os.environ)
    try:
        lib = importlib.import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise ConfigError(
            f"transport ucx needs ucxx ({error}): pip install 'kvferry[ucx-cu13]' (or kvferry[ucx-cu12] for CUDA 12; "
            "both work without a GPU)"
        ) from error
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]
    if not hasattr(lib.UCXWorker, "tag_recv_with_handle"):
        raise ConfigError("transport ucx needs ucxx 0.52 or newer: pip install -U 'kvferry[ucx-cu13]'")
    return lib


def _allows_shared_memory(tls: str) -> bool:
    """Whether UCX's transport selection (``UCX_TLS``) leaves cross-memory attach in."""
    names = set(tls.lstrip("^").split(","))
    return not names & _CMA_NAMES if tls.startswith("^") else bool(names & {"all", *_CMA_NAMES})


def _without_shared_memory(tls: str) -> str:
    """The same selection without cross-memory attach.

    Raises:
        ConfigError: Nothing would be left.
    """
    if tls.startswith("^"):
        return f"{tls},cma"
    names = tls.split(",")
    if "all" in names:
        return "^cma"
    left = [name for name in names if name not in _CMA_NAMES]
    if not set(left) - {"self"}:
        raise ConfigError(f"UCX_TLS={tls} leaves nothing for lane net of transport ucx; add tcp or an RDMA transport")
    return ",".join(left)


def _tag_value(found: Any) -> int:
    return int(getattr(found.sender_tag, "value", found.sender_tag))


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _transport_error(error: Exception, what: str) -> TransportError:
    """The one place where UCXX's exceptions become ours."""
    kind = type(error).__name__
    if kind in ("UCXUnreachableError", "UCXInvalidAddrError", "UCXNoDeviceError"):
        return PeerUnreachable(f"{what}: {_in_words(error)}")
    if kind in ("UCXCanceledError", "UCXCanceled", "UCXCloseError"):
        return TransportClosed(f"{what}: {_in_words(error)}")
    return WriteFailed(f"{what}: {_in_words(error)}")
