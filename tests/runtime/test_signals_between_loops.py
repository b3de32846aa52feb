"""Loops of both ends over `cuda_ipc` with signals, on faked devices: KV arrives, and no watch or entry stays open."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import random
import time
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from tests.runtime.test_local_pair import DECODE, TOKENS, Pair
from tests.transport.host_cuda import HostCuda, HostDriver, HostWords, TwinTransport
from transfer import local_pair
from transfer.copy.digest import HostDigest
from transfer.copy.host_copy_queue import HostCopyQueue
from transfer.copy.piece_copier import ScatterLaunch
from transfer.errors import TransferAborted
from transfer.loop_turns import run_measured
from transfer.receive import loop as receive_loop
from transfer.receive import signal_watch
from transfer.receive.loop import ReceiverLoop
from transfer.send import loop as send_loop
from transfer.transport.signals import NUM_ENTRIES, GatherSignal, SignalWriter

needs_compiled = pytest.mark.skipif(
    find_spec("transfer.receive._signals") is None, reason="transfer.receive._signals is not built: make setup builds it"
)
_LOOK_S = 0.0005
_SLOW_S = 0.06


class SignallingQueue(HostCopyQueue):
    """Copies in host memory. Gathers take some time, and send signals like a stream of a device. Scatters can be armed."""

    driver: HostDriver
    chance: random.Random
    slow: float  # share of gathers that take `_SLOW_S`
    unarmed: float  # share of scatters that cannot be armed
    halved = 0.5  # share of gathers, and of scatters, in two halves
    num_used: int

    def gather(self, piece: Any, out: Any, *, on_done: Any, signal: GatherSignal | None = None, **how: Any) -> None:
        wire = torch.frombuffer((ctypes.c_uint8 * out.numel()).from_address(out.data_ptr()), dtype=torch.uint8)
        total = ctypes.c_uint64(self.chance.getrandbits(64))
        if signal is not None:
            signal.begin(0, ctypes.addressof(total), has_halves=self.chance.random() < self.halved)

        def done(digest: int, begun_s: float, ended_s: float) -> None:
            total.value += digest
            if signal is not None:
                signal.end_half(0)
                signal.end(0, ctypes.addressof(total))
            on_done(digest, begun_s, ended_s)

        def gather() -> None:
            super(SignallingQueue, self).gather(piece, wire, on_done=done, **how)

        pause_s = _SLOW_S if self.chance.random() < self.slow else self.chance.choice([0, 2, 6]) * _LOOK_S
        asyncio.get_running_loop().call_later(pause_s, gather)

    def launch_of(self, piece: Any, source: Any, *, algorithm: str, peer: int) -> ScatterLaunch | None:
        if self.chance.random() < self.unarmed:
            return None
        total, cell = ctypes.c_uint64(), (ctypes.c_uint64 * 2)()

        def scatter() -> None:
            type(self).num_used += 1
            found = HostDigest(algorithm)
            piece.scatter(source, found)
            total.value = found.value()

        return ScatterLaunch(
            stream=peer,
            sum_address=ctypes.addressof(total),
            cell_address=ctypes.addressof(cell),
            kernels=((self.driver.kernel(lambda: None), 1, 1, 32, 0, b""), (self.driver.kernel(scatter), 1, 1, 32, 0, b"")),
            num_first=int(self.chance.random() < self.halved),
            keeps=(total, cell),
            give_back=lambda: None,
        )


def loops_of(pair: Pair) -> list[ReceiverLoop]:
    return [receiver.loop for receiver in pair.pair._receivers]  # noqa: SLF001


def words_of(pair: Pair) -> list[HostWords]:
    """Return the signal words of all sessions."""
    readers = [session.signal_reader for loop in loops_of(pair) for session in loop._sessions.values()]  # noqa: SLF001
    assert readers and all(reader is not None for reader in readers)
    return [reader.words for reader in readers if reader is not None]


def num_stopped(words: list[HostWords]) -> int:
    return sum(one.words[1] for one in words)


async def all_ended(pair: Pair) -> None:
    """Wait until the loops are idle. Then no grant is watched, and no scatter is armed."""
    for loop in loops_of(pair):
        while not loop.is_idle:
            await asyncio.sleep(_LOOK_S)
        assert not loop._awaited and not loop._to_arm and not loop._signalled  # noqa: SLF001
        assert loop._watch.is_idle and not loop._watch.armed  # noqa: SLF001


async def all_closed(words: list[HostWords]) -> None:
    """Wait until every entry whose gather has begun is closed. The last gather of each session was looked at."""
    for one in words:
        while one.words[0] != max(one.words[8 * entry + 2] for entry in range(1, NUM_ENTRIES + 1)):
            await asyncio.sleep(_LOOK_S)


def on_a_ranks_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on a loop that looks at signals while it waits."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        run_measured(test(*arguments, **named))

    return run


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = HostCuda()
    SignallingQueue.driver = cuda.stream_driver = HostDriver()
    SignallingQueue.chance, SignallingQueue.slow, SignallingQueue.unarmed = random.Random(1), 0.0, 0.0
    SignallingQueue.num_used = 0
    monkeypatch.setattr(local_pair, "InprocTransport", lambda hub: TwinTransport(cuda))
    monkeypatch.setattr(signal_watch, "SIGNAL_LIMIT_S", 20.0)
    for module in (send_loop, receive_loop):
        monkeypatch.setattr(module, "open_copy_queue", lambda name, device, loop, crash: SignallingQueue(name, loop, crash))


def refuse(functions: object, limit_s: float) -> None:
    raise OSError("too many open files")


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("module", [None, SimpleNamespace(Watch=refuse)])
@on_a_ranks_loop
async def test_without_the_compiled_thread_signals_are_stopped_and_prompts_arrive_by_messages(
    module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that needs the GIL to end the wait of a stream may never get it."""
    monkeypatch.setattr(signal_watch, "_signals", module)
    pair = Pair()
    async with asyncio.timeout(20), pair.pair:
        words = words_of(pair)
        pair.compute("0", 0)
        await pair.pair.transfer("0", num_tokens=TOKENS, **pair.tables(0))
        pair.assert_arrived("0", 0)
        await all_ended(pair)
        assert num_stopped(words) == len(words) and not SignallingQueue.num_used


@needs_compiled
@pytest.mark.usefixtures("faked")
@on_a_ranks_loop
async def test_grants_of_a_pause_use_signals_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their writer sends a message only if no release comes for a second."""
    monkeypatch.setattr(receive_loop, "SIGNAL_PAUSE_S", 2.0)
    monkeypatch.setattr(signal_watch, "SIGNAL_LIMIT_S", _SLOW_S / 3)
    SignallingQueue.slow = 1.0
    pair = Pair()
    async with asyncio.timeout(20), pair.pair:
        words = words_of(pair)
        pair.compute("0", 0)
        await pair.pair.transfer("0", num_tokens=TOKENS, **pair.tables(0))
        pair.assert_arrived("0", 0)
        await all_ended(pair)
        assert num_stopped(words) == len(words)
        SignallingQueue.slow, SignallingQueue.num_used = 0.0, 0
        pair.compute("1", 1)
        request = pair.pair.begin("1", num_tokens=TOKENS, **pair.tables(1))
        while not all(loop.ring.num_live_grants for loop in loops_of(pair)):
            await asyncio.sleep(_LOOK_S)
        assert num_stopped(words) == len(words)
        while num_stopped(words):
            await asyncio.sleep(_LOOK_S)
        request.computed(TOKENS)
        await request.wait()
        pair.assert_arrived("1", 1)
        await all_ended(pair)
        assert SignallingQueue.num_used


@needs_compiled
@pytest.mark.usefixtures("faked")
@on_a_ranks_loop
async def test_a_session_that_ends_while_its_gathers_run_reports_no_slow_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scatters under way end by the limit of their wait. The metric and the log line say that a device was slow."""
    monkeypatch.setattr(signal_watch, "SIGNAL_LIMIT_S", _SLOW_S / 3)
    SignallingQueue.slow = 1.0
    pair = Pair()
    async with asyncio.timeout(20), pair.pair:
        pair.compute("0", 0)
        request = pair.pair.begin("0", num_tokens=TOKENS, **pair.tables(0))
        request.computed(TOKENS)
        while not any(loop._signalled or loop._watch._launches for loop in loops_of(pair)):  # noqa: SLF001
            await asyncio.sleep(_LOOK_S)
        with structlog.testing.capture_logs() as lines:
            for loop in (*loops_of(pair), *(sender.loop for sender in pair.pair._senders)):  # noqa: SLF001
                for session in list(loop._sessions if isinstance(loop, ReceiverLoop) else loop._peers):  # noqa: SLF001
                    loop.close_session(session, "the link is lost")
            with pytest.raises(TransferAborted):
                await request.wait()
            await all_ended(pair)
        assert not [line for line in lines if line["event"] == "signal_given_up"]


@needs_compiled
@pytest.mark.usefixtures("faked")
@on_a_ranks_loop
async def test_no_scatter_is_queued_once_the_stream_of_a_closed_session_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CopyQueue.forget` gives the stream back, and `CopyQueue.close` reports that all streams are done."""
    pair = Pair()
    async with asyncio.timeout(20), pair.pair:
        pair.compute("0", 0)
        request = pair.pair.begin("0", num_tokens=TOKENS, **pair.tables(0))
        receiver = loops_of(pair)[0]
        while not receiver._watch.armed:  # noqa: SLF001
            await asyncio.sleep(_LOOK_S)
        session, grants = next(iter(receiver._sessions)), list(receiver._watch.armed)  # noqa: SLF001
        words, total = receiver._sessions[session].signal_reader.words, ctypes.c_uint64()  # type: ignore[union-attr]  # noqa: SLF001
        writer = SignalWriter(words)

        def forget(queue: Any, peer: int) -> None:
            for grant in grants if peer == session else ():
                writer.begin(grant, 0, ctypes.addressof(total))
            time.sleep(0.05)
            assert SignallingQueue.driver.is_idle(peer)

        monkeypatch.setattr(SignallingQueue, "forget", forget)
        receiver.close_session(session, "the link is lost")
        for sender in pair.pair._senders:  # noqa: SLF001
            sender.loop.close_session(session, "the link is lost")
        with pytest.raises(TransferAborted):
            await request.wait()
        await all_ended(pair)


@needs_compiled
@pytest.mark.usefixtures("faked")
@on_a_ranks_loop
async def test_a_scatter_that_cannot_be_queued_ends_the_rank() -> None:
    SignallingQueue.driver.status = 700
    crashes: list[BaseException] = []
    pair = Pair()
    async with asyncio.timeout(20):
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(pair.pair)
            for loop in loops_of(pair):
                loop._on_crash = crashes.append  # noqa: SLF001
            pair.compute("0", 0)
            request = pair.pair.begin("0", num_tokens=TOKENS, **pair.tables(0))
            request.computed(TOKENS)
            while not crashes:
                await asyncio.sleep(_LOOK_S)
            for loop in loops_of(pair):  # the device can still write these pages, so they stay in use
                assert loop._watch._launches.keys() - loop._watch.armed.keys() == loop._signalled.keys()  # noqa: SLF001
            SignallingQueue.driver.status = 0
            request.cancel("the rank ends")
    assert "CUDA's driver returned error 700" in str(crashes[0])


@needs_compiled
@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("slow", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(2))
@on_a_ranks_loop
async def test_prompts_arrive_and_nothing_is_left(seed: int, slow: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts run one after the other and two at once. Some are cancelled during the transfer."""
    chance = SignallingQueue.chance = random.Random(seed)
    SignallingQueue.slow, SignallingQueue.unarmed = slow, 0.2
    if slow:
        monkeypatch.setattr(signal_watch, "SIGNAL_LIMIT_S", _SLOW_S / 3)
    pair = Pair()
    async with asyncio.timeout(20), pair.pair:
        words = words_of(pair)
        for number in range(20):
            first, second = f"{number}.0", f"{number}.1"
            pair.compute(first, 0)
            pair.compute(second, 1)
            one = pair.pair.begin(first, num_tokens=TOKENS, **pair.tables(0))
            other = pair.pair.begin(second, num_tokens=TOKENS, **pair.tables(1))
            one.computed(40)
            other.computed(TOKENS)
            await asyncio.sleep(chance.choice([0, 2, 10]) * _LOOK_S)
            is_cancelled = chance.random() < 0.5
            if is_cancelled:
                other.cancel("no longer needed")
            one.computed(TOKENS)
            await one.wait()
            pair.assert_arrived(first, 0)
            try:
                await other.wait()
            except TransferAborted:
                assert is_cancelled
            else:
                pair.assert_arrived(second, 1)
        await all_ended(pair)
        assert SignallingQueue.num_used > 20 or slow
        assert (num_stopped(words) > 0) == (slow > 0)
        SignallingQueue.slow = SignallingQueue.unarmed = 0.0
        for loop in loops_of(pair):
            for session in loop._sessions:  # noqa: SLF001
                loop._watch.resume(session)  # noqa: SLF001  # as after the pause
        num_used = SignallingQueue.num_used
        pair.compute("resumed", 0)
        await pair.pair.transfer("resumed", num_tokens=TOKENS, **pair.tables(0))
        pair.assert_arrived("resumed", 0)
        assert SignallingQueue.num_used > num_used
        await all_closed(words)
        pair.compute("lost", 0)
        lost = pair.pair.begin("lost", num_tokens=TOKENS, **pair.tables(0))
        lost.computed(TOKENS)
        await asyncio.sleep(chance.choice([0, 2, 10]) * _LOOK_S)
        receiver = loops_of(pair)[0]
        session = next(iter(receiver._sessions))  # noqa: SLF001
        receiver.close_session(session, "the link is lost")
        for sender in pair.pair._senders:  # noqa: SLF001
            sender.loop.close_session(session, "the link is lost")  # as the end of the registry's stream does
        with contextlib.suppress(TransferAborted):  # it may have arrived before
            await lost.wait()
        await all_ended(pair)
    assert len(words) == DECODE.num_ranks
