"""A smaller model that computes draft tokens for decode steps.

Its layers are the last ones of the engine's KV layout, so its KV lies in the pages of the model's KV and is transferred with
it. Every step computes both models' KV of its tokens. Before a step with draft tokens, the draft model runs once for each of
them, and once more for the KV of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from embedded_engine.architectures import check_can_speculate
from embedded_engine.causal_model import CausalModel
from embedded_engine.model_files import ModelFiles
from embedded_engine.paged_attention import GatherDecodePlan
from embedded_engine.sampling import sample_on_device
from embedded_engine.step_arrays import on_device
from embedded_engine.tensor_parallel import TensorParallelGroup
from transfer.engine_types import DecodeItem
from transfer.errors import ConfigError
from transfer.pool.kv_pool import KVPool

if TYPE_CHECKING:
    from embedded_engine.device_decode import DeviceDecoder


def check_draft_model(files: ModelFiles, draft: ModelFiles) -> None:
    """Reject a draft model that cannot be used with the model.

    Raises:
        ConfigError: It is recurrent, or has another vocabulary.
    """
    check_can_speculate(draft.architecture)
    if draft.vocab_size != files.vocab_size:
        raise ConfigError(
            f"speculative.model {draft.directory} has a vocabulary of {draft.vocab_size} tokens, and {files.directory} one of "
            f"{files.vocab_size}; both need the same tokenizer"
        )


class DraftModel(CausalModel):
    """One rank's part of the draft model; see the module's docstring. Arguments as of `CausalModel`."""

    def __init__(
        self,
        files: ModelFiles,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorParallelGroup | None,
        advice: str,
        first_layer: int,
    ) -> None:
        super().__init__(files, dtype=dtype, device=device, group=group, advice=advice, first_layer=first_layer)
        self._dtype = dtype
        self._device = device
        self._pool: KVPool
        self._decoder: DeviceDecoder | None = None

    def use_pool(self, pool: KVPool, decoder: DeviceDecoder | None) -> None:
        """Use the engine's pool. With a decoder, steps attend by its kernels."""
        self._pool = pool
        self._decoder = decoder

    def leave_pool(self) -> None:
        """Drop everything that refers to the pool."""
        self.__dict__.pop("_pool", None)
        self._decoder = None

    def drafted(self, items: Sequence[DecodeItem]) -> list[DecodeItem]:
        """Put the KV of a step's tokens into the pool, and return the items with their draft tokens.

        Waits for the device once for each draft token. All ranks of a group find the same tokens.

        Args:
            items: Checked items of a decode step.
        """
        tokens = [[item.token_id] for item in items]
        for number in range(1 + max(item.num_draft_tokens for item in items)):
            rows = [row for row, item in enumerate(items) if item.num_draft_tokens >= number]
            logits = self.joined(self._own_logits([_row_of(items[row], tokens[row][-1], number) for row in rows]))
            wanted = [place for place, row in enumerate(rows) if items[row].num_draft_tokens > number]
            if wanted:
                chosen = self._chosen(logits, wanted, [items[rows[place]] for place in wanted], number)
                for place, token in zip(wanted, chosen, strict=True):
                    tokens[rows[place]].append(token)
        return [
            replace(item, draft_token_ids=tuple(own[1:]), num_draft_tokens=0) for item, own in zip(items, tokens, strict=True)
        ]

    def _own_logits(self, rows: Sequence[DecodeItem]) -> Tensor:
        """Run the model over one token of each request; return [rows, vocab] of this rank's part of the vocabulary."""
        if self._decoder is not None:
            return self._decoder.logits(rows)
        tables = [tuple(np.array(table, dtype=np.int64) for table in row.page_tables) for row in rows]
        inputs = on_device(
            np.array([[row.token_id for row in rows], [row.position for row in rows]], dtype=np.int64), self._device
        )
        plan = GatherDecodePlan(rows, tables, self._pool, self._dtype)
        return self.compute(inputs[:1], inputs[1:], plan)

    def _chosen(self, logits: Tensor | None, wanted: Sequence[int], items: Sequence[DecodeItem], number: int) -> list[int]:
        """Return the next token of each wanted row, as the model would choose it from the same logits.

        With the request's own sampling values, a sampled draft token is accepted more often than the likeliest one.
        """
        if logits is None:
            chosen = torch.empty(len(wanted), dtype=torch.int64, device=self._device)
        else:
            own = torch.nan_to_num(logits[on_device(np.array(wanted), self._device)])
            chosen = sample_on_device(own, [item.sampling for item in items], [item.position + number + 1 for item in items])
        if self._group is not None:
            self._group.share(chosen)
        found: list[int] = chosen.tolist()
        return found


def _row_of(item: DecodeItem, token_id: int, number: int) -> DecodeItem:
    return replace(item, token_id=token_id, position=item.position + number, num_draft_tokens=0)
