"""A prefill rank computes what follows the loaded prefix. Sent KV, and KV that attention reads, is the prompt's in any case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from node_runtime.rank_messages import StepDone
from prefill_node.prefix_loader import PrefixLoader
from prefill_node.rank_messages import LoadPrefix, PrefillStepPart, PrefixLoaded, RunPrefillStep
from prefill_node.scheduler import page_needs
from tests.prefill.stored_pages import Prompt, cut, store_client
from tests.prefill.test_prefix_loader import MIXED, PLAIN, shard
from tests.prefill.workers import Sender, decode_peer, new_worker, start_request
from tests.runtime.instances import until
from tests.storage.stores import MemoryStore, Seen
from transfer.chunk import Chunk, ChunkPlan, split_into_chunks
from transfer.connector.messages import CancelOutgoing, PagesReleased
from transfer.engine_types import PrefillItem
from transfer.instance import Instance
from transfer.layer_groups import layer_groups
from transfer.layout import KVLayout, Shard
from transfer.pool.kv_pool import KVPool
from transfer.pool.page_allocator import GroupAllocator
from transfer.send.attach import DecodePeer
from transfer.send.events import SentStats
from transfer.storage.base import Store
from transfer.storage.directory import DirectoryStore
from transfer.worker_thread import WorkerThread

NUM_TOKENS, CHUNK_TOKENS = 45, 8


class Engine:
    """Computes a known prompt: reads the KV that attention needs, and writes the KV that the model would compute."""

    def __init__(self, prompt: Prompt, own: Instance, decode: Instance, pool: KVPool) -> None:
        self.layout, self.shard, self.pool = own.layout, own.shard, pool
        self._prompt, self._own, self._decode = prompt, own, decode

    def prefill(self, items: Sequence[PrefillItem], on_layers_written: Callable[[int, None], None]) -> dict[str, int]:
        for item in items:
            if item.first_token:
                self._prompt.check(self.pool, self._own, self._decode, item.page_tables, item.first_token)
            tokens = torch.arange(item.first_token, item.end_token)
            for layer in range(self.layout.num_layers):
                table = torch.tensor(item.page_tables[self.pool.group_of(layer)])
                slots = table[tokens // self.pool.page_size] * self.pool.page_size + tokens % self.pool.page_size
                assert int(slots.min()) >= 0
                k, v = (self._prompt.values[layer, is_v][tokens] for is_v in (False, True))
                self.pool.write(layer, slots, k, v)
        on_layers_written(self.layout.num_layers, None)
        return {item.request_id: 7 for item in items if item.is_last}


class Rank:
    """A worker with a pool and a store, and a sender that checks the KV of each computed chunk."""

    def __init__(self, prompt: Prompt, own: Shard, decode: Shard, store: Store) -> None:
        layout, loop = prompt.layout, asyncio.get_running_loop()
        self.prompt, self.own, self.decode = prompt, cut(layout, own), cut(layout, decode)
        groups = layer_groups(layout)
        needs = page_needs(groups, own.page_size, chunk_tokens=CHUNK_TOKENS)
        num_pages = needs.peak(NUM_TOKENS).by_group  # not one more than the prompt is counted with
        self.pool = KVPool(layout=layout, shard=own, num_pages=num_pages)
        self.allocator = GroupAllocator(needs, num_pages)
        self.thread = WorkerThread("engine", loop, lambda error: pytest.fail(str(error)))
        self.client = store_client(store, Seen())
        self.said: list[Any] = []
        self.sent: list[int] = []  # chunks, as they were told
        self.crashes: list[BaseException] = []
        loop.set_exception_handler(lambda _, context: self.crashes.append(context["exception"]))
        self.peer: DecodePeer | None = decode_peer(self.decode)
        self.worker = new_worker(
            thread=self.thread,
            send=self.said.append,
            engine=Engine(prompt, self.own, self.decode, self.pool),
            allocator=self.allocator,
            sender=Sender(self._on_chunk),
            peer=lambda: self.peer,
            loader=PrefixLoader(self.client, pool=self.pool, own=self.own, thread=self.thread, timeout_s=10.0, batch_bytes=3000),
            loop=loop,
            crash=self.crashes.append,
        )

    def start(self, *, start_token: int = 0) -> None:
        plan = ChunkPlan(chunk_tokens=CHUNK_TOKENS, layers_per_group=2)
        self.chunks: Sequence[Chunk] = split_into_chunks(
            plan, num_tokens=NUM_TOKENS, num_layers=self.prompt.layout.num_layers, start_token=start_token
        )
        self.worker.on_message(start_request("a", plan, NUM_TOKENS, decode_incarnation=5, start_token=start_token))

    def order_load(self, num_pages: int | None = None) -> None:
        hashes = self.prompt.prefix(self.decode).hashes[:num_pages]
        self.worker.on_message(LoadPrefix(request_id="a", decode_incarnation=5, hashes=hashes))

    async def load(self, num_pages: int | None = None) -> int:
        self.order_load(num_pages)
        await until(lambda: self.loaded())
        (num_tokens,) = self.loaded()
        return num_tokens

    def loaded(self) -> list[int]:
        return [message.num_tokens for message in self.said if isinstance(message, PrefixLoaded)]

    async def compute(self, begin: int) -> None:
        """As the leader has it computed, with two steps ahead."""
        steps = 0
        while begin < NUM_TOKENS:
            end = min(NUM_TOKENS, (begin // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
            steps += 1
            part = PrefillStepPart(
                request_id="a", token_ids=self.prompt.token_ids[begin:end], first_token=begin, is_last=end == NUM_TOKENS
            )
            self.worker.on_message(RunPrefillStep(step=steps, parts=(part,)))
            begin = end
            await until(lambda steps=steps: self.steps_done() >= steps - 1)
        await until(lambda: self.steps_done() == steps)

    def steps_done(self) -> int:
        return sum(isinstance(message, StepDone) for message in self.said)

    def _on_chunk(self, request_id: str, index: int) -> None:
        """Check the KV that a gather of the chunk would send; of windows, only the part that is sent."""
        assert index not in self.sent
        self.sent.append(index)
        chunk, tables = self.chunks[index], self.worker.tables_of(request_id)
        for layer in range(chunk.layers.begin, chunk.layers.end):
            group = self.pool.groups[self.pool.group_of(layer)]
            first = max(chunk.tokens.begin, group.first_travelling_token(NUM_TOKENS))
            tokens = torch.arange(first, max(first, chunk.tokens.end))
            table = torch.tensor(tables[self.pool.group_of(layer)])
            slots = table[tokens // self.pool.page_size] * self.pool.page_size + tokens % self.pool.page_size
            assert not len(slots) or int(slots.min()) >= 0
            found = self.pool.read(layer, slots)
            for is_v in (False, True):
                assert torch.equal(found[is_v], self.prompt.values[layer, is_v][tokens]), (index, layer, is_v)

    def assert_over(self) -> None:
        """Check that all chunks were sent, and that all pages are released."""
        assert sorted(self.sent) == [chunk.index for chunk in self.chunks]
        self.worker.outgoing.on_source_released("a")
        self.assert_released()

    def assert_released(self) -> None:
        assert [type(message) for message in self.said].count(PagesReleased) == 1
        assert isinstance(self.said[-1], PagesReleased)
        self.worker.outgoing.on_sent("a", SentStats())
        assert self.worker.check_idle() and not self.crashes
        self.allocator.check_invariants()


@asynccontextmanager
async def rank_of(layout: KVLayout, own: Shard, decode: Shard, store: Store) -> AsyncIterator[Rank]:
    rank = Rank(Prompt(layout, NUM_TOKENS), own, decode, store)
    try:
        yield rank
    finally:
        if isinstance(store, MemoryStore):
            store.gate.set()
        await rank.client.close()
        assert rank.thread.close(timeout_s=10.0)


CUTS = [(shard(), shard()), (shard(page_size=2), shard(page_size=8)), (shard(page_size=8), shard(tp_size=2, page_size=3))]


@pytest.mark.parametrize(("own", "decode"), CUTS)
@pytest.mark.parametrize("layout", [PLAIN, MIXED], ids=["plain", "windows"])
@pytest.mark.parametrize("start_token", [0, 19])
async def test_what_was_loaded_is_sent_without_being_computed(
    tmp_path: Path, layout: KVLayout, own: Shard, decode: Shard, start_token: int
) -> None:
    store = DirectoryStore(tmp_path)
    async with rank_of(layout, own, decode, store) as rank:
        rank.prompt.store(store, rank.decode)
        rank.start(start_token=start_token)
        loaded = await rank.load()
        assert loaded == 44 // decode.page_size * decode.page_size
        assert not rank.sent, "where computing begins is the leader's to say"
        computing = asyncio.ensure_future(rank.compute(loaded))
        await asyncio.sleep(0)
        done = [chunk.index for chunk in rank.chunks if chunk.tokens.end <= loaded]
        assert rank.sent == done and done
        await computing
        rank.assert_over()


@pytest.mark.parametrize("layout", [PLAIN, MIXED], ids=["plain", "windows"])
async def test_a_rank_that_has_loaded_in_vain_computes_everything(tmp_path: Path, layout: KVLayout) -> None:
    """Another rank lacks a page. Windows have no pages before their reach, and need them after all."""
    store = DirectoryStore(tmp_path)
    async with rank_of(layout, shard(), shard(), store) as rank:
        rank.prompt.store(store, rank.decode)
        rank.start()
        assert await rank.load() == 44
        await rank.compute(0)
        rank.assert_over()


@pytest.mark.parametrize("order", ["load ends first", "gathers end first"])
async def test_pages_of_what_is_given_up_are_kept_until_nothing_is_written_into_them(order: str) -> None:
    store = MemoryStore()
    async with rank_of(PLAIN, shard(), shard(), store) as rank:
        rank.prompt.store(store, rank.decode)
        store.gate.clear()
        rank.start()
        rank.order_load()
        await until(lambda: store.num_calls)
        rank.worker.on_message(CancelOutgoing(transfer_id="a", reason="the client left"))
        if order == "gathers end first":
            rank.worker.outgoing.on_source_released("a")
            assert rank.said == []
        store.gate.set()
        await until(rank.loaded)
        if order == "load ends first":
            assert [type(message) for message in rank.said] == [PrefixLoaded]
            rank.worker.outgoing.on_source_released("a")
        rank.assert_released()
