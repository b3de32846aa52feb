"""Driving an engine whose requests have some of their pages in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.embedded_engine.steps import PageBook, fill_with_nan
from transfer.copy.page_mover import PageMove, PageMover
from transfer.engine_types import DecodeItem
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


class Tiers:
    """A request's first pages leave the device while it runs; what they leave behind there is no number.

    Args:
        engine: With a host pool.
        host: That pool.
        book: The requests' pages on the device.
        ends: Request -> how much of it is in host memory; those that are not named have nothing there.
    """

    def __init__(self, engine: Any, host: HostPool, book: PageBook, ends: Mapping[str, HostEnd]) -> None:
        self._engine = engine
        self._book = book
        self._ends = ends
        self._group = full_group(engine.pool.groups)
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
        for entry in range(len(in_host), end):
            in_host.append(self._free.pop())
            self._mover.save([PageMove(group=group, device_pages=[tables[group][entry]], host_pages=[in_host[-1]])])
            fill_with_nan(self._engine.pool, layers, tables[group][entry])
        tables[group][: len(in_host)] = [NO_PAGE] * len(in_host)
        hosts = tuple(tuple(in_host) if index == group else () for index in range(len(tables)))
        return DecodeItem(request_id=name, token_id=token, position=position, page_tables=tuple(tables), host_tables=hosts)

    def decode(self, first: Mapping[str, int], lengths: Mapping[str, int], num_tokens: int) -> dict[str, list[int]]:
        """`num_tokens` tokens of every request, the first included."""
        tokens = {name: [token] for name, token in first.items()}
        for step in range(num_tokens - 1):
            items = [self.item(name, own[-1], lengths[name] + step) for name, own in tokens.items()]
            found = self._engine.decode(items)
            for name, own in tokens.items():
                own.append(found[name])
        return tokens
