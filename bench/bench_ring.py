"""`StagingAllocator`: assign + release pairs a second, with 10 to 10,000 grants live.

    python -m bench.bench_ring [--json FILE]

The live grants are released in the order in which they were given ("in order") or at random; in order is what a ring without
stuck requests sees. A pair is what a decode rank does per chunk and route, so it must not grow with the number of live grants.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from transfer.ring import ALIGNMENT_BYTES, Grant, StagingAllocator

LIVE_GRANTS = (10, 100, 1_000, 10_000)
GRANT_BYTES = 16 * ALIGNMENT_BYTES
TARGET_PAIRS_PER_S = 200_000
ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RingResult:
    """One row: the best of all rounds, for other load only adds time."""

    num_live_grants: int
    order: str
    pairs_per_s: float


def pairs_in_order(num_live_grants: int, num_pairs: int) -> float:
    """Seconds for `num_pairs` of assign + release of the oldest, while `num_live_grants` are live."""
    ring = StagingAllocator(num_live_grants * GRANT_BYTES)
    live: deque[Grant] = deque(ring.assign(GRANT_BYTES) for _ in range(num_live_grants))
    started = time.perf_counter()
    for _ in range(num_pairs):
        ring.release(live.popleft())
        live.append(ring.assign(GRANT_BYTES))
    return time.perf_counter() - started


def pairs_at_random(num_live_grants: int, num_pairs: int) -> float:
    """The same, releasing a grant at random: the released ranges become many."""
    ring = StagingAllocator(num_live_grants * GRANT_BYTES)
    live = [ring.assign(GRANT_BYTES) for _ in range(num_live_grants)]
    chance = random.Random(1)
    victims = [chance.randrange(num_live_grants) for _ in range(num_pairs)]
    started = time.perf_counter()
    for victim in victims:
        ring.release(live[victim])
        live[victim] = ring.assign(GRANT_BYTES)
    return time.perf_counter() - started


def run(*, num_pairs: int = 50_000) -> list[RingResult]:
    """All rows."""
    results: list[RingResult] = []
    for order, pairs in (("in order", pairs_in_order), ("at random", pairs_at_random)):
        for num_live_grants in LIVE_GRANTS:
            seconds = min(pairs(num_live_grants, num_pairs) for _ in range(ROUNDS))
            results.append(RingResult(num_live_grants=num_live_grants, order=order, pairs_per_s=num_pairs / seconds))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="assign + release pairs of the ring's allocator")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--pairs", type=int, default=50_000, help="pairs per round")
    arguments = parser.parse_args()
    results = run(num_pairs=arguments.pairs)
    print(f"{'live grants':>12}  {'released':<10} {'pairs/s':>10}   (in order: at least {TARGET_PAIRS_PER_S:,})")
    for result in results:
        print(f"{result.num_live_grants:>12,}  {result.order:<10} {result.pairs_per_s:>10,.0f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
