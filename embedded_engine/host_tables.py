"""What the host tables of a decode step must fulfil; beside `step_checks`, which asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from transfer.engine_types import DecodeItem
from transfer.errors import EngineError
from transfer.layer_groups import NO_PAGE, GroupKind, LayerGroup

HostTables = tuple[tuple[int, ...], ...]
"""Host pages of one request, one table per layer group, empty where it has none."""


class HostTableChecks:
    """Refuses items whose host pages do not fit the host pool or their own page tables.

    Tables are long and rarely change from one step to the next: tuples that are the same objects as in the last step are not
    looked at again, and are handed on as the same objects.

    Args:
        groups: The pool's groups of layers.
        page_size: Tokens of a page.
        num_host_pages: Host pages of each group; None where there is no host pool.
    """

    def __init__(self, groups: Sequence[LayerGroup], page_size: int, num_host_pages: Sequence[int] | None) -> None:
        self._groups = tuple(groups)
        self._page_size = page_size
        self._num_host_pages = None if num_host_pages is None else tuple(num_host_pages)
        self._nothing: HostTables = ((),) * len(self._groups)
        self._last: dict[str, DecodeItem] = {}

    def check(self, items: Sequence[DecodeItem]) -> list[HostTables]:
        """The items' host tables, one for each group, in every item.

        Raises:
            EngineError: One does not fit.
        """
        checked = [self._checked(item) if item.host_tables else self._nothing for item in items]
        self._last = {item.request_id: item for item in items if item.host_tables}
        return checked

    def _checked(self, item: DecodeItem) -> HostTables:
        name = f"request {item.request_id!r}"
        if len(item.host_tables) != len(self._groups):
            names = ", ".join(group.name for group in self._groups)
            raise EngineError(f"{name} has {len(item.host_tables)} host tables; the model has one for each of: {names}")
        if not any(map(len, item.host_tables)):
            return self._nothing
        if self._num_host_pages is None:
            raise EngineError(f"{name} has pages in host memory; the engine has no host pool (use_host_pool)")
        for index, table in enumerate(item.host_tables):
            if table:
                self._check_table(item, index, self._num_host_pages[index])
        return tuple(tuple(table) for table in item.host_tables)  # of a tuple, itself

    def _check_table(self, item: DecodeItem, index: int, num_host_pages: int) -> None:
        group, table = self._groups[index], item.host_tables[index]
        name = f"request {item.request_id!r}, {group.name}"
        if group.kind is not GroupKind.FULL:
            raise EngineError(f"{name} has {len(table)} host pages; only full attention can leave the device")
        newest = item.position // self._page_size
        if len(table) > newest:
            raise EngineError(
                f"{name} has {len(table)} host pages; position {item.position} is written on the device, so at most {newest}"
            )
        if self._is_known(item, index):
            return
        if not 0 <= min(table) <= max(table) < num_host_pages:
            raise EngineError(f"{name} has host pages {min(table)} to {max(table)}; the host pool's are in [0, {num_host_pages})")
        on_device = tuple(item.page_tables[index][: len(table)]) if index < len(item.page_tables) else ()
        if on_device.count(NO_PAGE) != len(table):
            raise EngineError(f"{name} has {len(table)} host pages; so many entries of its page table must begin it as {NO_PAGE}")

    def _is_known(self, item: DecodeItem, index: int) -> bool:
        """Whether both tables are the tuples that passed in the last step."""
        last = self._last.get(item.request_id)
        if last is None or index >= min(len(last.page_tables), len(item.page_tables)):
            return False
        pairs = ((item.host_tables[index], last.host_tables[index]), (item.page_tables[index], last.page_tables[index]))
        return all(now is before and isinstance(now, tuple) for now, before in pairs)
