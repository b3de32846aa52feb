"""Options of `kvferry bench serve`, checked before the first request."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.bench_serve.summary import Objectives
from kvferry.bench_serve.workload import (
    MAX_RATE,
    MAX_REQUESTS,
    MAX_SECONDS,
    ArrivalKind,
    Choice,
    Lengths,
    Planned,
    Shape,
    number_within,
    plan_requests,
    read_trace,
)
from kvferry.cli.options import check_range
from transfer.errors import ConfigError

_FRESH_SEEDS = 1 << 31


def fresh_seed() -> int:
    """Return a new seed. With the same one, a store or host memory would serve the second of two runs."""
    return secrets.randbelow(_FRESH_SEEDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One rate, in requests a second on average.

    Args:
        duration_s: Seconds of arrivals that count; None means until the last one.
        again: Number of earlier runs of the same rate.
    """

    rate: float
    planned: tuple[Planned, ...]
    duration_s: float | None = None
    again: int = 0

    @property
    def name(self) -> str:
        """Return the unique name of the run, which its prompts depend on."""
        return f"{self.rate:g}{f' again {self.again}' if self.again else ''}"

    def window_s(self, until_s: float = math.inf) -> float:
        """Return the seconds of arrivals that count, from the last one of the warm-up to the end or `until_s`."""
        begin_s = max((one.at_s for one in self.planned if one.is_warm_up), default=0.0)
        end_s = self.planned[-1].at_s if self.duration_s is None else begin_s + self.duration_s
        return max(min(end_s, until_s) - begin_s, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of the command.

    Args:
        targets: host:port of each decode node.
        rates: Requests a second; one run for each, in this order. Empty only with a trace.
        shape: Lengths and shared prefixes; with a trace only the latter are used.
        trace: JSONL file with times and lengths.
        num_requests, duration_s: Requests that count in each run, or seconds of their arrivals; exactly one, none with a trace.
        num_warm_up: Requests before those.
        timeout_s: Deadline of each request.
        max_lateness_s: Highest 99th percentile of the generator's delay.
        vocab_size: Number of token ids; None means that the nodes report it.

    Raises:
        ConfigError: A value is invalid, or two exclude each other.
    """

    targets: tuple[str, ...]
    rates: tuple[float, ...]
    shape: Shape
    arrivals: ArrivalKind = ArrivalKind.POISSON
    trace: Path | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    num_warm_up: int = 0
    timeout_s: float = 120.0
    choice: Choice = Choice.ROUND_ROBIN
    objectives: Objectives = field(default_factory=Objectives)
    seed: int = field(default_factory=fresh_seed)
    max_lateness_s: float = 0.1
    vocab_size: int | None = None
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not self.targets:
            raise ConfigError("no --target; give host:port of a decode node, once for each")
        if repeated := {one for one in self.targets if self.targets.count(one) > 1}:
            raise ConfigError(f"--target {min(repeated)} is given twice; one connection serves any load")
        for rate in self.rates:
            if not 0 < rate <= MAX_RATE:
                raise ConfigError(f"--rate is {rate:g}; it must be above 0 and at most {MAX_RATE} requests a second")
        for name, value in (
            ("--duration", self.duration_s), ("--timeout", self.timeout_s), ("--slo-ttft", self.objectives.ttft_s),
            ("--slo-tpot", self.objectives.tpot_s), ("--max-lateness", self.max_lateness_s),
        ):  # fmt: skip
            if value is not None and not 0 < value <= MAX_SECONDS:
                raise ConfigError(f"{name} is {value:g}; it must be above 0 and at most {MAX_SECONDS} seconds")
        for name, number, least, most in (
            ("--requests", self.num_requests, 1, MAX_REQUESTS),
            ("--warmup", self.num_warm_up, 0, MAX_REQUESTS),
            ("--prefixes", self.shape.num_prefixes, 1, MAX_REQUESTS),
            ("--vocab-size", self.vocab_size, 2, 1 << 31),
            ("--seed", self.seed, 0, (1 << 63) - 1),
        ):
            if number is not None:
                check_range(name, number, least, most)
        if not 0 <= self.shape.shared_prefix <= 1:
            raise ConfigError(f"--shared-prefix is {self.shape.shared_prefix:g}; it must be a part of each prompt, from 0 to 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"--temperature is {self.temperature:g}; it must be 0 (greedy) or above")
        self._check_how_much()

    def _check_how_much(self) -> None:
        if self.trace is not None:
            if self.num_requests is not None or self.duration_s is not None:
                raise ConfigError("--trace says how many requests there are; leave out --requests and --duration")
            return
        if not self.rates:
            raise ConfigError("no --rate; give requests a second, several with commas for a sweep, as 1,2,4")
        if (self.num_requests is None) == (self.duration_s is None):
            raise ConfigError("give either --requests or --duration, of each rate")
        if self.duration_s is not None and max(self.rates) * self.duration_s > MAX_REQUESTS:
            raise ConfigError(f"--rate {max(self.rates):g} for --duration {self.duration_s:g} s is over {MAX_REQUESTS} requests")

    def runs(self) -> list[Run]:
        """Return the runs in their order.

        Raises:
            ConfigError: The trace is invalid.
        """
        before = Counter[str]()
        found: list[Run] = []
        for asked in self.rates or (None,):
            planned = None if self.trace is None else read_trace(self.trace, rate=asked, num_warm_up=self.num_warm_up)
            rate = asked if planned is None else _mean_rate(planned)
            assert rate is not None  # without a trace there are rates
            again = before[f"{rate:g}"]
            before[f"{rate:g}"] += 1
            planned = self._plan(rate, again) if planned is None else planned
            found.append(Run(rate=rate, planned=planned, duration_s=self.duration_s, again=again))
        return found

    def _plan(self, rate: float, again: int) -> tuple[Planned, ...]:
        number = self.num_requests
        if number is None:
            assert self.duration_s is not None
            number = number_within(
                self.arrivals,
                rate=rate,
                duration_s=self.duration_s,
                num_warm_up=self.num_warm_up,
                seed=self.seed,
                again=again,
            )
        return plan_requests(
            self.shape,
            kind=self.arrivals,
            rate=rate,
            number=number,
            num_warm_up=self.num_warm_up,
            seed=self.seed,
            again=again,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "targets": list(self.targets),
            "rates": list(self.rates),
            "arrivals": str(self.arrivals),
            "prompt_tokens": None if self.trace else self.shape.prompt.text,
            "output_tokens": None if self.trace else self.shape.output.text,
            "trace": None if self.trace is None else str(self.trace),
            "shared_prefix": self.shape.shared_prefix,
            "prefixes": self.shape.num_prefixes,
            "requests": self.num_requests,
            "duration_s": self.duration_s,
            "warmup_requests": self.num_warm_up,
            "timeout_s": self.timeout_s,
            "choice": str(self.choice),
            "slo_ttft_s": self.objectives.ttft_s,
            "slo_tpot_s": self.objectives.tpot_s,
            "seed": self.seed,
            "max_lateness_s": self.max_lateness_s,
            "temperature": self.temperature,
        }


def _mean_rate(planned: tuple[Planned, ...]) -> float:
    """Return the requests a second of a trace; `read_trace` has checked that they do not all come at one moment."""
    return (len(planned) - 1) / (planned[-1].at_s - planned[0].at_s)


def parse_rates(texts: list[str]) -> tuple[float, ...]:
    """Parse rates such as ``["1,2", "4"]``.

    Raises:
        ConfigError: One is not a number.
    """
    rates = []
    for part in ",".join(texts).replace(" ", "").split(","):
        try:
            rates.append(float(part))
        except ValueError:
            raise ConfigError(f"--rate has {part!r}; give requests a second, several with commas for a sweep, as 1,2,4") from None
    return tuple(rates)


def shape_of(prompt_tokens: str, output_tokens: str, *, shared_prefix: float = 0.0, num_prefixes: int = 1) -> Shape:
    """Return the shape that the texts of the options describe.

    Raises:
        ConfigError: A text is not a distribution.
    """
    return Shape(
        prompt=Lengths.parse("--prompt-tokens", prompt_tokens),
        output=Lengths.parse("--output-tokens", output_tokens),
        shared_prefix=shared_prefix,
        num_prefixes=num_prefixes,
    )
