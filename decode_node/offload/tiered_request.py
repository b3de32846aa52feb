"""What the leader remembers of one request's pages: how far they are computed, saved, and left behind by the device.

Data and the questions that it can answer of itself; every decision is that of `decode_node.offload.leader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from decode_node.offload.host_tier import HostPage
from decode_node.offload.rules import TierRules
from transfer.layer_groups import GroupKind, LayerGroup
from transfer.storage.keys import PageHashes


@dataclass(slots=True, kw_only=True, eq=False)
class TieredRequest:
    """One try of a request, from its place in both tiers until every rank has given its pages back.

    Pages are counted in the layers that keep every token, where nothing else is said.

    Args:
        request_id: The try's.
        rules: The settings.
        chain: Hashes of its whole pages, prompt first.
        num_prompt_tokens: Tokens of the prompt.
        total_pages: Pages of prompt and new tokens.
        share: Device pages that it may have.
        least_share: The smallest share with which it can go on.
        guaranteed: Leading pages that have, or are promised, room in host memory.
        boundary: Leading pages that are read in host memory.
        host: The leading pages that are held in host memory, for as long as the request lives.
        next_save: First page that has not been looked at for saving; never before the boundary.
        first_window_page: First page that the prompt has brought whole of each sliding window, by the index of its group.
        next_window_save: First page of each that has not been looked at for saving.
        num_computed: Tokens whose KV is in the pool.
        saving: First window entry that a copy under way still reads, by job and group.
        num_copied_from: Other requests that are getting pages of it.
        asked_ns: See `Prompt`.
    """

    request_id: str
    rules: TierRules
    chain: PageHashes
    num_prompt_tokens: int
    total_pages: int
    share: int
    least_share: int
    guaranteed: int
    boundary: int
    host: list[HostPage] = field(default_factory=list)
    next_save: int = 0
    first_window_page: dict[int, int] = field(default_factory=dict)
    next_window_save: dict[int, int] = field(default_factory=dict)
    num_computed: int = 0
    num_loading: int = 0  # jobs that bring known pages of its prompt onto the device, before it may run
    is_running: bool = False
    is_moving: bool = False  # its boundary is being moved, or pages are being brought back
    shrinks_to: int | None = None  # the share that is asked of it, while the device is short of pages
    leaves_to: int | None = None  # the boundary to which the ranks are moving it, and take the difference in shares
    returns_to: int | None = None  # the boundary down to which pages are being brought back, and have their device pages already
    saving: dict[int, dict[int, int]] = field(default_factory=dict)
    num_copied_from: int = 0
    stalled_at: int | None = None  # the position of the last step that had to wait
    is_damaged: bool = False  # its KV may be no good: it goes on, and nobody else gets any of it
    asked_ns: int = 0
    _num_ready: int = 0

    @property
    def target_share(self) -> int:
        """The share to make do with."""
        return self.share if self.shrinks_to is None else self.shrinks_to

    @property
    def num_whole(self) -> int:
        """Pages all of whose tokens are computed."""
        return self.num_computed // self.rules.page_size

    @property
    def num_ready(self) -> int:
        """Leading pages that every rank has in host memory, and that stay there."""
        while self._num_ready < len(self.host) and self.host[self._num_ready].is_ready:
            self._num_ready += 1
        return self._num_ready

    def wanted_boundary(self) -> int:
        """Where its boundary should be for the token that comes next."""
        return self.rules.next_boundary(
            boundary=self.boundary,
            end=self.num_whole + 1,
            share=self.target_share,
            saved_end=min(self.num_ready, self.guaranteed),
        )

    def may_step(self, position: int, groups: Sequence[LayerGroup], slack_pages: int) -> bool:
        """Whether a step can be run without more device pages than it has.

        Args:
            slack_pages: Pages of a window that are set aside for those that a save still reads when the window has passed them.
        """
        end = position // self.rules.page_size + 1
        if end - (self.boundary if self.returns_to is None else self.returns_to) > self.share:
            return False
        if self.leaves_to is not None and end - self.leaves_to > self.target_share:
            return False
        for of_job in self.saving.values():
            for index, entry in of_job.items():
                if groups[index].first_needed_token(position) // self.rules.page_size - entry > slack_pages:
                    return False
        return True

    def whole_windows(self, groups: Sequence[LayerGroup]) -> None:
        """The prompt is there: of a window, saving begins with the first page that has come whole."""
        for index, group in enumerate(groups):
            if group.kind is GroupKind.WINDOW:
                self.first_window_page[index] = self.rules.num_pages(group.first_travelling_token(self.num_prompt_tokens))
        self.next_window_save = dict(self.first_window_page)
