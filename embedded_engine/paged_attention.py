"""Attention of one step over the paged pool.

transformers calls one function per layer; it finds the step's plan in the keyword arguments that the model passes through.
A plan is made once per step (slots, masks), so that a layer costs a write, a read and one attention call per group of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from transfer.engine_types import DecodeItem, PrefillItem
from transfer.kv_pool import PagedKVPool

ATTENTION_NAME = "kvferry_paged"

QUERY_BLOCK_TOKENS = 128
"""Prefill attends this many query tokens at a time, each block over the keys up to its own end: about half of a chunk's own
masked triangle is never computed (600 tokens on one core: 8.8 ms against 11.2 ms), and a mask is never larger than block x
context."""


class AttentionPlan(Protocol):
    """One step, as the attention of each layer needs it."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write this step's K and V of `layer` into the pool, then attend.

        Args:
            layer: Global layer.
            query: [1, query heads, rows, dim], rotated; one row per token of the step.
            key, value: [1, KV heads, rows, dim], rotated.
            scale: Factor of the scores.

        Returns:
            [1, rows, query heads, dim].
        """
        ...


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged_plan: AttentionPlan,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' models call in place of their own attention."""
    return paged_plan.attend(module.layer_idx, query, key, value, scaling), None


# No mask function is registered under this name: transformers then builds no mask at all.
AttentionInterface.register(ATTENTION_NAME, paged_attention)


def token_slots(page_table: NDArray[np.int64], begin: int, end: int, page_size: int) -> NDArray[np.int64]:
    """Slots of the tokens [begin, end) of a request, int64 [end - begin]."""
    if page_size == 1:
        return page_table[begin:end]
    first_page = begin // page_size
    pages = page_table[first_page : -(-end // page_size)]
    slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
    return slots[begin - first_page * page_size : end - first_page * page_size]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """One request's rows [begin, end) of the step, and the slots [context] of everything that they may look at."""

    begin: int
    end: int
    context_slots: Tensor

    def blocks(self) -> list[tuple[int, int]]:
        return [(row, min(row + QUERY_BLOCK_TOKENS, self.end)) for row in range(self.begin, self.end, QUERY_BLOCK_TOKENS)]


class PrefillPlan:
    """A ragged batch of chunks; see `AttentionPlan`.

    Args:
        items: The step's items, already checked.
        tables: Their page tables, int64.
        pool: Where K and V are written and read.
        dtype: What the model computes in.
        on_written: Called with each layer after its K and V of all items are in the pool.
    """

    def __init__(
        self,
        items: Sequence[PrefillItem],
        tables: Sequence[NDArray[np.int64]],
        pool: PagedKVPool,
        dtype: torch.dtype,
        on_written: Callable[[int], None],
    ) -> None:
        self._pool = pool
        self._on_written = on_written
        self._dtype = dtype
        self._chunks: list[_Chunk] = []
        new_slots: list[NDArray[np.int64]] = []
        row = 0
        for item, table in zip(items, tables, strict=True):
            slots = token_slots(table, 0, item.end_token, pool.page_size)
            new_slots.append(slots[item.first_token :])
            context_slots = torch.from_numpy(slots).to(pool.device)
            self._chunks.append(_Chunk(begin=row, end=row + item.num_tokens, context_slots=context_slots))
            row += item.num_tokens
        self._new_slots = torch.from_numpy(np.concatenate(new_slots)).to(pool.device)
        self._mask = self._triangular_mask(items, dtype)

    def _triangular_mask(self, items: Sequence[PrefillItem], dtype: torch.dtype) -> Tensor:
        """[rows, context] with -inf where the key is later than the query, for the last rows and keys of a full block.

        Counted from the lower right corner every block of every request is a part of this one matrix.
        """
        rows = min(QUERY_BLOCK_TOKENS, max(item.num_tokens for item in items))
        context = max(item.end_token for item in items)
        mask = torch.full((rows, context), float("-inf"), dtype=dtype, device=self._pool.device)
        return mask.triu_(context - rows + 1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        pool = self._pool
        pool.write(layer, self._new_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        self._on_written(layer)
        mask_rows, mask_context = self._mask.shape
        output = torch.empty((1, query.shape[2], query.shape[1], value.shape[-1]), dtype=query.dtype, device=query.device)
        for chunk in self._chunks:
            k, v = (part.to(self._dtype).transpose(0, 1).unsqueeze(0) for part in pool.read(layer, chunk.context_slots))
            for begin, end in chunk.blocks():
                context = chunk.context_slots.shape[0] - (chunk.end - end)
                attended = functional.scaled_dot_product_attention(
                    query[:, :, begin:end],
                    k[:, :, :context],
                    v[:, :, :context],
                    attn_mask=self._mask[mask_rows - (end - begin) :, mask_context - context :],
                    scale=scale,
                    enable_gqa=True,
                )
                output[:, begin:end] = attended.transpose(1, 2)
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowGroup:
    """Rows of the step that attend in one call.

    Args:
        rows: Which rows, int64; None for all of them.
        context_slots: [rows, longest context]; a shorter row repeats its own first slot, which holds finite numbers.
        mask: [rows, 1, 1, longest context], -inf where a row repeats; None where all are equally long.
    """

    rows: Tensor | None
    context_slots: Tensor
    mask: Tensor | None


class DecodePlan:
    """One token of each request; see `AttentionPlan`.

    Requests attend together, padded to the longest of their group; no request is padded to more than twice its own length.
    """

    def __init__(
        self, items: Sequence[DecodeItem], tables: Sequence[NDArray[np.int64]], pool: PagedKVPool, dtype: torch.dtype
    ) -> None:
        self._pool = pool
        self._dtype = dtype
        slots = [token_slots(table, 0, item.position + 1, pool.page_size) for item, table in zip(items, tables, strict=True)]
        self._new_slots = torch.tensor([own[-1] for own in slots], dtype=torch.int64, device=pool.device)
        self._groups = [self._row_group(rows, slots) for rows in _rows_of_similar_length([len(own) for own in slots])]

    def _row_group(self, rows: list[int], slots: list[NDArray[np.int64]]) -> _RowGroup:
        device = self._pool.device
        longest = max(len(slots[row]) for row in rows)
        padded = np.empty((len(rows), longest), dtype=np.int64)
        mask = np.zeros((len(rows), 1, 1, longest), dtype=np.float32)
        for index, row in enumerate(rows):
            own = slots[row]
            padded[index, : len(own)] = own
            padded[index, len(own) :] = own[0]
            mask[index, :, :, len(own) :] = -np.inf
        return _RowGroup(
            rows=None if len(rows) == len(slots) else torch.tensor(rows, device=device),
            context_slots=torch.from_numpy(padded).to(device),
            mask=torch.from_numpy(mask).to(device, self._dtype) if mask.any() else None,
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        pool = self._pool
        pool.write(layer, self._new_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        num_query_heads, num_rows, dim = query.shape[1:]
        num_kv_heads = key.shape[1]
        # The query heads that share a KV head take the place of query tokens: [rows, KV heads, heads of each, dim].
        queries = query[0].transpose(0, 1).reshape(num_rows, num_kv_heads, num_query_heads // num_kv_heads, dim)
        output = torch.empty((num_rows, num_kv_heads, queries.shape[2], value.shape[-1]), dtype=query.dtype, device=query.device)
        for group in self._groups:
            k, v = (part.to(self._dtype).transpose(1, 2) for part in pool.read(layer, group.context_slots))
            own = queries if group.rows is None else queries[group.rows]
            attended = functional.scaled_dot_product_attention(own, k, v, attn_mask=group.mask, scale=scale)
            if group.rows is None:
                output = attended
            else:
                output[group.rows] = attended
        return output.reshape(1, num_rows, num_query_heads, -1)


def _rows_of_similar_length(lengths: Sequence[int]) -> list[list[int]]:
    """Rows in groups whose longest is at most twice as long as their shortest; ascending inside a group.

    Ascending, because a group of all rows is not indexed at all: it takes and gives the step's own order.
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if groups and lengths[groups[-1][0]] <= 2 * lengths[row]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [sorted(group) for group in groups]
