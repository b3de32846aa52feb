"""One request of the simulation, and the pieces in which its KV travels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from transfer.ring import Grant


@dataclass(slots=True, eq=False)
class Piece:
    """What travels at once: a chunk's tokens of a group of layers. Its grant is there before its data, or after."""

    request: Request
    num_bytes: int
    grant: Grant | None = None
    is_computed: bool = False
    ready_s: float = -1.0


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and what it generates. Times are -1 until they are known."""

    index: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    prefill: int = -1  # indexes of its nodes
    decode: int = -1
    deadline_s: float = 0.0
    started_s: float = -1.0  # it has room on both sides
    computed_s: float = -1.0
    whole_s: float = -1.0  # all of its KV is in the decode node's pool
    acked_s: float = -1.0
    first_token_s: float = -1.0
    ended_s: float = -1.0
    failure: str = ""
    computed: int = 0  # tokens
    is_asking: bool = False
    next_ask_s: float = 0.0
    is_first_token_known: bool = False
    pieces: list[Piece] = field(default_factory=list)
    num_asked: int = 0  # pieces whose grants have been asked for
    num_released: int = 0
    num_acked: int = 0
    credit_wait_s: float = 0.0
    when_over: Callable[[Request], None] | None = None

    @property
    def is_served(self) -> bool:
        return self.ended_s >= 0 and not self.failure

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        return None if self.output_tokens < 2 else (self.ended_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def end_to_end_s(self) -> float:
        return self.ended_s - self.arrived_s

    @property
    def exposed_s(self) -> float:
        """Transfer after the last chunk had been computed, to its last acknowledgement."""
        return max(0.0, self.acked_s - self.computed_s)
