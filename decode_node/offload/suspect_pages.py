"""Delete damaged pages from the store. They are not looked for until that succeeds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

from transfer.storage.client import StoreClient

PAGES_AT_ONCE: Final = 64
"""Pages of one call, which has one deadline."""

RETRY_S: Final = 5.0
"""Pause before the next attempt to delete pages that were not deleted."""

MOST: Final = 1 << 18
"""Maximum number of remembered pages, which take some tens of megabytes. Above it, the oldest pages are trusted again."""

PageName = tuple[int, bytes]
"""Group of layers and hash of a page in host memory and in the store."""


class DistrustedPages:
    """See the module's docstring. Owned by the leader's loop.

    Args:
        keys_of: See `StoreLeader`.
        being_put: Pages on their way into the store, which may arrive there after they were deleted.
    """

    def __init__(
        self, client: StoreClient, *, keys_of: Callable[[int, bytes], Sequence[str]], being_put: Collection[PageName]
    ) -> None:
        self._client = client
        self._keys_of = keys_of
        self._being_put = being_put
        self._names: dict[PageName, int] = {}  # with the count at which each was added; the oldest first
        self._num_added = 0
        self._deleting: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __contains__(self, name: PageName) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, names: Sequence[PageName]) -> None:
        """Delete these pages as soon as the store can be reached."""
        for name in names:
            self._num_added += 1
            self._names.pop(name, None)
            self._names[name] = self._num_added
        while len(self._names) > MOST:
            del self._names[next(iter(self._names))]
        if names:
            self._delete()

    def close(self) -> None:
        """Delete nothing more."""
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()

    def _delete(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._deleting is None and not self._is_closed:
            self._deleting = asyncio.get_running_loop().create_task(self._delete_all())

    async def _delete_all(self) -> None:
        """Try to delete each present page once."""
        left = list(self._names.items())
        while left and not self._is_closed:
            names, left = left[:PAGES_AT_ONCE], left[PAGES_AT_ONCE:]
            keys = [self._keys_of(*name) for name, _ in names]
            answers = iter(await self._client.delete([key for of_page in keys for key in of_page]))
            for (name, added), of_page in zip(names, keys, strict=True):
                is_deleted = all([next(answers) for _ in of_page])
                if is_deleted and self._names.get(name) == added and name not in self._being_put:
                    del self._names[name]
        self._deleting = None
        if self._names and not self._is_closed:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._delete)
