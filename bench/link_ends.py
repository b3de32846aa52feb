"""The two ends of a link over kvferry's transports, driven as the nodes drive them: by a `SessionDriver` on an asyncio loop.

On a two-sided transport the target answers each round with a byte, so that there the way back is seen as well; on a one-sided one
the target does nothing but exist.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.link_plan import Samples, Step
from bench.pair import bytes_on, synchronize
from transfer.errors import ConfigError
from transfer.transport.base import ByteRange, LocalMemory, Session, Transport
from transfer.transport.driver import SessionDriver

_DEADLINE_S = 30.0
_FIRST_ANSWER_KEY = 1 << 40
_ANSWER = ByteRange(begin=0, end=1)
_ANSWER_BYTES = 4096  # of memory beside what is written, for the answers of two-sided transports

LANES = ("shm", "ucx", "ucx/shm", "ucx/net", "nixl", "cuda_ipc/copy", "cuda_ipc/fused")
"""A transport, and what there is to choose of it."""


def open_transport(lane: str, device: str) -> Transport:
    """The transport that a rank with its pool on `device` would open.

    Raises:
        ConfigError: There is no such lane, or its library is not installed.
    """
    name, _, choice = lane.partition("/")
    if lane not in LANES:
        raise ConfigError(f"lane {lane!r} is unknown; use one of {', '.join(LANES)}")
    match name:
        case "ucx":
            from transfer.transport.ucx import UcxTransport

            wanted: Any = choice or "auto"
            return UcxTransport(lane=wanted, options={"NET_DEVICES": "lo"})
        case "nixl":
            from transfer.transport.nixl import NixlTransport

            return NixlTransport()
        case "shm":
            from transfer.transport.shm import ShmTransport

            return ShmTransport()
        case _:
            from transfer.transport.cuda_ipc import CudaIpcTransport

            mode: Any = choice
            return CudaIpcTransport(mode=mode, device_index=torch.device(device).index)


@dataclass(slots=True, kw_only=True)
class LinkSamples:
    """Seconds per write, by step.

    Attributes:
        writes: Until the writer's handle is done: the source may be reused.
        answers: Until a byte of the target's is back; two-sided transports only.
        lane: What carried it, as the session says.
    """

    writes: dict[str, Samples] = field(default_factory=dict)
    answers: dict[str, Samples] = field(default_factory=dict)
    lane: str = ""


@dataclass(slots=True, kw_only=True)
class End:
    """One end of the link and its memory."""

    driver: SessionDriver
    session: Session
    memory: LocalMemory

    async def wait(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            await self.driver.wait(self.session, handle, deadline_s=_DEADLINE_S)

    async def write_all(self, plan: Sequence[Step], *, is_answered: bool) -> LinkSamples:
        """The writer's half."""
        found = LinkSamples(lane=self.session.lane)
        key = 0
        for step in plan:
            rounds = []
            for _ in range(step.repetitions + 1):
                rounds.append(await self._write_round(step, key, is_answered=is_answered))
                key += step.in_flight
            found.writes[step.name] = [written_s / step.in_flight for written_s, _ in rounds[1:]]
            if is_answered:
                found.answers[step.name] = [answered_s / step.in_flight for _, answered_s in rounds[1:]]
        return found

    async def _write_round(self, step: Step, first_key: int, *, is_answered: bool) -> tuple[float, float]:
        key = _FIRST_ANSWER_KEY + first_key
        answers = [self.session.expect(self.memory, _ANSWER, key)] if is_answered else []
        begun = time.perf_counter()
        writes = []
        for i in range(step.in_flight):
            place = _place(step, i)
            writes.append(self.session.write(self.memory, place, place, first_key + i))
        await self.wait(writes)
        written_s = time.perf_counter() - begun
        await self.wait(answers)
        return written_s, time.perf_counter() - begun

    async def answer_all(self, plan: Sequence[Step]) -> None:
        """The target's half on a two-sided transport."""
        rounds = [step for step in plan for _ in range(step.repetitions + 1)]
        key = 0
        expected = self._expect(rounds[0], key)
        for i, step in enumerate(rounds):
            await self.wait(expected)
            next_key = key + step.in_flight
            if i + 1 < len(rounds):
                expected = self._expect(rounds[i + 1], next_key)  # before the answer, so that no write ever waits for us
            await self.wait([self.session.write(self.memory, _ANSWER, _ANSWER, _FIRST_ANSWER_KEY + key)])
            key = next_key

    def _expect(self, step: Step, first_key: int) -> list[Any]:
        return [self.session.expect(self.memory, _place(step, i), first_key + i) for i in range(step.in_flight)]


def _place(step: Step, index: int) -> ByteRange:
    begin = _ANSWER_BYTES + index * step.num_bytes
    return ByteRange(begin=begin, end=begin + step.num_bytes)


def memory_bytes_of(plan: Sequence[Step]) -> int:
    return _ANSWER_BYTES + max(step.num_bytes * step.in_flight for step in plan)


def write(pipe: Connection, device: str, plan: Sequence[Step], lane: str, spin_s: float) -> LinkSamples:
    """The writer's process."""
    transport = open_transport(lane, device)
    memory = transport.register(bytes_on(device, memory_bytes_of(plan)))
    synchronize(device)
    offer = transport.offer()
    pipe.send(offer.blob)
    session = offer.complete(pipe.recv())

    async def run() -> LinkSamples:
        driver = SessionDriver(asyncio.get_running_loop(), spin_s=spin_s)
        driver.add(session)
        found = await End(driver=driver, session=session, memory=memory).write_all(plan, is_answered=not transport.has_one_sided)
        driver.remove(session)
        return found

    found = asyncio.run(run())
    transport.close()
    pipe.send("done")
    return found


def serve(pipe: Connection, device: str, plan: Sequence[Step], lane: str, spin_s: float) -> None:
    """The target's process."""
    transport = open_transport(lane, device)
    memory = transport.register(bytes_on(device, memory_bytes_of(plan), is_shared=transport.has_one_sided))
    synchronize(device)
    session, answer = transport.accept(pipe.recv(), memory)
    pipe.send(answer)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        driver = SessionDriver(loop, spin_s=spin_s)
        driver.add(session)
        if not transport.has_one_sided:
            await End(driver=driver, session=session, memory=memory).answer_all(plan)
        await loop.run_in_executor(None, pipe.recv)
        driver.remove(session)

    asyncio.run(run())
    transport.close()
