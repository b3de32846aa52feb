"""Place the pages of a decode node's requests. `Tiers` has the device alone, `OffloadLeader` adds host memory and a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decode_node.admission import Admission, Room
from decode_node.rank_messages import JobDone
from transfer.errors import LocalProtocolError
from transfer.instance import Instance
from transfer.layer_groups import PageCounts
from transfer.storage.keys import PageHashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt, before it is computed.

    Args:
        chain: Hashes of its whole pages, which those of generated pages extend; None if nothing is kept.
        fetched: Hashes of the pages that were fetched from the store for it.
        asked_ns: When it was asked for, since the epoch. Its stored pages count as used then.
    """

    token_ids: Sequence[int] = field(repr=False)
    chain: PageHashes | None = None
    fetched: frozenset[bytes] = frozenset()
    asked_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRequest:
    """A question for room.

    Args:
        request_id: Id of the attempt.
        chunk_tokens: Size of the prompt's chunks.
        may_skip: Whether prefill can leave out the known pages of the prompt.
        accepted_s: Monotonic time of the request's acceptance, the same for all of its attempts.
    """

    request_id: str
    prompt: Prompt
    max_new_tokens: int
    chunk_tokens: int
    may_skip: bool
    accepted_s: float

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and generation."""
        return len(self.prompt.token_ids) + self.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request's pages go.

    Args:
        pages: Device pages of each group of layers.
        start_token: First token that has to come from prefill.
        host_pages, num_stored: See `ExpectRequest`.
    """

    pages: PageCounts
    start_token: int = 0
    host_pages: tuple[int, ...] = ()
    num_stored: int = 0


class Tiers:
    """The tiers of a node that keeps pages on the device only, and no longer than their request. Owned by the leader's loop.

    Requests are known by the id of their attempt.

    Args:
        admission: Counts the device pages that requests hold.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def listen(
        self, *, on_loaded: Callable[[str], None], on_room: Callable[[], None], on_lost: Callable[[str, str], None]
    ) -> None:
        """Set the callbacks.

        Args:
            on_loaded: Called with the id of a request when all of its known pages are on the device.
            on_room: Called when a request that missed a step may be able to continue.
            on_lost: Called with the id of a request that cannot continue without the store, and the reason.
        """

    def refusal(self, num_tokens: int) -> str | None:
        """Return why a request of so many tokens can never have room, or None. The text follows a name and that number."""
        pages = self._admission.needs.peak(num_tokens)
        if pages.fit(self._admission.pool_pages):
            return None
        return f"need {self._admission.needs.shown(pages)} pages; this decode node's pool has fewer"

    async def look_up(self, token_ids: Sequence[int], salt: str, *, prefill: Instance, may_skip: bool) -> Prompt:
        """Find the known pages of a prompt, and fetch them into host memory, in bounded time.

        Args:
            prefill: Instance that computes the prompt. Only KV of the same precision is shared.
            may_skip: See `PlaceRequest`. If False, this does not wait.
        """
        return Prompt(token_ids=token_ids)

    def place(self, wanted: PlaceRequest) -> Place | None:
        """Take room for all of a request. None means "not yet"; room is set aside for the oldest request with this answer.

        Raises:
            LayoutError: With chunks of that size it can never have room.
        """
        pages = self._admission.needs.peak(wanted.total_tokens)
        if self._admission.reserve(wanted.request_id, pages, accepted_s=wanted.accepted_s):
            return Place(pages=pages)
        self._admission.wait(wanted.request_id, Room(pages=pages), accepted_s=wanted.accepted_s)
        return None

    def begin_loading(self, request_id: str) -> None:
        """Load the known pages of the prompt onto the device. Every rank knows the request by now."""

    def is_loading(self, request_id: str) -> bool:
        return False

    def begin(self, request_id: str) -> None:
        """Record that the whole prompt is on every rank: the request runs."""

    def computed(self, request_id: str, token_id: int) -> None:
        """Record that a step has put the token's KV into every rank's pool. Ignore a request that does not run any more."""

    def step_over(self) -> None:
        """Go on after all tokens of a step were recorded."""

    def may_step(self, request_id: str, position: int) -> bool:
        """Return whether the request has the pages for a step at this position. If not, `on_room` is called later."""
        return True

    def reads_store(self, request_id: str) -> bool:
        """Return whether a step of the request reads pages in the store, which takes long."""
        return False

    def draft_room(self, request_id: str, position: int, num_tokens: int) -> int:
        """Return how many draft tokens a step at this position can have, at most `num_tokens`."""
        return num_tokens

    def finish(self, request_id: str) -> None:
        """Record that a running request has its last token. The ranks learn it next."""

    def give_up(self, request_id: str) -> None:
        """End a request early, in any state. Idempotent."""
        self._admission.stop_waiting(request_id)

    def damaged(self, prompt: Prompt) -> None:
        """Forget the KV of a prompt and of its generated tokens: a step of either tier found it damaged."""

    def gone(self, request_id: str) -> None:
        """Release a request whose pages every rank has given back."""
        self._admission.release(request_id)

    def job_done(self, rank: int, message: JobDone) -> None:
        """Record that a rank did its part of a job.

        Raises:
            LocalProtocolError: The rank does not have that job, or an invariant is broken after the last one.
        """
        raise LocalProtocolError(f"rank {rank} has done job {message.job}; this node keeps nothing in host memory")

    def show(self) -> None:
        """Update the gauges."""

    async def close(self) -> None:
        """End the use of the store, in bounded time."""
