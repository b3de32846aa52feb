"""Copies of pools on a GPU: queued by the owner on a stream per peer. A thread per peer waits for their events, in order.

Nothing here makes the host wait. Kernels are queued behind the engine's event, and the digest goes to pinned memory by an
asynchronous copy. The waiting thread sleeps without the interpreter's lock: in the driver until the engine is done, then between
looks. Each peer has a stream, because a peer whose device takes bytes slowly (a direct session's gather stores over the link)
must not delay the others.

The kernels of a copy add its digest to the one sum of the stream. The sum is read before and after, so nothing has to be cleared.

With a signal, a gather's stream writes words at the start and the end of the gather (`transfer.transport.signals`). The scatter
behind it is prepared here as a `ScatterLaunch`, which has a sum of its own, and queued by `transfer.receive.signal_watch`.

Kernels that were not compiled at attach are compiled on a separate thread, because that can take seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from transfer.copy.digest import DIGEST_WORDS
from transfer.copy.piece_copier import OnGathered, OnScattered, PieceCopy, ScatterLaunch
from transfer.engine_types import DeviceEvent
from transfer.errors import ConfigError, LocalProtocolError
from transfer.transport.base import DirectMemory
from transfer.transport.cuda_ipc_driver import process_cuda
from transfer.transport.signals import GatherSignal
from transfer.worker_thread import WorkerThread

_MASK = 2**64 - 1

_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""Streams of peers that have left. They belong to the process, because a change of role creates other queues."""

_LINK_IDLE_S = 0.02
"""NVLink sleeps after 50 ms without use (H200, `nvidia-smi nvlink --getLowPowerInfo`). Then a copy takes 0.17 ms longer."""
_WAKING_BYTES = 64 << 10
"""Enough for all 18 links between two GPUs: 8 bytes wake one of them."""

_FEW = 4
"""Copies of a peer among which gathers are halved. With more, the scatters of other pieces run beside a gather."""

_LOOK_SHARE = 1 / 20
_MIN_PAUSE_S = 20e-6
_MAX_PAUSE_S = 0.002


@dataclass(slots=True, kw_only=True, eq=False)
class _Outcome:
    """The end of a copy under way. Reused for later copies.

    Args:
        cell: int64 [1], pinned: the stream's sum after the copy.
        begin: Fires when the stream has passed the engine's event, for copies that wait for one.
        end: Fires when the cell is written.
    """

    cell: Tensor
    begin: torch.cuda.Event
    end: torch.cuda.Event


@dataclass(slots=True, kw_only=True, eq=False)
class _PeerStream:
    """One peer's copies. They run, and end, in the order in which they were queued."""

    stream: torch.cuda.Stream
    waiter: WorkerThread
    sum: Tensor  # int64 [1] on the device
    free: deque[_Outcome] = field(default_factory=deque)
    # Sum on the device and two pinned words of launches. The stream clears a sum before its next use.
    free_cells: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    num_queued: int = 0
    link_used_s: float = -math.inf
    # Of the previous copy. Only the waiter uses them.
    last_sum: int = 0
    last_end_s: float = 0.0


class DeviceCopyQueue:
    """A `CopyQueue` of one device, which has pools, staging memory and ring."""

    def __init__(
        self, name: str, device: torch.device, loop: asyncio.AbstractEventLoop, on_crash: Callable[[BaseException], None]
    ) -> None:
        self._name = name
        self._device = device
        self._loop = loop
        self._on_crash = on_crash
        self._compiler = WorkerThread(f"{name}-compiler", loop, on_crash)
        self._peers: dict[int, _PeerStream] = {}
        self._closing: list[WorkerThread] = []
        self._waking: Tensor | None = None

    def gather(
        self,
        piece: PieceCopy,
        out: Tensor | DirectMemory,
        *,
        algorithm: str,
        peer: int,
        after: DeviceEvent | None,
        on_done: OnGathered,
        signal: GatherSignal | None = None,
    ) -> None:
        def launch(peer_stream: _PeerStream) -> None:
            is_pending = isinstance(after, torch.cuda.Event) and not after.query()
            # If the gather begins at once, its message arrives before the target's next look at the signal.
            sent = signal if is_pending or peer_stream.num_queued > 0 else None
            if is_pending and not isinstance(out, Tensor):
                self._wake_link(peer_stream, out)

            def copy(total: Tensor) -> None:
                if sent is None:
                    piece.gather(out, digest=total)
                    return
                stream, has_halves = peer_stream.stream.cuda_stream, piece.can_halve and peer_stream.num_queued <= _FEW
                sent.begin(stream, total.data_ptr(), has_halves=has_halves)
                if has_halves:
                    piece.gather_half(0, out, total)
                    sent.end_half(stream)
                    piece.gather_half(1, out, total)
                else:
                    piece.gather(out, digest=total)
                sent.end(stream, total.data_ptr())

            self._queue(peer_stream, after, copy, on_done)

        self._when_ready(piece, out, algorithm, peer, launch, lambda: on_done(0, 0.0, 0.0), is_gather=True)

    def _wake_link(self, peer_stream: _PeerStream, out: DirectMemory) -> None:
        """Write into the granted bytes before the engine is done, unless the link was in use recently."""
        now_s = time.monotonic()
        if now_s - peer_stream.link_used_s > _LINK_IDLE_S:
            with torch.cuda.stream(peer_stream.stream):
                if self._waking is None:
                    self._waking = torch.zeros(_WAKING_BYTES, dtype=torch.uint8, device=self._device)
                num_bytes, stream = min(_WAKING_BYTES, out.numel()), peer_stream.stream.cuda_stream
                process_cuda().call("cuMemcpyDtoDAsync", out.data_ptr(), self._waking.data_ptr(), num_bytes, stream)
        peer_stream.link_used_s = now_s

    def expect(self, piece: PieceCopy, *, peer: int) -> None:
        peer_stream = self._peers.get(peer) or self._open(peer)
        with torch.cuda.stream(peer_stream.stream):
            piece.upload()

    def launch_of(self, piece: PieceCopy, source: Tensor, *, algorithm: str, peer: int) -> ScatterLaunch | None:
        peer_stream = self._peers[peer]
        if algorithm != DIGEST_WORDS or not piece.is_compiled(source.data_ptr(), is_gather=False):
            return None
        with torch.cuda.stream(peer_stream.stream):
            cells = peer_stream.free_cells.pop() if peer_stream.free_cells else self._new_cells()
            total, cell = cells
            kernels = piece.scatter_kernels(source, total)
            if kernels is not None:
                total.zero_()
        if kernels is None:
            peer_stream.free_cells.append(cells)
            return None
        return ScatterLaunch(
            stream=peer_stream.stream.cuda_stream,
            sum_address=total.data_ptr(),
            cell_address=cell.data_ptr(),
            kernels=kernels,
            num_first=int(piece.can_halve),
            keeps=(piece, source, cells),
            give_back=lambda: peer_stream.free_cells.append(cells),
        )

    def scatter(
        self,
        piece: PieceCopy,
        source: Tensor,
        *,
        algorithm: str,
        digest: int,
        peer: int,
        on_done: OnScattered,
    ) -> None:
        def compare(found: int, begun_s: float, ended_s: float) -> None:
            on_done(found == digest, ended_s - begun_s)

        def launch(peer_stream: _PeerStream) -> None:
            self._queue(peer_stream, None, lambda total: piece.scatter(source, digest=total), compare)

        self._when_ready(piece, source, algorithm, peer, launch, lambda: on_done(False, 0.0), is_gather=False)

    def forget(self, peer: int) -> None:
        ended = self._peers.pop(peer, None)
        if ended is not None:
            ended.waiter.submit(lambda: _give_back(self._device, ended.stream), lambda _: None)
            ended.waiter.finish()
            self._closing = [thread for thread in self._closing if thread.is_alive]
            self._closing.append(ended.waiter)

    def close(self, timeout_s: float) -> bool:
        for peer in list(self._peers):
            self.forget(peer)
        ends_at = time.monotonic() + timeout_s
        return all([thread.close(max(0.0, ends_at - time.monotonic())) for thread in (*self._closing, self._compiler)])

    def _when_ready(
        self,
        piece: PieceCopy,
        wire: Tensor | DirectMemory,
        algorithm: str,
        peer: int,
        launch: Callable[[_PeerStream], None],
        give_up: Callable[[], None],
        *,
        is_gather: bool,
    ) -> None:
        """Launch now, or when the piece's kernels are compiled. After the session was closed, never: its memory may be gone."""
        if algorithm != DIGEST_WORDS:
            raise LocalProtocolError(f"digest algorithm is {algorithm}; copies on {self._device} make {DIGEST_WORDS}")
        peer_stream = self._peers.get(peer) or self._open(peer)
        address, is_direct = wire.data_ptr(), not isinstance(wire, Tensor)
        if piece.is_compiled(address, is_gather=is_gather, is_direct=is_direct):
            launch(peer_stream)
            return

        def compiled(_: None) -> None:
            if self._peers.get(peer) is peer_stream:
                launch(peer_stream)
            else:
                give_up()

        self._compiler.submit(lambda: piece.compile(address, is_gather=is_gather, is_direct=is_direct), compiled)

    def _queue(
        self,
        peer_stream: _PeerStream,
        after: DeviceEvent | None,
        copy: Callable[[Tensor], None],
        on_done: OnGathered,
    ) -> None:
        """Queue a copy, and wait for its end on the peer's thread."""
        outcome = peer_stream.free.popleft() if peer_stream.free else _new_outcome()
        peer_stream.num_queued += 1
        try:
            with torch.cuda.stream(peer_stream.stream):  # and its device with it
                if after is not None:
                    _wait_for(after, peer_stream.stream)
                    outcome.begin.record(peer_stream.stream)
                copy(peer_stream.sum)
                outcome.cell.copy_(peer_stream.sum, non_blocking=True)
                outcome.end.record(peer_stream.stream)
        except Exception as error:
            # As for a copy on a thread. The queued part would be added to the digest of the next copy, so no copy may follow.
            self._on_crash(error)
            return
        queued_s = time.monotonic()

        def work() -> tuple[int, float, float]:
            # The copy begins when the stream is free and the engine is done, which may take far longer than the copy. Events
            # with timing would cost each copy two more calls.
            begun_s = max(queued_s, peer_stream.last_end_s)
            if after is not None and not outcome.begin.query():
                outcome.begin.synchronize()
                begun_s = time.monotonic()
            _wait_through(outcome.end, begun_s)
            end_s, total = time.monotonic(), int(outcome.cell) & _MASK
            digest, peer_stream.last_sum, peer_stream.last_end_s = (total - peer_stream.last_sum) & _MASK, total, end_s
            return digest, begun_s, end_s

        def done(result: tuple[int, float, float]) -> None:
            peer_stream.free.append(outcome)
            peer_stream.num_queued -= 1
            on_done(*result)

        peer_stream.waiter.submit(work, done)

    def _new_cells(self) -> tuple[Tensor, Tensor]:
        """Return int64 [1] on the device, for the current stream, and int64 [2] in pinned memory."""
        return torch.empty(1, dtype=torch.int64, device=self._device), torch.zeros(2, dtype=torch.int64, pin_memory=True)

    def _open(self, peer: int) -> _PeerStream:
        with torch.cuda.device(self._device):
            # Created on the current stream, and written before the stream reads it.
            total = torch.zeros(1, dtype=torch.int64, device=self._device)
            stream = _new_stream(self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))
        found = self._peers[peer] = _PeerStream(
            stream=stream, waiter=WorkerThread(f"{self._name}-{len(self._peers)}", self._loop, self._on_crash), sum=total
        )
        return found


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that no other code uses, and that has no copies under way.

    torch returns 32 streams in turn. A stream that waits for the end of a peer's gather must not be the engine's, too.
    Without cuda-bindings, no stream waits for a peer.
    """
    with contextlib.suppress(IndexError):
        return _idle_streams[device].pop()
    try:
        handle = process_cuda().create_stream(torch.cuda.current_device())
    except ConfigError:
        return torch.cuda.Stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


def _give_back(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Let other peers use the stream, once it is done with launches that were not queued here."""
    stream.synchronize()
    _idle_streams[device].append(stream)


def _new_outcome() -> _Outcome:
    make_event: Any = torch.cuda.Event
    cell = torch.empty(1, dtype=torch.int64, pin_memory=True)
    return _Outcome(cell=cell, begin=make_event(blocking=True), end=make_event())


def _wait_through(copy_end: torch.cuda.Event, begun_s: float) -> None:
    """Wait for the end of a copy that has run since `begun_s`.

    Looks with pauses: a thread that slept in the driver saw the end 135 us later than a thread that spun (two H200, virtual
    machine), and a spinning thread takes a core from the engine. A pause is a share of the copy's time so far, so it adds at most
    that share.
    """
    while not copy_end.query():
        time.sleep(min(max((time.monotonic() - begun_s) * _LOOK_SHARE, _MIN_PAUSE_S), _MAX_PAUSE_S))


def _wait_for(event: DeviceEvent, stream: torch.cuda.Stream) -> None:
    """Put the stream behind an engine's event. The host does not wait."""
    if not isinstance(event, torch.cuda.Event):
        raise LocalProtocolError(f"event of a chunk is {type(event).__name__}; for a pool on a GPU it is a torch.cuda.Event")
    stream.wait_event(event)
