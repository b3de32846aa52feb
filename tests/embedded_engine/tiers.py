"""Driving an engine whose requests have some of their pages in host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.embedded_engine.steps import PageBook, fill_with_nan
from transfer.copy.page_mover import PageMove, PageMover
from transfer.engine_types import DecodeItem, DeviceEvent, StoredRead
from transfer.layer_groups import NO_PAGE, GroupKind, LayerGroup
from transfer.pool.host_pool import HostPool

HostEnd = Callable[[int], int]
"""Position of the newest token -> pages of a request that are in host memory, at most those before the newest token's."""

NOTHING: HostEnd = lambda newest_page: 0  # noqa: E731
HALF: HostEnd = lambda newest_page: newest_page // 2  # noqa: E731
ALL_BUT_NEWEST: HostEnd = lambda newest_page: newest_page  # noqa: E731


def full_group(groups: Sequence[LayerGroup]) -> int:
    return next(index for index, group in enumerate(groups) if group.kind is GroupKind.FULL)


def host_pool_of(engine: Any, num_pages: int) -> HostPool:
    """Host pages for the engine's full attention alone, filled with numbers that are none."""
    host = HostPool(engine.pool, num_pages=[num_pages if group.kind is GroupKind.FULL else 0 for group in engine.pool.groups])
    part = host.part(full_group(engine.pool.groups))
    for layer in part.layers:
        for is_v in (False, True)[: engine.pool.layout.layers[layer].num_buffers]:
            part.buffer(layer, is_v=is_v).fill_(float("nan"))
    return host


def largest_slice(host: HostPool, group: int) -> int:
    """Bytes of a layer's part of a page."""
    part = host.part(group)
    return max(
        sum(part.buffer(layer, is_v=is_v)[0].nbytes for is_v in (False, True)[: part.layout.layers[layer].num_buffers])
        for layer in part.layers
    )


class StoredPages:
    """A `StoredKV` whose store is a dictionary.

    Args:
        host: The host pool that its blocks come from.
        group: The group of full attention.
    """

    def __init__(self, host: HostPool, group: int, *, pages_per_block: int, num_buffers: int = 3) -> None:
        self.pages_per_block = pages_per_block
        self.missing: set[int] = set()  # blocks that the store does not give any more
        self.most_ahead = 0
        self._host, self._group = host, group
        size = pages_per_block * largest_slice(host, group)
        is_gpu = host.is_pinned
        self.buffers = [torch.zeros(size, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(num_buffers)]
        self._stored: dict[tuple[int, int], Tensor] = {}
        self._num_blocks = 0
        self._reads: deque[StoredRead] = deque()
        self._filled: deque[tuple[int, StoredRead]] = deque()
        self._free: deque[tuple[int, DeviceEvent | None]] = deque((index, None) for index in range(num_buffers))

    def put(self, host_pages: Sequence[int]) -> int:
        """Store a block, and return its number."""
        part = self._host.part(self._group)
        for layer in part.layers:
            buffers = [part.buffer(layer, is_v=is_v) for is_v in (False, True)[: part.layout.layers[layer].num_buffers]]
            packed = [buffer[list(host_pages)].flatten(1).view(torch.uint8) for buffer in buffers]
            self._stored[layer, self._num_blocks] = torch.cat(packed, dim=1).flatten()
        self._num_blocks += 1
        return self._num_blocks - 1

    def begin(self, reads: Sequence[StoredRead]) -> None:
        assert not self._reads and not self._filled, "the step before has used all of its reads"
        self._reads.extend(reads)

    def next(self) -> int | None:
        while self._reads and self._free:
            read, (buffer, event) = self._reads.popleft(), self._free.popleft()
            if event is not None:
                event.synchronize()
            stored = self._stored[read.layer, read.block]
            self.buffers[buffer].fill_(255)  # numbers that are none
            self.buffers[buffer][: len(stored)] = stored
            self._filled.append((buffer, read))
        self.most_ahead = max(self.most_ahead, len(self._filled))
        buffer, read = self._filled.popleft()
        if read.block in self.missing:
            self._free.append((buffer, None))
            return None
        return buffer

    def release(self, buffer: int, event: DeviceEvent | None = None) -> None:
        self._free.append((buffer, event))


class Tiers:
    """A request's first pages leave the device while it runs; what they leave behind there is no number.

    Args:
        engine: With a host pool.
        host: That pool.
        book: The requests' pages on the device.
        ends: Request -> how much of it is in host memory; those that are not named have nothing there.
        stored: Where whole blocks of those pages move on to, but for the last page in host memory. None: they stay there.
    """

    def __init__(
        self,
        engine: Any,
        host: HostPool,
        book: PageBook,
        ends: Mapping[str, HostEnd],
        stored: StoredPages | None = None,
    ) -> None:
        self.stored, self.blocks = stored, dict[str, tuple[int, ...]]()
        self._engine = engine
        self._book = book
        self._ends = ends
        self._group = full_group(engine.pool.groups)
        self._host_part = host.part(self._group)
        self._free = list(range(host.num_pages[self._group]))[::-1]
        self._host_tables: dict[str, list[int]] = {name: [] for name in ends}
        self._mover = PageMover(engine.pool, host, buffer_bytes=2 * host.page_bytes[self._group])

    def item(self, name: str, token: int, position: int) -> DecodeItem:
        """The request's part of a step, after its pages up to its end in host memory were moved there."""
        tables = [list(table) for table in self._book.at(name, position)]
        if name not in self._ends:
            return DecodeItem(request_id=name, token_id=token, position=position, page_tables=tuple(tables))
        in_host, group = self._host_tables[name], self._group
        end = self._ends[name](position // self._book.page_size)
        layers = self._book.groups[group].layers
        blocks = self.blocks.get(name, ())
        num_stored = 0 if self.stored is None else len(blocks) * self.stored.pages_per_block
        for entry in range(num_stored + len(in_host), end):
            in_host.append(self._free.pop())
            self._mover.save([PageMove(group=group, device_pages=[tables[group][entry]], host_pages=[in_host[-1]])])
            fill_with_nan(self._engine.pool, layers, tables[group][entry])
        while self.stored is not None and len(in_host) > self.stored.pages_per_block:
            leaving = in_host[: self.stored.pages_per_block]
            blocks = self.blocks[name] = (*blocks, self.stored.put(leaving))
            del in_host[: len(leaving)]
            for page in leaving:
                fill_with_nan(self._host_part, layers, page)
            self._free += leaving
        tables[group][:end] = [NO_PAGE] * end
        hosts = tuple(tuple(in_host) if index == group else () for index in range(len(tables)))
        return DecodeItem(
            request_id=name,
            token_id=token,
            position=position,
            page_tables=tuple(tables),
            host_tables=hosts,
            stored_blocks=blocks,
        )

    def decode(self, first: Mapping[str, int], lengths: Mapping[str, int], num_tokens: int) -> dict[str, list[int]]:
        """`num_tokens` tokens of every request, the first included."""
        tokens = {name: [token] for name, token in first.items()}
        for step in range(num_tokens - 1):
            items = [self.item(name, own[-1], lengths[name] + step) for name, own in tokens.items()]
            found = self._engine.decode(items)
            for name, own in tokens.items():
                own.append(found[name])
        return tokens
