"""One planned step of the embedded engine, and its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedded_engine.step_arrays import on_device
from embedded_engine.step_plan import StepPlan
from planner.memory_advice import Phase
from transfer.engine_types import DecodeItem, RequestFault, SamplingParams
from transfer.errors import EngineError

NO_TOKEN = -1
"""In place of a token whose logits are not finite."""


_Tokens = TypeVar("_Tokens", int, tuple[int, ...])


class BadLogits(RequestFault):
    """The model computed NaN or infinity for the requests that the message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRow:
    """A row of the step whose next token is wanted, and the position of that token."""

    request_id: str
    row: int
    sampling: SamplingParams
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTokens:
    """The tokens of a step on the device, which the next step can read.

    Args:
        rows: Request -> its index in `tokens`.
        tokens: int64 [rows], all of them valid token ids: 0 for a request without a token.
    """

    rows: Mapping[str, int]
    tokens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadRows:
    """Rows of a step whose tokens the previous step chooses.

    Args:
        places: int64 [2, n], the index of each row, and the index of its token in `tokens`.
        tokens: See `ChosenTokens`.
    """

    places: NDArray[np.int64]
    tokens: Tensor

    def put(self, token_ids: Tensor) -> None:
        """Queue the copy into the step's token ids, int64 [rows], after the previous step."""
        rows, sources = on_device(self.places, token_ids.device)
        token_ids.index_copy_(0, rows, self.tokens.index_select(0, sources))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step, checked and planned. Made by `EmbeddedEngine.prefill_batch` and `decode_batch`.

    Args:
        wanted: Rows whose next token is wanted.
        token_ids, positions: int64 [rows].
        plan: The work of the layers; None for a decode step on a GPU, which is planned when it runs, in memory that all such
            steps share.
        decode_rows: The rows of a decode step as items of one token each, their tables cut to the checked entries.
        drafts: Request -> its draft tokens. The rows of a request are adjacent.
        unread: Rows whose tokens are on the device only; None if there are no such rows.
    """

    wanted: tuple[WantedRow, ...]
    token_ids: NDArray[np.int64] = field(repr=False)
    positions: NDArray[np.int64]
    plan: StepPlan | None
    decode_rows: tuple[DecodeItem, ...] = ()
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unread: UnreadRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """The tokens of a step, on the group's first rank; empty on the other ranks.

    Args:
        request_ids: The request of each token, in order.
        next_tokens: int64 [wanted rows] on the engine's device, `NO_TOKEN` if the logits are not finite.
        next_tokens_host: The same on the CPU (pinned, if the device is a GPU); valid after `copied`.
        copied: Event after the copy; None if there is nothing to wait for.
        drafts: Request -> its draft tokens.
    """

    request_ids: tuple[str, ...]
    next_tokens: Tensor
    next_tokens_host: Tensor
    copied: torch.cuda.Event | None
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def tokens(self) -> dict[str, int]:
        """Wait for a step without draft tokens and return request_id -> token.

        Raises:
            BadLogits: Some requests have no token; the error has the tokens of the others.
        """
        found = self._chosen()
        return _without_bad(found, {request_id: own[0] for request_id, own in found.items() if own})

    def verified(self) -> dict[str, tuple[int, ...]]:
        """Wait for the step and return request_id -> its accepted draft tokens and the token behind them.

        A draft token is accepted if it is the token that the model chose at its position, and all before it are accepted. So the
        tokens are those of steps without draft tokens, greedy or sampled.

        Raises:
            BadLogits: Some requests have no token; the error has the tokens of the others.
        """
        found = self._chosen()
        return _without_bad(found, {request_id: tuple(own) for request_id, own in found.items() if own})

    def _chosen(self) -> dict[str, list[int]]:
        """Return request_id -> tokens up to the first that is not its draft token, or whose logits are not finite."""
        if self.copied is not None:
            with torch.cuda.device(
                self.next_tokens.device
            ):  # a thread that only reads tokens would open a context on the first GPU
                self.copied.synchronize()
        chosen: list[int] = self.next_tokens_host.tolist()
        found: dict[str, list[int]] = {}
        num_rows = Counter[str]()
        for request_id, token in zip(self.request_ids, chosen, strict=True):
            own, row = found.setdefault(request_id, []), num_rows[request_id]
            num_rows[request_id] += 1
            if token != NO_TOKEN and tuple(own) == self.drafts.get(request_id, ())[:row]:
                own.append(token)
        return found


def _without_bad(found: Mapping[str, Sequence[int]], tokens: dict[str, _Tokens]) -> dict[str, _Tokens]:
    """Return the tokens of a step. Raise BadLogits if a request has none in `found`."""
    bad = [request_id for request_id, own in found.items() if not own]
    if bad:
        reason = f"logits of request {', '.join(bad)} are not finite; its KV or the model's weights are damaged"
        raise BadLogits(reason, request_ids=bad, tokens=tokens)
    return tokens


def use_of(batch: ForwardBatch) -> tuple[str, Phase]:
    """Return the description of a step, and its phase."""
    if batch.decode_rows:
        num_requests = len({row.request_id for row in batch.decode_rows})
        return f"computing a decode step of {num_requests} requests", Phase.DECODE_STEP
    return f"computing a prefill step of {len(batch.token_ids)} tokens", Phase.PREFILL_STEP


def unread_rows(items: Sequence[DecodeItem], last: ChosenTokens | None) -> UnreadRows | None:
    """Return the rows of a step without draft tokens whose tokens are on the device only; None if there are no such rows.

    Raises:
        EngineError: The previous step has no token for such an item.
    """
    found = [(row, item.request_id) for row, item in enumerate(items) if item.is_unread]
    if not found:
        return None
    for _, request_id in found:
        if last is None or request_id not in last.rows:
            raise EngineError(f"request {request_id!r} is unread, and the previous step chose no token for it; set its token_id")
    assert last is not None
    places = [[row for row, _ in found], [last.rows[request_id] for _, request_id in found]]
    return UnreadRows(places=np.array(places, dtype=np.int64), tokens=last.tokens)


def rows_of(item: DecodeItem) -> list[DecodeItem]:
    """Return an item of one token for the newest token and for each draft token.

    A step writes the KV of all rows before any of them attends, so each row sees the rows before it.
    """
    if not item.draft_token_ids:
        return [item]
    return [
        replace(item, token_id=token, position=position, draft_token_ids=())
        for position, token in enumerate(item.token_ids, item.position)
    ]
