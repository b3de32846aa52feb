"""How much of a prompt is in the store, asked by the leader, which has pages neither to fill nor to wait with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from prefill_node.stored_prefix import StoredPrefix, groups_of, needed_pages
from transfer.layer_groups import GroupKind, LayerGroup
from transfer.storage.client import StoreClient

Exists = Callable[[list[str]], Awaitable[list[bool]]]


async def num_stored_pages(prefix: StoredPrefix, client: StoreClient, *, deadline_s: float) -> int:
    """The most pages behind which computing could begin, as far as names can tell.

    Pages of full attention are searched by halving: where a page is stored the ones before it nearly always are, and where not,
    the ranks will find out.

    Args:
        deadline_s: On the loop's clock; what has not been answered by then is not there.
    """
    exists = partial(_exists, client, deadline_s)
    full, windows = (groups_of(prefix.decode, kind) for kind in (GroupKind.FULL, GroupKind.WINDOW))

    async def has(page: int) -> bool:
        return all(await exists(prefix.keys(full, [page])))

    num_pages = await _first_false(has, prefix.num_pages) if full else prefix.num_pages
    if not windows or not num_pages:
        return num_pages
    return await _with_windows(prefix, exists, windows, num_pages)


async def _exists(client: StoreClient, deadline_s: float, keys: list[str]) -> list[bool]:
    left_s = deadline_s - asyncio.get_running_loop().time()
    return await client.exists(keys, timeout_s=left_s) if left_s > 0 else [False] * len(keys)


async def _first_false(has: Callable[[int], Awaitable[bool]], count: int) -> int:
    """The least number that `has` is false of, or `count`. First and last go first: most prompts are all new or all old."""
    if not await has(0):
        return 0
    if await has(count - 1):
        return count
    low, high = 0, count - 1  # has(low), and not has(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await has(middle) else (low, middle)
    return high


async def _with_windows(prefix: StoredPrefix, exists: Exists, windows: Sequence[LayerGroup], num_pages: int) -> int:
    """The most of `num_pages` pages with all that every window needs right before their end."""
    present: list[list[bool]] = []
    for window in windows:
        keys = [prefix.keys([window], [page]) for page in range(num_pages)]
        answers = iter(await exists([key for page_keys in keys for key in page_keys]))
        present.append([all([next(answers) for _ in page_keys]) for page_keys in keys])
    for count in range(num_pages, 0, -1):
        if all(
            all(found[page] for page in needed_pages(window, count, prefix.page_size))
            for window, found in zip(windows, present, strict=True)
        ):
            return count
    return 0
