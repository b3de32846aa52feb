"""The wait of a stream for a signal ends after the time limit in every case. The copy queue's device is faked."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import subprocess
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.transport.host_cuda import HostWords
from transfer.copy import compiled_copy, device_copy_queue
from transfer.copy.compiled_copy import WaitLimit
from transfer.copy.device_copy_queue import DeviceCopyQueue
from transfer.copy.digest import DIGEST_WORDS
from transfer.transport.shared_memory import shared_memory
from transfer.transport.signals import NUM_BYTES, SIGNAL_LIMIT_S, ArrivalSignal, SignalReader, SignalWriter
from transfer.worker_thread import WorkerThread

pytestmark = pytest.mark.skipif(not compiled_copy.IS_BUILT, reason="transfer.copy._host_copy is not built: make setup builds it")
_LATE_S = 20 * SIGNAL_LIMIT_S


class Stream:
    """A stream that waits for the word of a signal. CUDA compares cyclically: the signed difference must be at least 0."""

    cuda_stream = 0

    def __init__(self, signal: ArrivalSignal) -> None:
        self._address, self._value = signal.awaited_end

    def query(self) -> bool:
        return (ctypes.c_uint64.from_address(self._address).value - self._value) % 2**64 < 2**63

    def record(self, stream: object = None) -> None:
        return


class Piece:
    """A copy that calls `launch` when its scatter is launched."""

    def __init__(self, launch: Callable[[], None]) -> None:
        self._launch = launch
        self.calls: list[str] = []

    def is_compiled(self, address: int, *, is_gather: bool) -> bool:
        return True

    def upload(self) -> None:
        self.calls.append("upload")

    def scatter(self, source: Any, digest: Any) -> None:
        self.calls.append("scatter")
        self._launch()


class Ends:
    """Both ends of a signal: a gather that has begun, and the queue of the scatter behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = shared_memory(NUM_BYTES)
        self.words = HostWords(memory)
        self.writer, self.reader = SignalWriter(HostWords(memory)), SignalReader(HostWords(memory))
        self.gather = self.writer.of(8)
        self.total = ctypes.c_uint64()
        self.gather.begin(0, ctypes.addressof(self.total))
        (self.arrival,) = self.reader.take()
        self.stream = Stream(self.arrival)
        self.crashes: list[BaseException] = []
        outcome = device_copy_queue._Outcome  # noqa: SLF001
        new = outcome(cell=torch.zeros(1, dtype=torch.int64), begin=self.stream, end=self.stream)  # type: ignore[arg-type]
        monkeypatch.setattr(device_copy_queue, "_new_outcome", lambda: new)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        loop = asyncio.get_running_loop()
        self.queue = DeviceCopyQueue("scatter", torch.device("cpu"), loop, self.crashes.append)
        self.waiter = WorkerThread("scatter", loop, self.crashes.append)
        peer_stream = device_copy_queue._PeerStream  # noqa: SLF001
        self.queue._peers[1] = peer_stream(  # noqa: SLF001
            stream=self.stream,  # type: ignore[arg-type]
            waiter=self.waiter,
            sum=torch.zeros(1, dtype=torch.int64),
        )

    def scatter(self, launch: Callable[[], None] = lambda: None) -> asyncio.Future[bool | None]:
        done: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
        self.piece = Piece(launch)
        self.queue.scatter(
            self.piece,  # type: ignore[arg-type]
            torch.zeros(8, dtype=torch.uint8),
            algorithm=DIGEST_WORDS,
            digest=0,
            peer=1,
            on_done=lambda is_intact, _: done.set_result(is_intact),
            signal=self.arrival,
        )
        return done

    def until_woken(self, limit_s: float) -> bool:
        """Block like a call of CUDA that returns only when the stream is done. Return whether it is."""
        begun_s = time.monotonic()
        while not self.stream.query() and time.monotonic() - begun_s < limit_s:
            time.sleep(0.001)
        return self.stream.query()


@pytest.fixture
async def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    return Ends(monkeypatch)


async def test_the_scatter_follows_the_end_of_the_gather(ends: Ends) -> None:
    done = ends.scatter()
    assert ends.piece.calls == ["upload", "scatter"]  # memory for the tables is allocated before the wait
    ends.gather.end(0, ctypes.addressof(ends.total))
    assert await asyncio.wait_for(done, 20) is True
    assert not ends.crashes and ends.queue.close(5)


async def test_a_launch_that_waits_for_the_stream_returns_after_the_limit(ends: Ends) -> None:
    """The first launch of a kernel, and memory that must be freed first, wait for the whole device."""
    returned: list[bool] = []
    done = ends.scatter(lambda: returned.append(ends.until_woken(_LATE_S)))
    assert returned == [True]
    assert await asyncio.wait_for(done, 20) is None
    assert not ends.crashes and ends.queue.close(5)


@pytest.mark.parametrize("is_waiter_busy", [False, True])
async def test_a_call_that_holds_the_gil_does_not_keep_a_stream_waiting(ends: Ends, is_waiter_busy: bool) -> None:
    """Also if the peer's thread needs the GIL to begin with the scatter, or is busy with the copy before."""
    if is_waiter_busy:
        ends.waiter.submit(lambda: time.sleep(SIGNAL_LIMIT_S / 2), lambda _: None)
    done = ends.scatter()
    ctypes.PyDLL(None).usleep(int(10 * SIGNAL_LIMIT_S * 1e6))
    is_ended = ends.stream.query()
    assert await asyncio.wait_for(done, 20) is None
    assert is_ended and ends.queue.close(5)


async def test_a_forked_process_has_limits_of_its_own(ends: Ends) -> None:
    """It has no thread of its parent, and ends no limit of its parent's."""
    limit = WaitLimit(ends.arrival.awaited_end, limit_s=60, last=(), keeps=ends)
    child = os.fork()
    if not child:
        words = array("Q", [0])
        address, _ = words.buffer_info()
        WaitLimit((address, 1), limit_s=0.01, last=[(address, 7)], keeps=words)
        limit.end()
        os._exit(0 if compiled_copy.wait_for_words([(address, 7)], timeout_s=20, most_pause_s=0.01) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not limit.end()


def test_a_process_can_end_while_a_stream_waits() -> None:
    """The words of its limits are unmapped before it has ended."""
    code = """
import atexit, ctypes, mmap, time
words = mmap.mmap(-1, 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(words))
def end():
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), 4096)
    time.sleep(0.5)
atexit.register(end)  # runs after what is registered later
from transfer.copy.compiled_copy import WaitLimit
WaitLimit((address, 5), limit_s=0.2, last=[(address, 5)], keeps=None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)


async def test_a_writer_that_sets_the_word_back_does_not_keep_a_stream_waiting(ends: Ends) -> None:
    """The host accepts the number as the end. For the device, which compares cyclically, the number is lower."""
    done = ends.scatter()
    address, value = ends.arrival.awaited_end
    ctypes.c_uint64.from_address(address).value = value + 2**63
    assert not ends.stream.query()
    await asyncio.wait_for(done, 20)
    assert ends.queue.close(5)


async def test_a_launch_that_fails_reports_nothing_but_the_crash(ends: Ends) -> None:
    def fail() -> None:
        raise RuntimeError("a launch failed")

    done = ends.scatter(fail)
    assert [str(error) for error in ends.crashes] == ["a launch failed"]
    assert await asyncio.to_thread(ends.queue.close, 5)
    await asyncio.sleep(0)
    assert not done.done()


async def test_the_next_queue_of_a_process_uses_the_streams_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that changes its role creates other queues. Nothing frees a stream."""
    created: list[int] = []

    class NewStream:
        def wait_stream(self, stream: object) -> None:
            return

    def create_stream(device: int) -> int:
        created.append(device)
        return device

    monkeypatch.setattr(device_copy_queue, "_idle_streams", defaultdict(list), raising=False)
    monkeypatch.setattr(device_copy_queue, "process_cuda", lambda: SimpleNamespace(create_stream=create_stream))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: NewStream())
    for _ in range(3):
        queue = DeviceCopyQueue("scatter", torch.device("cpu"), asyncio.get_running_loop(), lambda error: None)
        streams = [queue._open(peer).stream for peer in range(2)]  # noqa: SLF001
        assert streams[0] is not streams[1]
        assert queue.close(5)
    assert len(created) == 2
