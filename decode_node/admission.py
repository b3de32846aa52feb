"""Who has room in the decode ranks' KV pools: by count, all or nothing, for the whole life of a request. Pure.

All ranks have pools of the same number of pages, so one count serves them all. Room is taken when prefill is about to start
and not before, and covers prompt and new tokens, so that generation can never run out of pages half way.
"""

from __future__ import annotations

from transfer.errors import LocalProtocolError
from transfer.layer_groups import LayerGroup, PageCounts, PageNeeds


def page_needs(groups: tuple[LayerGroup, ...], page_size: int) -> PageNeeds:
    """What requests take of a decode rank's pool: of a prompt its last window arrives, and then one token is computed a step."""
    return PageNeeds(groups=groups, page_size=page_size, tokens_in_flight=1)


class Admission:
    """Counts the pages that requests hold.

    Args:
        pool_pages: Pages of every rank's pool.
        needs: What requests take of it.
        max_running: Requests that may hold room at once.
    """

    def __init__(self, *, pool_pages: PageCounts, needs: PageNeeds, max_running: int) -> None:
        self._pool_pages = pool_pages
        self._needs = needs
        self._max_running = max_running
        self._held: dict[str, PageCounts] = {}
        self._free_pages = pool_pages

    @property
    def num_running(self) -> int:
        return len(self._held)

    @property
    def free_pages(self) -> PageCounts:
        return self._free_pages

    def pages_for(self, num_tokens: int) -> str:
        """What a request of so many tokens needs, for a message."""
        return self._needs.shown(self._needs.peak(num_tokens))

    def can_ever_hold(self, num_tokens: int) -> bool:
        return self._needs.peak(num_tokens).fit(self._pool_pages)

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Take room for all of the request; False means "not yet"."""
        if request_id in self._held:
            raise LocalProtocolError(f"request {request_id} has room already")
        pages = self._needs.peak(num_tokens)
        if not pages.fit(self._free_pages) or len(self._held) >= self._max_running:
            return False
        self._held[request_id] = pages
        self._free_pages -= pages
        return True

    def release(self, request_id: str) -> None:
        """Every rank has given the request's pages back."""
        self._free_pages += self._held.pop(request_id)

    def holds(self, request_id: str) -> bool:
        return request_id in self._held
