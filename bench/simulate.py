"""How many nodes of which tier a load takes, and how much ring and staging: a cluster as discrete events.

    python -m bench.simulate --nodes 2,8,64                  # sizes each number of nodes: split, ring, staging, highest load
    python -m bench.simulate --prefill 2 --decode 2 --rate 9 # one cluster under one load

Stage times come from a file (--times; those in bench/simulation/*.yaml by name). docs/scaling.md explains its use, and
docs/simulation.md how far it is off.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.simulation.cluster import largest_piece_bytes
from bench.simulation.node_settings import differing
from bench.simulation.outcome import Outcome, simulate, staging_bytes
from bench.simulation.settings import ClusterSettings, Placement
from bench.simulation.sizing import Sizing, load_of, ratio_text, size
from bench.simulation.stage_times import StageTimes
from bench.timing import Environment, readable_bytes
from kvferry.bench_serve.options import shape_of
from kvferry.bench_serve.summary import Objectives, Spread
from kvferry.bench_serve.workload import MAX_RATE, MAX_REQUESTS, MAX_SECONDS, Shape
from transfer.errors import ConfigError

_TIMES = Path(__file__).parent / "simulation"
_FEW, _PLENTY = 2000, 20_000
_MOST_NODES = 4096
_OF_NODES = {
    "chunk-tokens": (2048, 1), "max-step-tokens": (8192, 1), "layer-groups": (2, 1), "staging-slots": (4, 2),
    "ring-mib": (2048, 1), "prefill-running": (64, 1), "decode-running": (256, 1), "prefill-pool-tokens": (421_088, 1),
    "decode-pool-tokens": (433_488, 1),
}  # fmt: skip
"""Flags of the nodes' settings: default and least. Defaults are those of a node of Llama 3.1 8B on a GPU of 80 GiB."""
_LOOKED_FROM = {"staging-slots": 16, "ring-mib": 8192}
"""Defaults with --nodes, which looks for the least that is no worse."""


def stage_times(name: str) -> StageTimes:
    """Of a file, or of one of this folder's by its name. Raises ValueError."""
    known = sorted(file.stem for file in _TIMES.glob("*.yaml"))
    file = _TIMES / f"{name}.yaml" if name in known else Path(name)
    if not os.path.isfile(file):  # Path.is_file raises OSError for a name that is too long
        raise ValueError(f"--times is {name}; it is no file, and none of {', '.join(known)}")
    return StageTimes.read(file)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="a two-tier cluster as discrete events", allow_abbrev=False)
    add = made.add_argument
    add("--times", default="h100-llama-3-8b", metavar="FILE", help="stage times: YAML, a record of bench.scaling, or a name")
    add("--nodes", metavar="N[,N...]", help="size so many nodes")
    add("--prefill", type=int, default=1, help="prefill nodes, with --rate")
    add("--decode", type=int, default=1, help="decode nodes, with --rate")
    add("--rate", type=float, help="requests a second: one cluster under one load")
    add("--requests", type=int, help="of the one load, a fifth of them warm-up; default 20,000")
    add("--lasts-s", type=float, default=60.0, help="of each simulation for --nodes; of few nodes until there are 2,000 requests")
    add("--rounds", type=int, default=6, help="simulations of each split, to halve where its highest load is")
    add("--around", type=int, default=1, help="splits to try on either side of the one that balances the tiers' work")
    add("--prompt-tokens", default="lognormal:1024:1.0:16384", metavar="LENGTHS", help="as kvferry bench serve")
    add("--output-tokens", default="lognormal:192:0.7:2048", metavar="LENGTHS", help="as kvferry bench serve")
    add("--slo-ttft", type=float, default=1.0, help="seconds")
    add("--slo-tpot", type=float, default=0.025, help="seconds")
    add("--seed", type=int, default=0)
    add("--link-gb-per-s", type=float, help="10**9 bytes a second of a node's port, instead of that of the stage times")
    for name, (default, _) in _OF_NODES.items():
        with_nodes = f"; with --nodes {_LOOKED_FROM[name]}, or the least that is no worse" if name in _LOOKED_FROM else ""
        add(f"--{name}", type=int, help=f"as the nodes' setting; default {default}{with_nodes}")
    add("--group-size", type=int, help="prefill nodes that a decode node joins; default: all; with --placement told or alike")
    add("--placement", choices=[str(one) for one in Placement], default="order", help="told is what nodes do, and slower")
    add("--json", type=Path, metavar="FILE", help="write settings, stage times and outcome there")
    return made


def with_defaults(given: argparse.Namespace) -> argparse.Namespace:
    """Return what was given, with the defaults of the nodes' settings that were not."""
    for name, (default, _) in _OF_NODES.items():
        if getattr(given, attribute := name.replace("-", "_")) is None:
            setattr(given, attribute, default if given.nodes is None else _LOOKED_FROM.get(name, default))
    return given


def check(given: argparse.Namespace) -> None:
    """Raises ValueError for a number that cannot be."""
    for name, number, least, most in (
        ("--prefill", given.prefill, 1, _MOST_NODES), ("--decode", given.decode, 1, _MOST_NODES),
        ("--requests", given.requests, 1, MAX_REQUESTS), ("--seed", given.seed, 0, (1 << 63) - 1),
        ("--rounds", given.rounds, 1, 64), ("--around", given.around, 0, _MOST_NODES),
    ):  # fmt: skip
        if number is not None and not least <= number <= most:
            raise ValueError(f"{name} is {number}; it must be in [{least}, {most}]")
    for name, (_, least) in _OF_NODES.items():
        if (number := getattr(given, name.replace("-", "_"))) < least:
            raise ValueError(f"--{name} is {number}; it must be at least {least}")
    for name, value, largest, unit in (
        ("--rate", given.rate, MAX_RATE, "requests a second"), ("--lasts-s", given.lasts_s, MAX_SECONDS, "seconds"),
        ("--slo-ttft", given.slo_ttft, MAX_SECONDS, "seconds"), ("--slo-tpot", given.slo_tpot, MAX_SECONDS, "seconds"),
        ("--link-gb-per-s", given.link_gb_per_s, 1_000_000, "GB a second"),
    ):  # fmt: skip
        if value is not None and not 0 < value <= largest:
            raise ValueError(f"{name} is {value:g}; it must be above 0 and at most {largest} {unit}")


def _check_json(file: Path) -> None:
    """Raises ValueError: It cannot be written."""
    try:
        with open(file, "ab"):
            pass
    except OSError as error:
        raise ValueError(f"--json is {file}; it cannot be written: {error.strerror}") from None


def settings_of(arguments: argparse.Namespace) -> ClusterSettings:
    """Raises ValueError for a setting that cannot be."""
    return ClusterSettings(
        num_prefill=arguments.prefill,
        num_decode=arguments.decode,
        prefill_pool_tokens=arguments.prefill_pool_tokens,
        decode_pool_tokens=arguments.decode_pool_tokens,
        ring_bytes=arguments.ring_mib << 20,
        staging_slots=arguments.staging_slots,
        chunk_tokens=arguments.chunk_tokens,
        max_step_tokens=arguments.max_step_tokens,
        layer_groups=arguments.layer_groups,
        prefill_running=arguments.prefill_running,
        decode_running=arguments.decode_running,
        placement=Placement(arguments.placement),
        group_size=arguments.group_size,
    )


def _shown(name: str, value: float) -> str:
    return readable_bytes(round(value)) if "bytes" in name else f"{value:,.1f}".removesuffix(".0")


def _milliseconds(spread: Spread) -> str:
    return " / ".join(f"{value * 1e3:,.1f}" for value in (spread.p50, spread.p90, spread.p99))


def _of_survivors(outcome: Outcome) -> str:
    return f"[red]{1 - outcome.served / outcome.requests:.1%} failed: these times are of the requests that were served[/]"


def print_outcome(console: Console, outcome: Outcome, settings: ClusterSettings, times: StageTimes) -> None:
    """One cluster under one load."""
    table = Table(show_header=False, box=None)
    rows: list[tuple[str, str]] = [
        ("cluster", f"{settings.num_prefill} prefill, {settings.num_decode} decode nodes; {times.name}"),
        (
            "offered, goodput",
            f"{outcome.offered_rate:,.2f}, {outcome.goodput:,.2f} requests a second; {outcome.attainment:.1%} good",
        ),
        (
            "served",
            f"{outcome.served:,} of {outcome.requests:,}" + "".join(f", {n:,} {why}" for why, n in outcome.failures.items()),
        ),
        ("TTFT p50 / p90 / p99", f"{_milliseconds(outcome.ttft_s)} ms"),
        ("TPOT p50 / p90 / p99", f"{_milliseconds(outcome.tpot_s)} ms"),
        ("transfer after computing", f"{_milliseconds(outcome.exposed_s)} ms; {outcome.exposed_share.mean:.1%} of TTFT"),
        ("credit wait of a piece", f"{outcome.credit_wait_s * 1e3:,.2f} ms"),
        ("busy", ", ".join(f"{name} {share:.0%}" for name, share in outcome.busy.items())),
        ("bottleneck", outcome.bottleneck),
        ("batch of a decode step", f"{outcome.batch:.1f}"),
        ("busiest prefill node", f"{outcome.imbalance:.2f} of the mean's prompt tokens"),
    ]
    if outcome.is_of_survivors:
        rows.insert(3, ("", _of_survivors(outcome)))
    for name, use in outcome.uses.items():
        most, mean, capacity = (_shown(name, value) for value in (use.most, use.mean, use.capacity))
        rows.append((name, f"most {most}, mean {mean}, of {capacity}"))
    rows.append(("simulated", f"{outcome.simulated_s:,.1f} s in {outcome.took_s:.1f} s, {outcome.num_events:,} events"))
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)


def print_sizings(console: Console, found: Sequence[tuple[int, Sizing | None]], times: StageTimes) -> None:
    """A row for each number of nodes."""
    table = Table(title=f"{times.name}: ring of a decode rank, staging of a prefill rank", title_justify="left", box=None)
    for heading in (
        "nodes", "prefill:decode", "ratio", "requests/s", "a node", "TTFT p50 / p90 / p99 ms", "TPOT p50 / p90 / p99 ms",
        "ring", "slots", "staging", "decode pool, most", "busiest",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for num_nodes, sizing in found:
        if sizing is None:
            table.add_row(f"{num_nodes:,}", "no load meets the objectives")
            continue
        settings, outcome = sizing.settings, sizing.outcome
        busiest = outcome.bottleneck
        table.add_row(
            f"{num_nodes:,}",
            f"{settings.num_prefill}:{settings.num_decode}",
            ratio_text(settings),
            f"{sizing.rate:,.1f}",
            f"{sizing.rate / num_nodes:.2f}",
            _milliseconds(outcome.ttft_s),
            _milliseconds(outcome.tpot_s),
            readable_bytes(settings.ring_bytes),
            f"{settings.staging_slots}",
            readable_bytes(staging_bytes(times, settings)),
            f"{outcome.uses['decode pool tokens'].most:,} tokens",
            f"{busiest} {outcome.busy[busiest]:.0%}",
        )
    console.print(table)
    for num_nodes, sizing in found:
        if sizing is not None and sizing.outcome.is_of_survivors:
            console.print(f"{num_nodes:,} nodes: {_of_survivors(sizing.outcome)}")


def print_differing(console: Console, settings: ClusterSettings, *, but: Sequence[str] = ()) -> None:
    """What nodes have to be told so that they are as those that were simulated; `but`: names that are shown elsewhere."""
    found = [one for one in differing(settings) if one.name not in but]
    if found:
        console.print("simulated with settings that nodes do not have by themselves (docs/configuration.md); give them these:")
    for one in found:
        console.print(f"  {one.role}: {one.name}: {one.simulated}  (default {one.default})", highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser()
    given = with_defaults(made.parse_args(arguments))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 240)
    try:
        check(given)
        times = stage_times(given.times)
        if given.link_gb_per_s is not None:
            times = replace(times, link_bytes_per_s=given.link_gb_per_s * 1e9)
        settings = settings_of(given)
        shape = shape_of(given.prompt_tokens, given.output_tokens)
        objectives = Objectives(ttft_s=given.slo_ttft, tpot_s=given.slo_tpot)
        if (given.nodes is None) == (given.rate is None):
            raise ValueError("give either --nodes, to size so many, or --rate, for one load on --prefill and --decode nodes")
        if given.json is not None:
            _check_json(given.json)
        content = _one(console, given, times, settings, shape, objectives)
    except (ValueError, ConfigError) as error:
        made.error(str(error))
    if given.json is not None:
        environment = Environment.here().to_json()
        whole: dict[str, Any] = {
            "environment": environment,
            "stage_times": times.to_json(),
            "shape": _shape_json(shape),
            **content,
        }
        given.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


def _one(
    console: Console,
    given: argparse.Namespace,
    times: StageTimes,
    settings: ClusterSettings,
    shape: Shape,
    objectives: Objectives,
) -> dict[str, Any]:
    if given.rate is not None:
        number = _PLENTY if given.requests is None else given.requests
        load = load_of(shape, rate=given.rate, number=number, seed=given.seed)
        outcome = simulate(times, settings, load, objectives=objectives)
        print_outcome(console, outcome, settings, times)
        print_differing(console, settings)
        return {"settings": settings.to_json(), "outcome": outcome.to_json()}
    found: list[tuple[int, Sizing | None]] = []
    for num_nodes in _counts(given.nodes):
        print(f"{num_nodes} nodes", file=sys.stderr, flush=True)
        sizing = size(
            times,
            settings,
            shape,
            objectives,
            num_nodes=num_nodes,
            lasts_s=given.lasts_s,
            seed=given.seed,
            rounds=given.rounds,
            around=given.around,
            least_requests=_FEW,
            say=lambda line: print(f"  {line}", file=sys.stderr, flush=True),
        )
        found.append((num_nodes, sizing))
    print_sizings(console, found, times)
    console.print(
        f"placement {settings.placement}; pieces of {readable_bytes(largest_piece_bytes(times, settings))}; TTFT within "
        f"{objectives.ttft_s} s and TPOT within {objectives.tpot_s} s for 90 % of requests; prompts {shape.prompt.text}, "
        f"new tokens {shape.output.text}"
    )
    print_differing(console, settings, but=("ring.capacity_bytes", "staging.num_slots"))
    return {"sizings": {str(nodes): None if one is None else one.to_json() for nodes, one in found}}


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--nodes is {text!r}; give numbers with commas between them, as 2,8,64") from None
    if min(counts) < 2 or max(counts) > _MOST_NODES:
        raise ValueError(f"--nodes is {text!r}; each must be from 2 to {_MOST_NODES}")
    return counts


def _shape_json(shape: Shape) -> dict[str, str]:
    return {"prompt_tokens": shape.prompt.text, "output_tokens": shape.output.text}


if __name__ == "__main__":
    sys.exit(main())
