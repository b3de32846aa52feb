"""Measure a link at attach. This detects slow links, and moves the cold start of every link to its attach.

Both ends run their half at the same time with the same plan: `probe_link` on the writer, `serve_probe` on the target. On a
two-sided transport, small writes go back and forth, and a small write answers each bulk write, so that the time includes the
arrival. On a one-sided transport, the writer times the completion of its own writes, and the target does nothing. On a fast link
a bulk write takes little more than the latency. 4 MiB occupy an NVLink for 11 us, and the writer sees their end after 42 us. Such
a link is also measured with bursts of bulk writes, which pay the latency once, if there is time for them. A two-sided target
expects the most writes that a burst can have. The writer declines those that it does not send, and it declines a whole burst to
end the probe.

The probe uses keys from `FIRST_PROBE_KEY` in both directions; grants use keys below.

The bytes of a probe fit into a processor's caches, and those of a request do not. So if pools are in host memory, callers limit
the bandwidth to `host_copy_bytes_per_s`.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from transfer.errors import ConfigError, TransportTimeout
from transfer.transport.base import FIRST_PROBE_KEY, ByteRange, Handle, LocalMemory, Session
from transfer.transport.driver import SessionDriver

_MAX_ROUNDS = 10_000
_SMALL_BYTES = 4096
_DEADLINE_S = 10.0
_MAX_BULK_BYTES = 8 * 2**20
_MIN_BURST_WRITES = 4
_MAX_BURST_WRITES = 64
_BURST_S = 4e-3
"""Minimum target duration of a burst. Its number of writes is the target divided by the time of a single write. The measured end
of a burst is off by about 20 us: on a link of 400 GB/s a tenth of 16 writes of 4 MiB, a fortieth of 64."""
_MAX_BURSTS_PART = 0.5
"""Maximum part of the time that is left that bursts may take, if each of their writes takes as long as a lone one."""
_HOST_COPY_BYTES = 32 << 20
"""Source and target together exceed the last cache level of most processors."""
_BURST_BELOW = 20
"""Number of latencies. A bulk write that takes longer measures the bandwidth to 5 %, and so does a burst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """The writes of a probe; equal on both ends.

    Attributes:
        small_bytes: Size of a write that measures the latency.
        bulk_bytes: Size of a write that measures the bandwidth.
        warmup_rounds: Small writes that are not counted; the first one sets up the connection.
        small_rounds: Small writes that are counted.
        bulk_rounds: Bulk writes that are counted, after one that is not. Also the number of bursts.
        burst_writes: Most bulk writes of a burst. 0 means that no burst is sent: the other end is of a release without the
            capability `probe_bursts`.
        target_begin: Place in the target's offered memory where a one-sided probe may write. Only other probes may use it
            meanwhile: it lies after the ring, never in it.
    """

    small_bytes: int = _SMALL_BYTES
    bulk_bytes: int = _MAX_BULK_BYTES
    warmup_rounds: int = 8
    small_rounds: int = 33
    bulk_rounds: int = 3
    burst_writes: int = _MAX_BURST_WRITES
    target_begin: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("small_bytes", 1, 2**20),
            ("bulk_bytes", 1, 2**40),
            ("warmup_rounds", 0, _MAX_ROUNDS),
            ("small_rounds", 1, _MAX_ROUNDS),
            ("bulk_rounds", 1, _MAX_ROUNDS),
            ("burst_writes", 0, _MAX_ROUNDS),
            ("target_begin", 0, 2**62),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} of a probe is {value}; it must be in [{least}, {most}]")

    @classmethod
    def fitting(cls, num_bytes: int, *, target_begin: int = 0, has_bursts: bool = True) -> ProbePlan:
        """Return the default plan for scratch memory, and for a place at `target_begin`, of `num_bytes`: at most 8 MiB in bulk.

        Args:
            has_bursts: Whether both ends have the capability `probe_bursts`, or the transport is one-sided.

        Raises:
            ConfigError: There is no room.
        """
        return cls(
            small_bytes=min(_SMALL_BYTES, num_bytes),
            bulk_bytes=min(_MAX_BULK_BYTES, num_bytes),
            burst_writes=_MAX_BURST_WRITES if has_bursts else 0,
            target_begin=target_begin,
        )

    @property
    def num_bytes(self) -> int:
        """Scratch bytes that either end needs."""
        return max(self.small_bytes, self.bulk_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbe:
    """A writer's measurements of a link."""

    lane: str
    latency_s: float
    bandwidth_bytes_per_s: float


class _Prober:
    """One end of a probe: posts and awaits operations against one deadline."""

    def __init__(
        self,
        driver: SessionDriver,
        session: Session,
        scratch: LocalMemory,
        plan: ProbePlan,
        deadline_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if scratch.num_bytes < plan.num_bytes:
            raise ConfigError(f"scratch memory of a probe has {scratch.num_bytes} bytes; its plan needs {plan.num_bytes}")
        self._driver = driver
        self._session = session
        self._scratch = scratch
        self._plan = plan
        self._deadline_s = deadline_s
        self._clock = clock
        self._ends_at = time.monotonic() + deadline_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(self._ends_at - time.monotonic(), 0.0)

    async def settled(self, handle: Handle) -> None:
        try:
            await self._driver.wait(self._session, handle, deadline_s=self.left_s)
        except TransportTimeout:
            raise TransportTimeout(
                f"probe of link {self._session.lane} did not end within {self._deadline_s} s; "
                "the other end does not answer, or probes by another plan"
            ) from None

    async def all_settled(self, handles: Sequence[Handle]) -> None:
        """Wait for the last handle first. It mostly settles last, and then the others cost no turns of the loop."""
        await self.settled(handles[-1])
        for handle in handles[:-1]:
            if not handle.poll():
                await self.settled(handle)

    def write(self, key: int, num_bytes: int) -> Handle:
        begin = self._plan.target_begin
        target_range = ByteRange(begin=begin, end=begin + num_bytes)
        return self._session.write(self._scratch, ByteRange(begin=0, end=num_bytes), target_range, FIRST_PROBE_KEY + key)

    def expect(self, key: int, num_bytes: int) -> Handle:
        return self._session.expect(self._scratch, ByteRange(begin=0, end=num_bytes), FIRST_PROBE_KEY + key)

    async def send(self, step: _Step, num_writes: int = 1) -> float:
        """Return the seconds of a step until its small answer arrives, or until its writes are complete if they are one-sided.

        The first `num_writes` of the step's writes start at once. The others are declined before.
        """
        await self.decline(step.keys[num_writes:])
        answer = None if self._session.is_one_sided else self.expect(step.keys[0], self._plan.small_bytes)
        begun = self._clock()
        sent = [self.write(key, step.num_bytes) for key in step.keys[:num_writes]]
        await self.all_settled(sent if answer is None else [answer])
        elapsed_s = self._clock() - begun
        await self.all_settled(sent)
        return elapsed_s

    async def decline(self, keys: range) -> None:
        """Settle the receives that the target has posted for writes that are not sent. One-sided: return at once."""
        if keys and not self._session.is_one_sided:
            await self.all_settled([self._session.decline(FIRST_PROBE_KEY + key) for key in keys])

    async def answer(self) -> None:
        """Answer each step, until the writer declines all writes of a step. The next step is expected before the answer, so that
        it never waits for this end."""
        steps = _steps(self._plan)
        expected = self._expect_step(steps[0])
        for step, following in itertools.zip_longest(steps, steps[1:]):
            await self.all_settled(expected)
            if not any(handle.num_bytes for handle in expected):
                return
            expected = self._expect_step(following) if following is not None else []
            await self.settled(self.write(step.keys[0], self._plan.small_bytes))

    def _expect_step(self, step: _Step) -> list[Handle]:
        return [self.expect(key, step.num_bytes) for key in step.keys]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Writes with one answer: a lone write, or a burst."""

    keys: range
    num_bytes: int


def _steps(plan: ProbePlan) -> list[_Step]:
    """Return the steps of a probe, in order: small writes, bulk writes, bursts."""
    small, bulk = plan.warmup_rounds + plan.small_rounds, 1 + plan.bulk_rounds
    lone = [
        _Step(keys=range(key, key + 1), num_bytes=plan.small_bytes if key < small else plan.bulk_bytes)
        for key in range(small + bulk)
    ]
    burst_keys = range(len(lone), len(lone) + plan.bulk_rounds * plan.burst_writes)
    bursts = [
        _Step(keys=burst_keys[first : first + plan.burst_writes], num_bytes=plan.bulk_bytes)
        for first in range(0, len(burst_keys), plan.burst_writes or 1)
    ]
    return lone + bursts


async def probe_link(
    driver: SessionDriver,
    session: Session,
    scratch: LocalMemory,
    *,
    plan: ProbePlan | None = None,
    deadline_s: float = _DEADLINE_S,
    clock: Callable[[], float] = time.perf_counter,
) -> LinkProbe:
    """Measure a link from the writer's end.

    Args:
        driver: Drives `session`.
        session: The writer's end.
        scratch: Registered memory of this process. Its content is sent, and overwritten if the session is two-sided.
        plan: Equal on both ends; by default `ProbePlan.fitting(scratch)`, which needs equally large scratches.
        deadline_s: Seconds for the whole probe.
        clock: Seconds.

    Returns:
        Median latency of a small write (two-sided: half of a round trip) and best bandwidth of bulk writes, both as a user of
        `driver` sees them.

    Raises:
        TransportTimeout: It did not end in time.
        TransportError: A write failed, or the plans differ.
        ConfigError: The scratch is smaller than the plan needs.
    """
    plan = ProbePlan.fitting(scratch.num_bytes) if plan is None else plan
    prober = _Prober(driver, session, scratch, plan, deadline_s, clock)
    num_small = plan.warmup_rounds + plan.small_rounds
    num_lone = num_small + 1 + plan.bulk_rounds
    steps = _steps(plan)
    elapsed_s = [await prober.send(step) for step in steps[:num_lone]]
    latency_s = statistics.median(elapsed_s[plan.warmup_rounds : num_small])
    if not session.is_one_sided:
        latency_s /= 2
    whole_s = min(elapsed_s[num_small + 1 :])
    # The answer to a bulk write is a small write, whose time does not count. It is at most half, if small writes were slow.
    bulk_s = whole_s if session.is_one_sided else max(whole_s - latency_s, whole_s / 2)
    bursts = steps[num_lone:]
    num_writes = _burst_writes(plan, prober.left_s, lone_s=whole_s, latency_s=latency_s) if bursts else 0
    if num_writes and bulk_s < _BURST_BELOW * latency_s:
        bulk_s = min(bulk_s, await _bulk_in_bursts_s(prober, bursts, num_writes, lone_s=whole_s))
    elif bursts:
        await prober.decline(bursts[0].keys)
    return LinkProbe(lane=session.lane, latency_s=latency_s, bandwidth_bytes_per_s=plan.bulk_bytes / bulk_s)


def _burst_writes(plan: ProbePlan, left_s: float, *, lone_s: float, latency_s: float) -> int:
    """Return the bulk writes of each burst; 0 if there is no time for bursts of two."""
    lone_s = max(lone_s, 1e-9)
    wanted = max(_MIN_BURST_WRITES, int(max(_BURST_S, _BURST_BELOW * latency_s) / lone_s))
    most = int(_MAX_BURSTS_PART * left_s / (plan.bulk_rounds * lone_s))
    return min(wanted, plan.burst_writes, most) if most > 1 else 0


async def _bulk_in_bursts_s(prober: _Prober, bursts: list[_Step], num_writes: int, *, lone_s: float) -> float:
    """Return the seconds that each further bulk write of a burst adds to a lone one."""
    burst_s = min([await prober.send(burst, num_writes) for burst in bursts])
    # At least half of its share: a lone write that was slow by chance must not make the bandwidth infinite.
    return max((burst_s - lone_s) / max(num_writes - 1, 1), 0.5 * burst_s / num_writes)


@cache
def host_copy_bytes_per_s() -> float:
    """Return the bandwidth of a copy by one thread in host memory. The first call takes about 30 ms, and 64 MiB meanwhile."""
    source, target = np.ones(_HOST_COPY_BYTES, np.uint8), np.zeros(_HOST_COPY_BYTES, np.uint8)
    target.fill(1)  # zeros are mapped when they are written first
    elapsed_s = []
    for _ in range(2):
        begun = time.perf_counter()
        np.copyto(target, source)
        elapsed_s.append(time.perf_counter() - begun)
    return _HOST_COPY_BYTES / min(elapsed_s)


async def serve_probe(
    driver: SessionDriver,
    session: Session,
    scratch: LocalMemory,
    *,
    plan: ProbePlan | None = None,
    deadline_s: float = _DEADLINE_S,
) -> None:
    """Do the target's half of a probe; arguments and errors as for `probe_link`. One-sided: returns at once."""
    if session.is_one_sided:
        return
    plan = ProbePlan.fitting(scratch.num_bytes) if plan is None else plan
    await _Prober(driver, session, scratch, plan, deadline_s).answer()
