"""Load the stored beginnings of prompts, as the leader sees it: look a prompt up in the store, then have every rank load it.

The leader has no pages to fill, so it only asks which keys exist. Each prompt that `begin` accepts is reported once with the
tokens that all ranks have, unless it is forgotten before. The look-up has a deadline here, and the loads have one in the ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from prefill_node.rank_messages import LoadPrefix, PrefixLoaded
from prefill_node.stored_prefix import StoredPrefix, groups_of, needed_pages, num_storable_tokens, prefix_chain
from transfer.instance import Instance
from transfer.layer_groups import GroupKind, LayerGroup
from transfer.storage.client import StoreClient
from transfer.storage.halving import first_false
from transfer.storage.hashing import HashingTurns

MAX_KEYS: Final = 1024
"""Maximum keys of a window in one question."""

MAX_STEPS: Final = 32
"""Maximum number of steps back from a place whose window is not stored. After that the whole prompt is computed."""

Exists = Callable[[list[str]], Awaitable[list[bool]]]


@dataclass(slots=True, kw_only=True)
class _Load:
    task: asyncio.Task[None] | None = None
    waiting_for: set[int] = field(default_factory=set)  # ranks
    num_tokens: int = 0


class PrefixLoads:
    """Owned by the leader's loop.

    Args:
        client: Client of the store.
        own: This instance.
        store_salt: See `transfer.storage.keys.chain_seed`.
        timeout_s: Longest time of a look-up.
        broadcast: Sends a message to every rank.
        on_loaded: Called with a request's id and the number of its first tokens that every rank has.
        on_task_over: Called with the task of each look-up that has ended, which may have failed.
    """

    def __init__(
        self,
        client: StoreClient,
        *,
        own: Instance,
        store_salt: str,
        timeout_s: float,
        broadcast: Callable[[object], None],
        on_loaded: Callable[[str, int], None],
        on_task_over: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._client = client
        self._own = own
        self._store_salt = store_salt
        self._timeout_s = timeout_s
        self._broadcast = broadcast
        self._on_loaded = on_loaded
        self._on_task_over = on_task_over
        self._turns = HashingTurns()
        self._loads: dict[str, _Load] = {}

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that are not reported yet."""
        return tuple(self._loads)

    def begin(self, request_id: str, token_ids: tuple[int, ...], decode: Instance, *, cache_salt: str) -> bool:
        """Look up a prompt that the ranks have started. Return False if it cannot be stored; it is then never reported."""
        if not num_storable_tokens(len(token_ids), decode):
            return False
        load = self._loads[request_id] = _Load()
        work = self._look_up(request_id, load, token_ids, decode, cache_salt)
        load.task = asyncio.get_running_loop().create_task(work)
        load.task.add_done_callback(self._on_task_over)
        return True

    def on_prefix_loaded(self, rank: int, message: PrefixLoaded) -> None:
        load = self._loads.get(message.request_id)
        if load is None or rank not in load.waiting_for:
            return  # the request was given up meanwhile
        load.waiting_for.discard(rank)
        load.num_tokens = min(load.num_tokens, message.num_tokens)
        if not load.waiting_for:
            del self._loads[message.request_id]
            self._on_loaded(message.request_id, load.num_tokens)

    def forget(self, request_id: str) -> None:
        """Cancel the load of a request that was given up, if there is one."""
        load = self._loads.pop(request_id, None)
        if load is not None and load.task is not None:
            load.task.cancel()

    async def close(self) -> None:
        """Forget all requests and close the client."""
        tasks = [load.task for load in self._loads.values() if load.task is not None]
        for request_id in self.request_ids:
            self.forget(request_id)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _look_up(self, request_id: str, load: _Load, token_ids: tuple[int, ...], decode: Instance, cache_salt: str) -> None:
        chain = prefix_chain(self._own, decode, store_salt=self._store_salt, request_salt=cache_salt)
        await self._turns.extend(chain, token_ids[: num_storable_tokens(len(token_ids), decode)])
        prefix = StoredPrefix(decode=decode, hashes=tuple(chain.hashes))
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        num_pages = await num_stored_pages(prefix, self._client, deadline_s=deadline_s)
        if not num_pages:
            del self._loads[request_id]
            self._on_loaded(request_id, 0)
            return
        load.waiting_for = set(range(self._own.shard.num_ranks))
        load.num_tokens = num_pages * prefix.page_size
        incarnation = prefix.decode.incarnation
        self._broadcast(LoadPrefix(request_id=request_id, decode_incarnation=incarnation, hashes=prefix.hashes[:num_pages]))


async def num_stored_pages(prefix: StoredPrefix, client: StoreClient, *, deadline_s: float) -> int:
    """Return the largest number of first pages after which computing could begin, judged by the keys that exist.

    Pages of full attention are searched by halving: if a page is stored, the pages before it nearly always are. If they are not,
    the ranks will notice.

    Args:
        deadline_s: On the loop's clock. Keys without an answer by then count as missing.
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
    """Return the largest count of at most `num_pages` pages that has all pages that windows need at its end; 0 after `MAX_STEPS`.

    If a needed page is missing, the count steps back to it. Each step asks for more pages at once, because a gap may be long.
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
    """Query which pages exist that a window needs after `count` pages, from the last to the first, until one is missing.

    Args:
        known: Pages that were asked for before; the answers are added.
        more: Ask for at least so many pages before the end, up to `MAX_KEYS`.
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
    """Return the largest count of at most `count` pages after which a window needs no page that is known to be missing."""
    while missing := [page for page in needed_pages(window, count, prefix.page_size) if not known.get(page, True)]:
        count = missing[0]
    return count
