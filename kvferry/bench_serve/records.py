"""What became of each request, as the client saw it. Times are seconds from the run's start, of one monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What the node said of the transfer of a request that ended well.

    Args:
        node_ttft_s: From the node's acceptance to the first token.
        transfer_s: From the first gather to the last release.
        exposed_s: What of it came after the last chunk had been computed.
        num_bytes, writes, resends: Sums over the ranks.
        prefill_node: Its address.
        retries: Attempts on other prefill nodes.
        cached_tokens: Of the prompt, not moved because they were there.
    """

    node_ttft_s: float
    transfer_s: float
    exposed_s: float
    num_bytes: int
    writes: int
    resends: int
    prefill_node: str
    retries: int
    cached_tokens: int


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. It ended well where `moved` is there, failed where `failure` is, and else was cut off by the run's end.

    Attributes:
        due_s: When it was to be sent.
        sent_s: When it was.
        token_s: When each message with tokens came.
        num_tokens: Generated tokens that came.
        ended_s: When its stream ended.
        failure: Name of the gRPC status.
        reason: The status in words.
    """

    index: int
    target: str
    due_s: float
    prompt_tokens: int
    is_warm_up: bool = False
    sent_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    ended_s: float | None = None
    failure: str | None = None
    reason: str = ""
    moved: Moved | None = None

    @property
    def is_served(self) -> bool:
        return self.moved is not None

    @property
    def lateness_s(self) -> float:
        """Of the generator itself."""
        return 0.0 if self.sent_s is None else self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """From the moment at which it was due, so that a late generator hides nothing. Only where a token came."""
        return self.token_s[0] - self.due_s

    @property
    def end_to_end_s(self) -> float:
        """From the moment at which it was due to the last token."""
        return self.token_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds for a token after the first; None where there is only one."""
        return None if self.num_tokens < 2 else (self.token_s[-1] - self.token_s[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between messages with tokens: inter-token latencies."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]
