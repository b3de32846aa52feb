"""Prompts whose stored beginning is being loaded, as the leader sees them: a look into the store, then an order to every rank.

Each prompt that is begun here is told of once, with the tokens that all ranks have, unless it is forgotten before. Whatever the
store does, that takes no longer than the look-up and the loads may: the ranks keep to a deadline of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from prefill_node.prefix_lookup import num_stored_pages
from prefill_node.rank_messages import LoadPrefix, PrefixLoaded
from prefill_node.stored_prefix import StoredPrefix, num_storable_tokens, prefix_chain
from transfer.instance import Instance
from transfer.storage.client import StoreClient
from transfer.storage.hashing import HashingTurns


@dataclass(slots=True, kw_only=True)
class _Load:
    task: asyncio.Task[None] | None = None
    waiting_for: set[int] = field(default_factory=set)  # ranks
    num_tokens: int = 0


class PrefixLoads:
    """Owned by the leader's loop.

    Args:
        client: Of the store.
        own: This instance.
        store_salt: Of the node, see `transfer.storage.keys.chain_seed`.
        timeout_s: Of a look into the store.
        broadcast: Sends a message to every rank.
        on_loaded: Called with a request's id and the tokens of it that every rank has; 0 when there are none.
        on_task_over: Called with each look-up that has ended, to see whether it broke.
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
        """Of those that nobody has been told of yet."""
        return tuple(self._loads)

    def begin(self, request_id: str, token_ids: tuple[int, ...], decode: Instance, *, cache_salt: str) -> bool:
        """Look for a prompt that the ranks have started; False when nothing of it can be stored, and nobody will be told."""
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
            return  # of one that was given up meanwhile
        load.waiting_for.discard(rank)
        load.num_tokens = min(load.num_tokens, message.num_tokens)
        if not load.waiting_for:
            del self._loads[message.request_id]
            self._on_loaded(message.request_id, load.num_tokens)

    def forget(self, request_id: str) -> None:
        """The request was given up; no-op when it is not loading."""
        load = self._loads.pop(request_id, None)
        if load is not None and load.task is not None:
            load.task.cancel()

    async def close(self) -> None:
        """Forget all, and let go of the store."""
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
