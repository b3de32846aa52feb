"""Loops of both ends over `cuda_ipc` with signals, on faked devices: KV arrives, and no watch or entry stays open."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
from typing import Any

import pytest
import structlog
import torch

from tests.runtime.test_local_pair import DECODE, TOKENS, Pair
from tests.transport.host_cuda import HostCuda, TwinTransport
from transfer import local_pair
from transfer.copy.host_copy_queue import HostCopyQueue
from transfer.errors import TransferAborted
from transfer.receive import loop as receive_loop
from transfer.send import loop as send_loop
from transfer.transport.signals import ArrivalSignal, GatherSignal, SignalReader

_LOOK_S = 0.0005


class SignallingQueue(HostCopyQueue):
    """Copies in host memory. Gathers take some time, and send signals like a stream of a device."""

    chance: random.Random
    give_up: float  # share of signals that are given up
    num_used: int
    num_given_up: int

    def gather(self, piece: Any, out: Any, *, on_done: Any, signal: GatherSignal | None = None, **how: Any) -> None:
        wire = torch.frombuffer((ctypes.c_uint8 * out.numel()).from_address(out.data_ptr()), dtype=torch.uint8)
        total = ctypes.c_uint64(self.chance.getrandbits(64))
        if signal is not None:
            signal.begin(0, ctypes.addressof(total))

        def done(digest: int, begun_s: float, ended_s: float) -> None:
            total.value += digest
            if signal is not None:
                signal.end(0, ctypes.addressof(total))
            on_done(digest, begun_s, ended_s)

        def gather() -> None:
            super(SignallingQueue, self).gather(piece, wire, on_done=done, **how)

        asyncio.get_running_loop().call_later(self.chance.choice([0, 2, 6]) * _LOOK_S, gather)

    def scatter(
        self, piece: Any, source: Any, *, digest: int, on_done: Any, signal: ArrivalSignal | None = None, **how: Any
    ) -> None:
        if signal is None:
            super().scatter(piece, source, digest=digest, on_done=on_done, **how)
            return
        address, value = signal.awaited_end
        will_give_up = self.chance.random() < self.give_up

        def done(is_intact: bool | None, seconds: float) -> None:
            signal.close()
            on_done(is_intact, seconds)

        def look() -> None:
            if will_give_up:
                type(self).num_given_up += 1
                for word, written in signal.giving_up:
                    ctypes.c_uint64.from_address(word).value = written
                done(None, 0.0)
            elif ctypes.c_uint64.from_address(address).value < value:
                asyncio.get_running_loop().call_later(_LOOK_S, look)
            else:
                type(self).num_used += 1
                super(SignallingQueue, self).scatter(piece, source, digest=signal.digest, on_done=done, **how)

        look()


def readers_of(pair: Pair) -> list[SignalReader]:
    loops = [receiver.loop for receiver in pair.pair._receivers]  # noqa: SLF001
    readers = [session.signal_reader for loop in loops for session in loop._sessions.values()]  # noqa: SLF001
    assert readers and all(reader is not None for reader in readers)
    return [reader for reader in readers if reader is not None]


async def all_ended(pair: Pair, readers: list[SignalReader]) -> None:
    """Wait until the loops are idle. Then no grant is watched, and each entry that was taken is closed."""
    for receiver in pair.pair._receivers:  # noqa: SLF001
        loop = receiver.loop
        while not loop.is_idle:
            await asyncio.sleep(_LOOK_S)
        assert not loop._awaited and not loop._signals  # noqa: SLF001
        assert not loop._watch._num_awaited and not loop._watch._readers  # noqa: SLF001
    for reader in readers:
        while reader._num_taken != reader._num_closed:  # noqa: SLF001  # signals between the thread and the loop
            await asyncio.sleep(_LOOK_S)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = HostCuda()
    SignallingQueue.chance, SignallingQueue.give_up = random.Random(1), 0.0
    SignallingQueue.num_used = SignallingQueue.num_given_up = 0
    monkeypatch.setattr(local_pair, "InprocTransport", lambda hub: TwinTransport(cuda))
    monkeypatch.setattr(receive_loop, "IS_BUILT", True)
    for module in (send_loop, receive_loop):
        monkeypatch.setattr(module, "open_copy_queue", lambda name, device, loop, crash: SignallingQueue(name, loop, crash))


@pytest.mark.usefixtures("faked")
async def test_without_compiled_code_signals_are_stopped_and_prompts_arrive_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that needs the GIL to end the wait of a stream may never get it (see `test_signalled_scatter`)."""
    monkeypatch.setattr(receive_loop, "IS_BUILT", False)
    pair = Pair()
    async with asyncio.timeout(20), pair.pair:
        readers = readers_of(pair)
        pair.compute("0", 0)
        await pair.pair.transfer("0", num_tokens=TOKENS, **pair.tables(0))
        pair.assert_arrived("0", 0)
        await all_ended(pair, readers)
        assert all(reader.is_stopped for reader in readers) and not SignallingQueue.num_used


@pytest.mark.usefixtures("faked")
async def test_grants_of_a_pause_use_signals_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their writer sends a message only if no release comes for a second."""
    monkeypatch.setattr(receive_loop, "SIGNAL_PAUSE_S", 2.0)
    SignallingQueue.give_up = 1.0
    pair = Pair()
    async with asyncio.timeout(20), pair.pair:
        readers = readers_of(pair)
        pair.compute("0", 0)
        await pair.pair.transfer("0", num_tokens=TOKENS, **pair.tables(0))
        await all_ended(pair, readers)
        assert all(reader.is_stopped for reader in readers)
        SignallingQueue.give_up = 0.0
        pair.compute("1", 1)
        request = pair.pair.begin("1", num_tokens=TOKENS, **pair.tables(1))
        rings = [receiver.loop.ring for receiver in pair.pair._receivers]  # noqa: SLF001
        while not all(ring.num_live_grants for ring in rings):
            await asyncio.sleep(_LOOK_S)
        assert all(reader.is_stopped for reader in readers)
        while any(reader.is_stopped for reader in readers):
            await asyncio.sleep(_LOOK_S)
        request.computed(TOKENS)
        await request.wait()
        pair.assert_arrived("1", 1)
        await all_ended(pair, readers)
        assert SignallingQueue.num_used


@pytest.mark.usefixtures("faked")
async def test_a_session_that_ends_before_a_scatter_is_queued_gives_no_signal_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy queue reports None then, too. The metric and the log line say that a device was slow."""
    waiting: list[Any] = []
    monkeypatch.setattr(SignallingQueue, "scatter", lambda queue, piece, source, **how: waiting.append(how))
    pair = Pair()
    async with asyncio.timeout(20), pair.pair:
        pair.compute("0", 0)
        request = pair.pair.begin("0", num_tokens=TOKENS, **pair.tables(0))
        request.computed(TOKENS)
        while not waiting:
            await asyncio.sleep(_LOOK_S)
        for session in {how["peer"] for how in waiting}:
            for receiver in pair.pair._receivers:  # noqa: SLF001
                receiver.loop.close_session(session, "the link is lost")
            for sender in pair.pair._senders:  # noqa: SLF001
                sender.loop.close_session(session, "the link is lost")
        with structlog.testing.capture_logs() as lines:
            for how in waiting:
                if how["signal"] is not None:
                    how["signal"].close()
                how["on_done"](None, 0.0)
        with pytest.raises(TransferAborted):
            await request.wait()
        assert not [line for line in lines if line["event"] == "signal_given_up"]


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("give_up", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(2))
async def test_prompts_arrive_and_nothing_is_left(seed: int, give_up: float) -> None:
    """Prompts run one after the other and two at once. Some are cancelled during the transfer."""
    chance = SignallingQueue.chance = random.Random(seed)
    SignallingQueue.give_up = give_up
    pair = Pair()
    async with asyncio.timeout(20), pair.pair:
        readers = readers_of(pair)
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
        await all_ended(pair, readers)
        assert SignallingQueue.num_used > 20 or give_up
        assert (SignallingQueue.num_given_up > 0) == (give_up > 0)
        assert not give_up or any(reader.is_stopped for reader in readers)
        for reader in readers:
            reader.resume()  # as after the pause
        num_used = SignallingQueue.num_used
        SignallingQueue.give_up = 0.0
        pair.compute("resumed", 0)
        await pair.pair.transfer("resumed", num_tokens=TOKENS, **pair.tables(0))
        pair.assert_arrived("resumed", 0)
        assert SignallingQueue.num_used > num_used
        pair.compute("lost", 0)
        lost = pair.pair.begin("lost", num_tokens=TOKENS, **pair.tables(0))
        lost.computed(TOKENS)
        await asyncio.sleep(chance.choice([0, 2, 10]) * _LOOK_S)
        receiver = pair.pair._receivers[0].loop  # noqa: SLF001
        session = next(iter(receiver._sessions))  # noqa: SLF001
        receiver.close_session(session, "the link is lost")
        for sender in pair.pair._senders:  # noqa: SLF001
            sender.loop.close_session(session, "the link is lost")  # as the end of the registry's stream does
        with contextlib.suppress(TransferAborted):  # it may have arrived before
            await lost.wait()
        await all_ended(pair, readers)
    assert len(readers) == DECODE.num_ranks
