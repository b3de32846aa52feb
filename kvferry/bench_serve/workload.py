"""The requests of a run: arrival, prompt and length of the output. The seed fixes all of them before the run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from transfer.errors import ConfigError

MAX_REQUESTS: Final = 1_000_000
MAX_RATE: Final = 100_000  # requests a second
MAX_SECONDS: Final = 86_400
FIRST_ID: Final = 3
"""Most vocabularies have special tokens (begin, end, padding) below it."""


class ArrivalKind(StrEnum):
    """Distribution of the gaps between requests; their mean is 1 / rate."""

    POISSON = "poisson"  # exponential gaps: independent users
    UNIFORM = "uniform"  # gaps between 0 and twice the mean
    CONSTANT = "constant"  # every gap is the mean


def gaps_s(kind: ArrivalKind, *, rate: float, number: int, chance: random.Random) -> list[float]:
    """Return the seconds before each of `number` arrivals, at `rate` a second."""
    match kind:
        case ArrivalKind.POISSON:
            return [chance.expovariate(rate) for _ in range(number)]
        case ArrivalKind.UNIFORM:
            return [chance.uniform(0.0, 2.0 / rate) for _ in range(number)]
        case ArrivalKind.CONSTANT:
            return [1.0 / rate] * number


def arrivals_s(kind: ArrivalKind, *, rate: float, number: int, chance: random.Random) -> list[float]:
    """Return the times of `number` arrivals, in seconds from the run's start; the first one also comes after a gap."""
    return list(accumulate(gaps_s(kind, rate=rate, number=number, chance=chance)))


class Choice(StrEnum):
    """Rule that chooses the decode node of the next request."""

    ROUND_ROBIN = "round-robin"
    LEAST_OUTSTANDING = "least-outstanding"


class LengthKind(StrEnum):
    FIXED = "fixed"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"


FORMS: Final = "N, fixed:N, uniform:LEAST:MOST or lognormal:MEDIAN:SIGMA[:MOST]"
_MOST: Final = 10_000_000
_MOST_DIGITS: Final = 20
"""Longest number, with leading zeros; Python refuses to parse numbers of thousands of digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of token counts, each at least 1.

    Args:
        least: For ``fixed`` the number itself, for ``lognormal`` 1.
        most: Upper bound of a draw.
        median, sigma: For ``lognormal``, the median and the standard deviation of the logarithm.
    """

    kind: LengthKind
    least: int = 1
    most: int = _MOST
    median: float = 0.0
    sigma: float = 0.0

    @classmethod
    def parse(cls, what: str, text: str) -> Lengths:
        """Parse one of `FORMS`. `what` names the option in messages.

        Raises:
            ConfigError: The text has another form or an invalid number.
        """
        kind, _, rest = text.partition(":") if ":" in text else ("fixed", "", text)
        parts = rest.split(":")
        try:
            match kind, parts:
                case "fixed", [number]:
                    return cls(kind=LengthKind.FIXED, least=_tokens(number), most=_tokens(number))
                case "uniform", [least, most]:
                    made = cls(kind=LengthKind.UNIFORM, least=_tokens(least), most=_tokens(most))
                    if made.least > made.most:
                        raise ValueError(f"{made.least} is above {made.most}")
                    return made
                case "lognormal", [median, sigma, *most] if len(most) <= 1:
                    bound = _tokens(most[0]) if most else _MOST
                    return cls(kind=LengthKind.LOGNORMAL, most=bound, median=_tokens(median), sigma=_sigma(sigma))
                case _:
                    raise ValueError("it has another form")
        except ValueError as error:
            raise ConfigError(f"{what} is {text!r}: {error}; give {FORMS}") from None

    def draw(self, chance: random.Random) -> int:
        match self.kind:
            case LengthKind.FIXED:
                return self.least
            case LengthKind.UNIFORM:
                return chance.randint(self.least, self.most)
            case LengthKind.LOGNORMAL:
                return max(1, min(self.most, round(chance.lognormvariate(math.log(self.median), self.sigma))))

    @property
    def text(self) -> str:
        """Return the text from which `parse` makes this distribution."""
        match self.kind:
            case LengthKind.FIXED:
                return f"fixed:{self.least}"
            case LengthKind.UNIFORM:
                return f"uniform:{self.least}:{self.most}"
            case LengthKind.LOGNORMAL:
                bound = "" if self.most == _MOST else f":{self.most}"
                return f"lognormal:{self.median:g}:{self.sigma:g}{bound}"


def _tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and 1 <= int(text) <= _MOST):
        raise ValueError(f"{text!r} is not a number of tokens from 1 to {_MOST}")
    return int(text)


def _sigma(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0 <= value <= 10):
        raise ValueError(f"sigma is {text}; it must be from 0 to 10")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request. It arrives `at_s` seconds after the run's start; a request of the warm-up does not count."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    is_warm_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Distribution of requests.

    Args:
        shared_prefix: Part of each prompt, from 0 to 1, that it shares with others.
        num_prefixes: Number of shared prefixes; each prompt begins with one of them.
    """

    prompt: Lengths
    output: Lengths
    shared_prefix: float = 0.0
    num_prefixes: int = 1


def plan_requests(
    shape: Shape, *, kind: ArrivalKind, rate: float, number: int, num_warm_up: int, seed: int, again: int = 0
) -> tuple[Planned, ...]:
    """Return `num_warm_up` requests and then `number` that count, at `rate` a second.

    Args:
        again: Number of earlier runs of the same rate, so that a repeated run is another draw.
    """
    chance = _chance(seed, rate, again)
    moments = arrivals_s(kind, rate=rate, number=num_warm_up + number, chance=chance)
    return tuple(
        Planned(
            at_s=at_s,
            prompt_tokens=shape.prompt.draw(chance),
            output_tokens=shape.output.draw(chance),
            is_warm_up=index < num_warm_up,
        )
        for index, at_s in enumerate(moments)
    )


def _chance(seed: int, rate: float, again: int) -> random.Random:
    return random.Random(f"{seed} plan {rate:g}{f' again {again}' if again else ''}")


def number_within(kind: ArrivalKind, *, rate: float, duration_s: float, num_warm_up: int, seed: int, again: int = 0) -> int:
    """Return how many arrivals of `plan_requests` come within `duration_s` after the last one of the warm-up."""
    expected = rate * duration_s
    enough = num_warm_up + math.ceil(expected + 10 * math.sqrt(expected) + 10)
    moments = arrivals_s(kind, rate=rate, number=enough, chance=_chance(seed, rate, again))
    begin_s = moments[num_warm_up - 1] if num_warm_up else 0.0
    return max(1, sum(begin_s < at_s <= begin_s + duration_s for at_s in moments))


def read_trace(file: Path, *, rate: float | None, num_warm_up: int) -> tuple[Planned, ...]:
    """Return the requests of a JSONL file: objects with ``timestamp_s``, ``prompt_tokens`` and ``output_tokens``.

    Mooncake's names are also accepted: ``timestamp`` in milliseconds, ``input_length``, ``output_length``.

    Args:
        rate: Mean rate to which the trace is stretched; None keeps its times.
        num_warm_up: Number of its first requests that do not count.

    Raises:
        ConfigError: A line is invalid, and the message names it. Or all requests that count come at one moment.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace is {file}; it cannot be read: {error}") from None
    found = [_trace_row(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if len(found) <= num_warm_up:
        raise ConfigError(f"--trace is {file} with {len(found)} requests; it must have more than the {num_warm_up} of --warmup")
    found.sort(key=lambda row: row[0])
    first_s, last_s = found[0][0], found[-1][0]
    begin_s = found[num_warm_up - 1][0] if num_warm_up else first_s
    if last_s <= begin_s:
        raise ConfigError(
            f"--trace is {file}; its requests that count, after {num_warm_up} of --warmup, all come at one moment, "
            f"{last_s:g} s, and so have no rate; their timestamps must differ"
        )
    scale = 1.0 if rate is None else (len(found) - 1) / (last_s - first_s) / rate
    return tuple(
        Planned(
            at_s=(at_s - first_s) * scale,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            is_warm_up=index < num_warm_up,
        )
        for index, (at_s, prompt_tokens, output_tokens) in enumerate(found)
    )


def _trace_row(file: Path, number: int, line: str) -> tuple[float, int, int]:
    where = f"--trace: {file}, line {number}"
    try:
        row = json.loads(line)
    except ValueError:
        raise ConfigError(f"{where} is no JSON object") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is no JSON object")
    at_s = row["timestamp_s"] if "timestamp_s" in row else _scaled(row.get("timestamp"), 1e-3)
    if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not math.isfinite(at_s):
        raise ConfigError(f"{where} has no timestamp_s (seconds) or timestamp (milliseconds)")
    lengths = [
        _trace_length(where, row, names) for names in (("prompt_tokens", "input_length"), ("output_tokens", "output_length"))
    ]
    return float(at_s), lengths[0], lengths[1]


def _scaled(value: Any, factor: float) -> Any:
    return value * factor if isinstance(value, int | float) and not isinstance(value, bool) else value


def _trace_length(where: str, row: dict[str, Any], names: tuple[str, str]) -> int:
    value = next((row[name] for name in names if name in row), None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where} has {names[0]} {value!r}; it must be a whole number from 1")
    return value


class Prompts:
    """Random token ids of each request, the same for the same seed and index, with shared prefixes.

    Args:
        longest: Length of the longest prompt.
    """

    def __init__(self, *, vocab_size: int, shape: Shape, longest: int, seed: int) -> None:
        self._ids = range(min(FIRST_ID, vocab_size - 1), vocab_size)
        self._share = shape.shared_prefix
        self._seed = seed
        shared = math.ceil(longest * shape.shared_prefix)
        self._prefixes = [
            random.Random(f"{seed} prefix {index}").choices(self._ids, k=shared)
            for index in range(shape.num_prefixes if shared else 0)
        ]

    def of(self, run: str, index: int, num_tokens: int) -> list[int]:
        """Return the prompt of the request with that index. Runs with different names share only prefixes."""
        chance = random.Random(f"{self._seed} prompt {run} {index}")
        if not self._prefixes:
            return chance.choices(self._ids, k=num_tokens)
        shared = chance.choice(self._prefixes)[: int(num_tokens * self._share)]
        return shared + chance.choices(self._ids, k=num_tokens - len(shared))


def longest_prompt(requests: Sequence[Planned]) -> int:
    return max(request.prompt_tokens for request in requests)
