"""Requests of a node with a store: a stored prefix is loaded first, and a store that fails costs time, never a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from prefill_node import requests as requests_module
from prefill_node.prefix_loads import PrefixLoads
from prefill_node.rank_messages import LoadPrefix, PrefixLoaded, RunPrefillStep, StartRequest
from prefill_node.requests import OnLoaded, OnTaskOver
from tests.decode.leader_world import turns
from tests.prefill.leader_world import CHUNK, World, new_join
from tests.prefill.stored_pages import prefix_of, store_client
from tests.runtime.hand_clock import HandClock
from tests.runtime.instances import instance, until
from tests.storage.stores import MemoryStore, Seen
from transfer.connector import outgoing as outgoing_module
from transfer.connector.decode_instances import Join
from transfer.connector.messages import CancelOutgoing
from transfer.connector.outgoing import Transfer
from transfer.errors import PeerUnreachable, TransferAborted
from transfer.layer_groups import layer_groups
from transfer.layout import Shard

NUM_TOKENS = 29  # seven whole pages of four
TIMEOUT_S = 60.0  # ends no test's wait: what hangs is ended by a clock that the test moves
OWN = instance(1, tp_size=2)


class Loading(World):
    """A leader with a store, to whose decode instance pages of four tokens belong."""

    def __init__(self, store: MemoryStore, *, store_salt: str = "") -> None:
        self.store = store
        self.store_salt = store_salt
        self.seen = Seen()
        self.client = store_client(store, self.seen, timeout_s=TIMEOUT_S, pause_s=30.0)
        super().__init__(make_loads=self._make_loads)
        self.join = self.paged(new_join())

    def _make_loads(self, broadcast: Callable[[object], None], on_loaded: OnLoaded, on_task_over: OnTaskOver) -> PrefixLoads:
        self.loads = PrefixLoads(
            self.client,
            own=OWN,
            store_salt=self.store_salt,
            timeout_s=TIMEOUT_S,
            broadcast=broadcast,
            on_loaded=on_loaded,
            on_task_over=on_task_over,
        )
        return self.loads

    @staticmethod
    def paged(join: Join) -> Join:
        join.instance = replace(join.instance, shard=Shard(page_size=4))
        return join

    def put(self, num_pages: int, *, num_tokens: int = NUM_TOKENS, request_salt: str = "") -> None:
        """Names suffice: the leader reads no page."""
        decode = self.join.instance
        prefix = prefix_of(range(num_tokens), decode, prefill=OWN, store_salt=self.store_salt, request_salt=request_salt)
        self.store.pages |= dict.fromkeys(prefix.keys(layer_groups(decode.layout), range(num_pages)), b"")

    def orders(self) -> list[LoadPrefix]:
        return [message for message in self.sent if isinstance(message, LoadPrefix)]

    def computed(self) -> list[tuple[int, int]]:
        """Ranges of tokens of every step that was sent."""
        parts = [part for message in self.sent if isinstance(message, RunPrefillStep) for part in message.parts]
        return [(part.first_token, part.first_token + len(part.token_ids)) for part in parts]

    def assert_nothing_is_left(self) -> None:
        super().assert_nothing_is_left()
        assert not self.loads.request_ids


@asynccontextmanager
async def opened(store: MemoryStore | None = None, **settings: Any) -> AsyncIterator[Loading]:
    world = Loading(store or MemoryStore(), **settings)
    try:
        yield world
    finally:
        world.store.gate.set()
        await world.close()


async def test_what_every_rank_has_is_not_computed() -> None:
    async with opened() as world:
        world.put(5)
        world.submit("a", NUM_TOKENS)
        await until(world.orders)
        (order,) = world.orders()
        assert (len(order.hashes), order.decode_incarnation) == (5, 5)
        assert not world.computed(), "nothing before it is known where to begin"
        world.finish_load(1, "a", 20)
        await turns()
        assert not world.computed()
        world.finish_load(0, "a", 12)
        assert world.computed() == [(12, 16), (16, 24)], "from the least that a rank has, up to the grid"
        world.finish_step()
        world.settle()
        assert world.computed()[-1] == (24, NUM_TOKENS)
        world.assert_nothing_is_left()


@pytest.mark.parametrize("loaded", [(0, 20), (20, 0), (0, 0)])
async def test_one_rank_without_it_has_all_compute_everything(loaded: tuple[int, int]) -> None:
    async with opened() as world:
        world.put(5)
        world.submit("a", NUM_TOKENS)
        await until(world.orders)
        for rank, num_tokens in enumerate(loaded):
            world.finish_load(rank, "a", num_tokens)
        assert world.computed()[0] == (0, CHUNK)
        world.settle()
        world.assert_nothing_is_left()


async def test_salts_keep_prompts_apart() -> None:
    async with opened(store_salt="node") as world:
        world.put(5, request_salt="tenant")
        for name, salt in (("a", "tenant"), ("b", "other")):
            world.submit(name, NUM_TOKENS, cache_salt=salt)
            await until(lambda name=name: name in [m.transfer_id for m in world.sent if isinstance(m, StartRequest)])
            await until(lambda: world.orders() or world.steps)
            assert bool(world.orders()) is (name == "a")
            world.settle()
            world.sent.clear()
        world.assert_nothing_is_left()


@pytest.mark.parametrize("what", ["hangs", "raises"])
async def test_a_store_that_fails_costs_its_deadline_and_no_request(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    clock, store = HandClock(monkeypatch, requests_module, outgoing_module), MemoryStore()
    async with opened(store) as world:
        world.put(5)
        if what == "hangs":
            store.gate.clear()
        else:
            store.error = OSError("gone")
        for name in "abc":
            world.submit(name, 8)
        await turns()
        if what == "hangs":
            await asyncio.to_thread(store.entered.acquire)
            await clock.advance(TIMEOUT_S)
        while world.loads.request_ids:
            await asyncio.to_thread(time.sleep, 0.001)  # what the store's threads have done reaches the loop meanwhile
        while world.outcomes != ["sent"] * 3:
            world.settle()  # two steps at a time
            await turns()
        world.assert_nothing_is_left()


@pytest.mark.parametrize("when", ["looked up", "loaded", "loaded in part"])
@pytest.mark.parametrize("end", ["abort", "join", "rank"])
async def test_a_request_that_ends_while_it_is_loaded_is_released_once(when: str, end: str) -> None:
    async with opened() as world:
        world.put(5)
        if when == "looked up":
            world.store.gate.clear()
        request = world.submit("a", NUM_TOKENS)
        await until(lambda: world.store.num_calls if when == "looked up" else world.orders())
        if when == "loaded in part":
            world.finish_load(0, "a", 20)
        end_request(world, request, end)
        await turns()
        assert isinstance(world.sent[-1], CancelOutgoing)
        world.store.gate.set()
        assert world.scheduler.num_running == 1, "a rank may still write its pages"
        for rank in range(2):
            if "a" in world.ranks[rank].loading:
                world.finish_load(rank, "a", 20)
        await turns()
        assert not world.computed()
        world.settle()
        await until(lambda: not world.leader.num_transfers)
        again = world.submit("a", NUM_TOKENS)  # the id is free, and what comes late of the first is not the second's
        await until(lambda: len(world.orders()) == (1 if when == "looked up" else 2))
        world.leader.on_prefix_loaded(0, PrefixLoaded(request_id="b", num_tokens=4))
        world.settle()
        assert again.is_over
        world.assert_nothing_is_left()


def end_request(world: Loading, request: Transfer, how: str) -> None:
    if how == "abort":
        assert world.leader.abort(request.transfer_id, TransferAborted("gone"))
    elif how == "join":
        world.leader.abort_join(world.join, PeerUnreachable("decode is gone"))
    else:
        world.fail_part(1, request.transfer_id)


async def test_the_end_of_the_life_ends_loads_too() -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store) as world:
        request = world.submit("a", NUM_TOKENS)
        await until(lambda: store.num_calls)
        store.gate.set()
        await world.close()
        assert request.is_over and not world.computed()
        assert await world.client.exists(["x"]) == [False], "the store was let go of"
