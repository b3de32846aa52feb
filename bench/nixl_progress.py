"""Write between two processes over NIXL for minutes, with and without NIXL's progress thread at the writer. By hand.

    python -m bench.nixl_progress [--minutes 10] [--processes 2] [--device cpu|cuda] [--lanes auto net] [--threads none writer]
                                  [--json FILE] [--quick] [--seed N]

Every combination of `--lanes` and `--threads` is a case of its own, and all cases run at the same time. A case consists of pairs
of a writer and a target. A pair registers memory at both ends and opens sessions. It writes random ranges, compares every byte at
the target, leaves the sessions idle, and closes some of them in the middle of a write. Then it deregisters the memory and starts
again.

`--threads writer` gives the writer's agent the progress thread that `NixlTransport` gives to targets alone. NIXL and UCX run as
they do in a rank: the environment and `NixlTransport` choose their options. kvferry sends no NIXL notifications, nor does this.

A process that dies is reported with its signal and the end of its output: Python's faulthandler and UCX both print a traceback
there. The exit code is 0 only if no process died, hung or found a wrong byte.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.pair import bytes_on, synchronize
from bench.timing import Environment, argument_parser
from transfer.transport.base import ByteRange, Handle, LocalMemory, Session
from transfer.transport.nixl import Lane, NixlTransport
from transfer.transport.nixl_library import Agent

_MEMORY_BYTES = 64 << 20
_NUM_SLOTS = 16  # slots of the memory; no two writes of a burst share a slot
_CUT_BYTES = 32 << 20  # size of a write that its session's end interrupts, at the memory's begin
_SESSIONS, _BURSTS, _ROUNDS_OF_A_MEMORY = 3, 4, 3  # at most
_PAUSE_S = 0.25  # at most; the progress thread wakes up every 0.1 s
_DEADLINE_S = 60.0
_SILENCE_S = 90.0  # without a report of a running pair; a round with its report takes about a second
_OUTPUT_LINES = 60


class _ThreadAtWriter(NixlTransport):
    """A transport whose both ends run a progress thread, as before ADR 0041."""

    def _create_agent(self, lane: str, *, is_target: bool) -> Agent:
        return super()._create_agent(lane, is_target=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The plan of one pair."""

    lane: Lane
    has_writer_thread: bool
    device: str
    seed: int
    minutes: float
    output: str

    @property
    def name(self) -> str:
        return f"lane {self.lane}, thread at {'both ends' if self.has_writer_thread else 'target'}, pair {self.seed}"

    def transport(self) -> NixlTransport:
        return (_ThreadAtWriter if self.has_writer_thread else NixlTransport)(lane=self.lane)


@dataclass(slots=True, kw_only=True)
class Counts:
    """The counts of one pair so far."""

    memories: int = 0
    sessions: int = 0
    cut_sessions: int = 0
    writes: int = 0
    bytes: int = 0
    carried_by: str = ""


@dataclass(frozen=True, slots=True)
class _Write:
    """One write that the target compares: the bytes from `source` on, of the source's seed, at `target`."""

    source: int
    target: int
    num_bytes: int


def _noise(device: str, seed: int) -> Tensor:
    values = torch.arange(_MEMORY_BYTES, device=device, dtype=torch.int32)
    return ((values + seed * 7919) * 2654435 >> 7).to(torch.uint8)


def _hear(pipe: Connection) -> Any:
    if not pipe.poll(_DEADLINE_S):
        raise TimeoutError(f"the other end said nothing for {_DEADLINE_S:g} s")
    return pipe.recv()


def _drive(session: Session, handles: Sequence[Handle]) -> None:
    ends_s = time.monotonic() + _DEADLINE_S
    while not all([handle.poll() for handle in handles]):
        session.progress()
        if time.monotonic() > ends_s:
            raise TimeoutError(f"a write over {session.lane} is pending for {_DEADLINE_S:g} s")


def _wait_over(sessions: Sequence[Session]) -> None:
    ends_s = time.monotonic() + _DEADLINE_S
    while not all(session.is_over for session in sessions):
        if time.monotonic() > ends_s:
            raise TimeoutError(f"a closed session over {sessions[0].lane} is not over after {_DEADLINE_S:g} s")
        time.sleep(0.001)


class _Writer:
    """The writer's end of a pair."""

    def __init__(self, plan: _Plan, pipe: Connection, report: Connection) -> None:
        self._plan = plan
        self._pipe = pipe
        self._report = report
        self._random = random.Random(plan.seed)
        self._transport = plan.transport()
        self._counts = Counts()

    def run(self) -> None:
        ends_s = time.monotonic() + 60 * self._plan.minutes
        while time.monotonic() < ends_s or not self._counts.memories:
            seed = self._random.randrange(1 << 16)
            source = self._transport.register(bytes_on(self._plan.device, _MEMORY_BYTES).copy_(_noise(self._plan.device, seed)))
            synchronize(self._plan.device)
            self._counts.memories += 1
            self._pipe.send(seed)
            for _ in range(self._random.randint(1, _ROUNDS_OF_A_MEMORY)):
                self._round(source)
            self._pipe.send(None)
            self._transport.deregister(source)
            _hear(self._pipe)
        self._pipe.send(None)
        _hear(self._pipe)
        self._transport.close()

    def _round(self, source: LocalMemory) -> None:
        sessions = [self._open() for _ in range(self._random.randint(1, _SESSIONS))]
        for _ in range(self._random.randint(1, _BURSTS)):
            for session in sessions:
                self._burst(session, source)
            if self._random.random() < 0.3:
                time.sleep(self._random.random() * _PAUSE_S)
        for session in sessions:
            if self._random.random() < 0.3:
                whole = ByteRange(begin=0, end=_CUT_BYTES)
                session.write(source, whole, whole, 1 << 40)
                session.progress()
                self._counts.cut_sessions += 1
            session.close()
        self._pipe.send("close")
        _wait_over(sessions)
        _hear(self._pipe)
        self._counts.carried_by = sessions[0].lane
        self._report.send(self._counts)

    def _open(self) -> Session:
        offer = self._transport.offer()
        self._pipe.send(offer.blob)
        self._counts.sessions += 1
        return offer.complete(_hear(self._pipe))

    def _burst(self, session: Session, source: LocalMemory) -> None:
        slot_bytes = _MEMORY_BYTES // _NUM_SLOTS
        writes = []
        for slot in self._random.sample(range(_NUM_SLOTS), self._random.randint(1, _NUM_SLOTS)):
            num_bytes = int(2 ** self._random.uniform(0, math.log2(slot_bytes)))
            begin = slot * slot_bytes + self._random.randint(0, slot_bytes - num_bytes)
            writes.append(_Write(self._random.randint(0, _MEMORY_BYTES - num_bytes), begin, num_bytes))
        handles = [
            session.write(
                source,
                ByteRange(begin=write.source, end=write.source + write.num_bytes),
                ByteRange(begin=write.target, end=write.target + write.num_bytes),
                self._counts.writes + i,
            )
            for i, write in enumerate(writes)
        ]
        _drive(session, handles)
        self._pipe.send(writes)
        _hear(self._pipe)
        self._counts.writes += len(writes)
        self._counts.bytes += sum(write.num_bytes for write in writes)


def _serve(plan: _Plan, pipe: Connection) -> None:
    """The target's end: answer offers, compare what was written, close."""
    transport = plan.transport()
    while (seed := _hear(pipe)) is not None:
        expected = _noise(plan.device, seed)
        tensor = bytes_on(plan.device, _MEMORY_BYTES, is_shared=True)
        memory = transport.register(tensor)
        synchronize(plan.device)
        sessions: list[Session] = []
        while (said := _hear(pipe)) is not None:
            if isinstance(said, bytes):
                session, answer = transport.accept(said, memory)
                sessions.append(session)
                pipe.send(answer)
            elif said == "close":
                for opened in sessions:
                    opened.close()
                _wait_over(sessions)
                sessions = []
                pipe.send("closed")
            else:
                _compare(tensor, expected, said)
                pipe.send("compared")
        transport.deregister(memory)
        del memory, tensor
        pipe.send("deregistered")
    transport.close()
    pipe.send("ended")


def _compare(tensor: Tensor, expected: Tensor, writes: Sequence[_Write]) -> None:
    for write in writes:
        found = tensor[write.target : write.target + write.num_bytes]
        wanted = expected[write.source : write.source + write.num_bytes]
        if not torch.equal(found, wanted):
            raise AssertionError(f"{int((found != wanted).sum())} of {write.num_bytes} bytes at {write.target} differ")


def _run(role: str, plan: _Plan, pipe: Connection, report: Connection) -> None:
    """Run one process. All output, including that of C libraries, goes to the plan's file."""
    output = os.open(f"{plan.output}.{role}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if plan.device != "cpu":
        torch.cuda.set_device(plan.device)
    if role == "writer":
        _Writer(plan, pipe, report).run()
    else:
        _serve(plan, pipe)


class _Pair:
    """Both processes of a pair, and how they ended."""

    def __init__(self, plan: _Plan) -> None:
        context = multiprocessing.get_context("spawn")
        ends = context.Pipe()
        self.plan = plan
        self.counts = Counts()
        self.failure = ""
        self._heard_s = time.monotonic()
        self._report, report = context.Pipe(duplex=False)
        self._processes: dict[str, SpawnProcess] = {}
        for role, pipe in zip(("writer", "target"), ends, strict=True):
            process = context.Process(target=_run, args=(role, plan, pipe, report), daemon=True)
            process.start()
            pipe.close()
            self._processes[role] = process
        report.close()

    @property
    def is_running(self) -> bool:
        return any(process.is_alive() for process in self._processes.values())

    def look(self) -> None:
        """Read the counts, and end both processes if one has failed."""
        try:
            while self._report.poll():
                self.counts = self._report.recv()
                self._heard_s = time.monotonic()
        except EOFError:
            pass  # both have ended
        codes = {role: process.exitcode for role, process in self._processes.items()}
        died = {role: code for role, code in codes.items() if code}
        if died and not self.failure:
            # Report the process that a signal killed first. The other one then finds its pipe closed.
            role, code = min(died.items(), key=lambda item: item[1])
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
            self.failure = f"{role} {how}"
            time.sleep(1.0)  # the other process may be about to fail, and log the cause
            self.kill()
        elif time.monotonic() - self._heard_s > _SILENCE_S and self.is_running:
            self.failure = f"said nothing for {_SILENCE_S:g} s"
            self._print_stacks()
            self.kill()

    def _print_stacks(self) -> None:
        """Make both processes write their stacks to their output."""
        for process in self._processes.values():
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()

    def output(self, role: str) -> list[str]:
        path = Path(f"{self.plan.output}.{role}")
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    @property
    def ucx_errors(self) -> int:
        """Number of error lines of UCX at both ends."""
        return sum(" ERROR " in line for role in self._processes for line in self.output(role))

    def to_json(self) -> dict[str, object]:
        return {
            "case": self.plan.name,
            "failure": self.failure,
            **asdict(self.counts),
            "ucx_errors": self.ucx_errors,
            "output": {role: self.output(role)[-_OUTPUT_LINES:] for role in self._processes},
        }

    def print(self) -> None:
        counts = self.counts
        print(
            f"{'FAILED' if self.failure else 'ok':6} {self.plan.name} ({counts.carried_by or 'no session closed'}): "
            f"{counts.writes} writes, {counts.bytes / 1e9:.2f} GB, {counts.sessions} sessions ({counts.cut_sessions} cut off), "
            f"{counts.memories} memories, {self.ucx_errors} error lines of UCX {self.failure}"
        )
        for role in self._processes if self.failure or self.ucx_errors else ():
            print(*(f"    {role}: {line}" for line in self.output(role)[-_OUTPUT_LINES:]), sep="\n")


def main() -> int:
    parser = argument_parser("writes over NIXL for minutes, with and without a progress thread at the writer")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long every pair writes")
    parser.add_argument("--processes", type=int, default=2, help="of each case; two are a pair")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lanes", nargs="+", choices=("auto", "shm", "net"), default=["auto", "net"])
    parser.add_argument("--threads", nargs="+", choices=("none", "writer"), default=["none", "writer"], help="at the writer")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.processes < 2 or options.processes % 2:
        parser.error(f"--processes is {options.processes}; use an even number, at least 2")
    minutes = 0.02 if options.quick else options.minutes
    print(f"NIXL {NixlTransport().version}; {Environment.here()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pairs = [
            _Pair(
                _Plan(
                    lane=lane,
                    has_writer_thread=thread == "writer",
                    device="cpu" if options.device == "cpu" else "cuda:0",
                    seed=options.seed + index,
                    minutes=minutes,
                    output=f"{folder}/{lane}-{thread}-{index}",
                )
            )
            for lane, thread, index in itertools.product(options.lanes, options.threads, range(options.processes // 2))
        ]
        while any(pair.is_running for pair in pairs):
            time.sleep(0.1)
            for pair in pairs:
                pair.look()
        for pair in pairs:
            pair.look()
            pair.print()
        if options.json is not None:
            content = {"environment": Environment.here().to_json(), "pairs": [pair.to_json() for pair in pairs]}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
        return int(any(pair.failure for pair in pairs))


if __name__ == "__main__":
    sys.exit(main())
