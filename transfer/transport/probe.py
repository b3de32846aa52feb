"""Measure a link at attach. This detects slow links, and moves the cold start of every link to its attach.

Both ends run their half at the same time with the same plan: `probe_link` on the writer, `serve_probe` on the target. On a
two-sided transport, small writes go back and forth, and a small write answers each bulk write, so that the time includes the
arrival. On a one-sided transport, the writer times the completion of its own writes, and the target does nothing. On a fast link
a bulk write takes little more than the latency. 4 MiB occupy an NVLink for 11 us, and the writer sees their end after 42 us. Such
a link is also measured with a burst of bulk writes, which pays the latency once.

The probe uses keys from `FIRST_PROBE_KEY` in both directions; grants use keys below.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from transfer.errors import ConfigError, TransportTimeout
from transfer.transport.base import FIRST_PROBE_KEY, ByteRange, Handle, LocalMemory, Session
from transfer.transport.driver import SessionDriver

_MAX_ROUNDS = 10_000
_SMALL_BYTES = 4096
_DEADLINE_S = 10.0
_MAX_BULK_BYTES = 8 * 2**20
_BURST_WRITES = (16, 64)
_BURST_S = 4e-3
"""Target duration of a burst. The number of its writes is this time divided by that of a single write, within `_BURST_WRITES`.
The measured end of a burst is off by about 20 us: on a link of 400 GB/s a tenth of 16 writes of 4 MiB, a fortieth of 64."""
_BURST_BELOW = 20
"""Number of latencies. A bulk write that takes longer measures the bandwidth to 5 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """The writes of a probe; equal on both ends.

    Attributes:
        small_bytes: Size of a write that measures the latency.
        bulk_bytes: Size of a write that measures the bandwidth.
        warmup_rounds: Small writes that are not counted; the first one sets up the connection.
        small_rounds: Small writes that are counted.
        bulk_rounds: Bulk writes that are counted, after one that is not.
        target_begin: Place in the target's offered memory where a one-sided probe may write. Only other probes may use it
            meanwhile: it lies after the ring, never in it.
    """

    small_bytes: int = _SMALL_BYTES
    bulk_bytes: int = _MAX_BULK_BYTES
    warmup_rounds: int = 8
    small_rounds: int = 33
    bulk_rounds: int = 3
    target_begin: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("small_bytes", 1, 2**20),
            ("bulk_bytes", 1, 2**40),
            ("warmup_rounds", 0, _MAX_ROUNDS),
            ("small_rounds", 1, _MAX_ROUNDS),
            ("bulk_rounds", 1, _MAX_ROUNDS),
            ("target_begin", 0, 2**62),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} of a probe is {value}; it must be in [{least}, {most}]")

    @classmethod
    def fitting(cls, num_bytes: int, *, target_begin: int = 0) -> ProbePlan:
        """Return the default plan for scratch memory, and for a place at `target_begin`, of `num_bytes`: at most 8 MiB in bulk.

        Raises:
            ConfigError: There is no room.
        """
        return cls(
            small_bytes=min(_SMALL_BYTES, num_bytes), bulk_bytes=min(_MAX_BULK_BYTES, num_bytes), target_begin=target_begin
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
        self._heard: Handle

    async def settled(self, handle: Handle) -> None:
        left_s = self._ends_at - time.monotonic()
        try:
            await self._driver.wait(self._session, handle, deadline_s=max(left_s, 0.0))
        except TransportTimeout:
            raise TransportTimeout(
                f"probe of link {self._session.lane} did not end within {self._deadline_s} s; "
                "the other end does not answer, or probes by another plan"
            ) from None

    def write(self, key: int, num_bytes: int) -> Handle:
        begin = self._plan.target_begin
        target_range = ByteRange(begin=begin, end=begin + num_bytes)
        return self._session.write(self._scratch, ByteRange(begin=0, end=num_bytes), target_range, FIRST_PROBE_KEY + key)

    def expect(self, key: int, num_bytes: int) -> Handle:
        return self._session.expect(self._scratch, ByteRange(begin=0, end=num_bytes), FIRST_PROBE_KEY + key)

    async def send(self, key: int, num_bytes: int) -> float:
        """Return the seconds of one write until its small answer arrives, or until it is complete if it is one-sided."""
        answer = None if self._session.is_one_sided else self.expect(key, self._plan.small_bytes)
        begun = self._clock()
        sent = self.write(key, num_bytes)
        await self.settled(sent if answer is None else answer)
        elapsed_s = self._clock() - begun
        await self.settled(sent)
        return elapsed_s

    async def burst(self, key: int, num_bytes: int, num_writes: int) -> float:
        """Return the seconds until `num_writes` one-sided writes, started at once to the same place, are complete."""
        begun = self._clock()
        handles = [self.write(key + number, num_bytes) for number in range(num_writes)]
        for handle in handles:
            await self.settled(handle)
        return self._clock() - begun

    async def answer(self, key: int, num_bytes: int, next_num_bytes: int | None) -> None:
        """Wait for one write, and answer it. The next one is expected before that, so that it never waits for this end."""
        if key == 0:
            self._heard = self.expect(0, num_bytes)
        heard = self._heard
        await self.settled(heard)
        if next_num_bytes is not None:
            self._heard = self.expect(key + 1, next_num_bytes)
        await self.settled(self.write(key, self._plan.small_bytes))


def _sizes(plan: ProbePlan) -> list[int]:
    """Return the bytes of each write of a probe, in order. The index of a write is its key."""
    small = [plan.small_bytes] * (plan.warmup_rounds + plan.small_rounds)
    return small + [plan.bulk_bytes] * (1 + plan.bulk_rounds)


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
    elapsed_s = [await prober.send(key, size) for key, size in enumerate(_sizes(plan))]
    num_small = plan.warmup_rounds + plan.small_rounds
    latency_s = statistics.median(elapsed_s[plan.warmup_rounds : num_small])
    if not session.is_one_sided:
        latency_s /= 2
    whole_s = min(elapsed_s[num_small + 1 :])
    # The answer to a bulk write is a small write, whose time does not count. It is at most half, if small writes were slow.
    bulk_s = whole_s if session.is_one_sided else max(whole_s - latency_s, whole_s / 2)
    if session.is_one_sided and bulk_s < _BURST_BELOW * latency_s:
        bulk_s = min(bulk_s, await _bulk_in_bursts_s(prober, plan, first_key=len(elapsed_s), lone_s=bulk_s))
    return LinkProbe(lane=session.lane, latency_s=latency_s, bandwidth_bytes_per_s=plan.bulk_bytes / bulk_s)


async def _bulk_in_bursts_s(prober: _Prober, plan: ProbePlan, *, first_key: int, lone_s: float) -> float:
    """Return the seconds that each further bulk write of a burst adds to a lone one."""
    least, most = _BURST_WRITES
    writes = max(least, min(most, int(_BURST_S / max(lone_s, 1e-9))))
    keys = range(first_key, first_key + plan.bulk_rounds * writes, writes)
    burst_s = min([await prober.burst(key, plan.bulk_bytes, writes) for key in keys])
    # At least half of its share: a lone write that was slow by chance must not make the bandwidth infinite.
    return max((burst_s - lone_s) / (writes - 1), 0.5 * burst_s / writes)


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
    prober = _Prober(driver, session, scratch, plan, deadline_s)
    sizes = _sizes(plan)
    for key, size in enumerate(sizes):
        await prober.answer(key, size, sizes[key + 1] if key + 1 < len(sizes) else None)
