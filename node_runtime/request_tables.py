"""The page tables of requests on a GPU: each entry goes there once, and nothing waits for it.

`TableEntries` is what is known of a table on the host; `RequestTables` brings it to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transfer.errors import LayoutError
from transfer.layer_groups import NO_PAGE

_MIN_ENTRIES = 256


class TableEntries:
    """What one page table has so far: pages of the pool, none twice at a time, each entry read once.

    A window that moves on leaves `NO_PAGE` in the first entries, and their pages may come again in later ones.

    Args:
        entries: int64 [room], to be filled.
        num_pages: Of the pool.
        request_id: Whose table it is, for what is said of it.
    """

    def __init__(self, entries: npt.NDArray[np.int64], *, num_pages: int, request_id: str) -> None:
        self.num_known = 0
        self._entries = entries
        self._num_passed = 0
        self._is_held = np.zeros(num_pages, dtype=np.bool_)
        self._name = f"the page table of request {request_id}"

    @property
    def room(self) -> int:
        return len(self._entries)

    def move_to(self, entries: npt.NDArray[np.int64]) -> None:
        """Go on in another array, with what there is so far."""
        entries[: self.num_known] = self._entries[: self.num_known]
        self._entries = entries

    def update(self, table: Sequence[int]) -> None:
        """Take in what is new in the table.

        Args:
            table: From token 0 on, of at most `room` entries.

        Raises:
            LayoutError: A new entry is beyond the pool's pages, or a page comes twice; no new entry is taken in then.
        """
        self._let_pass(table)
        fresh = np.array(table[self.num_known :], dtype=np.int64)
        pages = np.sort(fresh[fresh != NO_PAGE])
        self._check_new(pages)
        self._is_held[pages] = True
        end = self.num_known + len(fresh)
        self._entries[self.num_known : end] = fresh
        self.num_known = end

    def check(self, first: int, end: int) -> None:
        """
        Raises:
            LayoutError: One of the entries [first, end) is no page, or the table is too short.
        """
        if self.num_known < end:
            raise LayoutError(f"{self._name} has {self.num_known} entries; the piece takes {end}")
        needed = self._entries[first:end]
        if needed.min(initial=0) < 0:
            raise LayoutError(f"entry {first + int(np.argmin(needed))} in {self._name} is no page; [{first}, {end}) are needed")

    def _let_pass(self, table: Sequence[int]) -> None:
        begin = end = self._num_passed
        while end < self.num_known and table[end] == NO_PAGE:
            end += 1
        passed = self._entries[begin:end]
        self._is_held[passed[passed != NO_PAGE]] = False
        passed[:] = NO_PAGE
        self._num_passed = end

    def _check_new(self, pages: npt.NDArray[np.int64]) -> None:
        """Pages in ascending order."""
        for page in pages[[0, -1]] if len(pages) else ():
            if not 0 <= page < len(self._is_held):
                raise LayoutError(f"{self._name} has page {page}; the pool's are [0, {len(self._is_held)})")
        repeated = np.concatenate((pages[1:][pages[1:] == pages[:-1]], pages[self._is_held[pages]]))
        if len(repeated):
            raise LayoutError(f"{self._name} has page {repeated[0]} twice; the pages of one table are distinct")


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceTable:
    """A request's page table in one group.

    Args:
        entries: What it has.
        host: int64 [room], pinned: what `entries` fills.
        device: int64 [room] on the device: each entry as it was when it came.
        streams: Handles of those that wait for the last upload already.
    """

    entries: TableEntries
    host: Tensor
    device: Tensor
    uploaded: torch.cuda.Event
    streams: set[int] = field(default_factory=set)

    def use(self) -> Tensor:
        """The table, for kernels that are queued on the current stream from now on."""
        stream = torch.cuda.current_stream(self.device.device)
        if stream.cuda_stream not in self.streams:
            self.streams.add(stream.cuda_stream)
            stream.wait_event(self.uploaded)
            # Its memory is not used anew before what this stream has queued has run, whenever the table is dropped.
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
            table: From token 0 on; of entries that were given before only those that a window has passed have changed.
            first: Entries from here on must be pages.

        Raises:
            LayoutError: An entry that is needed is no page of the pool, a page comes twice, or the table is too short.
        """
        found = self._tables.get(request_id)
        if found is None:
            found = self._tables[request_id] = self._empty(len(table), request_id)
        elif found.entries.room < len(table):
            found = self._tables[request_id] = self._grown(found, len(table))
        known = found.entries.num_known
        found.entries.update(table)
        if known < found.entries.num_known:
            self._upload(found, known)
        found.entries.check(first, end)
        return found

    def forget(self, request_id: str) -> None:
        self._tables.pop(request_id, None)

    def _empty(self, num_entries: int, request_id: str) -> DeviceTable:
        host, device = self._memory(num_entries)
        entries = TableEntries(host.numpy(), num_pages=self._num_pages, request_id=request_id)
        return DeviceTable(entries=entries, host=host, device=device, uploaded=torch.cuda.Event())

    def _grown(self, old: DeviceTable, num_entries: int) -> DeviceTable:
        """A table with what the old one has, which copies that were prepared before go on using."""
        host, device = self._memory(num_entries)
        old.entries.move_to(host.numpy())
        grown = DeviceTable(entries=old.entries, host=host, device=device, uploaded=torch.cuda.Event())
        self._upload(grown, 0)
        return grown

    def _memory(self, num_entries: int) -> tuple[Tensor, Tensor]:
        """Pinned, and on the device: with room for twice as many entries as there are."""
        size = max(_MIN_ENTRIES, 2 * num_entries)
        with torch.cuda.stream(self._stream):
            device = torch.empty(size, dtype=torch.int64, device=self._device)
        return torch.empty(size, dtype=torch.int64, pin_memory=True), device

    def _upload(self, table: DeviceTable, begin: int) -> None:
        """Bring the entries from `begin` on to the device."""
        end = table.entries.num_known
        with torch.cuda.stream(self._stream):
            table.device[begin:end].copy_(table.host[begin:end], non_blocking=True)
            table.uploaded.record(self._stream)
        table.streams.clear()
