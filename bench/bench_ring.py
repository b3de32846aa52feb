"""`StagingAllocator`: assign + release pairs a second, with 10 to 10,000 grants live.

    python -m bench.bench_ring [--json FILE] [--quick]

The live grants are released in the order in which they were given ("in order") or at random; in order is what a ring without
stuck requests sees. A pair is what a decode rank does per chunk and route, so it must not grow with the number of live grants.
"""

from __future__ import annotations

import random
import time
from collections import deque

from bench.timing import Report, Row, argument_parser
from transfer.ring import ALIGNMENT_BYTES, Grant, StagingAllocator

LIVE_GRANTS = (10, 100, 1_000, 10_000)
GRANT_BYTES = 16 * ALIGNMENT_BYTES
TARGET_PAIRS_PER_S = 200_000
ROUNDS = 7


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


def measure(*, is_quick: bool) -> Report:
    """Seconds of a pair, a sample per round; each row's ratio is to the row with the fewest live grants."""
    report = Report(title=f"Ring: assign + release (in order: at least {TARGET_PAIRS_PER_S:,} pairs a second)")
    num_pairs = 2_000 if is_quick else 50_000
    for what, pairs in (("pair, released in order", pairs_in_order), ("pair, released at random", pairs_at_random)):
        fewest: Row | None = None
        for num_live_grants in LIVE_GRANTS:
            samples_s = [pairs(num_live_grants, num_pairs) / num_pairs for _ in range(ROUNDS)]
            row = report.add(f"{num_live_grants:,} live grants", what, samples_s, against=fewest)
            fewest = fewest or row
    return report


def main() -> None:
    arguments = argument_parser("assign + release pairs of the ring's allocator").parse_args()
    measure(is_quick=arguments.quick).finish(arguments.json)


if __name__ == "__main__":
    main()
