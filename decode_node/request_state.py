"""The requests of a decode leader, and the results for the caller.

Data, and properties that follow from it. `decode_node.requests` makes every decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from decode_node.offload.tiers import Prompt
from decode_node.text import TextStream
from transfer.connector.attempt import WantedPrompt
from transfer.connector.request_view import RequestView
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens that were generated, and the text that they add."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    finish_reason: str
    stats: pb.TransferStats
    ttft_s: float
    prefill_node: str
    retries: int
    cached_tokens: int


Progress = Tokens | Done | TransferError


@dataclass(slots=True, kw_only=True, eq=False)
class GenerationRequest(WantedPrompt):
    """One generation. `progress` is what its caller reads; the last item is `Done` or an error."""

    max_new_tokens: int
    end_ids: frozenset[int]
    text: TextStream
    known: Prompt | None = None  # lookup of its prompt in the tiers, made by the current attempt
    progress: asyncio.Queue[Progress] = field(default_factory=asyncio.Queue)
    generated: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    last_token_s: float = 0.0
    finish_reason: str = ""  # empty until the last token
    is_told: bool = False  # `Done` or an error is in `progress`
    told_s: float = 0.0  # when, by the monotonic clock

    @property
    def next_position(self) -> int:
        """Position of the newest token, which the next step takes in."""
        return len(self.token_ids) + len(self.generated) - 1

    def view(self, now_s: float, *, num_ranks: int) -> RequestView:
        """See `WantedPrompt.view`."""
        view = WantedPrompt.view(self, now_s, num_ranks=num_ranks)
        return replace(view, generated_tokens=len(self.generated), max_new_tokens=self.max_new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationObserver:
    """Callbacks that report generated tokens to the leader's metrics.

    Args:
        on_first_token: Seconds from acceptance.
        on_token: Seconds since the token before.
    """

    on_first_token: Callable[[float], None]
    on_token: Callable[[float], None]
