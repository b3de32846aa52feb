"""The page table on the device: where a decode step's kernels find the tokens of each request.

It has one row of slots for each running request, and one for the dummy request that pads a batch to a captured size. The tensor
never moves, so a CUDA graph may hold its address.

Invariants: a row belongs to at most one request. After the queued copies, the device shows what the host recorded of a row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfer.errors import ConfigError, LocalProtocolError, MemoryPlanError
from transfer.layer_groups import PAGE_TABLE_COLUMNS

NO_SLOT: Final = -1
"""Where a token has no slot: nobody reads it and nobody writes it."""

_MOST_SLOTS = 2**31  # what int32 numbers


class PageTable:
    """Slots of the tokens of running requests, int32 [num_rows, max_seq_len rounded up to a multiple of 32].

    The rows are a cache over requests: a request keeps its row until another one needs it, and the least recently used goes
    first. So nobody reports the end of a request, and an id that returns with other pages is written again. Not thread-safe.

    Args:
        num_rows: Most requests of one step, and one row more.
        max_seq_len: Most tokens of a request.
        page_size: Tokens of a page.

    Raises:
        ConfigError: A size is out of its range.
    """

    def __init__(self, *, num_rows: int, max_seq_len: int, page_size: int, device: torch.device | str = "cpu") -> None:
        for name, value, least in (("num_rows", num_rows, 2), ("max_seq_len", max_seq_len, 1), ("page_size", page_size, 1)):
            if value < least:
                raise ConfigError(f"{name} is {value}; must be at least {least}")
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.dummy_row = num_rows - 1
        """The row of a request that pads a batch: no token of it has a slot."""
        columns = -(-max_seq_len // PAGE_TABLE_COLUMNS) * PAGE_TABLE_COLUMNS
        self.slots: Tensor = torch.full((num_rows, columns), NO_SLOT, dtype=torch.int32, device=device)
        """The table itself: ``slots[row, t]`` is the slot of token t. Behind a request's pages a row shows what it did before."""
        self._shown: list[tuple[int, ...]] = [()] * self.dummy_row  # pages that each row shows, for any request
        self._rows: OrderedDict[str, int] = OrderedDict()  # by last use, the longest ago first
        self._unused = list(range(self.dummy_row - 1, -1, -1))

    @property
    def num_bytes(self) -> int:
        """Bytes of the table on the device."""
        return self.slots.numel() * self.slots.element_size()

    def rows_of(self, items: Sequence[tuple[str, Sequence[int], int]]) -> list[int]:
        """Return rows that show the pages of a step's requests.

        Only pages that a row does not show yet are written, in one copy that is queued on the current stream, behind the steps
        that may still read the rows. A step without changes costs no copy, and a table that is the same tuple as last time is not
        compared.

        Args:
            items: For each request its id, its pages (NO_PAGE where the tokens have passed a window) and its number of tokens.

        Raises:
            MemoryPlanError: There are more requests than rows, or a request is longer than a row.
            LocalProtocolError: A request is there twice, or its pages do not hold its tokens.
        """
        if len(items) > self.dummy_row:
            raise MemoryPlanError(f"a step has {len(items)} requests; the page table has rows for {self.dummy_row}")
        wanted = {request_id for request_id, _, _ in items}
        if len(wanted) != len(items):
            raise LocalProtocolError("a request is in the step twice; a step has at most one item of a request")
        for item in items:
            self._check(*item)
        for request_id in wanted & self._rows.keys():
            self._rows.move_to_end(request_id)  # before any row is taken: the step's own requests are the last to lose theirs
        rows = [self._row_of(request_id) for request_id, _, _ in items]
        tables = [tuple(pages) for _, pages, _ in items]  # tuple() of a tuple is the same one
        changes = [self._change(row, table) for row, table in zip(rows, tables, strict=True)]
        self._write([change for change in changes if change is not None])
        for row, table in zip(rows, tables, strict=True):
            self._shown[row] = table
        return rows

    def _check(self, request_id: str, pages: Sequence[int], num_tokens: int) -> None:
        if num_tokens > self.max_seq_len:
            raise MemoryPlanError(f"request {request_id!r} has {num_tokens} tokens; max_seq_len is {self.max_seq_len}")
        if len(pages) * self.page_size < num_tokens:
            raise LocalProtocolError(
                f"request {request_id!r} has {len(pages)} pages of {self.page_size} tokens for {num_tokens} tokens; "
                f"needs {-(-num_tokens // self.page_size)}"
            )
        row = self._rows.get(request_id)
        if row is not None and pages is self._shown[row]:
            return
        if max(pages, default=0) >= _MOST_SLOTS // self.page_size:
            raise LocalProtocolError(f"request {request_id!r} has page {max(pages)}; int32 slots end at {_MOST_SLOTS}")

    def _row_of(self, request_id: str) -> int:
        row = self._rows.get(request_id)
        if row is None:
            row = self._unused.pop() if self._unused else self._rows.popitem(last=False)[1]
            self._rows[request_id] = row
        return row

    def _change(self, row: int, pages: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return places in the flat table and their new slots; None if the row shows the pages already."""
        shown = self._shown[row]
        if pages is shown or pages == shown:
            return None
        new, old = (np.array(one, dtype=np.int64) for one in (pages, shown))
        common = min(len(new), len(old))
        changed = np.concatenate([np.flatnonzero(new[:common] != old[:common]), np.arange(common, len(new))])
        offsets = np.arange(self.page_size)
        columns = (changed[:, None] * self.page_size + offsets).reshape(-1)
        slots = np.where(new[changed, None] < 0, NO_SLOT, new[changed, None] * self.page_size + offsets).reshape(-1)
        num_columns = self.slots.shape[1]
        is_inside = columns < num_columns  # the last page may reach beyond the longest request
        return row * num_columns + columns[is_inside], slots[is_inside]

    def _write(self, changes: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> None:
        num_changed = sum(len(places) for places, _ in changes)
        if not num_changed:
            return
        is_gpu = self.slots.device.type == "cuda"
        # New memory each time: the allocator of pinned memory hands a block out again only when the copies from it are done.
        host = torch.empty((2, num_changed), dtype=torch.int64, pin_memory=is_gpu)
        for half, parts in zip(host.numpy(), zip(*changes, strict=True), strict=True):
            np.concatenate(parts, out=half)
        places, slots = host.to(self.slots.device, non_blocking=is_gpu)
        self.slots.view(-1).index_copy_(0, places, slots.to(torch.int32))
