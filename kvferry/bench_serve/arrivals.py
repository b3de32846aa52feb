"""When requests arrive: gaps drawn before the run, so that no answer can delay a request."""

from __future__ import annotations

import random
from enum import StrEnum
from itertools import accumulate


class ArrivalKind(StrEnum):
    """How the gaps between requests are drawn; their mean is 1 / rate."""

    POISSON = "poisson"  # exponential gaps: independent users
    UNIFORM = "uniform"  # gaps between 0 and twice the mean
    CONSTANT = "constant"  # every gap is the mean


def gaps_s(kind: ArrivalKind, *, rate: float, number: int, chance: random.Random) -> list[float]:
    """Seconds before each of `number` arrivals, at `rate` a second."""
    match kind:
        case ArrivalKind.POISSON:
            return [chance.expovariate(rate) for _ in range(number)]
        case ArrivalKind.UNIFORM:
            return [chance.uniform(0.0, 2.0 / rate) for _ in range(number)]
        case ArrivalKind.CONSTANT:
            return [1.0 / rate] * number


def arrivals_s(kind: ArrivalKind, *, rate: float, number: int, chance: random.Random) -> list[float]:
    """Moments of `number` arrivals, in seconds from the run's start; the first comes after a gap of its own."""
    return list(accumulate(gaps_s(kind, rate=rate, number=number, chance=chance)))
