"""Pages of the store that are damaged, as a request that had them has shown: deleted there, and not looked for until they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

from transfer.storage.client import StoreClient

PAGES_AT_ONCE: Final = 64
"""Which the store is to delete by one deadline."""

RETRY_S: Final = 5.0
"""After which it is asked again for what it has not deleted."""

MOST: Final = 1 << 18
"""Pages that are remembered; of more the oldest are trusted again. A few long prompts, and some tens of megabytes."""

PageName = tuple[int, bytes]
"""Of a page in host memory and in the store: its group of layers, and its hash."""


class DistrustedPages:
    """See the module's docstring; owned by the leader's loop.

    Args:
        client: To delete with.
        keys_of: From a group's index and a page's hash, the key of each rank's part.
        being_put: Pages on their way into the store, which could get there once they have been deleted.
    """

    def __init__(
        self, client: StoreClient, *, keys_of: Callable[[int, bytes], Sequence[str]], being_put: Collection[PageName]
    ) -> None:
        self._client = client
        self._keys_of = keys_of
        self._being_put = being_put
        self._names: dict[PageName, int] = {}  # and when each was added, by count; the oldest first
        self._num_added = 0
        self._deleting: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __contains__(self, name: PageName) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, names: Sequence[PageName]) -> None:
        """Nobody is to find these, as far as the store can be reached."""
        for name in names:
            self._num_added += 1
            self._names.pop(name, None)
            self._names[name] = self._num_added
        while len(self._names) > MOST:
            del self._names[next(iter(self._names))]
        if names:
            self._delete()

    def close(self) -> None:
        """Have nothing more deleted."""
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
        """Once for each that there is now."""
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
