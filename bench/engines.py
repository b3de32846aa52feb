"""Compare prefill and decode servers joined by kvferry, NIXL or Mooncake, and plain servers, of vLLM or SGLang.

    python -m bench.engines --setups one nixl kvferry --json FILE [--lengths 512 2000 8000] [--in-flight 1 8 32]

Needs vLLM, or SGLang with `--engine sglang`, in this environment, and NIXL for `nixl`. `bench.engine_servers.SETUPS` and
`bench.sglang_servers` describe the setups. All servers start at the beginning and share the first GPU, so their caches must fit
side by side (`-- --kv-cache-memory-bytes N`). `--gpus 0 1` puts prefill and decode servers on two GPUs. The setups get the same
prompts in turns, every second time in the opposite order, so that drift of the machine affects all of them. While one setup is
measured, the servers of the others are idle. Requests to pairs of vLLM servers go through `kvferry route`, except `mooncake`.

The default model has the KV of Llama 3 8B (128 KiB per token in 16 bits), random weights and 0.5 billion parameters. Prefill of a
small model is short, so times of the transfer weigh more than with a large model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.engine_load import Load
from bench.engine_servers import ServerFailed, Serving, Setup, Used, checked_setup
from bench.sglang_servers import SETUPS as SGLANG_SETUPS
from bench.sglang_servers import SglangSetup
from bench.timing import Environment
from kvferry.bench_serve.summary import Spread
from kvferry.demo.kinds import KINDS, VOCAB_SIZE, DemoKind, ModelKind
from kvferry.demo.model import make_demo_model

LEAST_REQUESTS: Final = 8
IDLE_S: Final = 5.0
_ENGINE_VARIABLES: Final = ("VLLM_", "SGLANG_", "UCX_", "MC_")
FIRST_TOKEN_ID: Final = 3  # the smaller ids are special tokens
SETUP_KINDS: Final[dict[str, type[Setup]]] = {"vllm": Setup, "sglang": SglangSetup}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Requests of one length with one number in flight, to one setup.

    Attributes:
        given_up: Requests whose client closed the connection. They count neither as failed nor as answered.
        differing: Answers whose text, or with `--token-ids` whose tokens, differ from those of the first setup.
        preemptions: How often the vLLM servers of the setup preempted a request.
        ttft_p50_s: Median time to first token of each turn.
        requests_per_s: Complete answers per second.
        goodput_per_s: Complete answers that met both objectives, per second.
        kvferry_cpu: CPU seconds of kvferry's threads per second of load, for the busiest process of each server.
        connector_calls: Seconds of vLLM's threads in connector calls per second with a step, for the busiest process of each
            server. Empty except for `kvferry+timed_calls`.
    """

    setup: str
    prompt_tokens: int
    in_flight: int
    requests: int
    failed: int
    given_up: int
    differing: int
    preemptions: int
    ttft_s: Spread
    ttft_p50_s: tuple[float, ...]
    interval_s: Spread
    requests_per_s: float
    goodput_per_s: float
    kvferry_cpu: dict[str, float]
    connector_calls: dict[str, float]
    errors: tuple[str, ...]


def thin_llama_8b(directory: Path) -> Path:
    """Write a model with the KV of Llama 3 8B and 0.5 billion parameters."""
    llama = KINDS[ModelKind.LLAMA]
    kind = DemoKind(
        family=llama.family,
        config_class=llama.config_class,
        gains=llama.gains,
        grown=(),
        config={
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 65536,
        },
    )
    return make_demo_model(directory, kind=kind)


def prompts_of(prompt_tokens: int, in_flight: int, *, number: int, seed: int) -> list[list[int]]:
    """Return the prompts of a cell. No two of them share a beginning, and every setup gets the same ones."""
    chance = random.Random(f"{seed} {prompt_tokens} {in_flight}")
    return [[chance.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(prompt_tokens)] for _ in range(number)]


def cell_of(
    setup: str,
    loads: Sequence[Load],
    references: Sequence[Load],
    *,
    in_flight: int,
    slo_ttft_s: float,
    slo_tpot_s: float,
    preemptions: int = 0,
    kvferry_cpu: Mapping[str, float] = MappingProxyType({}),
    connector_calls: Mapping[str, float] = MappingProxyType({}),
) -> Cell:
    """Summarise the loads of all turns.

    Args:
        references: Loads of the first setup with the same prompts.
        preemptions: How often the servers preempted a request while these loads were sent.
        kvferry_cpu, connector_calls: See `Cell`.
        slo_ttft_s: Objective for the time to first token.
        slo_tpot_s: Objective for the mean time per further token.
    """
    answers = [answer for load in loads for answer in load.answers]
    others = [answer for load in references for answer in load.answers]
    duration_s = sum(load.duration_s for load in loads)
    given_up = sum(answer.is_given_up for answer in answers)
    served = [answer for answer in answers if not answer.error and not answer.is_given_up]
    good = [
        answer
        for answer in served
        if answer.ttft_s <= slo_ttft_s and (not answer.intervals_s or statistics.fmean(answer.intervals_s) <= slo_tpot_s)
    ]
    return Cell(
        setup=setup,
        prompt_tokens=answers[0].prompt_tokens,
        in_flight=in_flight,
        requests=len(answers),
        failed=len(answers) - len(served) - given_up,
        given_up=given_up,
        differing=sum(
            not (answer.is_given_up or other.is_given_up or answer.error or other.error)
            and (answer.text, answer.token_ids) != (other.text, other.token_ids)
            for answer, other in zip(answers, others, strict=True)
        ),
        preemptions=preemptions,
        ttft_s=Spread.of(answer.ttft_s for answer in served),
        ttft_p50_s=tuple(
            Spread.of(answer.ttft_s for answer in load.answers if not answer.error and not answer.is_given_up).p50
            for load in loads
        ),
        interval_s=Spread.of(interval_s for answer in served for interval_s in answer.intervals_s),
        requests_per_s=len(served) / duration_s,
        goodput_per_s=len(good) / duration_s,
        kvferry_cpu=dict(kvferry_cpu),
        connector_calls=dict(connector_calls),
        errors=tuple(sorted({answer.error for answer in answers if answer.error})[:3]),
    )


class Comparison:
    """Cells of all setups.

    Args:
        arguments: Of the command line.
        serving: Settings of the servers.
    """

    def __init__(self, arguments: argparse.Namespace, serving: Serving) -> None:
        self._arguments = arguments
        self._serving = serving
        self._setups: list[Setup] = []
        self.cells: list[Cell] = []
        self.started_s: dict[str, float] = {}
        self.idle_cpu: dict[str, dict[str, float]] = {}  # by setup, as `Cell.kvferry_cpu`
        self.failures: dict[str, str] = {}
        self.is_finished = False

    def run(self, console: Console) -> None:
        """Start all setups, measure those that are ready, and stop them."""
        with contextlib.ExitStack() as stack:
            kind = SETUP_KINDS[self._arguments.engine]
            setups = [stack.enter_context(kind(name=name, serving=self._serving)) for name in self._arguments.setups]
            for setup in setups:
                setup.start()
            for setup in setups:
                try:
                    setup.wait()
                except ServerFailed as error:
                    self.failures[setup.name] = str(error)
                    console.print(f"{setup.name}: {error}", markup=False)
                else:
                    self.started_s[setup.name] = setup.started_s
                    self._setups.append(setup)
            self.write()
            if self._setups:
                asyncio.run(self._measure())
        self.is_finished = True
        self.write()
        print_table(self.cells, console)

    async def _measure(self) -> None:
        arguments = self._arguments
        for setup in self._setups:  # to compile kernels and open sessions
            for prompt_tokens in arguments.lengths:
                warm_up = prompts_of(prompt_tokens, 0, number=4, seed=arguments.seed)
                await setup.send(warm_up, in_flight=2, output_tokens=8, salt="warm-up")
        before = {setup.name: setup.used() for setup in self._setups}
        await asyncio.sleep(IDLE_S)
        self.idle_cpu = {setup.name: setup.used().since(before[setup.name]).cpu_shares() for setup in self._setups}
        for in_flight in arguments.in_flight:
            for prompt_tokens in arguments.lengths:
                await self._measure_cells(prompt_tokens, in_flight)
                self.write()

    async def _measure_cells(self, prompt_tokens: int, in_flight: int) -> None:
        arguments = self._arguments
        number = max(LEAST_REQUESTS, arguments.rounds * in_flight)
        prompts = prompts_of(prompt_tokens, in_flight, number=number * arguments.turns, seed=arguments.seed)
        loads: dict[str, list[Load]] = {setup.name: [] for setup in self._setups}
        used = {setup.name: Used() for setup in self._setups}
        before = {setup.name: setup.num_preemptions() for setup in self._setups}
        chance = random.Random(f"{arguments.seed} {prompt_tokens} {in_flight} patience")
        for turn in range(arguments.turns):
            hasty = {index for index in range(number) if chance.random() < arguments.give_up}
            patience_s = {index: chance.uniform(0, arguments.patience) for index in sorted(hasty)}
            for setup in reversed(self._setups) if turn % 2 else self._setups:
                begin = setup.used()
                load = await setup.send(
                    prompts[turn * number : (turn + 1) * number],
                    in_flight=in_flight,
                    output_tokens=arguments.output_tokens,
                    salt=f"load {in_flight}",
                    has_token_ids=arguments.token_ids,
                    patience_s=patience_s,
                )
                used[setup.name] += setup.used().since(begin)
                loads[setup.name].append(load)
        first = loads[self._setups[0].name]
        self.cells += [
            cell_of(
                setup.name,
                loads[setup.name],
                first,
                in_flight=in_flight,
                slo_ttft_s=arguments.slo_ttft,
                slo_tpot_s=arguments.slo_tpot,
                preemptions=setup.num_preemptions() - before[setup.name],
                kvferry_cpu=used[setup.name].cpu_shares(),
                connector_calls=used[setup.name].call_shares(),
            )
            for setup in self._setups
        ]

    def write(self) -> None:
        """Write the record so far, if the command line named a file."""
        if self._arguments.json is None:
            return
        content: dict[str, Any] = {
            "environment": Environment.here().to_json(),
            "engine": self._arguments.engine,
            "server_arguments": self._serving.arguments,
            "tp": [self._serving.prefill_tp, self._serving.decode_tp],
            "gpus": [self._serving.prefill_gpus, self._serving.decode_gpus],
            "environment_variables": {
                name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ENGINE_VARIABLES)
            },
            "is_finished": self.is_finished,
            "reference": self._setups[0].name if self._setups else None,
            "output_tokens": self._arguments.output_tokens,
            "token_ids": self._arguments.token_ids,
            "slo_s": [self._arguments.slo_ttft, self._arguments.slo_tpot],
            "started_s": self.started_s,
            "failures": self.failures,
            "idle_kvferry_cpu": self.idle_cpu,
            "cells": [asdict(cell) for cell in self.cells],
            "connector_profiles": {setup.name: found for setup in self._setups if (found := setup.connector_profiles())},
        }
        self._arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def print_table(cells: Sequence[Cell], console: Console) -> None:
    """Print one row per cell, with the time to first token beyond that of `one`."""
    table = Table(title="Time to first token and speed", title_justify="left")
    for name in ("tokens", "in flight", "setup"):
        table.add_column(name, no_wrap=True)
    columns = ("TTFT p50 ms", "beyond one", "TTFT p90", "interval p50 ms", "p99", "requests/s", "good/s", "failed", "given up")
    for name in (*columns, "preempted", "differing", "kvferry's CPU", "connector's calls"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        ones = [
            other
            for other in cells
            if (other.setup, other.in_flight, other.prompt_tokens) == ("one", cell.in_flight, cell.prompt_tokens)
        ]
        beyond = f"{(cell.ttft_s.p50 - ones[0].ttft_s.p50) * 1e3:+.1f}" if ones else ""
        table.add_row(
            str(cell.prompt_tokens),
            str(cell.in_flight),
            cell.setup,
            f"{cell.ttft_s.p50 * 1e3:.1f}",
            beyond,
            f"{cell.ttft_s.p90 * 1e3:.1f}",
            f"{cell.interval_s.p50 * 1e3:.2f}",
            f"{cell.interval_s.p99 * 1e3:.2f}",
            f"{cell.requests_per_s:.2f}",
            f"{cell.goodput_per_s:.2f}",
            str(cell.failed),
            str(cell.given_up),
            str(cell.preemptions),
            f"{cell.differing} of {cell.requests}",
            *(
                ", ".join(f"{server} {share:.1%}" for server, share in found.items())
                for found in (cell.kvferry_cpu, cell.connector_calls)
            ),
        )
    console.print(table)


def add_serving_arguments(parser: argparse.ArgumentParser, *, setups: Sequence[str], lengths: Sequence[int]) -> None:
    """Add the options of `serving_of`, with these defaults for setups and prompt lengths."""
    parser.add_argument("--engine", choices=SETUP_KINDS, default="vllm")
    parser.add_argument("--setups", nargs="+", default=list(setups))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(lengths), help="prompt lengths in tokens")
    parser.add_argument("--model", type=Path, help="folder of a model with at least 768 tokens (default: a thin Llama 3 8B)")
    parser.add_argument("--tp", nargs=2, type=int, default=[1, 1], metavar=("PREFILL", "DECODE"))
    parser.add_argument("--gpus", nargs=2, default=["", ""], metavar=("PREFILL", "DECODE"), help="as in CUDA_VISIBLE_DEVICES")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds for the servers of a setup to start")
    parser.add_argument("--logs", type=Path, help="folder for the logs of the servers (default: a temporary folder)")
    parser.add_argument("server_arguments", nargs="*", help="after --: further arguments of every server of the engine")


def serving_of(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, folder: Path, environment: Mapping[str, str] | None = None
) -> Serving:
    """Check the setups, and return the settings of their servers. `folder` gets the logs and the default model."""
    for setup in arguments.setups:
        if arguments.engine == "vllm":
            try:
                checked_setup(setup)
            except argparse.ArgumentTypeError as error:
                parser.error(f"--setups: {error}")
        elif setup not in SGLANG_SETUPS:
            parser.error(f"--setups has {setup}; with --engine sglang, use {', '.join(SGLANG_SETUPS)}")
    logs = arguments.logs or folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return Serving(
        model=arguments.model or thin_llama_8b(folder / "model"),
        arguments=tuple(arguments.server_arguments),
        prefill_tp=arguments.tp[0],
        decode_tp=arguments.tp[1],
        prefill_gpus=arguments.gpus[0],
        decode_gpus=arguments.gpus[1],
        start_timeout_s=arguments.start_timeout,
        logs=logs,
        environment=environment or {},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare KV connectors in vLLM or SGLang servers")
    add_serving_arguments(parser, setups=("one", "nixl", "kvferry"), lengths=(512, 2000, 8000))
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 8, 32], help="clients that send at the same time")
    parser.add_argument("--rounds", type=int, default=2, help="requests per client in each turn; a turn has at least 8 requests")
    parser.add_argument("--turns", type=int, default=3, help="loads of each length and number of clients, for each setup")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--token-ids", action="store_true", help="compare token ids instead of texts; slows the first token")
    parser.add_argument("--slo-ttft", type=float, default=0.5, help="objective in seconds, for goodput")
    parser.add_argument("--slo-tpot", type=float, default=0.05, help="objective in seconds, for goodput")
    parser.add_argument("--give-up", type=float, default=0.0, metavar="SHARE", help="share of requests whose client closes early")
    parser.add_argument("--patience", type=float, default=1.0, metavar="S", help="it closes at a random time up to S seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there, after each kind of load")
    arguments = parser.parse_args()
    console = Console(width=240)
    with tempfile.TemporaryDirectory(prefix="kvferry-engines-") as folder:
        comparison = Comparison(arguments, serving_of(parser, arguments, Path(folder)))
        comparison.run(console)
    console.print(str(Environment.here()))


if __name__ == "__main__":
    main()
