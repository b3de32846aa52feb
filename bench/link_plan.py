"""What is measured on a link: sizes, and how often; known to both ends and to every peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.timing import readable_bytes, sample

SIZES = (4 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)
IN_FLIGHT = 8
_MOST_IN_FLIGHT_BYTES = 64 << 20
_ENOUGH_BYTES = {"cpu": 1 << 29, "cuda": 16 << 30}  # a few tenths of a second for each step

Samples = list[float]
"""Seconds of each repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Writes of one size, `in_flight` at a time."""

    num_bytes: int
    in_flight: int = 1
    repetitions: int

    @property
    def name(self) -> str:
        return readable_bytes(self.num_bytes) + (f", {self.in_flight} in flight" if self.in_flight > 1 else "")

    def sample(self, call: Callable[[], object]) -> Samples:
        """Seconds of each call; the first is not counted."""
        return sample(call, repetitions=self.repetitions)


def steps(*, device_type: str, max_bytes: int, is_quick: bool) -> list[Step]:
    """Sizes up to `max_bytes`, one write at a time; small ones also several at a time."""
    plan: list[Step] = []
    for num_bytes in [size for size in SIZES if size <= max_bytes]:
        for in_flight in (1, IN_FLIGHT):
            moved = num_bytes * in_flight
            if in_flight == 1 or moved <= _MOST_IN_FLIGHT_BYTES:
                repetitions = 3 if is_quick else max(7, min(200, _ENOUGH_BYTES[device_type] // moved))
                plan.append(Step(num_bytes=num_bytes, in_flight=in_flight, repetitions=repetitions))
    return plan
