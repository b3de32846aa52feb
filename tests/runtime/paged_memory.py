"""Substitutes for an engine in tests of workers: pages that record their tokens, and a thread that runs work on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transfer.layer_groups import NO_PAGE, GroupKind, LayerGroup, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard

WINDOW_TOKENS = 6
PAGE_SIZE = 4
LAYOUT = KVLayout(
    layers=(
        LayerSpec(num_kv_heads=2, k_head_dim=4, v_head_dim=4),
        LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=2, k_head_dim=4, v_head_dim=4, window_tokens=WINDOW_TOKENS),
        LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=2, k_head_dim=9, v_head_dim=0),
    ),
    dtype=DType.FLOAT32,
)
SHARD = Shard(page_size=PAGE_SIZE)
GROUPS = layer_groups(LAYOUT)


class PagedMemory:
    """The tokens in the pages of every group. Reading another request's, or none, is a failure of the test."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, int], tuple[str, int]] = {}  # group, page, offset -> request, token

    def write(self, request_id: str, tables: Sequence[Sequence[int]], tokens: Iterable[int]) -> None:
        for group, table in zip(GROUPS, tables, strict=True):
            for token in tokens:
                self._found[self._place(group, table, token)] = (request_id, token)

    def read(
        self, request_id: str, tables: Sequence[Sequence[int]], num_tokens: int, *, window_tokens: int, has_states: bool = True
    ) -> None:
        """Read as after `num_tokens` tokens; a window reaches the last `window_tokens` of them."""
        for group, table in zip(GROUPS, tables, strict=True):
            if group.kind is GroupKind.STATE and not has_states:
                continue
            first = {GroupKind.FULL: 0, GroupKind.WINDOW: num_tokens - window_tokens, GroupKind.STATE: num_tokens - 1}[group.kind]
            for token in range(max(0, first), num_tokens):
                assert self._found.get(self._place(group, table, token)) == (request_id, token), (group.name, token, table)

    def spoil(self, group: LayerGroup, pages: Sequence[int]) -> None:
        """Lose the content of free pages, as if it was overwritten."""
        for place in [place for place in self._found if place[0] == group.name and place[1] in pages]:
            del self._found[place]

    def _place(self, group: LayerGroup, table: Sequence[int], token: int) -> tuple[str, int, int]:
        size = group.page_size(PAGE_SIZE)
        entry, offset = (0, 0) if group.kind is GroupKind.STATE else divmod(token, size)
        assert table[entry] != NO_PAGE, (group.name, token, table)
        return group.name, table[entry], offset


class HeldThread:
    """A `WorkerThread` that runs its work when the test calls `run_next`."""

    def __init__(self) -> None:
        self._work: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()

    def __len__(self) -> int:
        return len(self._work)

    def submit(self, work: Callable[[], Any], on_done: Callable[[Any], None]) -> None:
        self._work.append((work, on_done))

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        callback(*args)

    def run_next(self) -> None:
        work, on_done = self._work.popleft()
        on_done(work())
