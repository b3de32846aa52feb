"""Copies on a GPU's queue: behind the engine's event, without the loop waiting, with the digest of what they moved."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.pieces import piece_of
from transfer.chunk import ChunkPlan, split_into_chunks
from transfer.copy import Kernels
from transfer.copy.copy_queue import CopyQueue, open_copy_queue
from transfer.copy.digest import DIGEST_WORDS, digest
from transfer.copy.head_slice import TritonCopier, Tuning
from transfer.copy.piece_copier import PieceCopier, PieceCopy
from transfer.layout import DType, KVLayout, Shard, routes
from transfer.pool.kv_pool import KVPool
from transfer.receive.signal_watch import Gathered, Scattered, SignalWatch
from transfer.transport.cuda_ipc_driver import process_cuda
from transfer.transport.shared_memory import shared_memory
from transfer.transport.signals import NUM_BYTES, SIGNAL_LIMIT_S, GatherSignal, SignalReader, SignalWriter
from transfer.transport.waiting_thread import WaitingThread

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=64, dtype=DType.BFLOAT16)
PAGES = [5, 2, 7, 0]
BUSY_CYCLES = 400_000_000  # 0.2 s of an H200


@dataclass(slots=True)
class Side:
    """A pool on the GPU, a queue beside it, and 64 tokens of a request."""

    name: str
    pool: KVPool
    copier: PieceCopier
    queue: CopyQueue

    @classmethod
    def open(cls, name: str, kernels: Kernels) -> Side:
        device = torch.device("cuda", torch.cuda.current_device())
        pool = KVPool(layout=LAYOUT, shard=Shard(page_size=16), num_pages=8, device=device)
        for buffer in (pool.buffer(layer, is_v=is_v) for layer in range(LAYOUT.num_layers) for is_v in (False, True)):
            buffer.normal_(std=float(name == "gather"))
        torch.cuda.synchronize()
        queue = open_copy_queue(name, device, asyncio.get_running_loop(), _crash)
        return cls(name, pool, PieceCopier(pool, is_source=name == "gather", kernels=kernels), queue)

    def piece(self) -> PieceCopy:
        (route,) = routes(LAYOUT, Shard(page_size=16), Shard(page_size=16))
        (chunk,) = split_into_chunks(ChunkPlan(chunk_tokens=64), num_tokens=64, num_layers=2)
        return self.copier.prepare(piece_of(LAYOUT, route, chunk, num_tokens=64, dtype=DType.BFLOAT16), [PAGES])

    def wire(self) -> Tensor:
        """Memory for the piece, there for every stream."""
        found = torch.zeros(self.piece().num_wire_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        return found

    def tokens(self) -> list[Tensor]:
        slots = (torch.tensor(PAGES, device="cuda")[:, None] * 16 + torch.arange(16, device="cuda")).view(-1)
        return [part for layer in range(2) for part in self.pool.read(layer, slots)]


def _crash(error: BaseException) -> None:
    raise AssertionError(f"the queue crashed: {error!r}")


async def gathered(
    side: Side, wire: Any, after: torch.cuda.Event | None, signal: GatherSignal | None = None
) -> tuple[int, float]:
    """Return the digest, and the seconds of the copy."""
    done: asyncio.Future[tuple[int, float, float]] = asyncio.get_running_loop().create_future()
    side.queue.gather(
        side.piece(),
        wire,
        algorithm=DIGEST_WORDS,
        peer=1,
        after=after,
        on_done=lambda *result: done.set_result(result),
        signal=signal,
    )
    found, begun_s, ended_s = await asyncio.wait_for(done, 30)
    return found, ended_s - begun_s


async def scattered(side: Side, wire: Tensor, announced: int) -> tuple[bool, float]:
    done: asyncio.Future[tuple[bool, float]] = asyncio.get_running_loop().create_future()
    side.queue.scatter(
        side.piece(), wire, algorithm=DIGEST_WORDS, digest=announced, peer=1, on_done=lambda *result: done.set_result(result)
    )
    return await asyncio.wait_for(done, 30)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kernels", [Kernels.TRITON, Kernels.TORCH])
async def test_a_piece_goes_from_pool_to_pool_with_its_digest(kernels: Kernels) -> None:
    source, target = Side.open("gather", kernels), Side.open("scatter", kernels)
    wire = source.wire()
    for _ in range(3):  # the digest is the difference to the copy before
        found, seconds = await gathered(source, wire, None)
        assert found == digest(wire.cpu().numpy(), DIGEST_WORDS) and 0 < seconds < 10
        target.queue.expect(target.piece(), peer=1)
        is_intact, _ = await scattered(target, wire, found)
        assert is_intact
        assert not (await scattered(target, wire, found ^ 1))[0]
    for mine, theirs in zip(source.tokens(), target.tokens(), strict=True):
        assert torch.equal(mine, theirs)
    assert source.queue.close(5) and target.queue.close(5)


def signal_ends() -> tuple[SignalWriter, SignalReader]:
    words = process_cuda().open_words(torch.cuda.current_device(), shared_memory(NUM_BYTES), WaitingThread("closing").submit)
    assert words is not None, "this GPU and driver have no 64-bit memory operations of streams"
    return SignalWriter(words), SignalReader(words)


class Target:
    """A queue of scatters, and the watch of one session, which is its peer 1."""

    def __init__(self, reader: SignalReader) -> None:
        self.side = Side.open("scatter", Kernels.TRITON)
        self.watch = SignalWatch(asyncio.get_running_loop(), self._on_report)
        assert self.watch.open(reader)
        self.watch.begin(1, reader)
        self.ends: asyncio.Queue[Scattered | Gathered] = asyncio.Queue()

    def arm(self, wire: Tensor, grant: int) -> None:
        piece = self.side.piece()
        self.side.queue.expect(piece, peer=1)
        launch = self.side.queue.launch_of(piece, wire, algorithm=DIGEST_WORDS, peer=1)
        assert launch is not None, "the kernel's parameters are unknown, so no scatter can be queued without Python"
        self.watch.arm(1, grant, launch)

    async def next(self) -> Scattered | Gathered:
        return await asyncio.wait_for(self.ends.get(), 30)

    def close(self) -> None:
        assert self.side.queue.close(5)
        self.watch.close(is_idle=True)

    def _on_report(self) -> None:
        with self.watch.gate:
            self.watch.take_queued()
            for ends in self.watch.take_ended():
                for one in ends:
                    self.ends.put_nowait(one)


@pytest.mark.parametrize("has_halves", [False, True])
async def test_a_scatter_is_queued_while_its_gather_waits_for_the_engine(
    has_halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing before the gather, or that half of it, has ended. It has the digest of the gather's stream.

    Without an armed scatter, the end of the gather is reported.
    """
    if has_halves:
        monkeypatch.setitem(TritonCopier.__init__.__kwdefaults__ or {}, "tuning", Tuning(halved_bytes=0))
    writer, reader = signal_ends()
    source, target = Side.open("gather", Kernels.TRITON), Target(reader)
    wire = source.wire()
    await scattered(target.side, wire, (await gathered(source, wire, None))[0])  # compiled
    for grant in range(1, 6):
        for buffer in (source.pool.buffer(layer, is_v=is_v) for layer in range(2) for is_v in (False, True)):
            buffer.normal_()
        wire.zero_()
        torch.cuda.synchronize()
        if grant != 4:
            target.arm(wire, grant)
        torch.cuda._sleep(BUSY_CYCLES)  # noqa: SLF001
        computed = torch.cuda.Event()
        computed.record()
        signal = writer.of(grant)
        gathering = asyncio.ensure_future(gathered(source, wire, computed, signal))
        await asyncio.sleep(0)  # it is queued
        assert signal.is_sent and target.ends.empty()  # the engine is not done
        ended = await target.next()
        found = digest(wire.cpu().numpy(), DIGEST_WORDS)
        assert bool(reader.words.words[8 * grant + 6]) == has_halves
        if grant == 4:
            assert ended == Gathered(session=1, grant=grant, digest=found)
        else:
            assert isinstance(ended, Scattered) and (ended.grant, ended.is_intact) == (grant, True) and ended.seconds < 0.1
            for mine, theirs in zip(source.tokens(), target.side.tokens(), strict=True):
                assert torch.equal(mine, theirs)
        assert (await gathering)[0] == found
    assert source.queue.close(5)
    target.close()


async def test_the_link_is_woken_before_the_engine_is_done() -> None:
    """NVLink that sleeps makes the first gather slower. The write goes into the gather's own bytes."""
    source = Side.open("gather", Kernels.TRITON)
    wires = [source.wire(), source.wire()]
    device = source.pool.device.index
    rings = [SimpleNamespace(device_index=device, data_ptr=wire.data_ptr, numel=wire.numel) for wire in wires]
    await gathered(source, rings[0], None)  # compiled
    other = torch.cuda.Stream()  # before the engine is busy: the first one waits for the device
    for wire in wires:
        wire.fill_(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)  # noqa: SLF001
    computed = torch.cuda.Event()
    computed.record()
    gathering = [asyncio.ensure_future(gathered(source, ring, computed)) for ring in rings]
    await asyncio.sleep(0)  # they are queued
    with torch.cuda.stream(other):
        while wires[0][0] and not computed.query():
            await asyncio.sleep(0.001)
        assert wires[1][0] and not computed.query(), "the second gather found the link awake"
    for wire, one in zip(wires, gathering, strict=True):
        assert (await one)[0] == digest(wire.cpu().numpy(), DIGEST_WORDS)
    assert source.queue.close(5)


async def test_a_signalled_scatter_of_other_bytes_is_not_intact() -> None:
    writer, reader = signal_ends()
    target = Target(reader)
    wire = target.side.wire()
    await scattered(target.side, wire, 0)  # compiled
    total = torch.zeros(1, dtype=torch.int64, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    target.arm(wire, 8)
    assert writer.begin(8, stream, total.data_ptr()) == 1
    total += 1  # not the digest of zeros
    writer.end(1, stream, total.data_ptr())
    ended = await target.next()
    assert isinstance(ended, Scattered) and ended.is_intact is False
    target.close()


async def test_no_stream_waits_long_for_a_gather_that_does_not_end() -> None:
    writer, reader = signal_ends()
    target = Target(reader)
    wire = target.side.wire()
    await scattered(target.side, wire, 0)  # compiled
    stream = torch.cuda.Stream()
    total = torch.zeros(1, dtype=torch.int64, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    target.arm(wire, 8)
    begun_s = time.monotonic()
    assert writer.begin(8, stream.cuda_stream, total.data_ptr()) == 1
    ended = await target.next()
    assert isinstance(ended, Scattered) and ended.is_intact is None
    torch.cuda.synchronize()
    assert SIGNAL_LIMIT_S <= time.monotonic() - begun_s < SIGNAL_LIMIT_S + 1
    is_intact, _ = await scattered(target.side, wire, digest(wire.cpu().numpy(), DIGEST_WORDS))  # the next copy works
    assert is_intact
    target.close()


async def test_a_gather_without_a_step_to_wait_for_sends_no_signal() -> None:
    side = Side.open("gather", Kernels.TRITON)
    wire, (writer, reader) = side.wire(), signal_ends()
    fired = torch.cuda.Event()
    fired.record()
    fired.synchronize()
    for after in (None, fired):
        signal = writer.of(8)
        assert (await gathered(side, wire, after, signal))[0] == digest(wire.cpu().numpy(), DIGEST_WORDS)
        assert not signal.is_sent and not any(reader.words.words[:])
    assert side.queue.close(5)


async def test_a_gather_behind_another_sends_a_signal() -> None:
    """Its message would follow only after its end, like that of a gather that waits for the engine."""
    side = Side.open("gather", Kernels.TRITON)
    wires, (writer, _) = [side.wire(), side.wire()], signal_ends()
    await gathered(side, wires[0], None)  # compiled
    fired, computed = torch.cuda.Event(), torch.cuda.Event()
    fired.record()
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)  # noqa: SLF001
    computed.record()
    signals = [writer.of(8), writer.of(16)]
    ends = [
        asyncio.ensure_future(gathered(side, wire, after, signal))
        for wire, after, signal in zip(wires, (computed, fired), signals, strict=True)
    ]
    await asyncio.gather(*ends)
    assert all(signal.is_sent for signal in signals)
    assert side.queue.close(5)


async def test_streams_of_copies_are_nobody_elses() -> None:
    """torch hands out 32 streams in turn."""
    side = Side.open("gather", Kernels.TRITON)
    for peer in range(40):
        side.queue.expect(side.piece(), peer=peer)
    streams = {peer.stream.cuda_stream for peer in side.queue._peers.values()}  # type: ignore[attr-defined]  # noqa: SLF001
    assert len(streams) == 40 and not streams & {torch.cuda.Stream().cuda_stream for _ in range(64)}
    for peer in range(40):
        side.queue.forget(peer)
    wire = side.wire()
    assert (await gathered(side, wire, None))[0] == digest(wire.cpu().numpy(), DIGEST_WORDS)
    assert side.queue.close(5)


def test_signals_can_be_opened_while_a_graph_is_captured() -> None:
    graph, memory = torch.cuda.CUDAGraph(), torch.zeros(1024, device="cuda")
    with torch.cuda.graph(graph):
        memory += 1
        with ThreadPoolExecutor(1) as thread:
            writer, _ = thread.submit(signal_ends).result(30)
        memory += 1
    assert not writer.is_stopped
    memory.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert float(memory[0]) == 2.0
