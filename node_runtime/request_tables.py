"""The page tables of requests on a GPU: each entry goes there once, and nothing waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transfer.errors import LayoutError

_MIN_ENTRIES = 256


class KnownPages:
    """The pages that one table has so far: each at most once, and all of the pool.

    Args:
        num_pages: Of the pool.
        request_id: Whose table it is, for what is said of it.
    """

    def __init__(self, num_pages: int, request_id: str) -> None:
        self._is_known = np.zeros(num_pages, dtype=np.bool_)
        self._request_id = request_id

    def add(self, entries: npt.NDArray[np.int64]) -> None:
        """Take in what is new in the table. Negative entries are no pages, and may be there.

        Raises:
            LayoutError: An entry is beyond the pool's pages, or a page comes twice; nothing is taken in then.
        """
        pages = entries[entries >= 0]
        if not len(pages):
            return
        ordered = np.sort(pages)
        if ordered[-1] >= len(self._is_known):
            raise LayoutError(
                f"the page table of request {self._request_id} has page {ordered[-1]}; the pool's are [0, {len(self._is_known)})"
            )
        repeated = np.concatenate((ordered[1:][ordered[1:] == ordered[:-1]], ordered[self._is_known[ordered]]))
        if len(repeated):
            raise LayoutError(
                f"the page table of request {self._request_id} has page {repeated[0]} twice; the pages of one table are distinct"
            )
        self._is_known[pages] = True


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceTable:
    """A request's page table in one group.

    Args:
        host: int64 [entries], pinned: its first `num_known` entries are the table's, written once each.
        device: int64 [entries] on the device, the same.
    """

    host: Tensor
    device: Tensor
    uploaded: torch.cuda.Event
    pages: KnownPages
    num_known: int = 0
    streams: set[int] = field(default_factory=set)

    def use(self) -> Tensor:
        """The table, for kernels that are queued on the current stream from now on."""
        stream = torch.cuda.current_stream(self.device.device)
        stream.wait_event(self.uploaded)
        if stream.cuda_stream not in self.streams:
            # Its memory is not used anew before what this stream has queued has run, whenever the table is dropped.
            self.streams.add(stream.cuda_stream)
            self.device.record_stream(stream)
        return self.device


class RequestTables:
    """Page tables of one group on one device, by request.

    Uploads go over a stream of their own, from pinned memory: a gather waits for its table, and a table for nothing.

    Args:
        device: Of the pool.
        num_pages: Of the pool's group.
    """

    def __init__(self, device: torch.device, num_pages: int) -> None:
        self._device = device
        self._num_pages = num_pages
        self._stream = torch.cuda.Stream(device)
        self._tables: dict[str, DeviceTable] = {}

    def cover(self, request_id: str, table: Sequence[int], first: int, end: int) -> DeviceTable:
        """The request's table with at least its entries up to `end`; what is new in it is checked, and queued.

        Args:
            table: From token 0 on; entries that were given before are not read again.
            first: Entries from here on must be pages.

        Raises:
            LayoutError: An entry that is needed is no page of the pool, a page comes twice, or the table is too short.
        """
        if len(table) < end:
            raise LayoutError(f"the page table of request {request_id} has {len(table)} entries; the piece takes {end}")
        found = self._tables.get(request_id)
        if found is None:
            found = self._tables[request_id] = self._empty(len(table), KnownPages(self._num_pages, request_id))
        elif found.host.shape[0] < len(table):
            found = self._tables[request_id] = self._grown(found, len(table))
        if found.num_known < end:
            self._append(found, table)
        needed = found.host.numpy()[first:end]
        if needed.min(initial=0) < 0:
            entry = first + int(np.argmin(needed))
            raise LayoutError(f"entry {entry} in the page table of request {request_id} is no page; [{first}, {end}) are needed")
        return found

    def forget(self, request_id: str) -> None:
        self._tables.pop(request_id, None)

    def _append(self, found: DeviceTable, table: Sequence[int]) -> None:
        known, end = found.num_known, len(table)
        entries = found.host.numpy()
        entries[known:end] = table[known:]
        found.pages.add(entries[known:end])
        self._upload(found, known, end)

    def _grown(self, old: DeviceTable, num_entries: int) -> DeviceTable:
        """A table with what the old one has, which copies that were prepared before go on using."""
        grown = self._empty(num_entries, old.pages)
        grown.host[: old.num_known] = old.host[: old.num_known]
        self._upload(grown, 0, old.num_known)
        return grown

    def _empty(self, num_entries: int, pages: KnownPages) -> DeviceTable:
        """A table with room for twice as many entries as there are."""
        size = max(_MIN_ENTRIES, 2 * num_entries)
        with torch.cuda.stream(self._stream):
            device = torch.empty(size, dtype=torch.int64, device=self._device)
        host = torch.empty(size, dtype=torch.int64, pin_memory=True)
        return DeviceTable(host=host, device=device, uploaded=torch.cuda.Event(), pages=pages)

    def _upload(self, table: DeviceTable, begin: int, end: int) -> None:
        with torch.cuda.stream(self._stream):
            table.device[begin:end].copy_(table.host[begin:end], non_blocking=True)
            table.uploaded.record(self._stream)
        table.num_known = end
