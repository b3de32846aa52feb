"""How much of a prompt is in the store, asked by the leader, which has pages neither to fill nor to wait with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

from prefill_node.stored_prefix import StoredPrefix, groups_of, needed_pages
from transfer.layer_groups import GroupKind, LayerGroup
from transfer.storage.client import StoreClient
from transfer.storage.halving import first_false

MAX_KEYS: Final = 1024
"""Of a window, that are asked for at once."""

MAX_STEPS: Final = 32
"""Back from a place whose windows are not stored; then all is computed."""

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

    num_pages = await first_false(has, prefix.num_pages) if full else prefix.num_pages
    if not windows or not num_pages:
        return num_pages
    return await _with_windows(prefix, exists, windows, num_pages)


async def _exists(client: StoreClient, deadline_s: float, keys: list[str]) -> list[bool]:
    left_s = deadline_s - asyncio.get_running_loop().time()
    return await client.exists(keys, timeout_s=left_s) if left_s > 0 else [False] * len(keys)


async def _with_windows(prefix: StoredPrefix, exists: Exists, windows: Sequence[LayerGroup], num_pages: int) -> int:
    """The most of `num_pages` pages with all that every window needs right before their end; 0 after `MAX_STEPS` in vain.

    Asks for what the windows need there. Where a page is missing it steps back before it, and asks for more at a time with each
    step: behind a gap there may be a long way to go.
    """
    known: list[dict[int, bool]] = [{} for _ in windows]
    count = num_pages
    for step in range(MAX_STEPS):
        before = count
        for window, pages in zip(windows, known, strict=True):
            await _ask(prefix, exists, window, count, pages, more=2**step if step else 0)
            count = _step_back(prefix, window, count, pages)
        if count == before:
            return count
    return 0


async def _ask(
    prefix: StoredPrefix, exists: Exists, window: LayerGroup, count: int, known: dict[int, bool], *, more: int
) -> None:
    """Put into `known` which of the pages are there that a window needs behind `count` pages, from the last to the first.

    Args:
        known: What was asked for before is not again. Has all that is needed in the end, or one that is missing.
        more: Ask for so many pages before the end where fewer are needed, up to `MAX_KEYS`.
    """
    at_once = max(1, MAX_KEYS // len(prefix.keys([window], [0])))
    needed = needed_pages(window, count, prefix.page_size)
    first = max(0, min(needed.start, count - min(more, at_once)))
    unknown = [page for page in reversed(range(first, count)) if page not in known]
    for begin in range(0, len(unknown), at_once):
        pages = unknown[begin : begin + at_once]
        keys = [prefix.keys([window], [page]) for page in pages]
        answers = iter(await exists([key for page_keys in keys for key in page_keys]))
        known.update((page, all([next(answers) for _ in page_keys])) for page, page_keys in zip(pages, keys, strict=True))
        if _step_back(prefix, window, count, known) < count:
            return


def _step_back(prefix: StoredPrefix, window: LayerGroup, count: int, known: Mapping[int, bool]) -> int:
    """The most of `count` pages behind which a window needs none that is known to be missing."""
    while missing := [page for page in needed_pages(window, count, prefix.page_size) if not known.get(page, True)]:
        count = missing[0]
    return count
