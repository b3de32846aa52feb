"""One link, from 4 KiB to 64 MiB: every transport between two processes (inproc within one), against memcpy in the same run.

    python -m bench.link [--json FILE] [--quick] [--spin-us N]

One repetition is: write, receive, and an answer of one byte back, seen through `SessionDriver` as the nodes see it. With 8 in
flight the time of a repetition is that of all eight and one answer, divided by eight.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.timing import Report, argument_parser, readable_bytes, sample
from transfer.transport.base import ByteRange, LocalMemory, Session
from transfer.transport.driver import SessionDriver
from transfer.transport.inproc import InprocHub, InprocTransport
from transfer.transport.ucx import UcxTransport

SIZES = [4 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20]
MEMORY_BYTES = 64 << 20
_DEADLINE_S = 30.0
_FIRST_ANSWER_KEY = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One measurement, known to both ends."""

    num_bytes: int
    in_flight: int
    repetitions: int
    first_key: int


def steps(*, is_quick: bool) -> list[Step]:
    plan: list[Step] = []
    next_key = 0
    for num_bytes in SIZES:
        for in_flight in (1, 8):
            if num_bytes * in_flight > MEMORY_BYTES:
                continue
            repetitions = 5 if is_quick else max(15, min(300, (256 << 20) // (num_bytes * in_flight)))
            plan.append(Step(num_bytes=num_bytes, in_flight=in_flight, repetitions=repetitions, first_key=next_key))
            next_key += (repetitions + 1) * in_flight
    return plan


@dataclass(slots=True, kw_only=True)
class End:
    """One end of the link and its memory."""

    driver: SessionDriver
    session: Session
    memory: LocalMemory

    async def wait(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            await self.driver.wait(self.session, handle, deadline_s=_DEADLINE_S)

    async def write_all(self, plan: Sequence[Step]) -> list[list[float]]:
        """The writer's half: seconds per write, for each repetition of each step."""
        return [[await self._write_round(step, turn) for turn in range(step.repetitions + 1)][1:] for step in plan]

    async def _write_round(self, step: Step, turn: int) -> float:
        first = step.first_key + turn * step.in_flight
        answer = self.session.expect(self.memory, ByteRange(begin=0, end=1), _FIRST_ANSWER_KEY + first)
        begun = time.perf_counter()
        writes = []
        for i in range(step.in_flight):
            place = ByteRange(begin=i * step.num_bytes, end=(i + 1) * step.num_bytes)
            writes.append(self.session.write(self.memory, place, place, first + i))
        await self.wait([answer])
        elapsed_s = time.perf_counter() - begun
        await self.wait(writes)
        return elapsed_s / step.in_flight

    async def serve_all(self, plan: Sequence[Step]) -> None:
        """The target's half."""
        rounds = [(step, turn) for step in plan for turn in range(step.repetitions + 1)]
        expected = self._expect(*rounds[0])
        for i, (step, turn) in enumerate(rounds):
            await self.wait(expected)
            if i + 1 < len(rounds):
                expected = self._expect(*rounds[i + 1])  # before the answer, so that no write ever waits for us
            key = _FIRST_ANSWER_KEY + step.first_key + turn * step.in_flight
            await self.wait([self.session.write(self.memory, ByteRange(begin=0, end=1), ByteRange(begin=0, end=1), key)])

    def _expect(self, step: Step, turn: int) -> list[Any]:
        first = step.first_key + turn * step.in_flight
        places = [ByteRange(begin=i * step.num_bytes, end=(i + 1) * step.num_bytes) for i in range(step.in_flight)]
        return [self.session.expect(self.memory, place, first + i) for i, place in enumerate(places)]


def _serve_process(pipe: Connection, lane: Any, plan: Sequence[Step], spin_s: float) -> None:
    transport = UcxTransport(lane=lane)
    memory = transport.register(np.ones(MEMORY_BYTES, dtype=np.uint8))
    session, answer = transport.accept(pipe.recv(), memory)
    pipe.send(answer)

    async def serve() -> None:
        driver = SessionDriver(asyncio.get_running_loop(), spin_s=spin_s)
        driver.add(session)
        await End(driver=driver, session=session, memory=memory).serve_all(plan)
        driver.remove(session)

    asyncio.run(serve())
    pipe.send("done")
    transport.close()


def over_ucx(lane: Any, plan: Sequence[Step], spin_s: float) -> list[list[float]]:
    """The writer in this process, the target in another."""
    context = multiprocessing.get_context("spawn")
    pipe, child_pipe = context.Pipe()
    child = context.Process(target=_serve_process, args=(child_pipe, lane, plan, spin_s), daemon=True)
    child.start()
    transport = UcxTransport(lane=lane)
    memory = transport.register(np.ones(MEMORY_BYTES, dtype=np.uint8))
    offer = transport.offer()
    pipe.send(offer.blob)
    session = offer.complete(pipe.recv())

    async def write() -> list[list[float]]:
        driver = SessionDriver(asyncio.get_running_loop(), spin_s=spin_s)
        driver.add(session)
        samples_s = await End(driver=driver, session=session, memory=memory).write_all(plan)
        driver.remove(session)
        return samples_s

    samples_s = asyncio.run(write())
    pipe.recv()
    transport.close()
    child.join(10)
    return samples_s


def over_inproc(plan: Sequence[Step]) -> list[list[float]]:
    """Both ends on one loop of this process."""

    async def both() -> list[list[float]]:
        hub = InprocHub()
        writer, target = InprocTransport(hub), InprocTransport(hub)
        source = writer.register(np.ones(MEMORY_BYTES, dtype=np.uint8))
        ring = target.register(np.ones(MEMORY_BYTES, dtype=np.uint8))
        offer = writer.offer()
        target_session, answer = target.accept(offer.blob, ring)
        driver = SessionDriver(asyncio.get_running_loop())
        ends = []
        for session, memory in ((offer.complete(answer), source), (target_session, ring)):
            driver.add(session)
            ends.append(End(driver=driver, session=session, memory=memory))
        samples_s, _ = await asyncio.gather(ends[0].write_all(plan), ends[1].serve_all(plan))
        return samples_s

    return asyncio.run(both())


def measure(*, is_quick: bool, spin_s: float) -> Report:
    report = Report(title="One link: write, receive and a one-byte answer")
    plan = steps(is_quick=is_quick)
    source, target = np.ones(MEMORY_BYTES, dtype=np.uint8), np.zeros(MEMORY_BYTES, dtype=np.uint8)
    copies = {}
    for num_bytes in SIZES:
        copy = partial(np.copyto, target[:num_bytes], source[:num_bytes])
        samples_s = sample(copy, repetitions=5 if is_quick else 31)
        copies[num_bytes] = report.add(f"memcpy {readable_bytes(num_bytes)}", "one thread", samples_s, num_bytes=num_bytes)
    lanes: dict[str, Callable[[], list[list[float]]]] = {
        "inproc": lambda: over_inproc(plan),
        "ucx/shm": lambda: over_ucx("shm", plan, spin_s),
        "ucx/net": lambda: over_ucx("net", plan, spin_s),
    }
    for lane, run in lanes.items():
        for step, samples_s in zip(plan, run(), strict=True):
            report.add(
                f"{lane} {readable_bytes(step.num_bytes)}",
                f"{step.in_flight} in flight",
                samples_s,
                num_bytes=step.num_bytes,
                against=copies[step.num_bytes],
            )
    return report


def main() -> None:
    parser = argument_parser(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--spin-us", type=float, default=0.0, help="SessionDriver's spin_s, in microseconds")
    arguments = parser.parse_args()
    measure(is_quick=arguments.quick, spin_s=arguments.spin_us * 1e-6).finish(arguments.json)


if __name__ == "__main__":
    main()
