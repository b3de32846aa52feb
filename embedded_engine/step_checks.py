"""Checks of a step before it is planned; they need neither the model nor the device.

Every rank of a group finds a wrong item here, before anything is launched. The returned tables hold checked entries only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transfer.engine_types import DecodeItem, PrefillItem
from transfer.errors import EngineError
from transfer.layer_groups import NO_PAGE, GroupKind, LayerGroup

CheckedTables = tuple[tuple[int, ...], ...]
"""Page tables of one request, one per layer group: as many entries as its tokens need, `NO_PAGE` below those that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """A page table that passed.

    Args:
        given: The table as it came.
        table: The table that was returned.
        first: The first entry that was checked.
    """

    given: tuple[int, ...]
    table: tuple[int, ...]
    first: int


class StepChecks:
    """Refuse steps that do not fit the model or the pool.

    Tables are long and hardly change from one decode step to the next. So only new entries are checked of a page table that was
    in the last step, and a tuple that is the same object is not read again. Not thread-safe: it has one owner.

    Args:
        groups: The pool's groups of layers.
        num_pages: Pages of each group.
        max_context_tokens: Most tokens of a request.
        num_host_pages: Host pages of each group; None if there is no host pool.
        pages_per_stored_block: Pages of a block in the store; 0 if steps cannot read the store.
        max_draft_tokens: Maximum number of draft tokens of a decode item.
    """

    def __init__(
        self,
        *,
        groups: Sequence[LayerGroup],
        num_pages: Sequence[int],
        page_size: int,
        max_context_tokens: int,
        vocab_size: int,
        num_host_pages: Sequence[int] | None = None,
        pages_per_stored_block: int = 0,
        max_draft_tokens: int = 0,
    ) -> None:
        self._groups = tuple(groups)
        self._num_pages = tuple(num_pages)
        self._page_size = page_size
        self._page_sizes = tuple(group.page_size(page_size) for group in groups)
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size
        self._max_draft_tokens = max_draft_tokens
        self._num_host_pages = None if num_host_pages is None else tuple(num_host_pages)
        self._pages_per_stored_block = pages_per_stored_block
        self._no_host_tables: CheckedTables = ((),) * len(self._groups)
        self._last_tables: dict[str, tuple[_Checked, ...]] = {}
        self._last_items: dict[str, DecodeItem] = {}

    def check_prefill(self, items: Sequence[PrefillItem]) -> list[tuple[CheckedTables, CheckedTables]]:
        """Return the items' page tables and host tables.

        Raises:
            EngineError: An item does not fit the model, the pool or the host pool.
        """
        spans = [(item.first_token, item.end_token) for item in items]
        hosts = [self._checked_whole_hosts(item) if item.host_tables else self._no_host_tables for item in items]
        checked = self._check(items, spans, [[len(table) for table in own] for own in hosts], {})
        for item in items:
            self._check_tokens(item.request_id, item.token_ids)
        return [(tuple(one.table for one in own), host) for own, host in zip(checked, hosts, strict=True)]

    def check_decode(self, items: Sequence[DecodeItem]) -> list[DecodeItem]:
        """Return the items with their checked page tables and host tables, one of each for each group.

        The tables are the same objects as in the last step, if nothing in them has changed.

        Raises:
            EngineError: An item does not fit the model, the pool or the host pool.
        """
        hosts = [self._checked_hosts(item) if item.host_tables else self._no_host_tables for item in items]
        ends = [self._device_begins(item, own) for item, own in zip(items, hosts, strict=True)]
        self._last_items = {item.request_id: item for item in items if item.host_tables}
        spans = [(item.position, item.end_token) for item in items]
        checked = self._check(items, spans, ends, self._last_tables)
        for item in items:
            self._check_tokens(item.request_id, item.token_ids)
            self._check_drafts(item)
        self._last_tables = {item.request_id: own for item, own in zip(items, checked, strict=True)}
        return [
            replace(item, page_tables=tuple(one.table for one in own), host_tables=host)
            for item, own, host in zip(items, checked, hosts, strict=True)
        ]

    def _check(
        self,
        items: Sequence[PrefillItem | DecodeItem],
        spans: Sequence[tuple[int, int]],
        host_ends: Sequence[Sequence[int]],
        known: dict[str, tuple[_Checked, ...]],
    ) -> list[tuple[_Checked, ...]]:
        """Check the page tables of each item.

        Args:
            spans: Tokens of each item's request in the pool, before the step and after it.
            host_ends: Leading entries of each item's tables that are not on the device.
            known: request_id -> tables that passed before.
        """
        if len({item.request_id for item in items}) != len(items):
            raise EngineError("a request_id is in the step twice; a step has at most one item of a request")
        checked: list[tuple[_Checked, ...]] = []
        for item, (begin, end), own_ends in zip(items, spans, host_ends, strict=True):
            if end > self._max_context_tokens:
                raise EngineError(
                    f"request {item.request_id!r} ends at token {end}; the model's context is {self._max_context_tokens} tokens"
                )
            if len(item.page_tables) != len(self._groups):
                names = ", ".join(group.name for group in self._groups)
                raise EngineError(
                    f"request {item.request_id!r} has {len(item.page_tables)} page tables; the model has one for each of: {names}"
                )
            before = known.get(item.request_id, (None,) * len(self._groups))
            tables = enumerate(zip(item.page_tables, before, own_ends, strict=True))
            checked.append(tuple(self._checked(item.request_id, index, *table, begin, end) for index, table in tables))
        self._check_states(items, checked)
        return checked

    def _checked(
        self, request_id: str, index: int, pages: Sequence[int], known: _Checked | None, host_end: int, begin: int, end: int
    ) -> _Checked:
        """Check the entries of one table that a step over the tokens [begin, end) reads."""
        group, page_size = self._groups[index], self._page_sizes[index]
        num_entries = group.num_pages(end, page_size)
        first = max(group.first_needed_token(begin) // page_size, host_end)
        if known is not None and known.first > first:
            known = None
        if known is not None and known.given is pages and len(known.table) == num_entries:
            return known
        if len(pages) < num_entries:
            raise EngineError(
                f"{self._name(request_id, index)} has {len(pages)} pages of {page_size} tokens; {end} tokens need {num_entries}"
            )
        given = tuple(pages)  # a tuple stays the same object; a list can change later and is not kept
        table = (NO_PAGE,) * first + given[first:num_entries]
        new = first
        if known is not None:
            both = min(len(known.table), num_entries)
            # Fast: these are the allocator's numbers, so Python compares objects by identity.
            if table[first:both] == known.table[first:both]:
                new = max(first, both)
        entries = table[new:]
        if entries and not 0 <= min(entries) <= max(entries) < self._num_pages[index]:
            needed = table[first:]
            raise EngineError(
                f"{self._name(request_id, index)} has pages {min(needed)} to {max(needed)}; "
                f"the pool's are in [0, {self._num_pages[index]})"
            )
        return _Checked(given=given, table=table, first=first)

    def _check_states(self, items: Sequence[PrefillItem | DecodeItem], checked: Sequence[tuple[_Checked, ...]]) -> None:
        """Refuse two requests with one state: each would continue the other's."""
        for index, group in enumerate(self._groups):
            if group.kind is not GroupKind.STATE:
                continue
            owners: dict[int, str] = {}
            for item, own in zip(items, checked, strict=True):
                row = own[index].table[0]
                other = owners.setdefault(row, item.request_id)
                if other != item.request_id:
                    raise EngineError(f"requests {other!r} and {item.request_id!r} both have the state in row {row}")

    def _check_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise EngineError(f"request {request_id!r} has token {wrong}; the model's token ids are in [0, {self._vocab_size})")

    def _check_drafts(self, item: DecodeItem) -> None:
        number = item.end_token - item.position - 1
        if number > self._max_draft_tokens:
            raise EngineError(
                f"request {item.request_id!r} has {number} draft tokens; the engine is set up for at most "
                f"{self._max_draft_tokens} (num_speculative_tokens)"
            )
        if number and (item.stored_blocks or any(map(len, item.host_tables))):
            raise EngineError(
                f"request {item.request_id!r} has {number} draft tokens, and pages in host memory or in the "
                "store; each row would read all of them, so such a request must have no draft tokens"
            )

    def _name(self, request_id: str, index: int) -> str:
        return f"request {request_id!r}" + (f", {self._groups[index].name}" if len(self._groups) > 1 else "")

    def _check_num_hosts(self, item: PrefillItem | DecodeItem) -> None:
        """Check that the item has a host table for each group, and that there is a host pool if one of them has pages."""
        name = f"request {item.request_id!r}"
        if len(item.host_tables) != len(self._groups):
            names = ", ".join(group.name for group in self._groups)
            raise EngineError(f"{name} has {len(item.host_tables)} host tables; the model has one for each of: {names}")
        if self._num_host_pages is None and any(map(len, item.host_tables)):
            raise EngineError(f"{name} has pages in host memory; the engine has no host pool (use_host_pool)")

    def _checked_whole_hosts(self, item: PrefillItem) -> CheckedTables:
        """Check that all KV of full attention of the item lies in the host pool. Return the entries that the step needs."""
        self._check_num_hosts(item)
        checked: list[tuple[int, ...]] = []
        for index, (group, table) in enumerate(zip(self._groups, item.host_tables, strict=True)):
            if not len(table):
                checked.append(())
                continue
            name = self._name(item.request_id, index)
            if group.kind is not GroupKind.FULL:
                raise EngineError(f"{name} has {len(table)} host pages; only full attention can lie in host memory")
            num_entries = group.num_pages(item.end_token, self._page_size)
            own = tuple(table)[:num_entries]
            if len(own) < num_entries:
                raise EngineError(f"{name} has {len(own)} host pages; {item.end_token} tokens need {num_entries}")
            self._check_host_range(name, own, index)
            checked.append(own)
        return tuple(checked)

    def _check_host_range(self, name: str, table: Sequence[int], index: int) -> None:
        assert self._num_host_pages is not None
        if not 0 <= min(table) <= max(table) < self._num_host_pages[index]:
            raise EngineError(
                f"{name} has host pages {min(table)} to {max(table)}; the host pool's are in [0, {self._num_host_pages[index]})"
            )

    def _device_begins(self, item: DecodeItem, hosts: CheckedTables) -> list[int]:
        """Return the entries of each table that are in host memory or in the store, after a check of the latter."""
        ends = [len(table) for table in hosts]
        if not item.stored_blocks:
            return ends
        name = f"request {item.request_id!r}"
        if not self._pages_per_stored_block:
            raise EngineError(f"{name} has {len(item.stored_blocks)} blocks in the store; the engine cannot read any")
        index = next(index for index, group in enumerate(self._groups) if group.kind is GroupKind.FULL)
        ends[index] += len(item.stored_blocks) * self._pages_per_stored_block
        newest = item.position // self._page_size
        if ends[index] > newest:
            raise EngineError(
                f"{name} has {ends[index]} pages in the store and in host memory; position {item.position} is written on the "
                f"device, so at most {newest}"
            )
        return ends

    def _checked_hosts(self, item: DecodeItem) -> CheckedTables:
        """Check that the item's host pages fit the host pool and its page tables."""
        self._check_num_hosts(item)
        if not any(map(len, item.host_tables)):
            return self._no_host_tables
        for index, table in enumerate(item.host_tables):
            if table:
                self._check_hosts(item, index)
        return tuple(tuple(table) for table in item.host_tables)

    def _check_hosts(self, item: DecodeItem, index: int) -> None:
        group, table = self._groups[index], item.host_tables[index]
        name = f"request {item.request_id!r}, {group.name}"
        if group.kind is not GroupKind.FULL:
            raise EngineError(f"{name} has {len(table)} host pages; only full attention can leave the device")
        newest = item.position // self._page_size
        if len(table) > newest:
            raise EngineError(
                f"{name} has {len(table)} host pages; position {item.position} is written on the device, so at most {newest}"
            )
        pages = item.page_tables[index] if index < len(item.page_tables) else ()
        last = self._last_items.get(item.request_id)
        if last is not None and index < len(last.page_tables):
            pairs: tuple[tuple[Sequence[int], Sequence[int]], ...] = (
                (table, last.host_tables[index]),
                (pages, last.page_tables[index]),
                (item.stored_blocks, last.stored_blocks),
            )
            if all(now is before and isinstance(now, tuple) for now, before in pairs):
                return  # passed in the last step
        self._check_host_range(name, table, index)
        if tuple(pages[: len(table)]).count(NO_PAGE) != len(table):
            raise EngineError(f"{name} has {len(table)} host pages; so many entries of its page table must begin it as {NO_PAGE}")
