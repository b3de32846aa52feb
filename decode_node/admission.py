"""Who has room in the decode ranks' KV pools: by count, all or nothing, for the whole life of a request. Pure.

All ranks have pools of the same number of pages, so one count serves them all. Room is taken when prefill is about to start
and not before, and covers prompt and new tokens, so that generation can never run out of pages half way. Where pages can leave
the device early (`decode_node.offload`), it covers what a request cannot do without, and the rest is promised in host memory.
"""

from __future__ import annotations

from transfer.errors import LocalProtocolError
from transfer.layer_groups import LayerGroup, PageCounts, PageNeeds


def page_needs(groups: tuple[LayerGroup, ...], page_size: int, *, slack_tokens: int = 0) -> PageNeeds:
    """What requests take of a decode rank's pool: of a prompt its last window arrives, and then one token is computed a step.

    Args:
        slack_tokens: Tokens of a window that are kept a little longer, while they are copied.
    """
    return PageNeeds(groups=groups, page_size=page_size, tokens_in_flight=1 + slack_tokens)


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

    @property
    def pool_pages(self) -> PageCounts:
        """Pages of every rank's pool."""
        return self._pool_pages

    def peak(self, num_tokens: int) -> PageCounts:
        """The most pages that a request of so many tokens ever has."""
        return self._needs.peak(num_tokens)

    def shown(self, pages: PageCounts) -> str:
        """For a message."""
        return self._needs.shown(pages)

    def reserve(self, request_id: str, pages: PageCounts) -> bool:
        """Take room for a request; False means "not yet"."""
        if request_id in self._held:
            raise LocalProtocolError(f"request {request_id} has room already")
        if not pages.fit(self._free_pages) or len(self._held) >= self._max_running:
            return False
        self._held[request_id] = pages
        self._free_pages -= pages
        return True

    def resize(self, request_id: str, group: int, count: int) -> bool:
        """Have the request hold `count` pages more of a group, or less where it is negative; False means "not yet"."""
        change = PageCounts(tuple(count if index == group else 0 for index in range(len(self._pool_pages.by_group))))
        if not change.fit(self._free_pages):
            return False
        self._held[request_id] += change
        self._free_pages -= change
        return True

    def release(self, request_id: str) -> None:
        """Every rank has given the request's pages back."""
        self._free_pages += self._held.pop(request_id)

    def holds(self, request_id: str) -> bool:
        return request_id in self._held
