"""One attached peer over UCX: operations, their handles, and the end of it all."""

from __future__ import annotations

import logging
import time
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from transfer.errors import LocalProtocolError, TransportClosed, TransportError, WriteFailed
from transfer.transport.base import MAX_KEY, ByteRange, LocalMemory, check_key
from transfer.transport.registered_memory import Memory, check_range, check_write, wait_for_devices
from transfer.transport.ucx_library import Ucx, in_words, transport_error

_KIND_SHIFT = 62
_PROGRESS_STEPS = 64  # of one `progress()`: bounds the time for which one busy session holds its owner
_PROGRESS_S = 0.0005  # the same: a step may copy a whole payload, and what came by then waits to be scattered
_CLOSE_STEPS = 10_000  # of `close()`: UCX settles what it cancelled within a few
_MAX_UNEXPECTED = 4096  # messages nobody expects; a right writer sends what was granted, so this is a broken or hostile one

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
            self.fail(transport_error(error, f"key {self.key}"))
        else:
            self._settled = self._failure is None
        self.detach()
        return True

    def detach(self) -> tuple[Any, Memory | None]:
        """Give up the request; returns what must stay alive until no worker can touch it."""
        kept = (self._array, self.memory)
        self._request = self._array = self.memory = None
        return kept


class UcxSessionOwner(Protocol):
    """What a session asks of its transport."""

    @property
    def ucx(self) -> Ucx: ...

    def own(self, memory: LocalMemory) -> Memory: ...

    def forget(self, session: UcxSession) -> None: ...


class UcxSession:
    """One attached peer over UCX: one worker, one endpoint."""

    def __init__(
        self, owner: UcxSessionOwner, worker: Any, endpoint: Any, lane: str, offered: Memory | None, obstacle: str = ""
    ) -> None:
        self._owner = owner
        self._ucx = owner.ucx
        self._worker = worker
        self._endpoint = endpoint
        self._fd: int | None = worker.epoll_file_descriptor
        self._lane = lane
        self._obstacle = obstacle
        self._offered = offered
        self._peer_num_bytes: int | None = None
        self._sends: dict[int, UcxHandle] = {}
        self._expected: dict[int, UcxHandle] = {}
        self._receives: list[UcxHandle] = []
        self._unexpected: dict[int, Any] = {}
        self._sink = np.zeros(1, dtype=np.uint8)
        self._sink_requests: list[Any] = []
        self._failure: str | None = None
        self._kept: list[Memory] = []  # behind `close()`: what copies on a device that has failed may still touch
        self._is_over = False

    @property
    def lane(self) -> str:
        return f"ucx/{self._lane}"

    @property
    def obstacle(self) -> str:
        return self._obstacle

    def bound_writes(self, peer_num_bytes: int) -> None:
        """Refuse writes behind the memory that the peer offered."""
        self._peer_num_bytes = peer_num_bytes

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> UcxHandle:
        memory = self._owner.own(source)
        check_write(memory.num_bytes, source_range, target_range, key)
        if self._peer_num_bytes is not None:
            check_range(self._peer_num_bytes, target_range, f"target range of key {key}")
        return self._send(UcxHandle(key, memory, source_range), _Kind.WRITE, memory.part(source_range))

    def decline(self, key: int) -> UcxHandle:
        return self._send(UcxHandle(key, None, None), _Kind.DECLINE, self._sink)

    def expect(self, target: LocalMemory, target_range: ByteRange, key: int) -> UcxHandle:
        memory = self._owner.own(target)
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

    def direct(self, target_range: ByteRange) -> None:
        return None

    def fileno(self) -> int | None:
        return self._fd

    def progress(self) -> bool:
        if self._worker is None:
            return False
        steps, ends_at = 0, time.perf_counter() + _PROGRESS_S
        while steps < _PROGRESS_STEPS and self._worker.progress_once():
            steps += 1
            if time.perf_counter() >= ends_at:
                break
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
        # The first progress of a worker looks at its endpoints, and UCX 1.21 crashes if one of them is closed by then.
        self._worker.progress_once()
        self._endpoint.close_blocking()  # forced, as errors are handled: waits for no peer
        self._worker.cancel_inflight_requests()  # those that UCXX scheduled for cancelling when the peer died
        active = handles
        for _ in range(_CLOSE_STEPS):  # not `worker.progress()`: after a refused connection, UCX makes progress for ever
            has_moved = self._worker.progress_once()
            self._discard_arrived()
            active = [handle for handle in active if handle.is_active]
            self._sink_requests = [request for request in self._sink_requests if not request.completed]
            if not (has_moved or active or self._sink_requests):
                break
        is_kept = bool(active or self._sink_requests)
        self._ucx.drop_cancelled(self._endpoint)
        # `kept` outlives the worker, which may touch that memory until it is destroyed with the last of these references.
        kept = [handle.detach() for handle in handles]
        for container in (self._sends, self._expected, self._receives, self._unexpected, self._sink_requests):
            container.clear()
        self._endpoint = None
        if is_kept:
            self._ucx.destroy(self._worker)
        self._worker = None
        self._fd = None
        if any(memory is not None and memory.is_device for _, memory in kept):
            try:
                wait_for_devices()
            except Exception as error:  # torch's and ours: an error of a device stays, so the copies cannot be ruled out, ever
                _log.warning(
                    "%s: copies on a device of this process cannot be shown to have ended: %s", self.lane, in_words(error)
                )
                self._kept = [memory for _, memory in kept if memory is not None and memory.is_device]
                return
        self._offered = None
        self._is_over = True
        self._owner.forget(self)

    @property
    def is_over(self) -> bool:
        """False behind `close()` only where a device of this process has failed."""
        return self._is_over

    def uses(self, memory: LocalMemory) -> bool:
        """Whether an unfinished operation, or the offer of this session, needs `memory`."""
        self._sweep()
        pending = (*self._sends.values(), *self._expected.values(), *self._receives)
        used = (self._offered, *self._kept, *(handle.memory for handle in pending))
        return any(one is memory for one in used)

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
            handle.fail(transport_error(error, f"key {handle.key}"))
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
                handle.fail(transport_error(error, f"key {key}"))
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

    def _discard_arrived(self) -> None:
        """Discard each message of which the first bytes have arrived.

        When UCXX 0.52 frees a worker, it receives the messages that are left, and waits for all of their bytes. If the peer is
        gone, that wait never ends.
        """
        while (found := self._worker.tag_probe(self._ucx.any_tag, self._ucx.any_mask, remove=True)).matched:
            self._discard(found)

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
            return f"peer disconnected ({in_words(error)})"
        return "peer disconnected"


def _tag_value(found: Any) -> int:
    return int(getattr(found.sender_tag, "value", found.sender_tag))
