"""Divide a request's pages between device and host memory. Counts pages of the layers that keep every token. Pure.

A request with early release has a *share* of the device pool. Its leading pages beyond the share, the *guaranteed* pages, have
room promised in host memory, so it can always continue. Its *boundary* is the number of leading pages in host memory alone. The
newest pages are on the device, at least those of the window in the settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from transfer.errors import ConfigError

STRIDES_BEHIND = 3
"""Strides of a share besides the window: one is being filled, one is being saved, one is saved and about to leave the device.

With fewer strides a request waits for its copies.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """The settings, in pages.

    Args:
        stride_pages: Pages that are saved, and leave the device, at a time.
        window_tokens: Newest tokens of a request that stay on the device; None means all, without early release. A prompt that
            arrives in host memory keeps fewer if the pool has no room for them and for rounding up to its chunks.
        high_water: Fraction of the pool above which requests give up pages.
        low_water: Fraction of the pool below which pages are brought back.

    Raises:
        ConfigError: The pool is too small for one request's least share.
    """

    page_size: int
    pool_pages: int
    stride_pages: int
    window_tokens: int | None
    high_water: float
    low_water: float

    def __post_init__(self) -> None:
        if self.window_tokens is not None and self._window_share > self.pool_pages:
            stride_tokens = self.stride_pages * self.page_size
            raise ConfigError(
                f"offload.device_window is {self.window_tokens} tokens and offload.stride_tokens {stride_tokens}, which take "
                f"{self._window_share} pages of {self.page_size} tokens of each request; the device pool has {self.pool_pages}: "
                "lower one of them, or give it more pages (pool.num_pages)"
            )

    @property
    def has_early_release(self) -> bool:
        """Whether pages leave the device before their request ends."""
        return self.window_tokens is not None

    @property
    def high_pages(self) -> int:
        """Used pages up to which requests may take more than their least share."""
        return int(self.pool_pages * self.high_water)

    @property
    def low_pages(self) -> int:
        """Used pages up to which pages are brought back."""
        return int(self.pool_pages * self.low_water)

    @property
    def _window_pages(self) -> int:
        return -(-(self.window_tokens or 0) // self.page_size) + 1  # one that begins inside a page touches one more

    @property
    def _window_share(self) -> int:
        return self._window_pages + STRIDES_BEHIND * self.stride_pages

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def grid_pages(self, chunk_tokens: int) -> int:
        """Return the pages between possible boundaries of an arriving prompt, which are where both a page and a chunk begin.

        Each part of a chunk is scattered either into host memory or onto the device.
        """
        return math.lcm(self.page_size, chunk_tokens) // self.page_size

    def least_share(self, total_pages: int, grid_pages: int) -> int:
        """Return the smallest share with which a request of so many pages can continue."""
        if not self.has_early_release:
            return total_pages
        needed = max(self._window_share, grid_pages + 1 + self.stride_pages)
        # Keeps the window of a prompt on the device, however far `first_boundary` is rounded up. The pool may have less.
        rounded = self._window_pages + grid_pages - 1 + 2 * self.stride_pages
        return min(total_pages, max(needed, min(rounded, self.pool_pages)))

    def first_boundary(self, prompt_tokens: int, *, total_pages: int, share: int, grid_pages: int) -> int:
        """Return the number of leading pages of a prompt that go to host memory as they arrive."""
        prompt_pages = self.num_pages(prompt_tokens)
        excess = prompt_pages - (share - 2 * self.stride_pages)
        if share >= total_pages or excess <= 0:
            return 0
        most = prompt_tokens // self.page_size // grid_pages * grid_pages  # a page that is not whole stays on the device
        return min(-(-excess // grid_pages) * grid_pages, most)

    def next_boundary(self, *, boundary: int, end: int, share: int, saved_end: int) -> int:
        """Return the new boundary: whole strides further, so that the share has room for one more stride.

        Args:
            boundary: The present one.
            end: Pages up to the newest token.
            saved_end: Leading pages that can leave the device.
        """
        excess = end - boundary + self.stride_pages - share
        if excess <= 0:
            return boundary
        strides = -(-excess // self.stride_pages)
        return max(boundary, min(boundary + strides * self.stride_pages, saved_end))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRules:
    """Divide the pages of a request that device and host memory cannot hold between host memory and the store.

    Its leading pages lie in the store, in whole blocks. Those after them are in host memory, at most its *host share*, and move
    on to the store when the share is used up.

    Args:
        block_pages: Pages of a block.
        host_pages: Pages in host memory.
        max_pages: Maximum number of pages of running requests in the store; None means no limit.
    """

    block_pages: int
    host_pages: int
    max_pages: int | None = None

    def least_host_share(self, grid_pages: int, stride_pages: int) -> int:
        """Return the smallest host share with which a request can continue.

        One block moves on while arriving chunks, or strides that leave the device, fill another.
        """
        return 2 * self.block_pages + max(grid_pages, 2 * stride_pages)

    def host_share(self, grid_pages: int, stride_pages: int) -> int:
        """Return the host share of a request: half of host memory, so that other requests have room as well."""
        return max(self.least_host_share(grid_pages, stride_pages), self.host_pages // 2)

    def num_stored(self, boundary: int, host_share: int) -> int:
        """Return how many leading pages of an arriving prompt go on to the store."""
        return max(0, -(-(boundary - host_share) // self.block_pages) * self.block_pages)
