"""Value types that a node passes to an engine: to `PrefillEngine` and `DecodeEngine`.

Standard library only, so an engine's author needs only these names. Pages are those of the engine's own pool. For each group of
layers (`transfer.layer_groups`; most models have one) a request has a page table, and token `t` is in page ``table[t //
page_size]`` at offset ``t % page_size``. Entries of a sliding window whose tokens are out of reach are `NO_PAGE`. The table of
recurrent layers has one entry: the row with the request's state. KV that has left the device is in pages of a host pool
(`transfer.pool.host_pool`), and its entries are `NO_PAGE` too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transfer.errors import ConfigError, EngineError


class DeviceEvent(Protocol):
    """A point in a device's work, such as a recorded `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Block the calling thread until everything before that point is done."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRead:
    """One layer of a stored block: `StoredKV.pages_per_block` pages of a running request that lie in the store.

    Args:
        layer: Index in the whole model.
        block: Number of the block, from `DecodeItem.stored_blocks`.
    """

    layer: int
    block: int


class StoredKV(Protocol):
    """Reads stored blocks during a decode step, ahead of their use. Only the engine's thread calls it.

    A buffer holds ``[pages_per_block, page_bytes of the layer]`` bytes, each page K then V as in a host page.
    """

    @property
    def pages_per_block(self) -> int: ...

    @property
    def buffers(self) -> Sequence[Any]:
        """Return the buffers: uint8 tensors in host memory of the size of the largest layer, pinned for a GPU."""
        ...

    def begin(self, reads: Sequence[StoredRead]) -> None:
        """Begin the reads of a step, in the order of their use. Remaining reads of an earlier step are cancelled."""
        ...

    def next(self) -> int | None:
        """Wait for the next read, and return the index of its buffer, which is valid until `release`.

        None means that the store failed. The engine then sets the attention of that request to NaN, so that each rank of its
        group finds that the request's logits are not finite.
        """
        ...

    def release(self, buffer: int, event: DeviceEvent | None = None) -> None:
        """Let the next read fill a buffer, after `event` if the device reads it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Raises ConfigError for a value out of its range.

    A sampled token depends only on the logits, these values and the token's position. The same request gives the same tokens
    wherever each is sampled (the first on the prefill side, the others on the decode side) and however it is batched.

    Args:
        temperature: 0 is greedy: the other values then have no effect. Otherwise logits are divided by it.
        top_p: Keep the smallest set of likeliest tokens whose probability reaches this; in (0, 1], 1 keeps all.
        top_k: Keep this many likeliest tokens; 0 keeps all.
        seed: Seed of the request, in [0, 2**63).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive finite number")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (1 keeps every token)")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; it must be 0 (keep every token) or positive")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be in [0, 2**63)")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


GREEDY = SamplingParams()


class RequestFault(EngineError):
    """A step ran, but some of its requests cannot continue. The others can, and so can the engine.

    Args:
        request_ids: The requests at fault.
        tokens: request_id -> token of the others, or their tokens, as the step would have returned them.
    """

    def __init__(
        self, message: str, *, request_ids: Sequence[str], tokens: Mapping[str, int] | Mapping[str, Sequence[int]]
    ) -> None:
        super().__init__(message)
        self.request_ids = tuple(request_ids)
        self.tokens: dict[str, int | Sequence[int]] = dict(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillItem:
    """The tokens of one request that one prefill step computes. Raises EngineError for a value out of its range.

    Args:
        request_id: The request; at most one item of it in a step.
        token_ids: The tokens of this step, in order; at least one.
        first_token: Position of ``token_ids[0]`` in the prompt. Everything before it is in the pool.
        page_tables: For each group of layers, the pages bound to the request so far. They hold every position up to the last one
            of this step that attention can still reach. A state's row holds the state after `first_token` tokens; if that is 0,
            it holds stale data.
        sampling: How the first token is chosen, if `is_last`.
        is_last: These are the prompt's last tokens: sample the first token after them.
        host_tables: For each group of layers, the host pages bound to the request so far; empty if nothing is in host memory. The
            group of full attention has host pages for all tokens up to the last one of this step, and its page table has only
            `NO_PAGE`. All other groups have no host pages.
    """

    request_id: str
    token_ids: tuple[int, ...] = field(repr=False)
    first_token: int
    page_tables: tuple[Sequence[int], ...]
    sampling: SamplingParams = GREEDY
    is_last: bool
    host_tables: tuple[Sequence[int], ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise EngineError(f"token_ids of request {self.request_id!r} is empty; a prefill step has at least one token")
        if self.first_token < 0:
            raise EngineError(f"first_token of request {self.request_id!r} is {self.first_token}; it must not be negative")

    @property
    def page_table(self) -> Sequence[int]:
        """The one page table. Raises EngineError for models with several groups of layers."""
        return _only_table(self.request_id, self.page_tables)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end_token(self) -> int:
        """Position after the last token of this step; if `is_last`, also the position of the sampled token."""
        return self.first_token + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeItem:
    """One request's share of one decode step: its newest token goes in, the next one comes out. Raises EngineError as
    `PrefillItem`.

    With draft tokens, the step computes the newest token and all draft tokens. So it chooses the token after each of them, and
    accepts the leading draft tokens that the model itself chooses.

    Args:
        request_id: The request; at most one item of it in a step.
        token_id: The newest token; its KV is written in this step. 0 if `is_unread`.
        position: Position of `token_id`. Everything before it is in the pool.
        page_tables: For each group of layers, the pages bound to the request. They hold every position up to and including
            `position`, and those of the draft tokens, that attention can still reach, except for those in host memory.
        sampling: How the next token is chosen.
        host_tables: For each group of layers, the host pages with the request's first tokens: of group g the entries below
            ``len(host_tables[g])``, which are `NO_PAGE` in its page table. Only groups of full attention have any, and the page
            of `position` is never among them. Empty if nothing is in host memory.
        stored_blocks: Blocks in the store, see `StoredKV`, with the request's first tokens in the group of full attention. The
            host pages of that group come after them, and all of these entries are `NO_PAGE` in its page table.
        num_draft_tokens: Draft tokens that the engine finds itself, with a draft model. Then there are no `draft_token_ids`.
        draft_token_ids: Guesses of the tokens behind `token_id`, in order; their KV is written in this step, too. The KV of
            those that are not accepted is not valid, and later steps write it again. None if pages are in host memory or in the
            store.
        is_unread: The newest token is the one that the previous step chose for this request, and the host has not read it. Only
            `begin_decode` of an engine gets such items, and they have no draft tokens.
    """

    request_id: str
    token_id: int
    position: int
    page_tables: tuple[Sequence[int], ...]
    sampling: SamplingParams = GREEDY
    host_tables: tuple[Sequence[int], ...] = ()
    stored_blocks: tuple[int, ...] = ()
    draft_token_ids: tuple[int, ...] = ()
    num_draft_tokens: int = 0
    is_unread: bool = False

    def __post_init__(self) -> None:
        if self.position < 0:
            raise EngineError(f"position of request {self.request_id!r} is {self.position}; it must not be negative")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The newest token and the draft tokens."""
        return (self.token_id, *self.draft_token_ids)

    @property
    def end_token(self) -> int:
        """Position after the last token of this step."""
        return self.position + 1 + max(len(self.draft_token_ids), self.num_draft_tokens)

    @property
    def page_table(self) -> Sequence[int]:
        """The one page table. Raises EngineError for models with several groups of layers."""
        return _only_table(self.request_id, self.page_tables)


def _only_table(request_id: str, page_tables: tuple[Sequence[int], ...]) -> Sequence[int]:
    if len(page_tables) != 1:
        raise EngineError(f"request {request_id!r} has {len(page_tables)} page tables; page_table is for models that have one")
    return page_tables[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCounts:
    """What block-sparse prefill did since the engine was loaded, on one rank.

    Args:
        selected_blocks: Pairs of a query block and a key block, of all heads and layers, that were attended to.
        skipped_blocks: Such pairs that full attention would have attended to as well.
        loaded_bytes: Bytes of K and V that steps read from host memory.
    """

    selected_blocks: int
    skipped_blocks: int
    loaded_bytes: int

    @property
    def density(self) -> float:
        """Part of full attention's blocks that was attended to; NaN before the first step."""
        seen = self.selected_blocks + self.skipped_blocks
        return self.selected_blocks / seen if seen else math.nan
