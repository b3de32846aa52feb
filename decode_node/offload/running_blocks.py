"""Keep blocks of a running request's pages in the store, and read them during steps. One per rank.

A block is a run of the request's leading pages in the layers that keep every token. Each layer of a block is one object, because
attention needs one layer at a time. The objects belong to their request alone, and are deleted when it ends.

Each step reads every object once. A few buffers in host memory are filled ahead of their use, while the engine attends to
earlier blocks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import torch
from torch import Tensor

from transfer.engine_types import DeviceEvent, StoredRead
from transfer.instance import Instance
from transfer.layer_groups import GroupKind, LayerGroup
from transfer.layout import KVLayout, Shard
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool
from transfer.storage.client import StoreClient
from transfer.storage.keys import running_key, store_fingerprint
from transfer.storage.pages import page_parts

ATTEMPTS: Final = 3
"""Attempts to put or read an object before its request fails."""

PAUSE_S: Final = 1.0
"""Pause before the next attempt, in which an open circuit breaker of the store may allow another call."""

LAYERS_AT_ONCE: Final = 4
"""Layers of a block that are copied and put at a time."""

DELETED_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A block in the store, or on its way there.

    Args:
        name: See `running_key`.
    """

    request_id: str
    name: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A read of the running step.

    Args:
        done: Whether the buffer is filled. None if the read is left out, because the request has lost another block.
    """

    request_id: str
    buffer: int
    done: Future[bool] | None


class RunningBlocks:
    """See the module's docstring. Implements `StoredKV`; its other methods belong to the rank's loop.

    Args:
        host, client: The blocks' pages come from this pool, and go to this store.
        loop: The rank's loop, which owns `client`.
        instance: The rank's instance.
        pool: The rank's pool.
        pages_per_block: Pages of a block.
        num_buffers: Buffers that are filled ahead.
        pause_s: See `PAUSE_S`.
    """

    def __init__(
        self,
        host: HostPool,
        client: StoreClient,
        *,
        loop: asyncio.AbstractEventLoop,
        instance: Instance,
        pool: KVPool,
        pages_per_block: int,
        num_buffers: int,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._loop = loop
        self._client = client
        self._incarnation = instance.incarnation
        self._pages_per_block = pages_per_block
        self._pause_s = pause_s
        self._fingerprint = store_fingerprint(instance)
        self._layout, self._shard = pool.layout, pool.shard
        (group,) = [index for index, one in enumerate(pool.groups) if one.kind is GroupKind.FULL]
        self._group = pool.groups[group]
        self._pages = host.pages(group)
        self._slices = _layer_slices(self._group, pool.layout, pool.shard)
        largest = pages_per_block * max((end - begin for begin, end in self._slices.values()), default=1)
        self._buffers = tuple(
            torch.empty(largest, dtype=torch.uint8, pin_memory=pool.device.type == "cuda") for _ in range(num_buffers)
        )
        self._blocks: dict[int, _Block] = {}
        self._numbers = itertools.count()
        # The engine's thread owns these, except that `take_lost` empties the last one between steps.
        self._free: deque[tuple[int, DeviceEvent | None]] = deque((index, None) for index in range(num_buffers))
        self._reads: deque[StoredRead] = deque()
        self._reading: deque[_Reading] = deque()
        self._lost: dict[str, str] = {}

    # On the rank's loop

    async def put(self, request_id: str, index: int, host_pages: Sequence[int]) -> int | None:
        """Put a block of a request into the store. Return its number, or None if the store failed to write all of it.

        Args:
            index: Number of blocks of the request before it.
            host_pages: Its `pages_per_block` pages, which must not change until this returns.
        """
        name = sha256(f"{self._incarnation}/{request_id}/{index}".encode()).digest()
        layers = list(self._slices)
        pages = torch.tensor(host_pages)
        for first in range(0, len(layers), LAYERS_AT_ONCE):
            objects: list[tuple[str, memoryview]] = []
            for layer in layers[first : first + LAYERS_AT_ONCE]:
                packed = self._pages[:, slice(*self._slices[layer])].index_select(0, pages)
                objects.append((self._key(name, layer), packed.numpy().data.cast("B")))
                await asyncio.sleep(0)  # a copy takes a millisecond
            if not await self._put(objects):
                await self._delete([self._key(name, layer) for layer in layers[: first + LAYERS_AT_ONCE]])
                return None
        number = next(self._numbers)
        self._blocks[number] = _Block(request_id=request_id, name=name)
        return number

    async def _put(self, objects: Sequence[tuple[str, memoryview]]) -> bool:
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._pause_s)
            if all(await self._client.put(objects)):
                return True
        return False

    def _key(self, name: bytes, layer: int) -> str:
        return running_key(self._fingerprint, name, layer=layer, group=self._group, layout=self._layout, shard=self._shard)

    def keys_of(self, number: int) -> dict[int, str]:
        """Return the keys of a block by layer."""
        return {layer: self._key(self._blocks[number].name, layer) for layer in self._slices}

    async def forget(self, numbers: Sequence[int]) -> None:
        """Delete blocks that no step reads any more. If the store does not answer, they stay there until it evicts them."""
        keys = [key for number in numbers for key in self.keys_of(number).values()]
        for number in numbers:
            del self._blocks[number]
        await self._delete(keys)

    async def _delete(self, keys: Sequence[str]) -> None:
        for begin in range(0, len(keys), DELETED_AT_ONCE):
            if not any(await self._client.delete(keys[begin : begin + DELETED_AT_ONCE])):
                return

    def take_lost(self) -> Mapping[str, str]:
        """Return the requests for which a step could not read a block, with the reason. Each is returned once."""
        lost, self._lost = self._lost, {}
        return lost

    async def _read(self, read: StoredRead, buffer: int) -> bool:
        block = self._blocks.get(read.block)
        if block is None:
            return False
        begin, end = self._slices[read.layer]
        view = self._buffers[buffer][: self._pages_per_block * (end - begin)].numpy().data
        key = self._key(block.name, read.layer)
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._pause_s)
            if (await self._client.get([(key, view)]))[0]:
                return True
        return False

    # On the engine's thread

    @property
    def pages_per_block(self) -> int:
        return self._pages_per_block

    @property
    def buffers(self) -> Sequence[Tensor]:
        return self._buffers

    def begin(self, reads: Sequence[StoredRead]) -> None:
        self._reads.clear()
        while self._reading:  # of a step that failed: their buffers are written until they end
            left = self._reading.popleft()
            if left.done is not None:
                left.done.result()
            self._free.append((left.buffer, None))
        self._reads.extend(reads)
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._reads and self._free:
            read, (buffer, event) = self._reads.popleft(), self._free.popleft()
            if event is not None:
                event.synchronize()
            request_id = self._blocks[read.block].request_id
            done = None
            if request_id not in self._lost:
                done = asyncio.run_coroutine_threadsafe(self._read(read, buffer), self._loop)
            self._reading.append(_Reading(request_id=request_id, buffer=buffer, done=done))

    def next(self) -> int | None:
        self._read_ahead()
        reading = self._reading.popleft()
        if reading.done is not None and reading.done.result():
            return reading.buffer
        self._free.append((reading.buffer, None))
        self._lost.setdefault(reading.request_id, f"{self._client.name} did not return KV of the request that it has stored")
        return None

    def release(self, buffer: int, event: DeviceEvent | None = None) -> None:
        self._free.append((buffer, event))


def _layer_slices(group: LayerGroup, layout: KVLayout, shard: Shard) -> dict[int, tuple[int, int]]:
    """Return where each layer of a group begins and ends in the bytes of a host page."""
    found: dict[int, tuple[int, int]] = {}
    for part in page_parts(group, layout=layout, shard=shard):
        begin, _ = found.get(part.layer, (part.offset_bytes, 0))
        found[part.layer] = (begin, part.offset_bytes + part.num_bytes)
    return found
