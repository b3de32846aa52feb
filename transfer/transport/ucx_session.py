"""One attached peer over UCX: its operations, and its end."""

from __future__ import annotations

import time
from enum import IntEnum
from typing import Any

import numpy as np

from transfer.errors import LocalProtocolError, TransportError, WriteFailed
from transfer.transport.base import MAX_KEY, ByteRange, LocalMemory, check_key
from transfer.transport.registered_memory import Memory
from transfer.transport.sessions import Operation, PeerSession, PeerTransport, have_devices_ended
from transfer.transport.ucx_library import Ucx, in_words, transport_error

_KIND_SHIFT = 62
_PROGRESS_STEPS = 64  # steps of one `progress()`: limits the time for which one busy session holds its owner
_PROGRESS_S = 0.0005  # the same: a step can copy a whole payload, and the payloads that have arrived wait to be scattered
_CLOSE_STEPS = 10_000  # steps of `close()`: UCX settles cancelled requests within a few
_MAX_UNEXPECTED = 4096  # messages without a receive. A correct writer sends only granted bytes, so more mean a broken peer


class _Kind(IntEnum):
    """Kind of a message: the top bits of its tag."""

    WRITE = 0
    DECLINE = 1


class UcxOperation(Operation):
    """An operation and its request of UCX, which both stay alive until UCX has ended the request or `detach()` is called."""

    __slots__ = ("_array", "_request", "_request_bytes", "byte_range")

    def __init__(self, key: int, memory: Memory | None = None, byte_range: ByteRange | None = None) -> None:
        super().__init__(key, memory)
        self.byte_range = byte_range
        self._request: Any = None
        self._array: Any = None
        self._request_bytes = 0

    def start(self, request: Any, array: Any, num_bytes: int) -> None:
        self._request, self._array, self._request_bytes = request, array, num_bytes

    @property
    def is_active(self) -> bool:
        """Whether UCX still works on it."""
        return self._request is not None and not self._request.completed

    def fail(self, failure: TransportError) -> None:
        memory = self.memory
        super().fail(failure)
        self.memory = memory  # UCX may still touch it

    def poll(self) -> bool:
        if self._failure is None and not self._is_settled:
            self.advance()
        return super().poll()

    def advance(self) -> bool:
        """Take the result of a completed request. Return whether UCX holds nothing of the operation any more."""
        if self._request is None:
            return self._is_settled or self._failure is not None
        if not self._request.completed:
            return False
        try:
            self._request.check_error()
        except Exception as error:
            self.fail(transport_error(error, f"key {self.key}"))
        else:
            self.settle(self._request_bytes)
        self.detach()
        return True

    def detach(self) -> tuple[Any, Memory | None]:
        """Drop the request. Return the objects that must stay alive until no worker can touch them."""
        kept = (self._array, self.memory)
        self._request = self._array = self.memory = None
        return kept


class UcxSession(PeerSession[Memory]):
    """One attached peer over UCX: one worker, one endpoint."""

    def __init__(
        self,
        transport: PeerTransport[Memory, UcxSession],
        ucx: Ucx,
        worker: Any,
        endpoint: Any,
        lane: str,
        *,
        offered: Memory | None = None,
        peer_num_bytes: int | None = None,
        obstacle: str = "",
    ) -> None:
        super().__init__(transport, f"ucx/{lane}", offered=offered, peer_num_bytes=peer_num_bytes, obstacle=obstacle)
        self._ucx = ucx
        self._worker = worker
        self._endpoint = endpoint
        self._fd: int | None = worker.epoll_file_descriptor
        self._sends: dict[int, UcxOperation] = {}
        self._expected: dict[int, UcxOperation] = {}
        self._receives: list[UcxOperation] = []
        self._unexpected: dict[int, Any] = {}
        self._sink = np.zeros(1, dtype=np.uint8)
        self._sink_requests: list[Any] = []
        self._kept: list[Memory] = []  # after `close()`: memory that copies on a failed device may still touch
        self._is_over = False

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> UcxOperation:
        memory = self._checked_source(source, source_range, target_range, key)
        return self._send(UcxOperation(key, memory, source_range), _Kind.WRITE, memory.part(source_range))

    def decline(self, key: int) -> UcxOperation:
        check_key(key)
        return self._send(UcxOperation(key), _Kind.DECLINE, self._sink)

    def expect(self, target: LocalMemory, target_range: ByteRange, key: int) -> UcxOperation:
        memory = self._checked_target(target, target_range, key)
        if key in self._expected:
            raise LocalProtocolError(f"key {key} is expected already; keys are unique in a session")
        receive = UcxOperation(key, memory, target_range)
        if self._refuses(receive):
            return receive
        self._expected[key] = receive
        found = self._unexpected.pop(key, None)
        if found is not None:
            self._receive(found)
        return receive

    def fileno(self) -> int | None:
        return self._fd

    def progress(self) -> bool:
        if self._is_closed:
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
        return self._is_closed or bool(self._worker.arm())

    @property
    def needs_polling(self) -> bool:
        # To wake the descriptor at the end of a copy between GPUs, UCX queues a host function (cuLaunchHostFunc) behind the
        # copies of its stream. The next copy waits until a thread of the driver has called it.
        return any(receive.memory is not None and receive.memory.is_device for receive in self._receives)

    def close(self) -> None:
        if self._worker is None:
            return
        pending = self._pending
        self._close_pending(pending)
        for found in self._unexpected.values():
            self._discard(found)  # UCX complains about every message that was taken and not received
        # The first progress of a worker looks at its endpoints, and UCX 1.21 crashes if one of them is closed by then.
        self._worker.progress_once()
        self._endpoint.close_blocking()  # forced, because errors are handled: does not wait for the peer
        self._worker.cancel_inflight_requests()  # requests that UCXX scheduled for cancelling when the peer died
        active = pending
        for _ in range(_CLOSE_STEPS):  # not `worker.progress()`: after a refused connection, UCX makes progress forever
            has_moved = self._worker.progress_once()
            self._discard_arrived()
            active = [operation for operation in active if operation.is_active]
            self._sink_requests = [request for request in self._sink_requests if not request.completed]
            if not (has_moved or active or self._sink_requests):
                break
        is_kept = bool(active or self._sink_requests)
        self._ucx.drop_cancelled(self._endpoint)
        # `kept` outlives the worker, which may touch that memory until it is destroyed with the last of these references.
        kept = [operation.detach() for operation in pending]
        for container in (self._sends, self._expected, self._receives, self._unexpected, self._sink_requests):
            container.clear()
        self._endpoint = None
        if is_kept:
            self._ucx.destroy(self._worker)
        self._worker = None
        self._fd = None
        on_device = [memory for _, memory in kept if memory is not None and memory.is_device]
        if on_device and not have_devices_ended(self.lane):
            self._kept = on_device
            return
        self._offered = None
        self._is_over = True
        self._transport.forget(self)

    @property
    def is_over(self) -> bool:
        """After `close()`: False only if a device of this process has failed."""
        return self._is_over

    def uses(self, memory: LocalMemory) -> bool:
        self._sweep()
        used = (self._offered, *self._kept, *(operation.memory for operation in self._pending))
        return any(one is memory for one in used)

    @property
    def _pending(self) -> list[UcxOperation]:
        return [*self._sends.values(), *self._expected.values(), *self._receives]

    def _send(self, handle: UcxOperation, kind: _Kind, part: Any) -> UcxOperation:
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

    def _match(self) -> bool:
        """Take all messages that have arrived. Receive the expected ones, and keep the others."""
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
                self._fail(f"peer sent {_MAX_UNEXPECTED} unexpected messages")
            else:
                self._unexpected[key] = found
        return matched

    def _receive(self, found: Any) -> None:
        """Start the receive of a message whose key is expected."""
        kind, key = divmod(_tag_value(found), MAX_KEY + 1)
        receive = self._expected.pop(key)
        memory, byte_range = receive.memory, receive.byte_range
        assert memory is not None and byte_range is not None  # an expected handle is pending
        if kind == _Kind.WRITE and found.length == byte_range.num_bytes:
            array = self._ucx.Array(memory.part(byte_range))
            try:
                receive.start(self._worker.tag_recv_with_handle(array, found), array, byte_range.num_bytes)
            except Exception as error:
                receive.fail(transport_error(error, f"key {key}"))
                return
            if not receive.advance():
                self._receives.append(receive)
            return
        if kind == _Kind.DECLINE:
            receive.settle()
        elif kind == _Kind.WRITE:
            receive.fail(WriteFailed(f"peer sent {found.length} bytes for key {key}; {byte_range.num_bytes} expected"))
        else:
            receive.fail(WriteFailed(f"peer sent a message of unknown kind {kind} for key {key}"))
        self._discard(found)

    def _discard(self, found: Any) -> None:
        """Receive a message into the sink, truncated. No payload lands, and the sender settles. The result is ignored."""
        self._sink_requests.append(self._worker.tag_recv_with_handle(self._ucx.Array(self._sink), found))

    def _discard_arrived(self) -> None:
        """Discard each message of which the first bytes have arrived.

        When UCXX 0.52 frees a worker, it receives the messages that are left, and waits for all of their bytes. If the peer is
        gone, that wait never ends.
        """
        while (found := self._worker.tag_probe(self._ucx.any_tag, self._ucx.any_mask, remove=True)).matched:
            self._discard(found)

    def _sweep(self) -> None:
        """Drop the operations and requests that have ended."""
        for key in [key for key, handle in self._sends.items() if handle.advance()]:
            del self._sends[key]
        if self._receives:
            self._receives = [handle for handle in self._receives if not handle.advance()]
        if self._sink_requests:
            self._sink_requests = [request for request in self._sink_requests if not request.completed]

    def _fail(self, reason: str) -> None:
        """Fail the session. UCX keeps its part of the pending operations until `close()` destroys the worker."""
        self._fail_pending(self._pending, reason)
        self._expected.clear()

    def _death_of_endpoint(self) -> str:
        try:
            self._endpoint.raise_on_error()
        except Exception as error:
            return f"peer disconnected ({in_words(error)})"
        return "peer disconnected"


def _tag_value(found: Any) -> int:
    return int(getattr(found.sender_tag, "value", found.sender_tag))
