"""One request in flight as a leader shows it to operators: plain values, none of them of its prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """The fields of the wire contract's RequestStatus, which says what each means."""

    request_id: str
    transfer_id: str
    stage: str
    age_s: float
    prompt_tokens: int
    ready_tokens: int = 0
    generated_tokens: int = 0
    max_new_tokens: int = 0
    peer: str = ""
    retries: int = 0
    ranks_done: int = 0
