"""NIXL on a GPU, between two processes: device memory at either end, and when a session over it is over."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from transfer.pool.staging import zeroed_bytes
from transfer.transport.base import ByteRange, Session
from transfer.transport.nixl import NixlTransport

SIZE = 64 << 20
WHOLE = ByteRange(begin=0, end=SIZE)
PAIRS = [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "cpu")]


def _pattern(device: str) -> Tensor:
    return (torch.arange(SIZE, device=device, dtype=torch.int32) * 2654435 >> 7).to(torch.uint8)


def _write(session: Session, memory: Any, key: int) -> float:
    """Seconds of one whole write."""
    begun = time.perf_counter()
    handle = session.write(memory, WHOLE, WHOLE, key)
    while not handle.poll():
        session.progress()
    return time.perf_counter() - begun


def _writer(pipe: Connection, device: str) -> None:
    """The other process: offers, connects, writes once for each number it is sent, and closes when it is sent None."""
    transport = NixlTransport()
    memory = transport.register(_pattern(device))
    torch.cuda.synchronize()
    offer = transport.offer()
    pipe.send(offer.blob)
    session = offer.complete(pipe.recv())
    pipe.send(session.lane)
    while (key := pipe.recv()) is not None:
        pipe.send(_write(session, memory, key))
    session.close()
    pipe.send("closed")
    pipe.recv()


class Ends:
    """This process as the target, and the writer."""

    def __init__(self, source: str, target: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_writer, args=(theirs, source), daemon=True)
        self.process.start()
        self.transport = NixlTransport()
        self.tensor = zeroed_bytes(SIZE, target, is_shared=True)
        self.memory = self.transport.register(self.tensor)
        self.session, answer = self.transport.accept(self.hear(), self.memory)
        self.pipe.send(answer)
        self.lane = self.hear()

    def hear(self) -> Any:
        assert self.pipe.poll(60), "the writer says nothing"
        return self.pipe.recv()

    def write(self, key: int) -> float:
        self.pipe.send(key)
        return float(self.hear())

    def is_over_within(self, seconds: float) -> bool:
        ends_at = time.monotonic() + seconds
        while not self.session.is_over and time.monotonic() < ends_at:
            time.sleep(0.005)
        return self.session.is_over

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.transport.close()


@pytest.fixture
def ends_of() -> Iterator[Callable[[str, str], Ends]]:
    opened: list[Ends] = []

    def open_ends(source: str, target: str) -> Ends:
        opened.append(Ends(source, target))
        return opened[-1]

    yield open_ends
    for ends in opened:
        ends.end()


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_bytes_arrive(
    ends_of: Callable[[str, str], Ends], source: str, target: str, record_property: Callable[[str, object], None]
) -> None:
    ends = ends_of(source, target)
    assert ends.session.lane == ends.lane == ("nixl/ipc" if target == "cuda" else "nixl/shm")
    seconds = [ends.write(key) for key in range(8)]
    assert torch.equal(ends.tensor.cpu(), _pattern("cpu"))
    ends.tensor.zero_()
    torch.cuda.synchronize()
    ends.write(100)
    assert torch.equal(ends.tensor.cpu(), _pattern("cpu"))
    record_property("gb_per_s", f"{source} to {target}: {SIZE / min(seconds) / 1e9:.1f}")
    print(f"{source} to {target}: {SIZE / min(seconds) / 1e9:.1f} GB/s at best, first {seconds[0] * 1e3:.1f} ms")


def test_device_memory_is_over_when_the_writer_says_so(ends_of: Callable[[str, str], Ends]) -> None:
    ends = ends_of("cuda", "cuda")
    ends.write(1)
    ends.session.close()
    assert not ends.is_over_within(0.2)
    ends.pipe.send(None)
    assert ends.hear() == "closed"
    assert ends.is_over_within(5)


@pytest.mark.parametrize("is_frozen_first", [False, True])
def test_device_memory_is_over_when_the_writer_is_dead_and_not_before(
    ends_of: Callable[[str, str], Ends], is_frozen_first: bool
) -> None:
    ends = ends_of("cuda", "cuda")
    ends.write(1)
    assert ends.process.pid is not None
    if is_frozen_first:
        os.kill(ends.process.pid, signal.SIGSTOP)
        ends.session.close()
        assert not ends.is_over_within(0.3)
    ends.process.kill()
    ends.process.join()
    ends.session.close()
    assert ends.is_over_within(5)
    ends.tensor.fill_(0x33)
    torch.cuda.synchronize()
    time.sleep(0.2)
    assert bool((ends.tensor == 0x33).all())
