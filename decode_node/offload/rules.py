"""How much of a request lies on the device and how much in host memory, in pages of the layers that keep every token. Pure.

A request with early release has a *share* of the device pool, and the leading pages that do not fit it, its *guaranteed* pages,
have room promised in host memory: so it can always go on. Its *boundary* is the number of leading pages that lie in host memory
alone. The newest pages are on the device, at least those of the window that the settings ask for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from transfer.errors import ConfigError

STRIDES_BEHIND = 3
"""Strides of pages that a share has besides the window: one is filled, one is being saved, one has been saved and waits to be
left behind. With fewer a request would wait for its copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """The settings, in pages.

    Args:
        page_size: Tokens of a page.
        pool_pages: Device pages of the layers that keep every token.
        stride_pages: Pages that are saved, and left behind, at a time.
        window_tokens: Newest tokens of a request that stay on the device; None: all of them, nothing leaves it early. Of a prompt
            that arrives in host memory only as far as the pool has room for them and for what its chunks round up.
        high_water: Part of the pool above which requests give pages up.
        low_water: Part of the pool below which pages are brought back.

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
        """Pages of the pool up to which requests take more than their least share."""
        return int(self.pool_pages * self.high_water)

    @property
    def low_pages(self) -> int:
        """Pages of the pool up to which pages are brought back."""
        return int(self.pool_pages * self.low_water)

    @property
    def _window_pages(self) -> int:
        return -(-(self.window_tokens or 0) // self.page_size) + 1  # one that begins inside a page touches one more

    @property
    def _window_share(self) -> int:
        return self._window_pages + STRIDES_BEHIND * self.stride_pages

    def num_pages(self, num_tokens: int) -> int:
        """Pages of so many tokens."""
        return -(-num_tokens // self.page_size)

    def grid_pages(self, chunk_tokens: int) -> int:
        """Pages between the places where a boundary can be while a prompt arrives: where both a page and a chunk begin.

        A part of a chunk is scattered either into host memory or onto the device.
        """
        return math.lcm(self.page_size, chunk_tokens) // self.page_size

    def least_share(self, total_pages: int, grid_pages: int) -> int:
        """The smallest share with which a request of so many pages can go on."""
        if not self.has_early_release:
            return total_pages
        needed = max(self._window_share, grid_pages + 1 + self.stride_pages)
        # So that the window of a prompt is on the device however far `first_boundary` is rounded up. The pool may have less.
        rounded = self._window_pages + grid_pages - 1 + 2 * self.stride_pages
        return min(total_pages, max(needed, min(rounded, self.pool_pages)))

    def first_boundary(self, prompt_tokens: int, *, total_pages: int, share: int, grid_pages: int) -> int:
        """Leading pages of a prompt that go to host memory as they arrive."""
        prompt_pages = self.num_pages(prompt_tokens)
        excess = prompt_pages - (share - 2 * self.stride_pages)
        if share >= total_pages or excess <= 0:
            return 0
        most = prompt_tokens // self.page_size // grid_pages * grid_pages  # what is not whole stays on the device, and grows
        return min(-(-excess // grid_pages) * grid_pages, most)

    def next_boundary(self, *, boundary: int, end: int, share: int, saved_end: int) -> int:
        """Where the boundary should be: whole strides further, so that a share has room for one more stride.

        Args:
            boundary: Where it is.
            end: Pages up to the newest token.
            share: Device pages that the request may have.
            saved_end: Leading pages that can be left behind.
        """
        excess = end - boundary + self.stride_pages - share
        if excess <= 0:
            return boundary
        strides = -(-excess // self.stride_pages)
        return max(boundary, min(boundary + strides * self.stride_pages, saved_end))
