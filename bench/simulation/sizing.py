"""How many nodes of which tier, how much ring and how many staging slots: found by simulating a few of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.simulation.cluster import largest_piece_bytes
from bench.simulation.outcome import Outcome, simulate
from bench.simulation.settings import ClusterSettings
from bench.simulation.stage_times import StageTimes
from kvferry.bench_serve.summary import ATTAINED, Objectives
from kvferry.bench_serve.workload import ArrivalKind, Planned, Shape, plan_requests
from transfer.ring import ALIGNMENT_BYTES

NO_WORSE: Final = 1.02
"""A mean TTFT within this of that with plenty counts as no worse; a p99 differs by more from one order of requests to another."""
_CALMER: Final = 0.9
"""Part of the highest load at which ring and staging are looked for: at the edge itself every change of order tells."""
_SAMPLE: Final = 4000
_WARM_UP: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Of one request, if it were alone: what each tier spends on it.

    Args:
        prefill_s: Of a prefill node's steps.
        decode_s: Of a decode node's steps, shared with a full batch.
    """

    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What is recommended for a number of nodes.

    Args:
        settings: The split, ring and staging that are recommended.
        rate: The highest load, requests a second, of which `ATTAINED` met the objectives.
        outcome: At that load.
        tried: Rates of the other splits, by number of prefill nodes.
        ring_tried, slots_tried: Mean TTFT in seconds by size, at `_CALMER` of that load.
    """

    settings: ClusterSettings
    rate: float
    outcome: Outcome
    tried: dict[int, float]
    ring_tried: dict[int, float]
    slots_tried: dict[int, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": self.settings.to_json(),
            "rate": self.rate,
            "outcome": self.outcome.to_json(),
            "rates_by_prefill_nodes": {str(key): value for key, value in self.tried.items()},
            "ttft_mean_by_ring_bytes": {str(key): value for key, value in self.ring_tried.items()},
            "ttft_mean_by_staging_slots": {str(key): value for key, value in self.slots_tried.items()},
        }


def means_of(times: StageTimes, settings: ClusterSettings, shape: Shape, objectives: Objectives) -> Means:
    """Over requests that are drawn from `shape`; decode with the largest batch whose steps meet the objective."""
    drawn = plan_requests(shape, kind=ArrivalKind.CONSTANT, rate=1.0, number=_SAMPLE, num_warm_up=0, seed=1)
    prefill_s = sum(times.prompt_seconds(one.prompt_tokens, settings.chunk_tokens) for one in drawn) / len(drawn)
    # A request is in the batch for each of its steps, so that long ones are there more often.
    steps = sum(one.output_tokens - 1 for one in drawn)
    context = sum((one.output_tokens - 1) * (one.prompt_tokens + one.output_tokens / 2) for one in drawn) / max(steps, 1)
    held = sum(one.prompt_tokens + one.output_tokens for one in drawn) / len(drawn)
    most = max(1, min(settings.decode_running, int(settings.decode_pool_tokens / held)))
    batch = most
    if objectives.tpot_s is not None:
        batch = next((n for n in range(most, 0, -1) if times.decode_seconds(n, n * context) <= objectives.tpot_s), 1)
    decode_s = times.decode_seconds(batch, batch * context) / batch * steps / len(drawn)
    return Means(prefill_s=prefill_s, decode_s=decode_s)


def load_of(shape: Shape, *, rate: float, number: int, seed: int) -> tuple[Planned, ...]:
    """`number` requests of which the first fifth is the warm-up."""
    warm_up = int(number * _WARM_UP)
    return plan_requests(shape, kind=ArrivalKind.POISSON, rate=rate, number=number - warm_up, num_warm_up=warm_up, seed=seed)


def highest_rate(
    times: StageTimes,
    settings: ClusterSettings,
    shape: Shape,
    objectives: Objectives,
    *,
    number: int,
    seed: int,
    bound: float,
    rounds: int,
) -> tuple[float, Outcome | None]:
    """The highest load of which `ATTAINED` met the objectives, and what came of it; found by halving.

    Args:
        number: Requests of each simulation.
        bound: No load above it is tried; what the steps alone could do.
        rounds: Simulations; the load is found to within ``bound / 2**rounds``.
    """
    low, high = 0.0, bound
    best: Outcome | None = None
    for _ in range(rounds):
        rate = (low + high) / 2
        outcome = simulate(times, settings, load_of(shape, rate=rate, number=number, seed=seed), objectives=objectives)
        if outcome.attainment >= ATTAINED:
            low, best = rate, outcome
        else:
            high = rate
    return low, best


def splits_of(num_nodes: int, means: Means, *, around: int = 1) -> list[int]:
    """Numbers of prefill nodes that are worth a try: what balances the two tiers' work, and some beside it."""
    balanced = num_nodes * means.prefill_s / (means.prefill_s + means.decode_s)
    step = max(1, num_nodes // 32)
    wanted = {round(balanced) + step * offset for offset in range(-around, around + 1)}
    return sorted({min(max(one, 1), num_nodes - 1) for one in wanted})


def size(
    times: StageTimes,
    settings: ClusterSettings,
    shape: Shape,
    objectives: Objectives,
    *,
    num_nodes: int,
    lasts_s: float,
    seed: int,
    least_requests: int = 2000,
    rounds: int = 6,
    around: int = 1,
    say: Callable[[str], None] = print,
) -> Sizing | None:
    """The best split of the nodes, and the least ring and staging with which it is no worse; None: no load meets the objectives.

    Args:
        settings: What is not looked for; its ring and slots are plenty, and are what the split is found with.
        lasts_s: Of each simulation, about; but at least so many requests.
        rounds: See `highest_rate`.
        around: Splits that are tried on either side of the one that balances the tiers' work.
    """
    means = means_of(times, settings, shape, objectives)
    tried: dict[int, float] = {}
    best: tuple[float, ClusterSettings, Outcome] | None = None
    number = least_requests
    for num_prefill in splits_of(num_nodes, means, around=around):
        split = replace(settings, num_prefill=num_prefill, num_decode=num_nodes - num_prefill)
        bound = min(num_prefill / means.prefill_s, split.num_decode / means.decode_s)
        number = max(least_requests, round(bound * lasts_s))
        rate, outcome = highest_rate(times, split, shape, objectives, number=number, seed=seed, bound=bound, rounds=rounds)
        tried[num_prefill] = rate
        say(f"{num_prefill}:{split.num_decode} up to {rate:.2f}/s, of {bound:.2f}/s that the steps alone could do")
        if outcome is not None and (best is None or rate > best[0]):
            best = rate, split, outcome
    if best is None:
        return None
    rate, split, outcome = best
    number = outcome.requests + int(outcome.requests * _WARM_UP / (1 - _WARM_UP))
    calmer = load_of(shape, rate=rate * _CALMER, number=number, seed=seed)
    plenty_s = simulate(times, split, calmer).ttft_s.mean
    slots, slots_tried = _least(
        [count for count in (2, 3, 4, 6, 8, 12, 16) if count <= split.staging_slots],
        lambda count: simulate(times, replace(split, staging_slots=count), calmer).ttft_s.mean,
        plenty_s,
    )
    split = replace(split, staging_slots=slots or split.staging_slots)
    ring, ring_tried = _least(
        _rings(times, split),
        lambda ring_bytes: simulate(times, replace(split, ring_bytes=ring_bytes), calmer).ttft_s.mean,
        plenty_s,
    )
    split = replace(split, ring_bytes=ring or split.ring_bytes)
    final = simulate(times, split, load_of(shape, rate=rate, number=number, seed=seed), objectives=objectives)
    return Sizing(settings=split, rate=rate, outcome=final, tried=tried, ring_tried=ring_tried, slots_tried=slots_tried)


def _rings(times: StageTimes, settings: ClusterSettings) -> list[int]:
    """Powers of two from what holds a piece to what there is."""
    piece = largest_piece_bytes(times, settings)
    sizes = []
    ring = ALIGNMENT_BYTES
    while ring < settings.ring_bytes:
        if ring >= piece:
            sizes.append(ring)
        ring *= 2
    return sizes


def _least(sizes: Sequence[int], mean_s: Callable[[int], float], plenty_s: float) -> tuple[int | None, dict[int, float]]:
    """The first size that is no worse than plenty, and what each that was tried came to."""
    tried: dict[int, float] = {}
    for one in sizes:
        tried[one] = mean_s(one)
        if tried[one] <= plenty_s * NO_WORSE:
            return one, tried
    return None, tried


def ratio_text(settings: ClusterSettings) -> str:
    """Prefill to decode nodes, as a ratio to one of the smaller."""
    prefill, decode = settings.num_prefill, settings.num_decode
    return f"{prefill / decode:.1f}:1" if prefill >= decode else f"1:{decode / prefill:.1f}"
