"""A prompt's KV as decode ranks store it, and as a prefill rank must have it, whatever the two cuts are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prefill_node.stored_prefix import StoredPrefix, num_storable_tokens, prefix_chain
from tests.storage.stores import Seen
from transfer.breaker import BreakerSettings
from transfer.instance import Instance
from transfer.layer_groups import layer_groups
from transfer.layout import DType, KVLayout, Shard
from transfer.messages import PROTOCOL_VERSIONS
from transfer.pool.kv_pool import KVPool, convert
from transfer.storage.base import Outcome, Store
from transfer.storage.client import StoreClient, StoreClientSettings
from transfer.storage.keys import store_key
from transfer.storage.pages import page_parts


def store_client(store: Store, observer: Seen, *, timeout_s: float = 10.0, pause_s: float = 1.0) -> StoreClient:
    """A client that keeps on asking, whatever the store does. Owned by the running loop, whose clock it uses.

    Args:
        timeout_s: Of `get`.
        pause_s: See `BreakerSettings`.
    """
    loop = asyncio.get_running_loop()
    breaker = BreakerSettings(failures=100, window_s=60.0, pause_s=pause_s, max_pause_s=pause_s)
    settings = StoreClientSettings(put_timeout_s=10.0, get_timeout_s=timeout_s, queue_bytes=1 << 24, threads=2, breaker=breaker)
    return StoreClient(store, loop=loop, settings=settings, observer=observer, clock=loop.time)


def cut(layout: KVLayout, shard: Shard, **fields: Any) -> Instance:
    return Instance(
        incarnation=5,
        layout=layout,
        shard=shard,
        model_fields={"weights": "some"},
        transport="inproc",
        digests=("xxh3-64",),
        protocol_versions=PROTOCOL_VERSIONS,
        **fields,
    )


def prefix_of(
    token_ids: Sequence[int], decode: Instance, *, prefill: Instance | None = None, store_salt: str = "", request_salt: str = ""
) -> StoredPrefix:
    """Return the pages of a prompt that can be stored.

    Args:
        prefill: None means an instance like the decode instance.
    """
    chain = prefix_chain(prefill or decode, decode, store_salt=store_salt, request_salt=request_salt)
    chain.extend(token_ids[: num_storable_tokens(len(token_ids), decode)])
    return StoredPrefix(decode=decode, hashes=tuple(chain.hashes))


class Prompt:
    """The KV that the model computes of a prompt: ``values[layer, is_v]`` is [tokens, all heads, dim]."""

    def __init__(self, layout: KVLayout, num_tokens: int, *, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layout = layout
        self.token_ids = tuple(torch.randint(0, 1000, (num_tokens,), generator=generator).tolist())
        self.values: dict[tuple[int, bool], Tensor] = {
            (layer, is_v): torch.randn(
                (num_tokens, spec.num_kv_heads, spec.v_head_dim if is_v else spec.k_head_dim), generator=generator
            )
            for layer, spec in enumerate(layout.layers)
            for is_v in (False, True)
        }

    def prefix(self, decode: Instance, **salts: str) -> StoredPrefix:
        return prefix_of(self.token_ids, decode, **salts)

    def stored(self, instance: Instance, layer: int, is_v: bool) -> Tensor:
        """Return the KV of a layer as a pool of that instance holds it, all heads."""
        if instance.pool_dtype is DType.INT8:  # of an engine that quantises by itself
            return (self.values[layer, is_v] * 20).to(torch.int8)
        scale = instance.scales_of(layer)[is_v]
        return convert(self.values[layer, is_v], instance.pool_dtype, scale=scale)

    def store(self, store: Store, decode: Instance, *, leave_out: Sequence[str] = (), **salts: str) -> StoredPrefix:
        """Put all its whole pages there, as every rank of the instance does; keys in `leave_out` are not put."""
        prefix = self.prefix(decode, **salts)
        for rank in range(decode.shard.num_ranks):
            shard = decode.shard.at(rank)
            for group in layer_groups(self.layout):
                for page, page_hash in enumerate(prefix.hashes):
                    key = store_key(prefix.fingerprint, page_hash, group=group, layout=self.layout, shard=shard)
                    content = self._page(decode, shard, group_index=layer_groups(self.layout).index(group), page=page)
                    if content and key not in leave_out:
                        assert store.put([(key, memoryview(content))]) == [Outcome.OK]
        return prefix

    def _page(self, decode: Instance, shard: Shard, *, group_index: int, page: int) -> bytes:
        """Build a page with a real pool, so that the pool defines its layout."""
        group = layer_groups(self.layout)[group_index]
        parts = page_parts(group, layout=self.layout, shard=shard)
        if not parts:
            return b""
        pool = KVPool(layout=self.layout, shard=shard, num_pages=[1] * len(layer_groups(self.layout)))
        tokens = slice(page * shard.page_size, (page + 1) * shard.page_size)
        content = b""
        for layer in dict.fromkeys(part.layer for part in parts):
            heads = shard.heads(self.layout.layers[layer].num_kv_heads)
            k, v = (self.stored(decode, layer, is_v)[tokens, heads.begin : heads.end] for is_v in (False, True))
            pool.write(layer, torch.arange(shard.page_size), k, v)
        for part in parts:
            buffer = pool.buffer(part.layer, is_v=part.is_v)[0]
            assert tuple(buffer.shape) == part.shape
            content += buffer.contiguous().view(torch.uint8).numpy().tobytes()
        return content

    def check(self, pool: KVPool, own: Instance, decode: Instance, tables: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Check that the pool has the KV of the first `num_tokens` tokens that later tokens need."""
        for layer in range(own.shard.layers(self.layout).begin, own.shard.layers(self.layout).end):
            group = pool.groups[pool.group_of(layer)]
            tokens = torch.arange(group.first_needed_token(num_tokens), num_tokens)
            table = torch.tensor(tables[pool.group_of(layer)])
            slots = table[tokens // pool.page_size] * pool.page_size + tokens % pool.page_size
            assert int(slots.min()) >= 0
            heads = own.shard.heads(self.layout.layers[layer].num_kv_heads)
            for is_v, found in zip((False, True), pool.read(layer, slots.to(pool.device)), strict=True):
                stored = self.stored(decode, layer, is_v)[tokens, heads.begin : heads.end]
                scale = (decode if decode.kv_scales else own).scales_of(layer)[is_v]
                expected = convert(stored, own.pool_dtype, scale=scale)
                assert torch.equal(found.cpu().view(torch.uint8), expected.contiguous().view(torch.uint8)), (layer, is_v)


def at_rank(instance: Instance, rank: int) -> Instance:
    return replace(instance, shard=instance.shard.at(rank))
