"""What a decode leader counts of pages outside of the device."""

from __future__ import annotations

from transfer.metrics.series import Series


class TierMetrics:
    """What a decode leader counts of pages outside of the device. Pages count once, and not for every rank.

    Args:
        series: The leader's.
        is_shown: Whether zeros are shown from the start.
    """

    def __init__(self, series: Series, *, is_shown: bool) -> None:
        self._series = series
        if is_shown:
            self._show_zeros()

    def _show_zeros(self) -> None:
        series = self._series
        for name, label, values in (
            ("offload_hit_tokens", "tier", ("device", "host", "storage")),
            ("offload_saved_pages", "source", ("prompt", "generated")),
            ("offload_backups", "outcome", ("stored", "failed")),
        ):
            for value in values:
                series(name, **{label: value})
        for name in ("prompt_tokens", "released_pages", "restored_pages", "host_full", "stalls"):
            series(f"offload_{name}")

    def looked_for(self, num_tokens: int) -> None:
        """A try's prompt of so many tokens was looked for in the tiers."""
        self._series("offload_prompt_tokens").inc(num_tokens)

    def hit(self, tier: str, num_tokens: int) -> None:
        """Tokens of a prompt were found in "device", "host" or "storage"."""
        self._series("offload_hit_tokens", tier=tier).inc(num_tokens)

    def saved(self, source: str, num_pages: int) -> None:
        """Pages of a "prompt", or "generated" ones, are in host memory on every rank."""
        self._series("offload_saved_pages", source=source).inc(num_pages)

    def released_early(self, num_pages: int) -> None:
        """Device pages were given back before their request ended."""
        self._series("offload_released_pages").inc(num_pages)

    def brought_back(self, num_pages: int) -> None:
        """Pages are on the device again."""
        self._series("offload_restored_pages").inc(num_pages)

    def host_full(self) -> None:
        """Host memory had no room for a request; once of each."""
        self._series("offload_host_full").inc()

    def stalled(self) -> None:
        """A step of a request has to wait; once of each."""
        self._series("offload_stalls").inc()

    def backed_up(self, num_pages: int, num_failed: int) -> None:
        """So many pages are in the store on every rank, and so many could not be put there."""
        self._series("offload_backups", outcome="stored").inc(num_pages)
        self._series("offload_backups", outcome="failed").inc(num_failed)

    def host_pages(self, group: str, *, free: int, cached: int, held: int) -> None:
        """Host pages of a group of layers now."""
        for state, pages in (("free", free), ("cached", cached), ("held", held)):
            self._series("host_pages", group=group, state=state).set(pages)

    def backup_queue(self, num_pages: int) -> None:
        """So many pages wait to be put into the store now."""
        self._series("offload_backup_queue").set(num_pages)
