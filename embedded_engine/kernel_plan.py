"""The plan of a decode step on a GPU, all of it in tensors: where its rows write and attend. See `device_decode`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from embedded_engine.attention import Scores
from embedded_engine.kernels.arguments import DecodeCall, WriteCall
from embedded_engine.kernels.paged_decode import paged_decode_attention
from embedded_engine.kernels.write_rows import write_rows
from embedded_engine.latent_attention import LatentHeads
from embedded_engine.step_plan import Advance
from transfer.layer_groups import GroupKind
from transfer.pool.kv_pool import KVPool
from transfer.pool.page_table import PageTable

TOKEN_IDS: Final = 0
POSITIONS: Final = 1
FIRST_GROUP: Final = 2
"""Rows of a step's inputs, followed by one row for each group of layers."""

_MAX_PIECE_ELEMENTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupRows:
    """The part of a step that the layers of one paged group share.

    Args:
        slots: The group's page table.
        rows: int32 [requests], each request's row of `slots`.
        new_slots: int32 [requests], slot of each request's new token.
        window_tokens: Tokens that attention reaches; 0 means all.
    """

    slots: Tensor
    rows: Tensor
    new_slots: Tensor
    window_tokens: int


class KernelDecodePlan:
    """One token of each request, by kernels; see `StepPlan`. The whole plan is in tensors that are computed from the inputs.

    Args:
        tables: Page table of each paged group of the pool.
        inputs: int64 [2 + groups, requests], see `embedded_engine.device_decode.DeviceDecoder`.
    """

    def __init__(self, pool: KVPool, tables: Mapping[int, PageTable], inputs: Tensor) -> None:
        positions = inputs[POSITIONS]
        self._pool = pool
        self._lengths = (positions + 1).to(torch.int32)
        self._groups: dict[int, _GroupRows] = {}
        for index, group in enumerate(pool.groups):
            rows = inputs[FIRST_GROUP + index]
            if group.kind is GroupKind.STATE:
                self._state_slots = rows.to(torch.int32)
                self._state_rows = rows.clamp(min=0)
                self._is_without_state = (positions <= 0).view(-1, 1, 1)
                continue
            slots = tables[index].slots
            self._groups[index] = _GroupRows(
                slots=slots,
                rows=rows.to(torch.int32),
                new_slots=slots[rows, positions.clamp(min=0)],
                window_tokens=group.window_tokens,
            )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        v = self._pool.buffer(layer, is_v=True)
        return self._attend(layer, query, key[0].transpose(0, 1), v, value[0].transpose(0, 1), scores)

    def attend_latent(self, layer: int, query: Tensor, latents: Tensor, heads: LatentHeads, scores: Scores) -> Tensor:
        """Attend as `GatherDecodePlan` does: all heads read a token's latent once, and V is its beginning."""
        absorbed = heads.absorb(query)
        return heads.values(self._attend(layer, absorbed, latents, None, None, scores, v_dim=heads.compressed_dim))

    def _attend(
        self,
        layer: int,
        query: Tensor,
        new_k: Tensor,
        v: Tensor | None,
        new_v: Tensor | None,
        scores: Scores,
        v_dim: int | None = None,
    ) -> Tensor:
        group = self._groups[self._pool.group_of(layer)]
        k = self._pool.buffer(layer, is_v=False)
        order = self._pool.order
        write_rows(WriteCall(k=k, v=v, new_k=new_k, new_v=new_v, slots=group.new_slots, order=order))
        rows = query[0].transpose(0, 1)
        call = DecodeCall(
            query=rows,
            k=k,
            v=v,
            slots=group.slots,
            rows=group.rows,
            lengths=self._lengths,
            scale=scores.scale,
            v_dim=v_dim,
            order=order,
            window_tokens=group.window_tokens,
            sinks=scores.sinks,
            softcap=scores.softcap,
        )
        attended, lse = paged_decode_attention(call)
        return self._merged(layer, rows, attended, lse, scores, v_dim).unsqueeze(0)

    def _merged(self, layer: int, query: Tensor, out: Tensor, lse: Tensor, scores: Scores, v_dim: int | None) -> Tensor:
        """Merge attention outside the pool into `out`; here there is none, see `tiered_decode`.

        Args:
            query, out: [rows, query heads, dim].
            lse: float32 [rows, query heads], the logarithm of the softmax's denominator in `out`.
        """
        return out

    def advance(self, layer: int, hidden: Tensor, advance: Advance) -> Tensor:
        buffer = self._pool.buffer(layer, is_v=False)  # [states, 1, heads, elements]
        states = buffer[:, 0].index_select(0, self._state_rows).masked_fill_(self._is_without_state, 0)
        output, states = advance(hidden.transpose(0, 1), states)
        # As heads of few elements, because the kernel keeps the elements of a head in registers.
        piece = _piece_elements(buffer[0].numel())
        new_rows = states.reshape(len(states), -1, piece)
        k = buffer.view(len(buffer), 1, -1, piece)
        write_rows(WriteCall(k=k, v=None, new_k=new_rows, new_v=None, slots=self._state_slots))
        return output.transpose(0, 1)


@functools.cache
def _piece_elements(num_elements: int) -> int:
    """Return the largest divisor of a state's elements that the kernel takes as one row."""
    return max(size for size in range(1, _MAX_PIECE_ELEMENTS + 1) if num_elements % size == 0)
