"""Decode steps on a GPU: page tables and inputs in fixed memory, attention and writes by kernels.

The launches of a step depend on the number of its requests, not on their lengths. So a step of a given size is captured into a
CUDA graph once and then replayed; only the contents of the input tensors change. Steps that read host memory (`tiered_decode`)
have separate graphs, for as much of a layer as both buffers hold. Larger steps, and steps that read more, are launched kernel by
kernel from the same inputs.

A batch is padded to a captured size with the dummy request: its position is -1, and it has the dummy row of every page table and
no row of states. So it attends to nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedded_engine.graphs import CannotBeCaptured, DecodeGraphs
from embedded_engine.host_tier import HostBlocks
from embedded_engine.kernel_plan import FIRST_GROUP, POSITIONS, TOKEN_IDS, KernelDecodePlan
from embedded_engine.step_plan import StepPlan
from embedded_engine.tiered_decode import DeviceBlocks, HostReader, TieredDecodePlan
from transfer.engine_types import DecodeItem
from transfer.layer_groups import GroupKind
from transfer.pool.kv_pool import KVPool
from transfer.pool.page_table import NO_SLOT, PageTable

log = structlog.get_logger(__name__)

Compute = Callable[[Tensor, Tensor, StepPlan], Tensor]
"""(token ids [1, rows], positions [1, rows], plan) -> logits [rows, vocabulary]."""
PutTokens = Callable[[Tensor], None]
"""Queues a copy into a step's token ids, int64 [rows] on the device."""

DUMMY_POSITION: Final = -1
"""Position of the dummy request, which therefore has no token."""

_DUMMY_HOST_PAGES: Final = (0,)
"""Host pages of a step that runs only to compile its kernels."""


class DeviceDecoder:
    """Run decode steps from static memory, by a CUDA graph if one has a fitting size.

    The inputs of a step are one int64 tensor [2 + groups, rows]: token ids, positions, and for each group of layers the
    row of the request in its page table or its states. A request with draft tokens has several adjacent rows.

    Args:
        max_rows: Most rows of a step.
        max_seq_len: Tokens of the longest request, for which page tables have columns.
        compute: Runs the model.
        advice: The settings to change if there is no memory for CUDA graphs.
        beside: Decoder of another model with the same pool, whose page tables this one uses, too.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        max_running_requests: int,
        max_rows: int,
        max_seq_len: int,
        compute: Compute,
        advice: str,
        beside: DeviceDecoder | None = None,
    ) -> None:
        self.max_running_requests = max_running_requests
        self.max_rows = max_rows
        self._pool = pool
        self._compute = compute
        self._advice = advice
        self._tables: dict[int, PageTable]
        if beside is not None:
            self._tables = beside._tables
        else:
            self._tables = {
                index: PageTable(
                    num_rows=max_running_requests + 1, max_seq_len=max_seq_len, page_size=part.page_size, device=pool.device
                )
                for index, (group, part) in enumerate(zip(pool.groups, pool.parts, strict=True))
                if group.kind is not GroupKind.STATE
            }
        dummy = [self._tables[index].dummy_row if index in self._tables else NO_SLOT for index in range(len(pool.groups))]
        self._dummy = np.array([[0], [DUMMY_POSITION], *([row] for row in dummy)], dtype=np.int64)
        self._inputs = torch.zeros(len(self._dummy) * max_rows, dtype=torch.int64, device=pool.device)
        self._graphs: DecodeGraphs | None = None
        self._tiered_graphs: DecodeGraphs | None = None
        self._host: HostReader | None = None

    @property
    def page_table_bytes(self) -> int:
        """Bytes of all page tables."""
        return sum(table.num_bytes for table in self._tables.values())

    @property
    def cuda_graph_bytes(self) -> int:
        """Bytes of the device that the CUDA graphs took."""
        return sum(graphs.num_bytes for graphs in (self._graphs, self._tiered_graphs) if graphs is not None)

    @property
    def captured_batch_sizes(self) -> tuple[int, ...]:
        """Sizes of steps with a CUDA graph, ascending."""
        return () if self._graphs is None else self._graphs.batch_sizes

    def capture(self, batch_sizes: Sequence[int]) -> None:
        """See `EmbeddedEngine.capture_cuda_graphs`."""
        self._graphs = self._tiered_graphs = None
        if not batch_sizes:
            return
        try:
            self._graphs = DecodeGraphs(
                batch_sizes, lambda size: self._load((), size), self._step, self._pool.device, advice=self._advice
            )
        except CannotBeCaptured as error:
            log.warning("no_cuda_graphs", reason=str(error))
        self._capture_tiered()

    def logits(self, items: Sequence[DecodeItem], put_unread: PutTokens | None = None) -> Tensor:
        """Queue a step on the current stream; return logits [items, vocabulary] that are valid until the next step.

        Args:
            items: One for each row, without draft tokens; those of a request are adjacent, in the order of their positions.
            put_unread: Writes the tokens of the unread items into the inputs; None if there are no such items.
        """
        size = None if self._graphs is None else self._graphs.size_for(len(items))
        has_stored = any(item.stored_blocks for item in items)
        if self._host is not None and (has_stored or any(any(item.host_tables) for item in items)):
            # Padded like a replayed step: the kernels of those sizes are compiled.
            num_rows, group = size or len(items), self._host.tier.group
            self._load(items, num_rows, put_unread)
            host_tables = [item.host_tables[group] if item.host_tables else () for item in items]
            if size is not None and self._tiered_graphs is not None and not has_stored and self._host.load(host_tables):
                return self._tiered_graphs.replay(size)[: len(items)]
            stored = [item.stored_blocks for item in items] if has_stored else ()
            host_tables += [()] * (num_rows - len(items))
            return self._tiered(num_rows, self._host, self._host.begin(host_tables, stored))[: len(items)]
        if self._graphs is None or size is None:
            self._load(items, len(items), put_unread)
            return self._step(len(items))
        self._load(items, size, put_unread)
        return self._graphs.replay(size)[: len(items)]

    @property
    def host_block_bytes(self) -> int:
        """Bytes of the buffers for host blocks on the device."""
        return 0 if self._host is None else self._host.fetcher.num_bytes

    def use_host_tier(self, tier: HostBlocks) -> None:
        """Let steps read host pages, see `EmbeddedEngine.use_host_pool`; a step of the dummy request compiles their kernels."""
        self._host = HostReader(self._pool, tier, max_rows=self.max_rows)
        self._load((), 1)
        self._tiered(1, self._host, self._host.begin([_DUMMY_HOST_PAGES]))
        self._capture_tiered()

    def _capture_tiered(self) -> None:
        """Capture steps that read host memory, in the sizes of the other graphs, if there are both."""
        host, graphs = self._host, self._graphs
        if host is None or graphs is None:
            return

        def load(size: int) -> None:
            self._load((), size)
            host.load([_DUMMY_HOST_PAGES])

        def step(size: int) -> Tensor:
            return self._tiered(size, host, host.begin_loaded(size))

        try:
            self._tiered_graphs = DecodeGraphs(
                graphs.batch_sizes, load, step, self._pool.device, advice=self._advice, beside=graphs
            )
        except CannotBeCaptured as error:
            log.warning("no_tiered_cuda_graphs", reason=str(error))

    def _tiered(self, num_rows: int, host: HostReader, blocks: DeviceBlocks) -> Tensor:
        """Launch a step over the inputs and blocks of host pages."""
        inputs = self._inputs_of(num_rows)
        try:
            return self._computed(inputs, TieredDecodePlan(self._pool, self._tables, inputs, host, blocks))
        finally:
            host.fetcher.end()  # also of a failed step: a replayed step does not wait for fetches under way

    def _step(self, num_rows: int) -> Tensor:
        """Launch a step over the inputs."""
        inputs = self._inputs_of(num_rows)
        return self._computed(inputs, KernelDecodePlan(self._pool, self._tables, inputs))

    def _computed(self, inputs: Tensor, plan: StepPlan) -> Tensor:
        return self._compute(inputs[TOKEN_IDS].unsqueeze(0), inputs[POSITIONS].unsqueeze(0), plan)

    def _inputs_of(self, num_rows: int) -> Tensor:
        """Return the inputs of a step of this size, the beginning of the memory that all sizes share: one copy fills it."""
        return self._inputs[: len(self._dummy) * num_rows].view(-1, num_rows)

    def _load(self, items: Sequence[DecodeItem], num_rows: int, put_unread: PutTokens | None = None) -> None:
        """Queue the copy of a step's inputs and of changed page tables, after all work that reads the previous ones."""
        is_gpu = self._inputs.device.type == "cuda"
        # New memory each time: the allocator of pinned memory reuses a block only after the copy from it has finished.
        host = torch.empty((len(self._dummy), num_rows), dtype=torch.int64, pin_memory=is_gpu)
        values: NDArray[np.int64] = host.numpy()
        values[:] = self._dummy
        values[TOKEN_IDS, : len(items)] = [item.token_id for item in items]
        values[POSITIONS, : len(items)] = [item.position for item in items]
        for index in range(len(self._pool.groups)):
            values[FIRST_GROUP + index, : len(items)] = self._rows_of(index, items)
        inputs = self._inputs_of(num_rows)
        inputs.copy_(host, non_blocking=is_gpu)
        if put_unread is not None:
            put_unread(inputs[TOKEN_IDS])

    def _rows_of(self, index: int, items: Sequence[DecodeItem]) -> list[int]:
        if index not in self._tables:
            return [item.page_tables[index][0] for item in items]
        last = {item.request_id: item for item in items}  # the last row of each request
        rows = self._tables[index].rows_of(
            [(request_id, item.page_tables[index], item.position + 1) for request_id, item in last.items()]
        )
        if len(last) == len(items):
            return rows
        row_of = dict(zip(last, rows, strict=True))
        return [row_of[item.request_id] for item in items]
