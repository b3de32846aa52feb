"""The page tables of requests on a GPU: each entry is uploaded once, and nothing waits for it.

`TableEntries` is the table on the host, and `RequestTables` brings it to the device. All of it belongs to one thread.

Every stream has its own copy, which the stream fills before the first kernel that reads it. So no stream waits for another, there
are no events, and memory is free as soon as the request's copies have run. Memory is allocated only if more tables, or longer
ones, are in use at a time than ever before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transfer.errors import LayoutError
from transfer.layer_groups import NO_PAGE
from transfer.pool.page_allocator import PageEntries

_MIN_ENTRIES = 256


class TableEntries:
    """The known entries of one page table: pages of the pool, none twice at a time, each read once.

    A window that moves on leaves `NO_PAGE` in the first entries, and their pages may come again in later ones. The array keeps
    the old pages, because it may be on its way to a device.

    Args:
        entries: int64 [room], to be filled.
        request_id: Names the table in errors.
    """

    def __init__(self, entries: npt.NDArray[np.int64], *, num_pages: int, request_id: str) -> None:
        self.num_known = 0
        self._entries = entries
        self._request_id = request_id
        self._num_passed = 0
        self._has_gaps = False  # `NO_PAGE` behind those that were passed
        self._is_held = np.zeros(num_pages, dtype=np.bool_)
        self._last: Sequence[int] | None = None

    @property
    def room(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all entries. The array is not touched again."""
        # `NO_PAGE` indexes the pool's last page here, which must be cleared as well.
        self._is_held[self._entries[: self.num_known]] = False
        self.num_known = self._num_passed = 0
        self._entries = self._entries[:0]
        self._has_gaps = False
        self._last = None

    def begin(self, entries: npt.NDArray[np.int64], request_id: str) -> None:
        """Begin another request's table in another array, after `clear`."""
        self._entries = entries
        self._request_id = request_id

    def move_to(self, entries: npt.NDArray[np.int64]) -> None:
        """Continue in another array, with the known entries."""
        entries[: self.num_known] = self._entries[: self.num_known]
        self._entries = entries

    def update(self, table: Sequence[int]) -> None:
        """Take in the new entries of the table, from token 0 on, with at most `room` entries.

        Raise LayoutError if a new entry is beyond the pool's pages, or a page comes twice. Then no new entry is taken in.
        """
        if table is self._last:
            return
        self._let_pass(table)
        known, end = self.num_known, len(table)
        if known < end:
            fresh = np.array(table[known:], dtype=np.int64)
            pages = np.sort(fresh)
            if pages[0] < 0:
                pages = pages[pages != NO_PAGE]
            if len(pages):
                self._check_new(pages)
                self._is_held[pages] = True
            self._entries[known:end] = fresh
            self.num_known = end
            if len(pages) < len(fresh):
                self._look_for_gaps(known)
        is_fixed = isinstance(table, tuple | PageEntries)
        self._last = table if is_fixed else None  # a list can have other entries later

    def check(self, first: int, end: int) -> None:
        """Raise LayoutError if one of the entries [first, end) is no page, or the table is too short."""
        if self.num_known < end:
            raise LayoutError(f"{self._name} has {self.num_known} entries; the piece takes {end}")
        if first < min(self._num_passed, end):
            raise LayoutError(f"entry {first} in {self._name} is no page; [{first}, {end}) are needed")
        if self._has_gaps:
            needed = self._entries[first:end]
            if needed.min(initial=0) < 0:
                raise LayoutError(
                    f"entry {first + int(np.argmin(needed))} in {self._name} is no page; [{first}, {end}) are needed"
                )

    @property
    def _name(self) -> str:
        return f"the page table of request {self._request_id}"

    def _let_pass(self, table: Sequence[int]) -> None:
        begin = end = self._num_passed
        most = min(self.num_known, len(table))
        while end < most and table[end] == NO_PAGE:
            end += 1
        if begin < end:
            passed = self._entries[begin:end]
            self._is_held[passed[passed != NO_PAGE]] = False
            self._num_passed = end

    def _look_for_gaps(self, begin: int) -> None:
        """Find `NO_PAGE` among the new entries from `begin` on."""
        is_page = self._entries[begin : self.num_known] != NO_PAGE
        if self._num_passed == begin:
            num_leading = int(np.argmax(is_page)) if is_page.any() else len(is_page)
            self._num_passed += num_leading
            is_page = is_page[num_leading:]
        self._has_gaps = self._has_gaps or not is_page.all()

    def _check_new(self, pages: npt.NDArray[np.int64]) -> None:
        """Check pages in ascending order, at least one."""
        num_pages = len(self._is_held)
        lowest, highest = pages[0], pages[-1]
        if lowest < 0 or highest >= num_pages:
            raise LayoutError(f"{self._name} has page {lowest if lowest < 0 else highest}; the pool's are [0, {num_pages})")
        is_repeated = pages[1:] == pages[:-1]
        is_held = self._is_held[pages]
        if is_repeated.any() or is_held.any():
            page = np.concatenate((pages[1:][is_repeated], pages[is_held]))[0]
            raise LayoutError(f"{self._name} has page {page} twice; the pages of one table are distinct")


def current_stream(device: torch.device) -> int:
    """Return the handle of the calling thread's stream; 0 in host memory."""
    if device.type == "cpu":
        return 0
    # As Triton finds it: torch.cuda.current_stream makes an object of more than we need.
    return torch._C._cuda_getCurrentRawStream(device.index)


class _Arrays:
    """Arrays for tables, by size. Free arrays are reused. `current_stream` returns the handle of the calling thread's stream."""

    def __init__(self, device: torch.device, current_stream: Callable[[torch.device], int]) -> None:
        self.device = device
        self.current_stream = current_stream
        self._on_host: dict[int, list[Tensor]] = {}  # int64 [size], pinned for a GPU
        self._on_device: dict[tuple[int, int], list[Tensor]] = {}

    def take_host(self, num_entries: int) -> Tensor:
        """Return an array of a power of two of entries, at least `num_entries`."""
        size = max(_MIN_ENTRIES, 1 << (num_entries - 1).bit_length())
        if free := self._on_host.get(size):
            return free.pop()
        return torch.empty(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def give_host(self, array: Tensor) -> None:
        self._on_host.setdefault(len(array), []).append(array)

    def take_device(self, stream: int, size: int) -> Tensor:
        """Return an array for the current stream only, whose handle is `stream`: it is allocated
        and freed in the stream's order."""
        if free := self._on_device.get((stream, size)):
            return free.pop()
        return torch.empty(size, dtype=torch.int64, device=self.device)

    def give_device(self, stream: int, array: Tensor) -> None:
        self._on_device.setdefault((stream, len(array)), []).append(array)


@dataclass(slots=True, eq=False)
class _StreamCopy:
    """A table's copy for one stream."""

    memory: Tensor
    num_uploaded: int = 0


class DeviceTable:
    """A request's page table in one group. `entries` fills `host`; memory comes from `arrays`."""

    __slots__ = ("_arrays", "_copies", "_host", "_outgrown", "entries")

    def __init__(self, arrays: _Arrays, host: Tensor, entries: TableEntries) -> None:
        self.entries = entries
        self._arrays = arrays
        self._host = host
        self._copies: dict[int, _StreamCopy] = {}
        self._outgrown: list[tuple[Tensor, dict[int, _StreamCopy]]] = []

    def use(self) -> Tensor:
        """Return the table for kernels that are queued on the current stream from now on: int64 [room] on the device.

        New entries are queued there before them.
        """
        stream = self._arrays.current_stream(self._arrays.device)
        copy = self._copies.get(stream)
        if copy is None:
            copy = self._copies[stream] = _StreamCopy(self._arrays.take_device(stream, self.entries.room))
        begin, end = copy.num_uploaded, self.entries.num_known
        if begin < end:
            copy.memory[begin:end].copy_(self._host[begin:end], non_blocking=True)
            copy.num_uploaded = end
        return copy.memory

    def grow(self, num_entries: int) -> None:
        """Continue in larger arrays. The old ones may be in use until the table is given back."""
        self._outgrown.append((self._host, self._copies))
        self._host, self._copies = self._arrays.take_host(num_entries), {}
        self.entries.move_to(self._host.numpy())

    def give_back(self) -> None:
        """Free its arrays. The table must not be used again."""
        for host, copies in (*self._outgrown, (self._host, self._copies)):
            self._arrays.give_host(host)
            for stream, copy in copies.items():
                self._arrays.give_device(stream, copy.memory)


class RequestTables:
    """Page tables of one group on one device, by request. `current_stream` returns the handle of the calling thread's stream."""

    def __init__(
        self, device: torch.device, num_pages: int, *, current_stream: Callable[[torch.device], int] = current_stream
    ) -> None:
        self._num_pages = num_pages
        self._arrays = _Arrays(device, current_stream)
        self._tables: dict[str, DeviceTable] = {}
        self._free_entries: list[TableEntries] = []

    def cover(self, request_id: str, table: Sequence[int], first: int, end: int) -> DeviceTable:
        """Return the request's table with at least its entries up to `end`. New entries are checked, and uploaded when used.

        Args:
            table: From token 0 on. Of earlier entries, only those that a window has passed may have changed.
            first: Entries from here on must be pages.

        Raises:
            LayoutError: A needed entry is no page of the pool, a page comes twice, or the table is too short.
        """
        found = self._tables.get(request_id)
        if found is None:
            found = self._tables[request_id] = self._empty(request_id, len(table))
        elif found.entries.room < len(table):
            found.grow(len(table))
        found.entries.update(table)
        found.entries.check(first, end)
        return found

    def forget(self, request_id: str) -> None:
        """Use the memory of the request's table for others. Idempotent.

        Every copy that was prepared with it must have run, or never will. An upload for copies that never came may still be
        queued. That is harmless: it writes an array of its stream, which the next table fills on the same stream, after it.
        """
        table = self._tables.pop(request_id, None)
        if table is not None:
            table.entries.clear()
            self._free_entries.append(table.entries)
            table.give_back()

    def _empty(self, request_id: str, num_entries: int) -> DeviceTable:
        host = self._arrays.take_host(num_entries)
        if self._free_entries:
            entries = self._free_entries.pop()
            entries.begin(host.numpy(), request_id)
        else:
            entries = TableEntries(host.numpy(), num_pages=self._num_pages, request_id=request_id)
        return DeviceTable(self._arrays, host, entries)
