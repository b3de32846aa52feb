"""`PageAllocator`: reserve + release pairs a second, in pools of 1,000 to 1,000,000 pages.

    python -m bench.pages [--json FILE] [--quick]

A pair is what admission costs a rank per request and group of layers, and must not grow with the pool: a million pages are 16
million tokens, which a rank with a small model can have. A request besides binds its pages, and a window passes some of them on;
that is told, per request of four pages. It takes up to twice as long in a large pool, whose page numbers come round so rarely
that they are never in the processor's cache.
"""

from __future__ import annotations

import time

from bench.timing import Report, Row, argument_parser
from transfer.pool.page_allocator import PageAllocator

POOL_PAGES = (1_000, 10_000, 100_000, 1_000_000)
NUM_PAGES = 4  # of a request
TARGET_PAIRS_PER_S = 500_000
ROUNDS = 7


def pairs(allocator: PageAllocator, num_pairs: int) -> float:
    """Seconds for `num_pairs` of reserve + release."""
    started = time.perf_counter()
    for _ in range(num_pairs):
        allocator.reserve("a request", NUM_PAGES)
        allocator.release("a request")
    return time.perf_counter() - started


def requests(allocator: PageAllocator, num_requests: int) -> float:
    """Seconds for requests that bind all their pages, pass half of them, bind as many others, and leave."""
    started = time.perf_counter()
    for _ in range(num_requests):
        allocator.reserve("a request", NUM_PAGES)
        allocator.bind("a request", NUM_PAGES)
        allocator.pass_before("a request", NUM_PAGES // 2)
        allocator.bind("a request", NUM_PAGES // 2)
        allocator.release("a request")
    return time.perf_counter() - started


def measure(*, is_quick: bool) -> Report:
    """Seconds of a pair and of a request, a sample per round; each row's ratio is to the row with the smallest pool."""
    report = Report(title=f"Pages: reserve + release (at least {TARGET_PAIRS_PER_S:,} pairs a second)")
    count = 2_000 if is_quick else 50_000
    allocators = {num_pages: PageAllocator(num_pages) for num_pages in POOL_PAGES}
    for what, run in (("pair", pairs), ("request with a window", requests)):
        samples_s: dict[int, list[float]] = {num_pages: [] for num_pages in POOL_PAGES}
        for _ in range(ROUNDS):  # pool by pool, so that other work on the machine slows all of them alike
            for num_pages, allocator in allocators.items():
                samples_s[num_pages].append(run(allocator, count) / count)
        smallest: Row | None = None
        for num_pages in POOL_PAGES:
            row = report.add(f"{num_pages:,} pages", what, samples_s[num_pages], against=smallest)
            smallest = smallest or row
    return report


def main() -> None:
    arguments = argument_parser("reserve + release pairs of the pages' allocator").parse_args()
    measure(is_quick=arguments.quick).finish(arguments.json)


if __name__ == "__main__":
    main()
