"""KV from one process's paged pool into another's over `ucx`: everything that ranks do for it, but no engine.

    python -m bench.pool_to_pool [--json FILE] [--quick] [--mb 64] [--in-flight 1 4] [--prefill-tp 4 --decode-tp 2] ...

Two processes, each with the real loop of its role: attach with link probe over gRPC, grants over ZeroMQ, gather into staging, one
write per chunk into the ring, digest, scatter, watermark back. Pages lie in random order and are of different size on the two
sides. A request's time runs from the moment at which all its KV lies computed in the prefill pool until the decode rank calls it
whole. After every round the bytes are compared (see `bench.pool_ends`), outside of what is timed.

The yardstick is memcpy of the same bytes on one thread, measured before every round: it takes one copy, a transfer at least three
(gather, write, scatter) and two looks at every byte for the digest, and both processes share the machine's cores.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from bench.pool_ends import DecodeEnd, PrefillEnd, Setting, StageTime, stage_times
from bench.timing import Report, argument_parser, readable_bytes, sample
from node_runtime.rank_process import SWITCH_INTERVAL_S
from transfer.config import ChunkConfig, LogConfig, RingConfig, StagingConfig
from transfer.instance import Instance, Link
from transfer.logs import configure_logging

TARGET_RATIO = 0.2
DEADLINE_S = 60.0
WARMUP_ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRound:
    """What the prefill process says of a round.

    Args:
        started_s: When each request was started, monotonic clock (one for all processes of a host).
        cpu_s: CPU time of the process, all threads.
        writes, resends: Of all requests.
        before, after: Stage times.
    """

    started_s: list[float]
    cpu_s: float
    writes: int
    resends: int
    before: dict[str, StageTime]
    after: dict[str, StageTime]


@dataclass(slots=True, kw_only=True)
class Rounds:
    """What was seen, a value per round; of `request_s` one per request, of `memcpy_s` three per round."""

    wall_s: list[float] = field(default_factory=list)
    memcpy_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    stage_s: dict[str, list[float]] = field(default_factory=dict)  # mean of a piece
    overlap: list[float] = field(default_factory=list)  # gather + write + scatter, summed over the pieces, over wall
    prefill_cpu_s: list[float] = field(default_factory=list)
    decode_cpu_s: list[float] = field(default_factory=list)
    writes: int = 0
    resends: int = 0
    acks: int = 0
    ring_peak_bytes: int = 0
    link: Link

    def add_stages(self, before: Mapping[str, StageTime], after: Mapping[str, StageTime]) -> float:
        """Returns the seconds of the stages that move bytes."""
        busy_s = 0.0
        for stage, until in after.items():
            since = before.get(stage, StageTime())
            count, seconds = until.count - since.count, until.seconds - since.seconds
            if count and stage != "total":
                self.stage_s.setdefault(stage, []).append(seconds / count)
                busy_s += seconds if stage in ("gather", "write", "scatter") else 0.0
        return busy_s


def prefill_process(pipe: Connection, setting: Setting) -> None:
    """The child: does what it is told, one command at a time."""
    _set_up_process("prefill")

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        end = PrefillEnd(loop, setting)
        while (command := await loop.run_in_executor(None, pipe.recv)) is not None:
            match command:
                case ("attach", Instance() as decode, str() as address):
                    pipe.send(await end.attach(decode, address))
                case ("send", list() as request_ids):
                    before, cpu_s = stage_times(end.metrics), time.process_time()
                    started_s, stats = await end.send(request_ids)
                    answer = SentRound(
                        started_s=started_s,
                        cpu_s=time.process_time() - cpu_s,
                        writes=sum(one.writes for one in stats),
                        resends=sum(one.resends for one in stats),
                        before=before,
                        after=stage_times(end.metrics),
                    )
                    pipe.send(answer)
                case ("digest", list() as request_ids):
                    pipe.send([end.digest(request_id) for request_id in request_ids])
        await end.close()

    asyncio.run(serve())


def _set_up_process(role: str) -> None:
    """As a rank process does it, see `node_runtime.rank_process`; sessions that end are no news here."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    configure_logging(LogConfig(level="warning"), role=role, rank=0)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(1)


async def play(setting: Setting, *, num_rounds: int) -> Rounds:
    """This process is the decode rank, a child the prefill rank.

    Raises:
        RuntimeError: What arrived is not what was sent, or the child died.
    """
    _set_up_process("decode")
    loop = asyncio.get_running_loop()
    context = multiprocessing.get_context("spawn")
    pipe, child_pipe = context.Pipe()
    child = context.Process(target=prefill_process, args=(child_pipe, setting), daemon=True)
    child.start()
    child_pipe.close()  # so that the end of the child is the end of the pipe
    end = DecodeEnd(loop, setting)

    async def answer() -> Any:
        try:
            return await asyncio.wait_for(loop.run_in_executor(None, pipe.recv), DEADLINE_S)
        except EOFError:
            raise RuntimeError(f"the prefill process ended with exit code {child.exitcode}") from None

    try:
        pipe.send(("attach", end.instance, await end.serve()))
        rounds = Rounds(link=await answer())
        copy_once = _memcpy_of(setting.moved_bytes)
        for number in range(WARMUP_ROUNDS + num_rounds):
            if number == WARMUP_ROUNDS:
                rounds = Rounds(link=rounds.link)
            rounds.memcpy_s += sample(copy_once, repetitions=3)
            request_ids = [f"round{number}-{i}" for i in range(setting.in_flight)]
            before, num_acks, cpu_s = stage_times(end.metrics), end.num_acks, time.process_time()
            end.expect(request_ids)
            pipe.send(("send", request_ids))
            complete_s = await end.wait_complete(request_ids, deadline_s=DEADLINE_S)
            rounds.decode_cpu_s.append(time.process_time() - cpu_s)
            sent: SentRound = await answer()
            rounds.prefill_cpu_s.append(sent.cpu_s)
            rounds.wall_s.append(max(complete_s) - min(sent.started_s))
            rounds.request_s += [done - begun for done, begun in zip(complete_s, sent.started_s, strict=True)]
            busy_s = rounds.add_stages(before, stage_times(end.metrics)) + rounds.add_stages(sent.before, sent.after)
            rounds.overlap.append(busy_s / rounds.wall_s[-1])
            rounds.writes += sent.writes
            rounds.resends += sent.resends
            rounds.acks += end.num_acks - num_acks
            pipe.send(("digest", request_ids))
            if (there := [end.digest(request_id) for request_id in request_ids]) != (here := await answer()):
                raise RuntimeError(f"round {number}: the KV that arrived is not what was sent: digests {here} and {there}")
        rounds.ring_peak_bytes = end.ring_peak_bytes
        pipe.send(None)
        return rounds
    finally:
        await end.close()
        child.join(10)
        if child.exitcode is None:
            child.kill()
            child.join()


def _memcpy_of(num_bytes: int) -> Callable[[], None]:
    source, target = np.ones(num_bytes, dtype=np.uint8), np.zeros(num_bytes, dtype=np.uint8)
    return lambda: np.copyto(target, source)


def add_rows(report: Report, setting: Setting, rounds: Rounds) -> None:
    """Rows of one setting; the facts that are no times go below the table."""
    case = f"{readable_bytes(setting.moved_bytes)}, {setting.in_flight} in flight"
    copy = report.add(case, "memcpy, one thread", rounds.memcpy_s, num_bytes=setting.moved_bytes)
    per_request_s = [wall_s / setting.in_flight for wall_s in rounds.wall_s]
    report.add(case, "pool to pool", per_request_s, num_bytes=setting.moved_bytes, against=copy)
    report.add(case, "a request, start to whole", rounds.request_s)
    for stage in ("credit_wait", "gather", "write", "scatter", "ack"):
        report.add(case, f"{stage} of a chunk", rounds.stage_s[stage])
    num_rounds = len(rounds.wall_s)
    requests = num_rounds * setting.in_flight
    for process, cpu_s in (("prefill", rounds.prefill_cpu_s), ("decode", rounds.decode_cpu_s)):
        report.add(case, f"CPU of {process}, a request", [seconds / setting.in_flight for seconds in cpu_s])
    report.facts[case] = {
        "writes_per_chunk_and_route": rounds.writes / (requests * setting.num_chunks),
        "chunks_per_request": setting.num_chunks,
        "overlap": statistics.median(rounds.overlap),
        "acks_per_chunk": rounds.acks / (requests * setting.num_chunks),
        "resends": rounds.resends,
        "ring_peak_bytes": rounds.ring_peak_bytes,
        "lane": rounds.link.lane,
        "probe_gb_per_s": rounds.link.bandwidth_bytes_per_s / 1e9,
        "probe_latency_us": rounds.link.latency_s * 1e6,
    }


def measure(setting: Setting, *, in_flight: list[int], num_rounds: int) -> Report:
    """One block of rows for each number of requests in flight."""
    cut = (
        f"TP {setting.prefill_tp} -> {setting.decode_tp}, pages {setting.prefill_page_size} -> {setting.decode_page_size} "
        f"{setting.decode_order}, chunks of {setting.chunk_tokens} tokens"
    )
    report = Report(title=f"Pool to pool over ucx, two processes: {cut} (at least {TARGET_RATIO} of memcpy, 1 write per chunk)")
    for number in in_flight:
        one = replace(setting, in_flight=number)
        add_rows(report, one, asyncio.run(play(one, num_rounds=num_rounds)))
    report.facts["setting"] = asdict(setting)
    return report


def setting_of(arguments: Namespace) -> Setting:
    return Setting(
        request_bytes=int(arguments.mb * (1 << 20)),
        prefill_tp=arguments.prefill_tp,
        decode_tp=arguments.decode_tp,
        prefill_page_size=arguments.prefill_page_size,
        decode_page_size=arguments.decode_page_size,
        decode_order=arguments.decode_order,
        chunk_tokens=arguments.chunk_tokens,
        layers_per_group=arguments.layers_per_group,
        num_slots=arguments.slots,
        ring_bytes=arguments.ring_mb << 20,
        lane=arguments.lane,
    )


def parser() -> ArgumentParser:
    """What is left out is as the nodes have it by default."""
    chunk, staging, ring = ChunkConfig(), StagingConfig(), RingConfig()
    made = argument_parser("paged pool to paged pool between two processes over ucx")
    made.add_argument("--mb", type=float, default=64.0, help="MiB of KV a request")
    made.add_argument("--in-flight", type=int, nargs="+", default=[1, 4], metavar="N", help="requests at a time")
    made.add_argument("--rounds", type=int, default=25)
    made.add_argument("--prefill-tp", type=int, default=1, help="rank 0 of it is measured")
    made.add_argument("--decode-tp", type=int, default=1)
    made.add_argument("--prefill-page-size", type=int, default=16)
    made.add_argument("--decode-page-size", type=int, default=32)
    made.add_argument("--decode-order", choices=("NHD", "HND"), default="NHD")
    made.add_argument("--chunk-tokens", type=int, default=chunk.chunk_tokens)
    made.add_argument("--layers-per-group", type=int, default=chunk.layers_per_group)
    made.add_argument("--slots", type=int, default=staging.num_slots)
    made.add_argument("--ring-mb", type=int, default=ring.capacity_bytes >> 20)
    made.add_argument("--lane", choices=("auto", "shm", "net"), default="auto")
    return made


def main() -> None:
    made = parser()
    arguments = made.parse_args()
    try:
        setting = setting_of(arguments)
    except ValueError as error:
        made.error(str(error))
    num_rounds = min(3, arguments.rounds) if arguments.quick else arguments.rounds
    measure(setting, in_flight=arguments.in_flight, num_rounds=num_rounds).finish(arguments.json)


if __name__ == "__main__":
    main()
