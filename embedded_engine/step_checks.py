"""What a step must fulfil before it is planned: every check that needs neither the model nor the device.

What is wrong with an item is found here, on every rank of a group alike, before anything is launched; what is handed on holds
nothing that was not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from embedded_engine.host_tables import HostTableChecks, HostTables
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
        table: What of it was handed on.
        first: The first entry that was looked at.
    """

    given: tuple[int, ...]
    table: tuple[int, ...]
    first: int


class StepChecks:
    """Refuses steps that do not fit the model or the pool.

    Page tables are long and hardly change from one decode step to the next: of those that took part in the last one, only new
    entries are looked at, and a tuple that is the same object costs nothing. Not thread-safe: it has one owner.

    Args:
        groups: The pool's groups of layers.
        num_pages: Pages of each.
        page_size: Tokens of a page.
        max_context_tokens: Most tokens of a request.
        vocab_size: Tokens that there are.
        num_host_pages: Host pages of each group; None where there is no host pool.
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
    ) -> None:
        self._hosts = HostTableChecks(groups, page_size, num_host_pages)
        self._groups = tuple(groups)
        self._num_pages = tuple(num_pages)
        self._page_sizes = tuple(group.page_size(page_size) for group in groups)
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size
        self._last_decode: dict[str, tuple[_Checked, ...]] = {}
        self._nothing_in_host = (0,) * len(self._groups)

    def check_prefill(self, items: Sequence[PrefillItem]) -> list[CheckedTables]:
        """The items' page tables.

        Raises:
            EngineError: An item does not fit the model or the pool.
        """
        spans = [(item.first_token, item.end_token) for item in items]
        checked = self._check(items, spans, [self._nothing_in_host] * len(items), {})
        for item in items:
            self._check_tokens(item.request_id, item.token_ids)
        return [tuple(one.table for one in own) for own in checked]

    def check_decode(self, items: Sequence[DecodeItem]) -> list[CheckedTables]:
        """As `check_prefill`; the same objects as in the last step where nothing of a table has changed."""
        spans = [(item.position, item.position + 1) for item in items]
        host_ends = [tuple(map(len, own)) for own in self.check_host_tables(items)]
        checked = self._check(items, spans, host_ends, self._last_decode)
        for item in items:
            self._check_tokens(item.request_id, (item.token_id,))
        self._last_decode = {item.request_id: own for item, own in zip(items, checked, strict=True)}
        return [tuple(one.table for one in own) for own in checked]

    def check_host_tables(self, items: Sequence[DecodeItem]) -> list[HostTables]:
        """The items' host pages, one table for each group; again the same objects where nothing has changed.

        Raises:
            EngineError: One does not fit the host pool or the item's page tables.
        """
        return self._hosts.check(items)

    def _check(
        self,
        items: Sequence[PrefillItem | DecodeItem],
        spans: Sequence[tuple[int, int]],
        host_ends: Sequence[tuple[int, ...]],
        known: dict[str, tuple[_Checked, ...]],
    ) -> list[tuple[_Checked, ...]]:
        """The tables of each item.

        Args:
            items: The step.
            spans: Of each item, how many tokens of the request are in the pool before the step, and how many after it.
            host_ends: Of each item, how many entries of each table are in host memory.
            known: request_id -> tables that passed before.
        """
        if len({item.request_id for item in items}) != len(items):
            raise EngineError("a request_id is in the step twice; a step has at most one item of a request")
        checked: list[tuple[_Checked, ...]] = []
        for item, (begin, end), ends in zip(items, spans, host_ends, strict=True):
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
            tables = enumerate(zip(item.page_tables, before, ends, strict=True))
            checked.append(tuple(self._checked(item.request_id, index, *table, begin, end) for index, table in tables))
        self._check_states(items, checked)
        return checked

    def _checked(
        self, request_id: str, index: int, pages: Sequence[int], known: _Checked | None, host_end: int, begin: int, end: int
    ) -> _Checked:
        """One table, after a check of the entries that a step over the tokens [begin, end) looks at."""
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
        given = tuple(pages)  # of a tuple, itself: what may still change is not kept
        table = (NO_PAGE,) * first + given[first:num_entries]
        new = first
        if known is not None:
            both = min(len(known.table), num_entries)
            # The allocator's own numbers, which are the same objects: compared without a look at them.
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
        """Refuse two requests with one state: each would go on from the other's."""
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

    def _name(self, request_id: str, index: int) -> str:
        return f"request {request_id!r}" + (f", {self._groups[index].name}" if len(self._groups) > 1 else "")
