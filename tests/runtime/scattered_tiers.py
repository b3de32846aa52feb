"""The example's two tiers, with pools that have been in use: their pages come in no order, and nobody may rely on runs."""

from __future__ import annotations

import random
from typing import Any

from examples.one_process import NUM_PAGES, TwoTiers
from transfer.page_allocator import PageAllocator


class ScatteredTiers(TwoTiers):
    """`TwoTiers` whose allocators bind pages in shuffled order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        pages = [*(sender.pages for sender in self.senders), *(receiver.pages for receiver in self.receivers)]
        for seed, each in enumerate(pages):
            scatter_pages(each.allocator, random.Random(seed))


def scatter_pages(allocator: PageAllocator, order: random.Random) -> None:
    """Bind every page once and release all of them in another order, which is the order that they are bound in from then on."""
    owners = [f"page {page}" for page in range(NUM_PAGES)]
    for owner in owners:
        assert allocator.reserve(owner, 1)
        allocator.bind(owner, 1)
    order.shuffle(owners)
    for owner in owners:
        allocator.release(owner)
