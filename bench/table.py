"""Targets of `make bench`: its benchmarks, and how their reports give the measured values.

A report is the JSON of a benchmark, see `bench.timing.Report`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.control import (
    GAPS,
    IDLE_SESSIONS,
    MOST_SESSIONS,
    TARGET_CHUNKS_PER_S,
    TARGET_GROWTH,
    TARGET_GROWTH_BYTES,
    TARGET_IDLE_SHARE,
    TARGET_PAIRS_PER_S,
    TARGET_ROUND_TRIP_S,
    TARGET_ROUND_TRIP_WITH_GAPS_S,
)
from bench.decode_leader import LEADER_CPU, TARGET_TOKENS_PER_S, TOKENS_PER_S
from bench.idle import TARGET_SHARE
from bench.lone_request import FIRST_TOKEN
from bench.lone_request import TARGET_S as TARGET_FIRST_TOKEN_S
from bench.loop_turns import BOUND_MS, COST, COST_BOUND_US, TURN
from bench.pages import POOL_PAGES
from bench.pages import TARGET_PAIRS_PER_S as TARGET_PAGE_PAIRS_PER_S
from bench.pool_to_pool import (
    POOL_TO_POOL,
    TARGET_CPU_SHM_S,
    TARGET_RATIO,
    TARGET_RATIO_SHM,
    TARGET_RATIO_SHM_ALONE,
    lane_row,
    memcpy_row,
)

Content = dict[str, Any]
Bound = Literal["at least", "below", "exactly"]
LARGE_BYTES = 64 * 10**6
CPU = "AMD EPYC"  # on which two targets were set: CPU time of `shm`, and the first token of a lone request
TARGET_OF_LIBRARY = 0.9  # of one bulk write: the rest is the cost of driving a library from an asyncio loop
TARGET_FLATNESS = 0.7  # speed in the largest pool over that in the smallest: the cost must not grow with the pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A benchmark that runs in a separate process.

    Args:
        module: Module under `bench`.
        arguments: Arguments besides ``--json`` and ``--quick``.
        timeout_s: Time limit, about three times the duration on a quiet machine.
    """

    module: str
    arguments: tuple[str, ...] = ()
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One line of the table.

    Args:
        measured: None if the run gave no value.
        limit: Target; None if there is none.
        bound: Relation of `measured` to `limit`.
        unit: Unit of both.
        cpu: Prefix of the model names of the CPUs that the limit is for, see `bench.timing.Environment`; empty means any.
    """

    what: str
    measured: float | None
    limit: float | None
    unit: str
    bound: Bound = "at least"
    note: str = ""
    cpu: str = ""

    @classmethod
    def failed(cls, what: str, reason: str) -> Outcome:
        """Return the line of a run that failed."""
        return cls(what=what, measured=None, limit=0.0, unit="", note=reason)

    @property
    def is_reached(self) -> bool:
        if self.measured is None or self.limit is None:
            return self.limit is None
        match self.bound:
            case "at least":
                return self.measured >= self.limit
            case "below":
                return self.measured < self.limit
            case "exactly":
                return self.measured == self.limit

    def is_missed(self, cpu: str) -> bool:
        """Return whether the limit applies to that CPU and is missed. A missing value always counts."""
        return not self.is_reached and (self.measured is None or cpu.startswith(self.cpu))

    def to_json(self) -> dict[str, object]:
        return {
            "what": self.what,
            "measured": self.measured,
            "limit": self.limit,
            "bound": None if self.limit is None else self.bound,
            "unit": self.unit,
            "ok": self.is_reached,
            "note": self.note,
            "cpu": self.cpu,
        }


BUDGET_S = 450.0
"""Time for all of them; the last ones get the remaining time."""

RUNS = (
    Run(module="pool_to_pool", arguments=("--lanes", "shm", "ucx", "nixl", "--in-flight", "1", "4"), timeout_s=90.0),
    Run(module="control", timeout_s=300.0),
    Run(module="pages", timeout_s=45.0),
    Run(module="idle", timeout_s=90.0),
    Run(module="lone_request", timeout_s=90.0),
    Run(module="decode_leader", timeout_s=60.0),
    Run(module="link", arguments=("--max-mb", "64", "--passes", "2"), timeout_s=90.0),
    Run(module="loop", arguments=("--only-measure",), timeout_s=240.0),
)


def outcomes_of(module: str, content: Content) -> Sequence[Outcome]:
    """Return the lines for a report."""
    return _READERS[module](content)


def _rows(content: Content, *, what: str, case: str = "") -> list[Content]:
    return [row for row in content["rows"] if row["what"] == what and case in row["case"]]


def _pool_to_pool(content: Content) -> list[Outcome]:
    found: list[Outcome] = []
    for row in content["rows"]:
        lane = row["what"].removeprefix("kvferry ").removesuffix(f", {POOL_TO_POOL}")
        if row["what"] != lane_row(lane, POOL_TO_POOL):
            continue
        facts = content["facts"][f"{row['case']}, {lane}"]
        (copy,) = [one for one in _rows(content, what=memcpy_row(lane)) if one["case"] == row["case"]]
        note = f"{row['gb_per_s']:.2f} of {copy['gb_per_s']:.2f} GB/s, {facts['lane']}, overlap {facts['overlap']:.2f}"
        what = f"{lane}, {row['case']}"
        found.append(
            Outcome(
                what=f"pool to pool, {what}",
                measured=row["ratio"],
                limit=_target_ratio(lane, is_alone=row["case"].endswith(", 1 in flight")),
                unit="of one-thread memcpy",
                note=note,
            )
        )
        writes = facts["writes_per_chunk_and_route"]
        found.append(Outcome(what=f"writes, {what}", measured=writes, limit=1.0, bound="exactly", unit="per chunk and route"))
        if lane == "shm":
            ends = [_rows(content, what=lane_row(lane, f"CPU of {end}, a request")) for end in ("prefill", "decode")]
            cpu_s = sum(one["median_s"] for rows in ends for one in rows if one["case"] == row["case"])
            per_64_mib = 1e3 * (64 << 20) / row["bytes"]
            found.append(
                Outcome(
                    what=f"CPU of both ends, {what}",
                    measured=cpu_s * per_64_mib,
                    limit=TARGET_CPU_SHM_S * 1e3,
                    bound="below",
                    unit="ms per 64 MiB",
                    cpu=CPU,
                )
            )
    return found


def _target_ratio(lane: str, *, is_alone: bool) -> float | None:
    if lane == "shm":
        return TARGET_RATIO_SHM_ALONE if is_alone else TARGET_RATIO_SHM
    return None if is_alone else TARGET_RATIO  # the stages of one request do not overlap


def _control(content: Content) -> list[Outcome]:
    (trip,) = _rows(content, what="grant, ready, ack", case="two processes, 1 peer")
    (gaps,) = _rows(content, what="grant, ready, ack", case=f"two processes, {GAPS[-1]} gaps")
    pairs = [row["median_s"] for row in _rows(content, what="ring pair, in order")]
    found = [
        Outcome(
            what="control plane, two processes", measured=content["chunks_per_second"], limit=TARGET_CHUNKS_PER_S, unit="chunks/s"
        ),
        Outcome(
            what="grant, ready, ack: p50",
            measured=content["round_trip_p50_s"] * 1e3,
            limit=TARGET_ROUND_TRIP_S * 1e3,
            bound="below",
            unit="ms",
            note=f"p99 {trip['p99_s'] * 1e3:.3g} ms",
        ),
        Outcome(
            what=f"grant, ready, ack with {GAPS[-1]} released ranges in the ring: p50",
            measured=gaps["median_s"] * 1e3,
            limit=TARGET_ROUND_TRIP_WITH_GAPS_S * 1e3,
            bound="below",
            unit="ms",
            note=f"p99 {gaps['p99_s'] * 1e3:.3g} ms",
        ),
        *(
            Outcome(
                what=f"idle CPU of a rank with {IDLE_SESSIONS} sessions{where}",
                measured=content[name] * 100,
                limit=TARGET_IDLE_SHARE * 100,
                bound="below",
                unit="% of a core",
            )
            for where, name in (("", "idle_share"), (", control messages over TCP", "idle_share_tcp"))
        ),
        Outcome(
            what=f"sessions lost, of {2 * IDLE_SESSIONS + MOST_SESSIONS:,}",
            measured=content["sessions_lost"],
            limit=0,
            bound="exactly",
            unit="sessions",
            note=f"idle: {content['idle_share_most']:.1%} of a core",
        ),
    ]
    for what, kind in (
        ("CPU of a chunk", "held grants"),
        ("CPU of a chunk", "waiting grants"),
        ("ring pair, in order", "live grants"),
    ):
        rows = _rows(content, what=what, case=kind)
        found.append(
            Outcome(
                what=f"{what}, {rows[0]['case'].split()[-3]} to {rows[-1]['case'].split()[-3]} {kind}",
                measured=max(row["median_s"] for row in rows) / rows[0]["median_s"],
                limit=TARGET_GROWTH,
                bound="below",
                unit="x, the slowest over the fewest",
            )
        )
    return [
        *found,
        Outcome(what="ring pair, the slowest", measured=1 / max(pairs), limit=TARGET_PAIRS_PER_S, unit="assign + release/s"),
        Outcome(
            what="memory over 100,000 chunks",
            measured=content["resident_growth_bytes"] / 2**20,
            limit=TARGET_GROWTH_BYTES / 2**20,
            bound="below",
            unit="MiB more of either end",
            note="in their second half",
        ),
    ]


def _pages(content: Content) -> list[Outcome]:
    rows = [_rows(content, what="pair", case=f"{number:,} pages")[0] for number in POOL_PAGES]
    slowest = max(row["median_s"] for row in rows)
    return [
        Outcome(
            what=f"pages, pools of {POOL_PAGES[0]:,} to {POOL_PAGES[-1]:,}",
            measured=1 / slowest,
            limit=TARGET_PAGE_PAIRS_PER_S,
            unit="reserve + release/s",
            note="the slowest",
        ),
        Outcome(
            what="pages, flat",
            measured=rows[0]["median_s"] / slowest,
            limit=TARGET_FLATNESS,
            unit="of the speed in the smallest pool",
        ),
    ]


def _idle(content: Content) -> list[Outcome]:
    found: list[Outcome] = []
    for kind, limit in (("rank", TARGET_SHARE), ("leader", None)):
        shares = {row["case"]: sum(row["samples_s"]) / len(row["samples_s"]) for row in content["rows"] if kind in row["case"]}
        worst = max(shares, key=lambda case: shares[case])
        found.append(
            Outcome(
                what=f"idle cluster, busiest {kind}",
                measured=shares[worst] * 100,
                limit=None if limit is None else limit * 100,
                bound="below",
                unit="% of a core",
                note=f"{worst}, of {len(shares)}",
            )
        )
    return found


def _link(content: Content) -> list[Outcome]:
    found: list[Outcome] = []
    for row in _rows(content, what="kvferry ucx/shm, with answer"):
        if row["case"] == "4 KiB":
            found.append(Outcome(what="ucx/shm, 4 KiB and its answer", measured=row["median_s"] * 1e6, limit=None, unit="us"))
    for lane in ("ucx/shm", "nixl"):
        for row in _rows(content, what=f"kvferry {lane}"):
            if row["bytes"] >= LARGE_BYTES and "in flight" not in row["case"]:
                found.append(
                    Outcome(
                        what=f"{lane}, one write of {row['case']}",
                        measured=row["ratio"],
                        limit=TARGET_OF_LIBRARY,
                        unit="of the library's plain use",
                        note=f"{row['gb_per_s']:.1f} GB/s; {row['ratio_to']}",
                    )
                )
    return found


def _lone_request(content: Content) -> list[Outcome]:
    (row,) = _rows(content, what=FIRST_TOKEN)
    return [
        Outcome(
            what=f"lone request, {row['case']}, {FIRST_TOKEN}",
            measured=row["median_s"] * 1e3,
            limit=TARGET_FIRST_TOKEN_S * 1e3,
            bound="below",
            unit="ms, an engine that computes nothing",
            note=f"p99 {row['p99_s'] * 1e3:.3g} ms",
            cpu=CPU,
        )
    ]


def _decode_leader(content: Content) -> list[Outcome]:
    (row,) = _rows(content, what=LEADER_CPU)
    return [
        Outcome(
            what=f"tokens of a decode leader, {row['case']}",
            measured=1 / row["median_s"],
            limit=TARGET_TOKENS_PER_S,
            unit="a second, on a core of its own",
            note=f"{content['facts'][row['case']][TOKENS_PER_S]:,.0f} a second beside ranks and client",
        )
    ]


def _loop(content: Content) -> list[Outcome]:
    found = [
        Outcome(
            what=f"longest turn, {row['case']}",
            measured=row["median_s"] * 1e3,
            limit=BOUND_MS,
            bound="below",
            unit="ms of CPU time",
            note=content["facts"][row["case"]]["event"],
        )
        for row in _rows(content, what=TURN)
    ]
    (cost,) = _rows(content, what=COST)
    return [
        *found,
        Outcome(what="measuring a turn", measured=cost["median_s"] * 1e6, limit=COST_BOUND_US, bound="below", unit="us"),
    ]


_READERS: dict[str, Callable[[Content], Sequence[Outcome]]] = {
    "pool_to_pool": _pool_to_pool,
    "control": _control,
    "pages": _pages,
    "idle": _idle,
    "lone_request": _lone_request,
    "decode_leader": _decode_leader,
    "link": _link,
    "loop": _loop,
}
