"""What a decode leader asks of whoever decides where a request's pages lie; and the answer where there is only the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from decode_node.admission import Admission, Room
from transfer.instance import Instance
from transfer.layer_groups import PageCounts
from transfer.storage.keys import PageHashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is known of a prompt before anybody computes it.

    Args:
        token_ids: Its tokens.
        chain: Hashes of its whole pages, which generated ones are added to; None where nothing is kept.
        fetched: Of these, those that were brought from the store for it.
        asked_ns: When it was asked for, since the epoch: what is stored of it counts as used then.
    """

    token_ids: Sequence[int]
    chain: PageHashes | None = None
    fetched: frozenset[bytes] = frozenset()
    asked_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request's pages go.

    Args:
        pages: Device pages of each group of layers.
        start_token: First token that has to come from prefill.
        host_pages: Host pages of its leading pages that are not on the device.
    """

    pages: PageCounts
    start_token: int = 0
    host_pages: tuple[int, ...] = ()


class Tiers(Protocol):
    """The tiers of a decode node; requests are known by the id of their try. Owned by the leader's loop."""

    def listen(self, *, on_loaded: Callable[[str], None], on_room: Callable[[], None]) -> None:
        """Args:
        on_loaded: Called with the id of a request all of whose known pages are on the device.
        on_room: Called when a request that missed a step may be able to go on.
        """
        ...

    def refusal(self, num_tokens: int) -> str | None:
        """Why a request of so many tokens can never have room, to follow its name and number; None when it can."""
        ...

    async def look_up(self, token_ids: Sequence[int], salt: str, *, prefill: Instance, may_skip: bool) -> Prompt:
        """Bring what can be had of a prompt near, in bounded time.

        Args:
            prefill: Instance that computes the prompt. Only KV of the same precision is shared.
            may_skip: As of `place`; if not, nothing of it is of use, and nothing is waited for.
        """
        ...

    def place(
        self,
        request_id: str,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        chunk_tokens: int,
        may_skip: bool,
        accepted_s: float,
    ) -> Place | None:
        """Take room for all of a request; None is "not yet". Room is set aside for the oldest request that got this answer.

        Args:
            chunk_tokens: Where the chunks of its prompt begin.
            may_skip: Whether prefill can leave out what is known of the prompt.
            accepted_s: Time of the request's acceptance, on the monotonic clock. All attempts of a request have the same.

        Raises:
            LayoutError: With chunks of that size it can never have room.
        """
        ...

    def begin_loading(self, request_id: str) -> None:
        """Every rank has been told of the request: have what is known of its prompt loaded onto the device."""
        ...

    def is_loading(self, request_id: str) -> bool:
        """Whether that is still under way."""
        ...

    def begin(self, request_id: str) -> None:
        """All of the prompt is on every rank: the request runs."""
        ...

    def computed(self, request_id: str, token_id: int) -> None:
        """A step has put the token's KV into every rank's pool; of a request that does not run any more, without effect."""
        ...

    def step_over(self) -> None:
        """All of a step's tokens have been told."""
        ...

    def may_step(self, request_id: str, position: int) -> bool:
        """Whether a step of a running request at this position has the pages that it needs; if not, `on_room` is called later."""
        ...

    def finish(self, request_id: str) -> None:
        """A running request has its last token; the ranks are about to be told."""
        ...

    def give_up(self, request_id: str) -> None:
        """A request ends early, wherever it stands. Does nothing twice."""
        ...

    def damaged(self, prompt: Prompt) -> None:
        """A step, of either tier, has found that the KV of such a prompt, or of what was generated behind it, is no good."""
        ...

    def gone(self, request_id: str) -> None:
        """Every rank has given its pages back."""
        ...


class DeviceOnly:
    """`Tiers` of a node that keeps nothing but on the device, and nothing longer than its request."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def listen(self, *, on_loaded: Callable[[str], None], on_room: Callable[[], None]) -> None:
        pass

    def refusal(self, num_tokens: int) -> str | None:
        pages = self._admission.peak(num_tokens)
        if pages.fit(self._admission.pool_pages):
            return None
        return f"need {self._admission.shown(pages)} pages; this decode node's pool has fewer"

    async def look_up(self, token_ids: Sequence[int], salt: str, *, prefill: Instance, may_skip: bool) -> Prompt:
        return Prompt(token_ids=token_ids)

    def place(
        self,
        request_id: str,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        chunk_tokens: int,
        may_skip: bool,
        accepted_s: float,
    ) -> Place | None:
        pages = self._admission.peak(len(prompt.token_ids) + max_new_tokens)
        if self._admission.reserve(request_id, pages, accepted_s=accepted_s):
            return Place(pages=pages)
        self._admission.wait(request_id, Room(pages=pages), accepted_s=accepted_s)
        return None

    def begin_loading(self, request_id: str) -> None:
        pass

    def is_loading(self, request_id: str) -> bool:
        return False

    def begin(self, request_id: str) -> None:
        pass

    def computed(self, request_id: str, token_id: int) -> None:
        pass

    def step_over(self) -> None:
        pass

    def may_step(self, request_id: str, position: int) -> bool:
        return True

    def finish(self, request_id: str) -> None:
        pass

    def give_up(self, request_id: str) -> None:
        self._admission.stop_waiting(request_id)

    def damaged(self, prompt: Prompt) -> None:
        pass

    def gone(self, request_id: str) -> None:
        self._admission.release(request_id)
