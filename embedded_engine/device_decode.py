"""Decode steps on a GPU: page tables and inputs that stay where they are, attention and writes by kernels.

Nothing that a step launches depends on how long its requests are, only on how many there are. So a step of a given size can be
captured into a CUDA graph once and replayed from then on; what changes between steps is what the input tensors hold. Larger steps
than any that was captured are launched kernel by kernel, from the same tensors.

A batch is padded to a captured size with the dummy request: its position is -1, it has the dummy row of every page table and no
row of states, so it attends to nothing, and nothing is written of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedded_engine.attention import Scores
from embedded_engine.graphs import CannotBeCaptured, DecodeGraphs
from embedded_engine.kernels.paged_decode import paged_decode_attention
from embedded_engine.kernels.write_rows import write_rows
from embedded_engine.paged_attention import Advance, LatentHeads, StepPlan
from transfer.engine_types import DecodeItem
from transfer.kv_pool import KVPool
from transfer.layer_groups import GroupKind
from transfer.memory.page_table import NO_SLOT, PageTable

log = structlog.get_logger(__name__)

Compute = Callable[[Tensor, Tensor, StepPlan], Tensor]
"""(token ids [1, rows], positions [1, rows], plan) -> logits [rows, vocabulary]."""

DUMMY_POSITION: Final = -1
"""Of the dummy request, which so has no token."""

_MAX_PIECE_ELEMENTS = 1024
_TOKEN_IDS, _POSITIONS, _FIRST_GROUP = 0, 1, 2  # rows of the inputs; behind them one row for each group of layers


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupRows:
    """What the layers of one paged group share in a step.

    Args:
        slots: The group's page table.
        rows: int32 [requests], whose row each request has.
        new_slots: int32 [requests], where the new token of each goes.
        window_tokens: Tokens that attention reaches; 0 for all.
    """

    slots: Tensor
    rows: Tensor
    new_slots: Tensor
    window_tokens: int


class KernelDecodePlan:
    """One token of each request, by kernels; see `StepPlan`. All that it knows of the step is in tensors, made of the inputs.

    Args:
        pool: Where K, V and states are written and read.
        tables: Page table of each paged group of the pool.
        inputs: int64 [2 + groups, requests], see `DeviceDecoder`.
    """

    def __init__(self, pool: KVPool, tables: Mapping[int, PageTable], inputs: Tensor) -> None:
        positions = inputs[_POSITIONS]
        self._pool = pool
        self._lengths = (positions + 1).to(torch.int32)
        self._groups: dict[int, _GroupRows] = {}
        for index, group in enumerate(pool.groups):
            rows = inputs[_FIRST_GROUP + index]
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
        """As in `GatherDecodePlan`: all heads read a token's latent once, and V is its beginning."""
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
        write_rows(k, v, new_k, new_v, group.new_slots, order=self._pool.order)
        attended, _ = paged_decode_attention(
            query[0].transpose(0, 1),
            k,
            v,
            slots=group.slots,
            rows=group.rows,
            lengths=self._lengths,
            scale=scores.scale,
            v_dim=v_dim,
            order=self._pool.order,
            window_tokens=group.window_tokens,
            sinks=scores.sinks,
            softcap=scores.softcap,
        )
        return attended.unsqueeze(0)

    def advance(self, layer: int, hidden: Tensor, advance: Advance) -> Tensor:
        buffer = self._pool.buffer(layer, is_v=False)  # [states, 1, heads, elements]
        states = buffer[:, 0].index_select(0, self._state_rows).masked_fill_(self._is_without_state, 0)
        output, states = advance(hidden.transpose(0, 1), states)
        # As heads of few elements, for the kernel keeps the elements of a head in registers.
        piece = _piece_elements(buffer[0].numel())
        new_rows = states.reshape(len(states), -1, piece)
        write_rows(buffer.view(len(buffer), 1, -1, piece), None, new_rows, None, self._state_slots)
        return output.transpose(0, 1)


class DeviceDecoder:
    """Runs decode steps from static memory, by a CUDA graph where there is one of a fitting size.

    The inputs of a step are one int64 tensor [2 + groups, requests]: token ids, positions, and for each group of layers the
    requests' rows: of its page table, or of its states.

    Args:
        pool: The engine's pool.
        max_running_requests: Most requests of a step.
        max_seq_len: Most tokens of a request.
        compute: The model.
    """

    def __init__(self, pool: KVPool, *, max_running_requests: int, max_seq_len: int, compute: Compute) -> None:
        self.max_running_requests = max_running_requests
        self._pool = pool
        self._compute = compute
        self._tables = {
            index: PageTable(
                num_rows=max_running_requests + 1, max_seq_len=max_seq_len, page_size=part.page_size, device=pool.device
            )
            for index, (group, part) in enumerate(zip(pool.groups, pool.parts, strict=True))
            if group.kind is not GroupKind.STATE
        }
        dummy = [self._tables[index].dummy_row if index in self._tables else NO_SLOT for index in range(len(pool.groups))]
        self._dummy = np.array([[0], [DUMMY_POSITION], *([row] for row in dummy)], dtype=np.int64)
        self._inputs = torch.zeros(len(self._dummy) * max_running_requests, dtype=torch.int64, device=pool.device)
        self._graphs: DecodeGraphs | None = None

    @property
    def page_table_bytes(self) -> int:
        """Bytes of all page tables."""
        return sum(table.num_bytes for table in self._tables.values())

    @property
    def cuda_graph_bytes(self) -> int:
        """What the CUDA graphs took of the device's memory."""
        return 0 if self._graphs is None else self._graphs.num_bytes

    @property
    def captured_batch_sizes(self) -> tuple[int, ...]:
        """Sizes of steps that are replayed, ascending."""
        return () if self._graphs is None else self._graphs.batch_sizes

    def capture(self, batch_sizes: Sequence[int]) -> None:
        """See `EmbeddedEngine.capture_cuda_graphs`."""
        self._graphs = None
        if not batch_sizes:
            return
        try:
            self._graphs = DecodeGraphs(batch_sizes, lambda size: self._load((), size), self._step, self._pool.device)
        except CannotBeCaptured as error:
            log.warning("no_cuda_graphs", reason=str(error))

    def logits(self, items: Sequence[DecodeItem]) -> Tensor:
        """[items, vocabulary] of a step of at most `max_running_requests`, queued on the current stream; until the next step."""
        size = None if self._graphs is None else self._graphs.size_for(len(items))
        if self._graphs is None or size is None:
            self._load(items, len(items))
            return self._step(len(items))
        self._load(items, size)
        return self._graphs.replay(size)[: len(items)]

    def _step(self, num_rows: int) -> Tensor:
        """Launch a step over what the inputs hold."""
        inputs = self._inputs_of(num_rows)
        plan = KernelDecodePlan(self._pool, self._tables, inputs)
        return self._compute(inputs[_TOKEN_IDS].unsqueeze(0), inputs[_POSITIONS].unsqueeze(0), plan)

    def _inputs_of(self, num_rows: int) -> Tensor:
        """The inputs of a step of this size: the beginning of the memory that all sizes share, so that one copy fills it."""
        return self._inputs[: len(self._dummy) * num_rows].view(-1, num_rows)

    def _load(self, items: Sequence[DecodeItem], num_rows: int) -> None:
        """Queue a step's inputs and what changed of its page tables, behind whatever still reads those of the step before."""
        is_gpu = self._inputs.device.type == "cuda"
        # New memory each time: the allocator of pinned memory hands a block out again only when the copy from it is done.
        host = torch.empty((len(self._dummy), num_rows), dtype=torch.int64, pin_memory=is_gpu)
        values: NDArray[np.int64] = host.numpy()
        values[:] = self._dummy
        values[_TOKEN_IDS, : len(items)] = [item.token_id for item in items]
        values[_POSITIONS, : len(items)] = [item.position for item in items]
        for index in range(len(self._pool.groups)):
            values[_FIRST_GROUP + index, : len(items)] = self._rows_of(index, items)
        self._inputs_of(num_rows).copy_(host, non_blocking=is_gpu)

    def _rows_of(self, index: int, items: Sequence[DecodeItem]) -> list[int]:
        if index not in self._tables:
            return [item.page_tables[index][0] for item in items]
        return self._tables[index].rows_of([(item.request_id, item.page_tables[index], item.position + 1) for item in items])


@functools.cache
def _piece_elements(num_elements: int) -> int:
    """The largest divisor of a state's elements that the kernel takes as one row."""
    return max(size for size in range(1, _MAX_PIECE_ELEMENTS + 1) if num_elements % size == 0)
