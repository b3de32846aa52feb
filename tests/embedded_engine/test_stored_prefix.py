"""A prompt whose beginning comes from the store has the tokens that it has when all of it is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from embedded_engine.engine import EmbeddedEngine
from prefill_node.prefix_loader import PrefixLoader
from prefill_node.stored_prefix import StoredPrefix
from tests.embedded_engine.conftest import Generate
from tests.embedded_engine.steps import PageBook, decode_all, make_engine, prefill_all
from tests.prefill.stored_pages import cut, prefix_of
from tests.storage.stores import Seen
from transfer.breaker import BreakerSettings
from transfer.engine_types import PrefillItem
from transfer.instance import Instance
from transfer.layout import Shard, TokenOrder
from transfer.storage.base import Outcome
from transfer.storage.client import StoreClient, StoreClientSettings
from transfer.storage.directory import DirectoryStore
from transfer.storage.keys import store_key
from transfer.storage.pages import page_parts
from transfer.worker_thread import WorkerThread

NUM_TOKENS, NUM_GENERATED = 129, 6
SETTINGS = StoreClientSettings(
    put_timeout_s=30.0,
    get_timeout_s=30.0,
    queue_bytes=1 << 26,
    threads=2,
    breaker=BreakerSettings(failures=3, window_s=60.0, pause_s=1.0, max_pause_s=1.0),
)


def store_prompt(engine: EmbeddedEngine, tokens: tuple[int, ...], instance: Instance, store: DirectoryStore) -> StoredPrefix:
    """Compute a prompt as any engine does, and store its whole pages as they lie in the pool."""
    book = PageBook.of(engine, {"a": len(tokens)}, seed=3)
    prefill_all(engine, {"a": tokens}, book)
    prefix = prefix_of(tokens, instance)
    for group, table in zip(engine.pool.groups, book.at("a", 0), strict=True):
        for page, page_hash in zip(table, prefix.hashes, strict=False):
            parts = page_parts(group, layout=engine.layout, shard=engine.shard)
            bits = [engine.pool.buffer(part.layer, is_v=part.is_v)[page].contiguous().view(torch.uint8) for part in parts]
            content = torch.cat([one.flatten() for one in bits]).numpy().data
            key = store_key(prefix.fingerprint, page_hash, group=group, layout=engine.layout, shard=engine.shard)
            assert store.put([(key, memoryview(content))]) == [Outcome.OK]
    return prefix


async def continue_behind(engine: EmbeddedEngine, prefix: StoredPrefix, tokens: tuple[int, ...], store: Any) -> list[int]:
    """Load the prefix into a pool that is full of numbers that are none, compute the rest, and generate."""
    loop = asyncio.get_running_loop()
    client = StoreClient(store, loop=loop, settings=SETTINGS, observer=Seen())
    thread = WorkerThread("engine", loop, lambda error: pytest.fail(str(error)))
    own = cut(engine.layout, engine.shard)
    loader = PrefixLoader(client, pool=engine.pool, own=own, thread=thread, timeout_s=30.0)
    book = PageBook.of(engine, {"a": len(tokens) + NUM_GENERATED}, seed=4)
    end = prefix.num_pages * prefix.page_size
    assert await loader.load(prefix, book.at("a", end)) == end
    rest = PrefillItem(request_id="a", token_ids=tokens[end:], first_token=end, page_tables=book.at("a", end), is_last=True)
    first = engine.prefill([rest])
    await client.close()
    assert thread.close(timeout_s=10.0)
    return decode_all(engine, first, {"a": len(tokens)}, book, NUM_GENERATED)["a"]


@pytest.mark.parametrize(
    ("own", "decode"),
    [(Shard(page_size=16), Shard(page_size=16)), (Shard(page_size=16), Shard(page_size=6, order=TokenOrder.HND))],
)
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
async def test_the_tokens_are_the_same(
    tmp_path: Path,
    family_dir: Callable[[str], Path],
    generate: Generate,
    prompts: dict[int, tuple[int, ...]],
    family: str,
    own: Shard,
    decode: Shard,
) -> None:
    directory, tokens = family_dir(family), prompts[NUM_TOKENS]
    store, writer = DirectoryStore(tmp_path), make_engine(directory, decode)
    prefix = store_prompt(writer, tokens, cut(writer.layout, decode), store)
    found = await continue_behind(make_engine(directory, own), prefix, tokens, store)
    assert found == generate(directory, tokens, NUM_GENERATED)
