"""Rounds of requests from pool to pool, played by two processes; what both saw of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from bench.pair import Devices, run_pair
from bench.plain_memcpy import REPETITIONS, PlainMemcpy, memcpy_of
from bench.pool_ends import DecodeEnd, PrefillEnd, Stages
from bench.pool_setting import Case, Setting
from bench.timing import sample
from node_runtime.process_setup import freeze_gc
from node_runtime.rank_process import SWITCH_INTERVAL_S
from transfer.chunk import ChunkPlan, split_into_chunks
from transfer.config import LogConfig
from transfer.errors import TransportError
from transfer.instance import Link
from transfer.logs import configure_logging
from transfer.loop_turns import run_measured

DEADLINE_S = 60.0
HOPS = {
    "computed to gathered": "gather",
    "gathered to written": "write",
    "written to scattered": "scatter",
    "scattered to released": "ack",
}
"""Ways of a lone chunk from the end of one stage, as its loop hears of it, to the end of the next, less the copy itself."""
WARMUP_ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRound:
    """What the prefill process says of a round.

    Args:
        started_s: When the KV of each request was computed, monotonic clock (one for all processes of a host).
        cpu_s: CPU time of the process, all threads.
        writes, resends: Of all requests.
        stages: Samples of each stage.
    """

    started_s: list[float]
    cpu_s: float
    writes: int
    resends: int
    stages: Stages


@dataclass(slots=True, kw_only=True)
class Rounds:
    """What was seen of a case: a value per round; of `request_s` one per request, of `stages_s` one per chunk.

    Attributes:
        memcpy_s: See `bench.plain_memcpy`, three per round; none on GPUs.
        rank_memcpy_s: Of the same copy in the decode process.
        hops_s: What a lone request of one chunk waits for besides its copies, see `HOPS`.
    """

    case: Case
    plan: ChunkPlan
    num_chunks: int
    wall_s: list[float] = field(default_factory=list)
    memcpy_s: list[float] = field(default_factory=list)
    rank_memcpy_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    stages_s: dict[str, list[float]] = field(default_factory=dict)
    hops_s: dict[str, list[float]] = field(default_factory=dict)
    overlap: list[float] = field(default_factory=list)  # gather + write + scatter, summed over the chunks, over wall
    prefill_cpu_s: list[float] = field(default_factory=list)
    decode_cpu_s: list[float] = field(default_factory=list)
    writes: int = 0
    resends: int = 0
    acks: int = 0

    def add_stages(self, stages: Stages, started_s: float, *, is_direct: bool) -> None:
        """Those of one round, of both ends.

        Args:
            started_s: When the round's first request was computed.
            is_direct: Gathers are the writes, and their seconds are told as both.
        """
        moving = ("gather", "scatter") if is_direct else ("gather", "write", "scatter")
        copied_s = sum(sample.seconds for stage in moving for sample in stages.get(stage, ()))
        self.overlap.append(copied_s / self.wall_s[-1])
        for stage, samples in stages.items():
            self.stages_s.setdefault(stage, []).extend(sample.seconds for sample in samples)
        if self.case.in_flight == self.num_chunks == 1 and all(stages.get(stage) for stage in (*moving, "ack")):
            last_s = started_s
            for name, stage in HOPS.items():
                if stage not in (*moving, "ack"):
                    continue
                sample = stages[stage][-1]
                waited_s = sample.told_s - last_s - (sample.seconds if stage in moving else 0.0)
                self.hops_s.setdefault(name, []).append(max(0.0, waited_s))
                last_s = sample.told_s


@dataclass(slots=True, kw_only=True)
class Played:
    """All cases over one lane, and what else is worth knowing."""

    link: Link
    ring_peak_bytes: int = 0
    rounds: list[Rounds] = field(default_factory=list)


def play(setting: Setting, lane: str, *, num_rounds: int, timeout_s: float) -> Played:
    """Every case of the setting over one lane, in two new processes.

    Raises:
        PairFailed: What arrived is not what was sent, a process failed or died, or it took too long.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when a process imports grpc; sessions that end are no news here
    played: Played = run_pair(
        _decode_process,
        _prefill_process,
        setting,
        lane,
        num_rounds,
        devices=Devices(writer=setting.devices.target, target=setting.devices.writer),
        timeout_s=timeout_s,
        roles=("decode process", "prefill process"),
    )
    return played


def _prefill_process(pipe: Connection, device: str, setting: Setting, lane: str, num_rounds: int) -> None:
    """Does what it is told, one command at a time."""
    _set_up_process("prefill")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        end = PrefillEnd(loop, setting, device, lane)
        while (command := await loop.run_in_executor(None, pipe.recv)) is not None:
            match command:
                case ("attach", decode, str() as address):
                    attached = await end.attach(decode, address)
                    freeze_gc()  # as a rank does it when it is ready
                    pipe.send(attached)
                case ("send", list() as request_ids, Case() as case):
                    cpu_s = time.process_time()
                    started_s, stats = await end.send(request_ids, case)
                    answer = SentRound(
                        started_s=started_s,
                        cpu_s=time.process_time() - cpu_s,
                        writes=sum(one.writes for one in stats),
                        resends=sum(one.resends for one in stats),
                        stages=end.metrics.take(),
                    )
                    pipe.send(answer)
                case ("digest", list() as request_ids, Case() as case):
                    pipe.send([await asyncio.to_thread(end.digest, request_id, case) for request_id in request_ids])
        await end.close()

    run_measured(run())


def _set_up_process(role: str) -> None:
    """As a rank process does it, see `node_runtime.rank_process`."""
    configure_logging(LogConfig(level="warning"), role=role, rank=0)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _decode_process(pipe: Connection, device: str, setting: Setting, lane: str, num_rounds: int) -> Played:
    _set_up_process("decode")

    async def run() -> Played:
        return await _Decode(pipe, device, setting, lane).play(num_rounds)

    return run_measured(run())


class _Decode:
    """The process that leads: it tells the prefill process what to do, and sees when the requests are whole."""

    def __init__(self, pipe: Connection, device: str, setting: Setting, lane: str) -> None:
        self._pipe = pipe
        self._setting = setting
        self._lane = lane
        self._end = DecodeEnd(asyncio.get_running_loop(), setting, device, lane)

    async def play(self, num_rounds: int) -> Played:
        try:
            link, self._end.plans = await self._ask("attach", self._end.instance, await self._end.serve())
            freeze_gc()
            played = Played(link=link)
            for number, case in enumerate(self._setting.cases):
                played.rounds.append(await self._play_case(number, case, self._end.plans[case], num_rounds))
            played.ring_peak_bytes = self._end.ring_peak_bytes
            self._pipe.send(None)
            return played
        finally:
            await self._end.close()

    async def _ask(self, *command: Any) -> Any:
        self._pipe.send(command)
        return await self._answer()

    async def _answer(self) -> Any:
        return await asyncio.wait_for(asyncio.to_thread(self._pipe.recv), DEADLINE_S)

    async def _play_case(self, number: int, case: Case, plan: ChunkPlan, num_rounds: int) -> Rounds:
        setting = self._setting
        chunks = split_into_chunks(plan, num_tokens=case.num_tokens, num_layers=setting.layout.num_layers)
        with contextlib.ExitStack() as stack:
            copy_once = plain = None
            if not setting.devices.is_cuda:
                num_bytes = setting.moved_bytes(case.num_tokens)
                copy_once = await asyncio.to_thread(memcpy_of, num_bytes)
                plain = stack.enter_context(contextlib.closing(PlainMemcpy(num_bytes)))
            rounds = Rounds(case=case, plan=plan, num_chunks=len(chunks))
            for turn in range(WARMUP_ROUNDS + num_rounds):
                if turn == WARMUP_ROUNDS:
                    rounds = Rounds(case=case, plan=plan, num_chunks=len(chunks))
                if copy_once is not None and plain is not None:
                    rounds.memcpy_s += await asyncio.to_thread(plain.sample)
                    rounds.rank_memcpy_s += await asyncio.to_thread(sample, copy_once, repetitions=REPETITIONS)
                await self._play_round(rounds, [f"case{number}-round{turn}-{i}" for i in range(case.in_flight)])
        return rounds

    async def _play_round(self, rounds: Rounds, request_ids: list[str]) -> None:
        end, case = self._end, rounds.case
        num_acks, cpu_s = end.num_acks, time.process_time()
        end.expect(request_ids, case)
        self._pipe.send(("send", request_ids, case))
        complete_s = await end.wait_complete(request_ids, deadline_s=DEADLINE_S)
        rounds.decode_cpu_s.append(time.process_time() - cpu_s)
        sent: SentRound = await self._answer()
        rounds.prefill_cpu_s.append(sent.cpu_s)
        rounds.wall_s.append(max(complete_s) - min(sent.started_s))
        rounds.request_s += [done - begun for done, begun in zip(complete_s, sent.started_s, strict=True)]
        rounds.add_stages(sent.stages | end.metrics.take(), min(sent.started_s), is_direct=self._lane.endswith("/fused"))
        rounds.writes += sent.writes
        rounds.resends += sent.resends
        rounds.acks += end.num_acks - num_acks
        # Beside the loop, here and there: a process whose heartbeats stop is given up.
        self._pipe.send(("digest", request_ids, case))
        there = [await asyncio.to_thread(end.digest, request_id, case) for request_id in request_ids]
        if there != (here := await self._answer()):
            raise TransportError(f"{request_ids[0]}: the KV that arrived is not what was sent: digests {here} and {there}")
