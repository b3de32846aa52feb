"""Options of `kvferry bench serve`, checked before the first request."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

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
from transfer.errors import ConfigError

_FRESH_SEEDS = 1 << 31


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
    """Options of `kvferry bench serve`. Each field is an option of the command line.

    Raises:
        ConfigError: A value is invalid, or two exclude each other.
    """

    targets: Annotated[
        list[str] | None,
        typer.Option("--target", metavar="HOST:PORT", help="gRPC address of a decode node; repeatable."),
    ] = None
    rates: Annotated[
        list[str] | None,
        typer.Option("--rate", metavar="N[,N...]", help="Requests a second; several: a sweep, one by one."),
    ] = None
    arrivals: Annotated[ArrivalKind, typer.Option(help="Gaps between requests.")] = ArrivalKind.POISSON
    prompt_tokens: Annotated[
        str, typer.Option(metavar="LENGTHS", help="N, fixed:N, uniform:LEAST:MOST or lognormal:MEDIAN:SIGMA[:MOST].")
    ] = "256"
    output_tokens: Annotated[str, typer.Option(metavar="LENGTHS", help="Tokens to generate, in the same form.")] = "32"
    trace: Annotated[
        Path | None,
        typer.Option(help="JSONL file with timestamp_s, prompt_tokens, output_tokens; --rate stretches it."),
    ] = None
    shared_prefix: Annotated[float, typer.Option(help="Shared beginning, as a part of each prompt from 0 to 1.")] = 0.0
    num_prefixes: Annotated[int, typer.Option("--prefixes", min=1, max=MAX_REQUESTS, help="Number of shared beginnings.")] = 1
    num_requests: Annotated[
        int | None, typer.Option("--requests", min=1, max=MAX_REQUESTS, help="Requests that count, of each rate.")
    ] = None
    duration_s: Annotated[
        float | None, typer.Option("--duration", help="Seconds of arrivals that count, of each rate, instead.")
    ] = None
    num_warm_up: Annotated[
        int,
        typer.Option("--warmup", min=0, max=MAX_REQUESTS, help="Requests before them, which do not count, of each rate."),
    ] = 5
    timeout_s: Annotated[float, typer.Option("--timeout", help="Deadline of each request, in seconds.")] = 120.0
    choice: Annotated[Choice, typer.Option(help="How a target is chosen for a request.")] = Choice.ROUND_ROBIN
    slo_ttft_s: Annotated[float | None, typer.Option("--slo-ttft", help="Objective: maximum seconds to the first token.")] = None
    slo_tpot_s: Annotated[float | None, typer.Option("--slo-tpot", help="Objective: maximum mean seconds per further token.")] = (
        None
    )
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="Seed of arrivals, lengths and prompts; random by default."),
    ] = None
    max_lateness_s: Annotated[
        float,
        typer.Option(
            "--max-lateness",
            help="Maximum lateness of this command (p99) in seconds; above it the report is invalid.",
        ),
    ] = 0.1
    vocab_size: Annotated[
        int | None, typer.Option(min=2, max=1 << 31, help="Vocabulary size; by default reported by the nodes.")
    ] = None
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0

    def __post_init__(self) -> None:
        if self.seed is None:  # with the seed of an earlier run, a store or host memory would serve this one
            object.__setattr__(self, "seed", secrets.randbelow(_FRESH_SEEDS))
        targets = self.targets or []
        if not targets:
            raise ConfigError("no --target; give host:port of a decode node, once for each")
        if repeated := {one for one in targets if targets.count(one) > 1}:
            raise ConfigError(f"--target {min(repeated)} appears twice; one connection is enough for any load")
        for rate in self.offered_rates:
            if not 0 < rate <= MAX_RATE:
                raise ConfigError(f"--rate is {rate:g}; it must be above 0 and at most {MAX_RATE} requests a second")
        for name, value in (
            ("--duration", self.duration_s), ("--timeout", self.timeout_s), ("--slo-ttft", self.slo_ttft_s),
            ("--slo-tpot", self.slo_tpot_s), ("--max-lateness", self.max_lateness_s),
        ):  # fmt: skip
            if value is not None and not 0 < value <= MAX_SECONDS:
                raise ConfigError(f"{name} is {value:g}; it must be above 0 and at most {MAX_SECONDS} seconds")
        if not 0 <= self.shared_prefix <= 1:
            raise ConfigError(f"--shared-prefix is {self.shared_prefix:g}; it must be a part of each prompt, from 0 to 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"--temperature is {self.temperature:g}; it must be 0 (greedy) or above")
        self._check_how_much()

    def _check_how_much(self) -> None:
        rates = self.offered_rates
        if self.trace is not None:
            if self.num_requests is not None or self.duration_s is not None:
                raise ConfigError("--trace determines the number of requests; remove --requests and --duration")
            return
        if not rates:
            raise ConfigError("no --rate; give requests a second, several with commas for a sweep, as 1,2,4")
        if (self.num_requests is None) == (self.duration_s is None):
            raise ConfigError("give either --requests or --duration, of each rate")
        if self.duration_s is not None and max(rates) * self.duration_s > MAX_REQUESTS:
            raise ConfigError(f"--rate {max(rates):g} for --duration {self.duration_s:g} s is over {MAX_REQUESTS} requests")

    @property
    def offered_rates(self) -> tuple[float, ...]:
        """Return the rates, one run each, in this order; empty only with a trace.

        Raises:
            ConfigError: One is not a number.
        """
        found = []
        for part in ",".join(self.rates or ()).replace(" ", "").split(",") if self.rates else ():
            try:
                found.append(float(part))
            except ValueError:
                raise ConfigError(
                    f"--rate has {part!r}; give requests a second, several with commas for a sweep, as 1,2,4"
                ) from None
        return tuple(found)

    @property
    def shape(self) -> Shape:
        """Return lengths and shared prefixes; with a trace only the latter are used."""
        return shape_of(self.prompt_tokens, self.output_tokens, shared_prefix=self.shared_prefix, num_prefixes=self.num_prefixes)

    @property
    def fixed_seed(self) -> int:
        """Return the given seed, or the drawn one."""
        assert self.seed is not None
        return self.seed

    @property
    def objectives(self) -> Objectives:
        return Objectives(ttft_s=self.slo_ttft_s, tpot_s=self.slo_tpot_s)

    def runs(self) -> list[Run]:
        """Return the runs in their order.

        Raises:
            ConfigError: The trace is invalid.
        """
        before = Counter[str]()
        found: list[Run] = []
        for asked in self.offered_rates or (None,):
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
                seed=self.fixed_seed,
                again=again,
            )
        return plan_requests(
            self.shape,
            kind=self.arrivals,
            rate=rate,
            number=number,
            num_warm_up=self.num_warm_up,
            seed=self.fixed_seed,
            again=again,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "targets": self.targets,
            "rates": list(self.offered_rates),
            "arrivals": str(self.arrivals),
            "prompt_tokens": None if self.trace else self.shape.prompt.text,
            "output_tokens": None if self.trace else self.shape.output.text,
            "trace": None if self.trace is None else str(self.trace),
            "shared_prefix": self.shared_prefix,
            "prefixes": self.num_prefixes,
            "requests": self.num_requests,
            "duration_s": self.duration_s,
            "warmup_requests": self.num_warm_up,
            "timeout_s": self.timeout_s,
            "choice": str(self.choice),
            "slo_ttft_s": self.slo_ttft_s,
            "slo_tpot_s": self.slo_tpot_s,
            "seed": self.seed,
            "max_lateness_s": self.max_lateness_s,
            "temperature": self.temperature,
        }


def _mean_rate(planned: tuple[Planned, ...]) -> float:
    """Return the requests a second of a trace; `read_trace` has checked that they do not all come at one moment."""
    return (len(planned) - 1) / (planned[-1].at_s - planned[0].at_s)


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
