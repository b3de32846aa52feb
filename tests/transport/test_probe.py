"""The link probe: sane numbers on every transport, a clear end when the other side does not play along."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.transport.contract import KINDS, TWO_SIDED, Pair, open_pair
from tests.transport.payload import rng
from transfer.errors import TransportError, TransportTimeout
from transfer.transport.base import FIRST_PROBE_KEY, ByteRange
from transfer.transport.driver import SessionDriver
from transfer.transport.probe import LinkProbe, ProbePlan, probe_link, serve_probe
from transfer.transport.registered_memory import memory_of

PLAN = ProbePlan(bulk_bytes=1 << 20, small_rounds=9, bulk_rounds=2)


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = open_pair(request.param)
    yield pair
    pair.close()


async def probe(pair: Pair, mine: ProbePlan | None, theirs: ProbePlan | None, deadline_s: float = 60.0) -> LinkProbe:
    driver = SessionDriver(asyncio.get_running_loop())
    driver.add(pair.writer)
    driver.add(pair.target)
    scratch = pair.target_transport.register(np.zeros(1 << 20, dtype=np.uint8))
    serving = asyncio.ensure_future(serve_probe(driver, pair.target, scratch, plan=theirs, deadline_s=deadline_s))
    try:
        return await probe_link(driver, pair.writer, pair.source_memory, plan=mine, deadline_s=deadline_s)
    finally:
        (outcome,) = await asyncio.gather(serving, return_exceptions=True)
        driver.remove(pair.writer)
        driver.remove(pair.target)
        if isinstance(outcome, BaseException) and not isinstance(outcome, TransportError):
            raise outcome


@pytest.mark.parametrize("plan", [PLAN, None, ProbePlan(bulk_bytes=1 << 20, small_rounds=9, bulk_rounds=2, burst_writes=0)])
async def test_probe(pair: Pair, plan: ProbePlan | None) -> None:
    """And grants work after it."""
    found = await probe(pair, plan, plan)
    assert found.lane == pair.writer.lane
    assert found.latency_s > 1e-7 and 0 < found.bandwidth_bytes_per_s < 1e12
    pair.ring[:] = 0
    pair.move(rng(0, 5000), rng(0, 5000), key=FIRST_PROBE_KEY - 1)
    assert (pair.ring[:5000] == pair.source[:5000]).all()


async def test_a_silent_target_is_a_timeout() -> None:
    pair = open_pair("ucx-net")
    driver = SessionDriver(asyncio.get_running_loop())
    driver.add(pair.writer)
    with pytest.raises(TransportTimeout, match=r"probe of link ucx/net did not end within 0\.1 s"):
        await probe_link(driver, pair.writer, pair.source_memory, plan=PLAN, deadline_s=0.1)
    driver.remove(pair.writer)
    pair.close()


@pytest.mark.parametrize("kind", TWO_SIDED)
async def test_different_plans_fail(kind: str) -> None:
    pair = open_pair(kind)
    with pytest.raises(TransportError):
        await probe(pair, PLAN, ProbePlan(bulk_bytes=1 << 19, small_rounds=9, bulk_rounds=2), deadline_s=0.5)
    pair.close()


class TimedLink:
    """The writer's end of a link that moves nothing, and its clock: waiting for a handle makes it the time when that settles.

    Writes follow one another, and each is seen `latency_s` late. A two-sided answer takes `answer_s` of the write's size more.
    """

    lane = "timed"
    is_over = False

    def __init__(self, *, latency_s: float, bytes_per_s: float, answer_s: dict[int, float] | None = None) -> None:
        self.is_one_sided = answer_s is None
        self._latency_s, self._bytes_per_s, self._answer_s = latency_s, bytes_per_s, answer_s or {}
        self._free_s = self._answered_s = self.now_s = 0.0
        self.written: list[int] = []
        self.declined: list[int] = []

    def clock(self) -> float:
        return self.now_s

    def write(self, source: Any, source_range: ByteRange, target_range: ByteRange, key: int) -> Any:
        self.written.append(key - FIRST_PROBE_KEY)
        num_bytes = source_range.num_bytes
        self._free_s = max(self._free_s, self.now_s) + num_bytes / self._bytes_per_s
        ends_s = self._free_s + self._latency_s
        self._answered_s = ends_s + self._answer_s.get(num_bytes, 0.0)
        return SimpleNamespace(poll=lambda: self._settle(ends_s))

    def decline(self, key: int) -> Any:
        self.declined.append(key - FIRST_PROBE_KEY)
        return SimpleNamespace(poll=lambda: True)

    def expect(self, target: Any, target_range: ByteRange, key: int) -> Any:
        return SimpleNamespace(poll=lambda: self._settle(self._answered_s))

    def _settle(self, ends_s: float) -> bool:
        self.now_s = max(self.now_s, ends_s)
        return True

    def fileno(self) -> None:
        return None

    def progress(self) -> bool:
        return False

    def arm(self) -> bool:
        return True


async def probe_timed(link: Any, plan: ProbePlan | None = None, deadline_s: float = 60.0) -> LinkProbe:
    driver = SessionDriver(asyncio.get_running_loop())
    driver.add(link)
    memory = memory_of(torch.zeros(4 << 20, dtype=torch.uint8))
    found = await probe_link(driver, link, memory, plan=plan, clock=link.clock, deadline_s=deadline_s)
    driver.remove(link)
    return found


@pytest.mark.parametrize("answer_s", [None, {4 << 20: 3e-3, 4096: 3e-3}], ids=["one-sided", "two-sided"])
async def test_bandwidth_of_a_fast_link_is_not_its_latency(answer_s: dict[int, float] | None) -> None:
    """4 MiB take 1 ms of this link and are seen after 4: a lone write would say a quarter of what it can do."""
    found = await probe_timed(TimedLink(latency_s=3e-3, bytes_per_s=4e9, answer_s=answer_s))
    assert found.bandwidth_bytes_per_s == pytest.approx(4e9)
    assert found.latency_s == pytest.approx(3e-3, rel=0.01)


@pytest.mark.parametrize(("bytes_per_s", "num_bursts"), [(4e9, 3), (1e6, 0)], ids=["fast", "slow"])
async def test_each_receive_of_a_burst_is_written_or_declined_once(bytes_per_s: float, num_bursts: int) -> None:
    """A receive that stays posted would keep the target's probe waiting until its deadline. The first burst ends a slow probe."""
    link, plan = TimedLink(latency_s=3e-3, bytes_per_s=bytes_per_s, answer_s={}), ProbePlan.fitting(4 << 20)
    await probe_timed(link, plan)
    num_lone = plan.warmup_rounds + plan.small_rounds + 1 + plan.bulk_rounds
    assert sorted(link.written + link.declined) == list(range(num_lone + max(num_bursts, 1) * plan.burst_writes))
    assert (len(link.written) > num_lone) is (num_bursts > 0)


@pytest.mark.parametrize(("deadline_s", "writes_per_burst"), [(100.0, 4), (10.0, 2), (6.0, 0)])
async def test_bursts_take_at_most_half_of_the_time_that_is_left(deadline_s: float, writes_per_burst: int) -> None:
    """On a link of 8 MB/s and 30 ms, bursts of four writes took the probe over its deadline, and the attach failed."""
    plan = ProbePlan.fitting(4 << 20)
    link = TimedLink(latency_s=0.03, bytes_per_s=8e6, answer_s={plan.bulk_bytes: 0.03, plan.small_bytes: 0.03})
    found = await probe_timed(link, plan, deadline_s)
    assert len(link.written) == plan.warmup_rounds + plan.small_rounds + 1 + plan.bulk_rounds + 3 * writes_per_burst
    num_bursts = plan.bulk_rounds if writes_per_burst else 1
    assert len(link.written) + len(link.declined) == 45 + num_bursts * plan.burst_writes
    assert found.bandwidth_bytes_per_s == pytest.approx(8e6, rel=0.06)


async def test_a_target_without_bursts_gets_lone_writes_only() -> None:
    """A target of the previous release stops after the lone writes: further ones would fail its session."""
    link = TimedLink(latency_s=3e-3, bytes_per_s=4e9, answer_s={})
    plan = ProbePlan.fitting(4 << 20, has_bursts=False)
    await probe_timed(link, plan)
    assert not link.declined and len(link.written) == plan.warmup_rounds + plan.small_rounds + 1 + plan.bulk_rounds


async def test_a_link_whose_answers_are_slow_is_not_endless() -> None:
    """On a busy machine the median answer took longer than a bulk write with its own: 4 MiB in no time were 4 million GB/s."""
    link = TimedLink(latency_s=0.0, bytes_per_s=1e15, answer_s={4 << 20: 0.001, 4096: 0.005})
    found = await probe_timed(link, ProbePlan.fitting(4 << 20, has_bursts=False))
    assert found.bandwidth_bytes_per_s == pytest.approx((4 << 20) / 0.0005, rel=0.01)


async def test_a_burst_as_short_as_a_lone_write_is_not_endless() -> None:
    """Ten writes were answered as soon as one. At most twice their rate is believed."""
    link = TimedLink(latency_s=0.0, bytes_per_s=1e15, answer_s={4 << 20: 0.001, 4096: 0.00105})
    found = await probe_timed(link)
    assert found.bandwidth_bytes_per_s == pytest.approx(2 * 10 * (4 << 20) / 0.001, rel=0.01)
