"""The control plane: chunks a second, and the round trip grant -> ready -> ack, with a data plane that takes no time.

    python -m bench.control [--json FILE] [--quick]

"two processes" is what ranks have between them: control messages over ZeroMQ, watermark acks over gRPC, one event loop each. Its
chunks are those of 8 requests of 32 chunks at a time; each has its grant, its ready and its ack. A round trip is one chunk by
itself, from its GrantRequest to the ack that shows its grant released.

"idle" sends nothing: CPU seconds of the writers' process and of the rank in a second. Each process is a rank with that number of
sessions. All sessions must hold, during the idle time and the rounds after it.

The rows show how the times grow with three numbers: peers that write to one rank, grants that are live during the whole run, and
gaps in the ring, of which a watermark names 64. Held grants are live and never computed. Waiting grants are computed, and wait
for a ring that has room for ten. "CPU" counts both ends, all threads, and varies less on a busy machine. The rows of the ring
measure only its allocator: assign + release.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from bench.control_ends import Load, Samples, between_two_processes, cpu_of_a_chunk, make_certificates
from bench.timing import Report, Row, argument_parser
from transfer.ring import ALIGNMENT_BYTES, Grant, StagingAllocator

PEERS = (1, 4, 16, 64)
LIVE_GRANTS = (10, 100, 1_000, 10_000)
GAPS = (10, 60, 100)
IDLE_SESSIONS = 256
MOST_SESSIONS = 1_024
IDLE_S = 16.0
GRANT_BYTES = 16 * ALIGNMENT_BYTES
TARGET_CHUNKS_PER_S = 3_000
TARGET_ROUND_TRIP_S = 0.001
TARGET_ROUND_TRIP_WITH_GAPS_S = 0.004
TARGET_PAIRS_PER_S = 200_000
TARGET_IDLE_SHARE = 0.04
"""Of a core, for a rank with `IDLE_SESSIONS` idle sessions."""

TARGET_GROWTH = 1.3
"""What a chunk, or a pair of the ring, takes with up to 10,000 live grants over what it takes with 10."""

TARGET_GROWTH_BYTES = 4 << 20
"""Of either end's resident memory over the second half of 100,000 chunks: the first half fills what is kept for reuse."""


def measure_ring(report: Report, *, is_quick: bool) -> None:
    """Rows of the allocator alone; rounds go over all numbers of grants, so that a busy machine slows them alike."""
    num_pairs, num_rounds = (2_000, 3) if is_quick else (20_000, 9)
    for what, pairs in (("ring pair, in order", _pairs_in_order), ("ring pair, at random", _pairs_at_random)):
        samples: dict[int, list[float]] = {number: [] for number in LIVE_GRANTS}
        for _ in range(num_rounds):
            for number in LIVE_GRANTS:
                samples[number].append(pairs(number, num_pairs) / num_pairs)
        _add_all(report, what, {f"{number:,} live grants": samples[number] for number in LIVE_GRANTS})


def _pairs_in_order(num_live_grants: int, num_pairs: int) -> float:
    """CPU seconds for `num_pairs` of assign + release of the oldest, while `num_live_grants` are live."""
    ring = StagingAllocator(num_live_grants * GRANT_BYTES)
    live: deque[Grant] = deque(ring.assign(GRANT_BYTES) for _ in range(num_live_grants))
    started = time.process_time()
    for _ in range(num_pairs):
        ring.release(live.popleft())
        live.append(ring.assign(GRANT_BYTES))
    return time.process_time() - started


def _pairs_at_random(num_live_grants: int, num_pairs: int) -> float:
    """The same, releasing a grant at random: the released ranges become many."""
    ring = StagingAllocator(num_live_grants * GRANT_BYTES)
    live = [ring.assign(GRANT_BYTES) for _ in range(num_live_grants)]
    chance = random.Random(1)
    victims = [chance.randrange(num_live_grants) for _ in range(num_pairs)]
    started = time.process_time()
    for victim in victims:
        ring.release(live[victim])
        live[victim] = ring.assign(GRANT_BYTES)
    return time.process_time() - started


def measure_waiting(report: Report, *, is_quick: bool) -> None:
    """Rows of both machines and their messages in one process, by number of grants that wait for the ring."""
    num_chunks, num_rounds = (200, 2) if is_quick else (2_000, 3)
    samples = {
        number: asyncio.run(cpu_of_a_chunk(num_waiting=number, num_chunks=num_chunks, num_rounds=num_rounds))
        for number in (LIVE_GRANTS[:2] if is_quick else LIVE_GRANTS)
    }
    _add_all(report, "CPU of a chunk", {f"one process, {number:,} waiting grants": times for number, times in samples.items()})


def _load(*, is_quick: bool) -> Load:
    if is_quick:
        return Load(round_requests=8, num_rounds=2, num_round_trips=40)
    return Load(round_requests=48, num_rounds=5, num_round_trips=400)


def measure_growth(report: Report, *, is_quick: bool) -> None:
    """Rows of two processes, by the number of peers, of held grants and of gaps in the ring."""
    load = _load(is_quick=is_quick)
    by_peers = {
        f"two processes, {number} peer{'s' * (number > 1)}": asyncio.run(between_two_processes(replace(load, num_peers=number)))
        for number in (PEERS[:2] if is_quick else PEERS)
    }
    by_held = {
        f"two processes, {number:,} held grants": asyncio.run(between_two_processes(replace(load, num_held=number)))
        for number in (LIVE_GRANTS[:2] if is_quick else LIVE_GRANTS)
    }
    by_gaps = {
        f"two processes, {number} gaps": asyncio.run(between_two_processes(replace(load, num_gaps=number)))
        for number in (GAPS[::2] if is_quick else GAPS)
    }
    for cases in (by_peers, by_held, by_gaps):
        _add_all(report, "chunk", {case: samples.chunk_s for case, samples in cases.items()})
        _add_all(report, "CPU of a chunk", {case: samples.cpu_s for case, samples in cases.items()})
        _add_all(report, "grant, ready, ack", {case: samples.round_trip_s for case, samples in cases.items()})
    rows = {row.what: row for row in report.rows if row.case == f"two processes, {PEERS[0]} peer"}
    report.headline["chunks_per_second"] = 1 / rows["chunk"].median_s
    report.headline["round_trip_p50_s"] = rows["grant, ready, ack"].median_s


def measure_tls(report: Report, *, is_quick: bool) -> None:
    """Rows of two processes with gRPC over TLS against the same in plain text; they take turns, for the machine may be busy."""
    load = _load(is_quick=is_quick)
    samples: dict[str, list[Samples]] = {"acks in plain text": [], "acks over TLS": []}
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder))
        for _ in range(1 if is_quick else 3):
            for case, tls_folder in zip(samples, ("", folder), strict=True):
                samples[case].append(asyncio.run(between_two_processes(replace(load, tls_folder=tls_folder))))
    for what, field in (("chunk", "chunk_s"), ("CPU of a chunk", "cpu_s"), ("grant, ready, ack", "round_trip_s")):
        _add_all(report, what, {case: [one for run in runs for one in getattr(run, field)] for case, runs in samples.items()})


def measure_memory(report: Report, *, is_quick: bool) -> None:
    """Resident memory of both ends over 100,000 chunks, after 10,000 that are not counted."""
    num_rounds, round_requests = (2, 8) if is_quick else (10, 313)
    load = Load(round_requests=round_requests, num_rounds=num_rounds)
    samples: Samples = asyncio.run(between_two_processes(load))
    case = f"two processes, {num_rounds * round_requests * load.request_chunks:,} chunks"
    report.add(case, "chunk", samples.chunk_s)
    growth: list[int] = []
    for name, at in (("writer", 0), ("target", 1)):
        resident = [both[at] for both in samples.resident_bytes]
        report.facts[f"{case}, {name}"] = {
            "resident before": f"{resident[0] / 2**20:.1f} MiB",
            "half-way": f"{resident[num_rounds // 2] / 2**20:.1f} MiB",
            "after": f"{resident[-1] / 2**20:.1f} MiB",
        }
        growth.append(resident[-1] - resident[num_rounds // 2])
    report.headline["resident_growth_bytes"] = max(growth)


def measure_idle(report: Report, *, is_quick: bool) -> None:
    """Rows of sessions without requests, and the number of sessions that are lost."""
    few, most = (16, 64) if is_quick else (IDLE_SESSIONS, MOST_SESSIONS)
    load = Load(round_requests=8 if is_quick else 48, num_rounds=1 if is_quick else 3, idle_s=IDLE_S / 8 if is_quick else IDLE_S)
    num_lost = 0
    for name, number, is_local in (("idle_share", few, True), ("idle_share_tcp", few, False), ("idle_share_most", most, True)):
        samples = asyncio.run(between_two_processes(replace(load, num_peers=number, is_local=is_local)))
        case = f"two processes, {number:,} sessions{'' if is_local else ' over TCP'}"
        for end, cpu_s in zip(("writers", "rank"), samples.idle_cpu_s, strict=True):
            report.add(case, f"a second idle, CPU of {end}", [cpu_s])
        report.add(case, "chunk", samples.chunk_s)
        report.facts[case] = {"sessions lost": samples.num_lost}
        report.headline[name] = max(samples.idle_cpu_s)
        num_lost += samples.num_lost
    report.headline["sessions_lost"] = num_lost


def _add_all(report: Report, what: str, samples: dict[str, list[float]]) -> None:
    """A row for each case, held against the first."""
    first: Row | None = None
    for case, samples_s in samples.items():
        row = report.add(case, what, samples_s, against=first)
        first = first or row


def measure(*, is_quick: bool) -> Report:
    """All rows; a chunk's median is one over the chunks a second."""
    report = Report(
        title=f"Control plane (at least {TARGET_CHUNKS_PER_S:,} chunks a second, round trip p50 below "
        f"{TARGET_ROUND_TRIP_S * 1e3:g} ms, CPU flat within {TARGET_GROWTH:g}x from 10 to 10,000 live grants, "
        f"{IDLE_SESSIONS} idle sessions below {TARGET_IDLE_SHARE:.0%} of a core)"
    )
    for part in (measure_memory, measure_growth, measure_tls, measure_waiting, measure_ring, measure_idle):
        part(report, is_quick=is_quick)
    return report


def main() -> None:
    arguments = argument_parser("chunks a second, round trip and growth of the control plane").parse_args()
    measure(is_quick=arguments.quick).finish(arguments.json)


if __name__ == "__main__":
    main()
