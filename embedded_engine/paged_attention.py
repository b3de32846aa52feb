"""Attention of one step over the paged pool.

transformers calls one function per layer, with the step's plan in the keyword arguments that the model passes through.
A plan is made once per step (slots, masks), so that a layer costs a write, a read and one attention call per group of rows.
The layers of a layer group share the planned slots and masks, as they share the page table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from embedded_engine import opaque_calls
from embedded_engine.attention import ATTENTION_BYTES, RunningSoftmax, Scores, attention
from embedded_engine.host_prefill import HostStep
from embedded_engine.host_tier import HostBlocks
from embedded_engine.kernels.block_sparse_arguments import KeySpan
from embedded_engine.latent_attention import LatentHeads
from embedded_engine.sparse_prefill import ChunkBlocks, SparseChunk, SparsePrefill, token_major
from embedded_engine.step_arrays import on_device, token_slots
from embedded_engine.step_plan import Advance, StepPlan
from transfer.engine_types import DecodeItem, PrefillItem, StoredRead
from transfer.layer_groups import GroupKind, LayerGroup
from transfer.pool.kv_pool import KVPool, PagedKVPool, convert

ATTENTION_NAME = "kvferry_paged"
LATENT_ATTENTION_NAME = "kvferry_paged_latent"

QUERY_BLOCK_TOKENS = 128
"""Query tokens that prefill attends at a time, each block over the keys up to its own end.

About half of a chunk's masked triangle is never computed (600 tokens on one core: 8.8 ms against 11.2 ms), and a mask is at most
block x context."""

Tables = tuple[NDArray[np.int64], ...]
"""Page tables of one request, one per layer group of the pool."""


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged_plan: StepPlan | None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers' models with K and V. A plan of None means that a compiled layer calls it."""
    if paged_plan is None:
        return opaque_calls.attend(query, key, value, scaling, softcap, s_aux), None
    scores = Scores(scale=scaling, softcap=softcap, sinks=s_aux)
    return paged_plan.attend(module.layer_idx, query, key, value, scores), None


def paged_latent_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged_plan: StepPlan | None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers' MLA layers; `key` and `value` are the parts of the latents that the hook left.

    A plan of None means that a compiled layer calls it.
    """
    latents = torch.cat((key, value), dim=-1)[0].transpose(0, 1)
    if paged_plan is None:
        return opaque_calls.attend_latent(query, latents, scaling, module.v_head_dim), None
    scores = Scores(scale=scaling)
    return paged_plan.attend_latent(module.layer_idx, query, latents, LatentHeads(module), scores), None


# No mask function is registered under these names, so transformers builds no mask.
AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionInterface.register(LATENT_ATTENTION_NAME, paged_latent_attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """One request's rows [begin, end) of the step, and the slots of the tokens [first_context, ...) that they attend to.

    Args:
        pages: int64, the pages of the request's tokens.
    """

    begin: int
    end: int
    first_token: int
    first_context: int
    context_slots: Tensor
    pages: Tensor

    @property
    def earlier_slots(self) -> Tensor:
        """Slots of the context without the rows' own tokens."""
        return self.context_slots[: self.first_token - self.first_context]

    def blocks(self, window_tokens: int) -> list[tuple[int, int, int, int]]:
        """Return (first row, end row, first and end index into the context) of each block of rows that attend in one call."""
        found = []
        for begin in range(self.begin, self.end, QUERY_BLOCK_TOKENS):
            end = min(begin + QUERY_BLOCK_TOKENS, self.end)
            first_query, end_query = (self.first_token + row - self.begin for row in (begin, end))
            first_key = max(self.first_context, first_query - window_tokens + 1)
            found.append((begin, end, first_key - self.first_context, end_query - self.first_context))
        return found


class _ChunkGroup:
    """The part of a prefill step that the layers of one group share: slots of new tokens, contexts, mask of a window.

    Args:
        is_hosted: For each item, whether its KV of this group lies in host memory.
    """

    def __init__(
        self,
        group: LayerGroup,
        part: PagedKVPool,
        items: Sequence[PrefillItem],
        tables: Sequence[NDArray[np.int64]],
        dtype: torch.dtype,
        is_hosted: Sequence[bool],
    ) -> None:
        self.window_tokens = group.window_tokens
        self.chunks: list[_Chunk] = []
        new_slots: list[NDArray[np.int64]] = []
        row = 0
        for item, table, is_hosted_item in zip(items, tables, is_hosted, strict=True):
            if is_hosted_item:
                row += item.num_tokens
                continue
            first_context = group.first_needed_token(item.first_token)
            slots = token_slots(table, first_context, item.end_token, part.page_size)
            new_slots.append(slots[item.first_token - first_context :])
            self.chunks.append(
                _Chunk(
                    begin=row,
                    end=row + item.num_tokens,
                    first_token=item.first_token,
                    first_context=first_context,
                    context_slots=on_device(slots, part.device),
                    pages=on_device(table, part.device),
                )
            )
            row += item.num_tokens
        own = [item for item, is_hosted_item in zip(items, is_hosted, strict=True) if not is_hosted_item]
        if own:
            self.new_slots = on_device(np.concatenate(new_slots), part.device)
        if own and self.window_tokens:
            self._mask = self._band(own, dtype, part.device)
        rows = (
            np.concatenate([np.arange(chunk.begin, chunk.end) for chunk in self.chunks]) if own else np.empty(0, dtype=np.int64)
        )
        self.rows = None if len(rows) == row else on_device(rows, part.device)
        """Rows of the step with pages on the device; None means all."""

    def _band(self, items: Sequence[PrefillItem], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return [rows, context] with -inf where the key is later than the query or has left its window.

        It covers the last rows and keys of a full block. Aligned at the lower right corner, every block of every request is a
        part of this matrix.
        """
        rows = min(QUERY_BLOCK_TOKENS, max(item.num_tokens for item in items))
        context = min(max(item.end_token for item in items), rows + self.window_tokens - 1)
        blocked = torch.full((rows, context), float("-inf"), dtype=dtype, device=device)
        return blocked.triu(context - rows + 1) + blocked.tril(context - rows - self.window_tokens)

    def mask(self, rows: int, context: int) -> Tensor:
        """Return the mask of `rows` queries, the last of which is the last of `context` keys."""
        mask_rows, mask_context = self._mask.shape
        return self._mask[mask_rows - rows :, mask_context - context :]


class PrefillPlan:
    """A ragged batch of chunks; see `StepPlan`.

    Args:
        items: The step's checked items, with `tables`.
        dtype: Dtype that the model computes in.
        on_written: Called with each layer when its KV of all items is written, on the stream that wrote it.
        host: The items whose KV of full attention lies in host memory; None if there are none.
        sparse: The policy of block-sparse prefill; None for full attention.
    """

    def __init__(
        self,
        items: Sequence[PrefillItem],
        tables: Sequence[Tables],
        pool: KVPool,
        dtype: torch.dtype,
        on_written: Callable[[int], None],
        host: HostStep | None = None,
        sparse: SparsePrefill | None = None,
    ) -> None:
        self._pool = pool
        self._on_written = on_written
        self._host = host
        self._sparse = sparse
        hosted = {chunk.begin for chunk in host.chunks} if host is not None else set()
        begins = np.cumsum([0, *(item.num_tokens for item in items)])
        self._dtype = dtype
        self._items = items
        self._groups: dict[int, _ChunkGroup] = {}
        self._state_rows: list[Tensor] = []
        for index, (group, part) in enumerate(zip(pool.groups, pool.parts, strict=True)):
            own = [tables_of_item[index] for tables_of_item in tables]
            if group.kind is GroupKind.STATE:
                self._state_rows = [on_device(table, pool.device) for table in own]
            else:
                is_hosted = [group.kind is GroupKind.FULL and int(begin) in hosted for begin in begins[:-1]]
                self._groups[index] = _ChunkGroup(group, part, items, own, dtype, is_hosted)
        if sparse is not None:
            self._cuts = {
                int(begin): ChunkBlocks(sparse, num_earlier=item.first_token, rows=item.num_tokens)
                for begin, item in zip(begins, items, strict=False)
            }

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        group = self._groups[self._pool.group_of(layer)]
        k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self._write(group, layer, k, v)

        def by_head(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            k, v = (one.to(self._dtype).transpose(0, 1).unsqueeze(0) for one in (k, v))
            return k, v

        if self._sparse is not None:
            return self._attend_sparse(self._sparse, layer, query, k, v, scores)
        if not group.window_tokens:
            token_bytes = (k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2]) * k.element_size()
            sizes = {"num_heads": k.shape[1], "value_dim": v.shape[-1], "token_bytes": token_bytes}
            return self._attend_full(layer, query, k, v, by_head, scores, **sizes)
        output = _output_of(query, v.shape[-1])
        for chunk in group.chunks:
            _attend(group, chunk, query, *by_head(*self._pool.read(layer, chunk.context_slots)), scores, output)
        return output

    def attend_latent(self, layer: int, query: Tensor, latents: Tensor, heads: LatentHeads, scores: Scores) -> Tensor:
        """Compute every head's K and V from the latents for this call only: many queries share that work."""
        group = self._groups[self._pool.group_of(layer)]
        no_v = latents[..., :0]
        self._write(group, layer, latents, no_v)
        # A head's K and V, and the product that both are parts of.
        token_bytes = query.shape[1] * 2 * (query.shape[3] + heads.value_dim) * query.element_size()

        def expanded(latents: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            return heads.expand(latents.to(self._dtype))

        sizes = {"num_heads": query.shape[1], "value_dim": heads.value_dim, "token_bytes": token_bytes}
        return self._attend_full(layer, query, latents, no_v, expanded, scores, **sizes)

    def _write(self, group: _ChunkGroup, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the step's K and V [rows, heads, dim] of a layer to the device and to host pages, and report the layer."""
        if group.rows is None:
            self._pool.write(layer, group.new_slots, k, v)
        else:
            if group.chunks:
                self._pool.write(layer, group.new_slots, k[group.rows], v[group.rows])
            assert self._host is not None
            self._host.write(layer, k, v)
        self._report(layer)

    def _report(self, layer: int) -> None:
        """Report that a layer is written. If a stream writes host pages, report it there, because that stream can be later."""
        if self._host is None:
            self._on_written(layer)
        else:
            with self._host.on_write_stream():
                self._on_written(layer)

    def _attend_full(
        self,
        layer: int,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        by_head: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        scores: Scores,
        *,
        num_heads: int,
        value_dim: int,
        token_bytes: int,
    ) -> Tensor:
        """Attend from the rows of each chunk to the chunk itself, and then to all earlier tokens, in blocks.

        Args:
            k, v: K and V of the step, [rows, heads, dim].
            by_head: Converts K and V [tokens, heads, dim] as stored to [1, `num_heads`, tokens, dim].
            value_dim: Elements of a head's value.
            token_bytes: Bytes that `by_head` returns for each token.
        """
        group, part = self._groups[self._pool.group_of(layer)], self._pool.part_of(layer)
        output = _output_of(query, value_dim)
        block_tokens = max(1, ATTENTION_BYTES // token_bytes)

        def begin(first: int, end: int) -> list[tuple[slice, RunningSoftmax]]:
            """Attend from rows [first, end) to themselves, in parts of `block_tokens`."""
            found: list[tuple[slice, RunningSoftmax]] = []
            for row in range(first, end, block_tokens):
                rows = slice(row, min(row + block_tokens, end))
                found.append((rows, RunningSoftmax(query[:, :, rows], num_heads, value_dim, scores)))
            for index, (rows, running) in enumerate(found):
                own = by_head(*(convert(one[rows], part.element) for one in (k, v)))  # rounded as in the pool
                running.attend_causally(*own)
                for _, later in found[index + 1 :]:
                    later.attend(*own)
            return found

        def attend(chunk: list[tuple[slice, RunningSoftmax]], k: Tensor, v: Tensor) -> None:
            context = by_head(k, v)
            for _, running in chunk:
                running.attend(*context)

        def store(chunk: list[tuple[slice, RunningSoftmax]]) -> None:
            for rows, running in chunk:
                output[:, rows] = running.result().transpose(1, 2)

        for chunk in group.chunks:
            own = begin(chunk.begin, chunk.end)
            for slots in chunk.earlier_slots.split(block_tokens) if chunk.first_token > chunk.first_context else ():
                attend(own, *self._pool.read(layer, slots))
            store(own)
        if group.rows is not None:
            assert self._host is not None
            hosted = [begin(one.begin, one.end) for one in self._host.chunks]
            for index, context_k, context_v in self._host.contexts(layer):
                for part_k, part_v in zip(context_k.split(block_tokens), context_v.split(block_tokens), strict=True):
                    attend(hosted[index], part_k, part_v)
            for own in hosted:
                store(own)
        return output

    def _attend_sparse(self, sparse: SparsePrefill, layer: int, query: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """Attend from the rows of each chunk to the blocks that are selected for them; arguments as for `_attend_full`."""
        group, part = self._groups[self._pool.group_of(layer)], self._pool.part_of(layer)
        output = _output_of(query, v.shape[-1])

        def begin(first: int, end: int) -> SparseChunk:
            own_k, own_v = (convert(one[first:end], part.element) for one in (k, v))  # rounded as in the pool
            chunk = SparseChunk(sparse, query[:, :, first:end], own_k, own_v, scores, self._cuts[first])
            chunk.estimate(chunk.own)
            return chunk

        for one in group.chunks:
            chunk = begin(one.begin, one.end)
            if one.first_token:
                earlier = KeySpan(
                    k=token_major(self._pool.buffer(layer, is_v=False), self._pool.order),
                    v=token_major(self._pool.buffer(layer, is_v=True), self._pool.order),
                    pages=one.pages,
                    num_tokens=one.first_token,
                    first_block=0,
                    is_own=False,
                )
                chunk.estimate(earlier)
            chunk.select()
            chunk.attend(chunk.own)
            if one.first_token:
                chunk.attend(earlier)
            output[:, one.begin : one.end] = chunk.result().transpose(1, 2)
        for index, hosted in enumerate(self._host.chunks if self._host is not None else ()):
            assert self._host is not None
            chunk = begin(hosted.begin, hosted.end)
            for span in self._host.spans(layer, index):
                chunk.estimate(span)
            selected = self._host.selected_spans(layer, index, chunk.select())  # fetched during the next line
            chunk.attend(chunk.own)
            for span, bounds in selected:
                chunk.attend(span, bounds)
            output[:, hosted.begin : hosted.end] = chunk.result().transpose(1, 2)
        return output

    def advance(self, layer: int, hidden: Tensor, advance: Advance) -> Tensor:
        outputs: list[Tensor] = []
        row = 0
        for item, state_row in zip(self._items, self._state_rows, strict=True):
            states, no_v = self._pool.read(layer, state_row)
            if item.first_token == 0:
                states.zero_()
            output, states = advance(hidden[:, row : row + item.num_tokens], states)
            self._pool.write(layer, state_row, states, no_v)
            outputs.append(output)
            row += item.num_tokens
        self._report(layer)
        return torch.cat(outputs, dim=1)


def _output_of(query: Tensor, value_dim: int) -> Tensor:
    return torch.empty((1, query.shape[2], query.shape[1], value_dim), dtype=query.dtype, device=query.device)


def _attend(group: _ChunkGroup, chunk: _Chunk, query: Tensor, k: Tensor, v: Tensor, scores: Scores, output: Tensor) -> None:
    """Attend with a chunk's rows to its context, K and V [1, heads, context, dim], and store the rows in `output`."""
    for begin, end, first_key, end_key in chunk.blocks(group.window_tokens):
        mask = group.mask(end - begin, end_key - first_key)
        attended = attention(query[:, :, begin:end], k[:, :, first_key:end_key], v[:, :, first_key:end_key], mask, scores)
        output[:, begin:end] = attended.transpose(1, 2)


_Pages = KVPool | PagedKVPool
"""A pool from which K and V of a layer are read by slot: the device's, or a part of the host pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowGroup:
    """Rows of the step that attend in one call.

    Args:
        rows: int64 row numbers; None means all.
        context_slots: [rows, longest context]; a shorter row repeats its own first slot, which holds finite numbers.
        mask: [rows, 1, 1, longest context], -inf where a row repeats; None if all rows are equally long.
    """

    rows: Tensor | None
    context_slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TieredRow:
    """A row of the step whose first tokens are in host memory or in the store.

    Args:
        device_slots: int64 [tokens], slots of the tokens on the device.
        host_blocks: int64 [tokens] each: slots of the host pool that are read together.
        stored: Blocks in the store.
    """

    row: int
    device_slots: Tensor
    host_blocks: tuple[Tensor, ...]
    stored: tuple[int, ...]


class _TokenGroup:
    """The part of a decode step that the layers of one group share: slots of new tokens, and the context of each row.

    Requests attend together, padded to the longest of their row group, at most to twice their own length. Requests with pages in
    host memory attend alone.

    Args:
        hosts: Host pages of each item.
        pages_per_block: Host pages that are read together.
        stored: Stored blocks of each item.
        pages_per_stored_block: Pages of each of these.
    """

    def __init__(
        self,
        group: LayerGroup,
        part: PagedKVPool,
        items: Sequence[DecodeItem],
        tables: Sequence[NDArray[np.int64]],
        dtype: torch.dtype,
        hosts: Sequence[Sequence[int]],
        pages_per_block: int,
        stored: Sequence[tuple[int, ...]],
        pages_per_stored_block: int,
    ) -> None:
        begins = [
            (len(host) + len(blocks) * pages_per_stored_block) * part.page_size
            for host, blocks in zip(hosts, stored, strict=True)
        ]
        slots = [
            token_slots(table, max(group.first_needed_token(item.position), begin), item.position + 1, part.page_size)
            for item, table, begin in zip(items, tables, begins, strict=True)
        ]
        self._dtype = dtype
        self._device = part.device
        self.new_slots = torch.tensor([own[-1] for own in slots], dtype=torch.int64, device=part.device)
        plain = [row for row, begin in enumerate(begins) if not begin]
        groups = rows_of_similar_length([len(slots[row]) for row in plain])
        self.row_groups = [self._row_group([plain[index] for index in rows], slots) for rows in groups]
        self.tiered_rows = [
            self._tiered_row(row, slots[row], hosts[row], part.page_size, pages_per_block, stored[row])
            for row, begin in enumerate(begins)
            if begin
        ]

    def _tiered_row(
        self,
        row: int,
        slots: NDArray[np.int64],
        host: Sequence[int],
        page_size: int,
        pages_per_block: int,
        stored: tuple[int, ...],
    ) -> _TieredRow:
        host_slots = token_slots(np.array(host, dtype=np.int64), 0, len(host) * page_size, page_size)
        return _TieredRow(
            row=row,
            device_slots=torch.from_numpy(slots).to(self._device),
            host_blocks=torch.from_numpy(host_slots).to(self._device).split(pages_per_block * page_size) if len(host) else (),
            stored=stored,
        )

    def _row_group(self, rows: list[int], slots: list[NDArray[np.int64]]) -> _RowGroup:
        longest = max(len(slots[row]) for row in rows)
        padded = np.empty((len(rows), longest), dtype=np.int64)
        mask = np.zeros((len(rows), 1, 1, longest), dtype=np.float32)
        for index, row in enumerate(rows):
            own = slots[row]
            padded[index, : len(own)] = own
            padded[index, len(own) :] = own[0]
            mask[index, :, :, len(own) :] = -np.inf
        return _RowGroup(
            rows=None if len(rows) == len(slots) else torch.tensor(rows, device=self._device),
            context_slots=torch.from_numpy(padded).to(self._device),
            mask=torch.from_numpy(mask).to(self._device, self._dtype) if mask.any() else None,
        )


class GatherDecodePlan:
    """One token of each request, from K and V that are gathered from the pool; see `StepPlan`.

    Args:
        items: The step's checked items, with `tables`.
        dtype: Dtype that the model computes in.
        tier: The host tier; needed if an item has host pages.
    """

    def __init__(
        self,
        items: Sequence[DecodeItem],
        tables: Sequence[Tables],
        pool: KVPool,
        dtype: torch.dtype,
        tier: HostBlocks | None = None,
    ) -> None:
        self._pool = pool
        self._dtype = dtype
        self._host = None if tier is None else tier.host.device_part(tier.group)
        self._stored = None if tier is None else tier.stored
        self._stored_pools = () if tier is None else tier.stored_pools
        self._groups: dict[int, _TokenGroup] = {}
        for index, (group, part) in enumerate(zip(pool.groups, pool.parts, strict=True)):
            own = [tables_of_item[index] for tables_of_item in tables]
            if group.kind is GroupKind.STATE:
                self._state_rows = torch.from_numpy(np.concatenate(own)).to(pool.device)
                self._new_states = torch.tensor([item.position == 0 for item in items], device=pool.device)
            else:
                hosts = [item.host_tables[index] if item.host_tables else () for item in items]
                pages_per_block = 1 if tier is None else tier.pages_per_block
                stored = [item.stored_blocks if group.kind is GroupKind.FULL else () for item in items]
                per_stored_block = 0 if self._stored is None else self._stored.pages_per_block
                self._groups[index] = _TokenGroup(
                    group, part, items, own, dtype, hosts, pages_per_block, stored, per_stored_block
                )
        if self._stored is not None and tier is not None:
            blocks = [block for row in self._groups[tier.group].tiered_rows for block in row.stored]
            self._stored.begin([StoredRead(layer=layer, block=block) for layer in tier.slice_bytes for block in blocks])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        group = self._groups[self._pool.group_of(layer)]
        self._pool.write(layer, group.new_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))

        def read(pages: _Pages, slots: Tensor) -> tuple[Tensor, Tensor]:
            k, v = (part.to(self._pool.device, self._dtype).transpose(1, 2) for part in pages.read(layer, slots))
            return k, v

        return self._attend(group, query, value.shape[-1], read, scores)

    def attend_latent(self, layer: int, query: Tensor, latents: Tensor, heads: LatentHeads, scores: Scores) -> Tensor:
        """Attend without the heads' keys and values: each row reads its latents once, as one KV head that all heads share."""
        group = self._groups[self._pool.group_of(layer)]
        self._pool.write(layer, group.new_slots, latents, latents[..., :0])

        def read(pages: _Pages, slots: Tensor) -> tuple[Tensor, Tensor]:
            # The values contain the rotary part, which is dropped later: values as wide as keys keep the fast path.
            context = pages.read(layer, slots)[0].to(self._pool.device, self._dtype).transpose(1, 2)
            return context, context

        return heads.values(self._attend(group, heads.absorb(query), latents.shape[-1], read, scores))

    def _attend(
        self,
        group: _TokenGroup,
        query: Tensor,
        value_dim: int,
        read: Callable[[_Pages, Tensor], tuple[Tensor, Tensor]],
        scores: Scores,
    ) -> Tensor:
        num_query_heads, num_rows = query.shape[1:3]
        queries = query[0].transpose(0, 1).unsqueeze(2)  # [rows, query heads, 1, dim]
        output = torch.empty((num_rows, num_query_heads, 1, value_dim), dtype=query.dtype, device=query.device)
        for rows in group.row_groups:
            k, v = read(self._pool, rows.context_slots)
            own = queries if rows.rows is None else queries[rows.rows]
            attended = attention(own, k, v, rows.mask, scores)
            if rows.rows is None:
                output = attended
            else:
                output[rows.rows] = attended
        for tiered in group.tiered_rows:
            assert self._host is not None  # the step's checks refuse such items without a host pool
            # At least the page of the newest token is in the pool.
            k, v = read(self._pool, tiered.device_slots.unsqueeze(0))
            running = RunningSoftmax(queries[tiered.row : tiered.row + 1], k.shape[1], value_dim, scores)
            running.add(k, v, None)
            for block in tiered.host_blocks:
                running.add(*read(self._host, block.unsqueeze(0)), None)
            is_lost = [not self._add_stored(running, read) for _ in tiered.stored]
            output[tiered.row] = torch.nan if any(is_lost) else running.result()[0]
        return output.view(1, num_rows, num_query_heads, -1)

    def _add_stored(self, running: RunningSoftmax, read: Callable[[_Pages, Tensor], tuple[Tensor, Tensor]]) -> bool:
        """Attend to the next stored block. Return False if the store failed."""
        assert self._stored is not None  # the step's checks refuse such items otherwise
        buffer = self._stored.next()
        if buffer is None:
            return False
        pages = self._stored_pools[buffer]
        running.add(*read(pages, torch.arange(pages.num_slots).unsqueeze(0)), None)
        self._stored.release(buffer)
        return True

    def advance(self, layer: int, hidden: Tensor, advance: Advance) -> Tensor:
        states, no_v = self._pool.read(layer, self._state_rows)
        states.masked_fill_(self._new_states.view(-1, 1, 1), 0)
        output, states = advance(hidden.transpose(0, 1), states)
        self._pool.write(layer, self._state_rows, states, no_v)
        return output.transpose(0, 1)


def rows_of_similar_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group the rows such that the longest of a group is at most twice as long as its shortest.

    Rows ascend in a group, because a group of all rows is not indexed: it has the step's order.
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if groups and lengths[groups[-1][0]] <= 2 * lengths[row]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [sorted(group) for group in groups]
