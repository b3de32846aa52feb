"""`EmbeddedEngine`: one rank of a Hugging Face model over kvferry's paged pool, for either tier.

Importing this module loads torch and transformers, but starts no thread and no process group, so that a fork server can import
it once and fork ranks from it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedded_engine.causal_model import CausalModel, compile_decode_steps
from embedded_engine.draft_model import DraftModel, check_draft_model
from embedded_engine.engine_settings import EngineSettings, check_batch_sizes, check_is_positive
from embedded_engine.failed_steps import StepGuard
from embedded_engine.forward_batch import (
    NO_TOKEN,
    ChosenTokens,
    ForwardBatch,
    ForwardOutput,
    WantedRow,
    rows_of,
    unread_rows,
    use_of,
)
from embedded_engine.graphs import reserved_bytes
from embedded_engine.host_prefill import HostChunk, HostPages, HostStep
from embedded_engine.host_tier import HostBlocks
from embedded_engine.model_config import one_line
from embedded_engine.model_files import ModelFiles, read_model_files
from embedded_engine.paged_attention import GatherDecodePlan, PrefillPlan, Tables
from embedded_engine.sampling import sample_on_device
from embedded_engine.sparse_prefill import SparsePrefill, sparse_kernels
from embedded_engine.step_arrays import on_device
from embedded_engine.step_checks import StepChecks
from embedded_engine.step_plan import StepPlan
from embedded_engine.tensor_parallel import TensorParallelGroup
from planner.memory_advice import Phase, advice_for
from planner.plan import MemoryPlan
from planner.workspace import XAttention
from transfer.engine_types import DecodeItem, PrefillCounts, PrefillItem, StoredKV
from transfer.errors import ConfigError, EngineError
from transfer.layer_groups import layer_groups, page_table_tokens
from transfer.layout import DType, KVLayout, LayerKind, Shard
from transfer.out_of_memory import allocating
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool

if TYPE_CHECKING:
    from embedded_engine.device_decode import DeviceDecoder

log = structlog.get_logger(__name__)

OnLayersWritten = Callable[[int, Any], None]
PlanPages = Callable[[int], Sequence[int]]
"""(bytes of the loaded weights) -> pages of each layer group."""
Advise = Callable[[Phase], str]
"""Work that finds no memory -> settings to change, as an imperative."""


class _Place(TypedDict):
    """How and where models are loaded, see `CausalModel`."""

    dtype: torch.dtype
    device: torch.device
    group: TensorParallelGroup | None
    advice: str


class EmbeddedEngine:
    """One rank; implements `PrefillEngine` and `DecodeEngine`.

    Used by one thread; another thread may read the tokens of `begin_decode`. If there is no memory for a step, only this step
    fails. After an error of the GPU the engine rejects further steps, because CUDA reports the error again at each later call.

    The ranks of a group must be given the same steps in the same order. Every rank finds a wrong item before the first
    collective. After any failed step of a group the engine refuses further steps: the ranks may have stopped at different places.

    Memory is allocated in this order: weights, pool (whose size may depend on the weights), page tables, CUDA graphs. Only a GPU
    has the last two: its decode steps attend by kernels, see `embedded_engine.device_decode`. Other devices, and engines without
    `max_running_requests`, use torch's attention, as prefill steps do. Layers are compiled before the pool is allocated.

    Args:
        directory: A local Hugging Face directory of a family in `ARCHITECTURES`, or its checked `ModelFiles`.
        shard: This rank's shard; `tp_size` and `tp_rank` must be those of `group`.
        num_pages: Pages of each layer group of this rank's pool (one number if there is one group), or a function that returns
            them after the weights are loaded.
        dtype: Dtype that the model computes in; None takes the dtype of the stored weights.
        group: The rank's TP group (`init_distributed`); None for TP 1. `close()` leaves it.
        layers_per_group: Layers that `prefill` reports at a time; None reports all at once.
        num_threads: CPU threads of a torch operation in this process; None leaves the number unchanged.
        max_seq_len: Tokens of the longest request, prompt and generation together; None means the model's context.
        max_running_requests: Most requests of a decode step; None if there are no decode steps, or no page tables for them.
        has_host_pages: Whether decode steps may read pages in host memory, see `use_host_pool`. A request can then be longer than
            the pool, and page tables have `max_seq_len` columns. Otherwise they are no wider than the pool.
        cuda_graph_batch_sizes: Rows of decode steps to capture as CUDA graphs; a smaller step is padded to the next of them. A
            row is a request's newest token or one of its draft tokens.
        advise: Names the settings to change in errors about memory. The default gives their names without values.
        has_decode_kernels: Whether decode steps and block-sparse prefill attend by kernels; None means on a GPU only. Triton's
            interpreter can run the kernels on a CPU.
        sparse_prefill: Policy of block-sparse prefill; None for full attention.
        chunk_tokens: Most tokens of a request in a prefill step; needed for the workspaces of `sparse_prefill`.
        num_speculative_tokens: Maximum number of draft tokens of a request in a decode step.
        draft: Checked directory of the draft model. `prefill`, `decode` and `verify` then also compute its KV, in further layers
            of the pool.
        torch_compile_max_bs: Maximum number of rows of a decode step that runs compiled; 0 disables compilation. On a GPU, the
            sizes in `cuda_graph_batch_sizes` up to this one are compiled; on a CPU, all sizes up to this one. See
            `embedded_engine.compiled_layers`.

    Attributes:
        memory_plan: The plan that sized the pool, if there is one.
        memory_warnings: Estimates of that plan that were wrong.
        weights_bytes: Bytes of this rank's weights.
        inductor_bytes: Device memory that compilation took; 0 on a CPU.

    Raises:
        ConfigError: The directory, a parallel size or a batch size is wrong.
        OutOfMemory: There is no memory for weights, pool, page tables or CUDA graphs.
        EngineError: The weights cannot be loaded, or the capture of a CUDA graph failed.
    """

    def __init__(
        self,
        directory: Path | str | ModelFiles,
        *,
        shard: Shard,
        num_pages: int | Sequence[int] | PlanPages,
        device: torch.device | str = "cpu",
        dtype: DType | None = None,
        group: TensorParallelGroup | None = None,
        layers_per_group: int | None = None,
        num_threads: int | None = None,
        max_seq_len: int | None = None,
        max_running_requests: int | None = None,
        cuda_graph_batch_sizes: Sequence[int] = (),
        has_host_pages: bool = False,
        advise: Advise = advice_for,
        has_decode_kernels: bool | None = None,
        sparse_prefill: XAttention | None = None,
        chunk_tokens: int | None = None,
        num_speculative_tokens: int = 0,
        draft: ModelFiles | None = None,
        torch_compile_max_bs: int = 0,
    ) -> None:
        self.memory_plan: MemoryPlan | None = None
        self.memory_warnings: tuple[str, ...] = ()
        self.files = directory if isinstance(directory, ModelFiles) else read_model_files(directory)
        self.draft_files = draft
        self.layout: KVLayout = self.files.layout(dtype)
        self.model_fields: Mapping[str, str] = self.files.fields
        if draft is not None:
            check_draft_model(self.files, draft)
            own_layers = self.layout.num_layers
            self.layout = KVLayout(layers=self.layout.layers + draft.layout(self.layout.dtype).layers, dtype=self.layout.dtype)
            self.model_fields = {**self.files.fields, **{f"draft.{name}": value for name, value in draft.fields.items()}}
        self.vocab_size = self.files.vocab_size
        self.eos_token_ids = self.files.eos_token_ids
        self._group = group
        self._advise = advise
        self._configure(
            EngineSettings(
                shard=shard,
                layers_per_group=layers_per_group,
                max_seq_len=max_seq_len,
                max_running_requests=max_running_requests,
                cuda_graph_batch_sizes=cuda_graph_batch_sizes,
                has_host_pages=has_host_pages,
                sparse_prefill=sparse_prefill,
                chunk_tokens=chunk_tokens,
                num_speculative_tokens=num_speculative_tokens,
                torch_compile_max_bs=torch_compile_max_bs,
            )
        )
        if not callable(num_pages):
            self._page_counts(num_pages)  # before the weights are loaded, which may take minutes
        if num_threads is not None:
            check_is_positive("num_threads", num_threads)
            torch.set_num_threads(num_threads)
        self._device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, self.layout.dtype.value)
        self._has_decode_kernels = self._device.type == "cuda" if has_decode_kernels is None else has_decode_kernels
        self._guard = StepGuard(f"rank {shard.tp_rank} of {shard.tp_size}", device=self._device, is_alone=group is None)
        place: _Place = {
            "dtype": self._dtype,
            "device": self._device,
            "group": group,
            "advice": advise(Phase.WEIGHTS),
        }
        self._model: CausalModel | None = CausalModel(self.files, **place)
        self._draft = None if draft is None else DraftModel(draft, **place, first_layer=own_layers)
        self.weights_bytes = self._model.weights_bytes + (0 if self._draft is None else self._draft.weights_bytes)
        self._open_pool(num_pages)

    def _configure(self, settings: EngineSettings) -> None:
        """Check and keep the settings that do not depend on the weights."""
        rank, size = (0, 1) if self._group is None else (self._group.rank, self._group.size)
        settings.check(self.files, self.draft_files, rank=rank, size=size)
        self._settings, self.shard = settings, settings.shard
        self.max_context_tokens = settings.max_context_tokens(self.files, self.draft_files)
        self.layers_per_group = settings.layers_per_group or self.layout.num_layers
        self._workspaces = settings.sparse_workspaces(self.files, self.layout, self.max_context_tokens)

    def _compile_sparse(self, sparse: SparsePrefill) -> None:
        """Compile the kernels of block-sparse prefill on a GPU."""
        if not self._has_decode_kernels or self._device.type != "cuda" or self.max_context_tokens <= sparse.policy.block_size:
            return  # without kernels, or with too short a context for a choice
        layer = next(index for index, one in enumerate(self.layout.layers) if one.kind is LayerKind.ATTENTION)
        k, v = (self.pool.buffer(layer, is_v=is_v) for is_v in (False, True))
        heads = (self.files.config.num_attention_heads // self.shard.tp_size, self.pool.part_of(layer).num_heads(layer))
        with torch.inference_mode():
            sparse.compile_kernels(heads=heads, dim=k.shape[3], value_dim=v.shape[3], dtypes=(self._dtype, k.dtype))

    def _page_counts(self, num_pages: int | Sequence[int]) -> tuple[int, ...]:
        """Return the pages of each layer group, checked."""
        groups = layer_groups(self.layout)
        counts = (num_pages,) if isinstance(num_pages, int) else tuple(num_pages)
        if len(counts) != len(groups) or min(counts) < 1:
            names = ", ".join(group.name for group in groups)
            raise ConfigError(f"num_pages is {num_pages}; must be at least 1 for each group of layers ({names})")
        return counts

    def _open_pool(self, num_pages: int | Sequence[int] | PlanPages) -> None:
        """Allocate everything that comes after the weights."""
        settings = self._settings
        counts = self._page_counts(num_pages(self.weights_bytes) if callable(num_pages) else num_pages)
        self._compile()
        groups = layer_groups(self.layout)
        with allocating(
            f"allocating the KV pool of {', '.join(map(str, counts))} pages",
            device=self._device,
            advice=self._advise(Phase.POOL),
            num_bytes=sum(count * group.page_bytes(self.layout, self.shard) for count, group in zip(counts, groups, strict=True)),
        ):
            self.pool = KVPool(layout=self.layout, shard=self.shard, num_pages=counts, device=self._device)
        self._checks = self._make_checks()
        self._sparse: SparsePrefill | None = None
        if settings.sparse_prefill is not None:
            with allocating(Phase.WORKSPACES, device=self._device, advice=self._advise(Phase.WORKSPACES)):
                self._sparse = SparsePrefill(
                    settings.sparse_prefill,
                    self._workspaces,
                    sparse_kernels(has_triton=self._has_decode_kernels),
                    page_size=self.pool.page_size,
                    device=self._device,
                )
                self._compile_sparse(self._sparse)
        self._chosen: ChosenTokens | None = None  # of the last step, if `begin_decode` began it
        self._tier: HostBlocks | None = None
        self._host_pages: HostPages | None = None
        self._decoder: DeviceDecoder | None = None
        self._draft_decoder: DeviceDecoder | None = None
        max_running_requests = settings.max_running_requests
        if max_running_requests is not None and self._has_decode_kernels:
            assert self._model is not None
            rows_each = 1 + settings.num_speculative_tokens
            with allocating("allocating the page tables", device=self._device, advice=self._advise(Phase.PAGE_TABLES)):
                self._decoder = self._make_decoder(self._model, max_running_requests, max_running_requests * rows_each)
                if self._draft is not None:
                    self._draft_decoder = self._make_decoder(self._draft, max_running_requests, max_running_requests)
        if self._draft is not None:
            self._draft.use_pool(self.pool, self._draft_decoder)
        if self._decoder is not None:
            self.capture_cuda_graphs(settings.cuda_graph_batch_sizes)

    def _compile(self) -> None:
        """Compile decode steps if `torch_compile_max_bs` is set."""
        self.inductor_bytes = 0
        models = [model for model in (self._model, self._draft) if model is not None]
        settings = self._settings
        is_gpu, most = self._device.type == "cuda", settings.torch_compile_max_bs
        all_rows = range(1, 1 + (settings.max_running_requests or 0) * (1 + settings.num_speculative_tokens))
        sizes = [size for size in (settings.cuda_graph_batch_sizes if is_gpu else all_rows) if size <= most]
        if not sizes:
            for model in models:
                model.compile_decode((), is_dynamic=False)
            if most and settings.max_running_requests is not None:
                reason = f"no batch of up to torch_compile_max_bs ({most}) is captured into a CUDA graph"
                log.warning("torch_compile_unusable", reason=reason, advice="set cuda_graph_bs, or set torch_compile to false")
            return
        before = reserved_bytes(self._device) if is_gpu else 0
        with self._step(Phase.COMPILE, Phase.COMPILE):
            compile_decode_steps(models, sizes, is_dynamic=not is_gpu)
        if is_gpu:
            self.inductor_bytes = max(0, reserved_bytes(self._device) - before)

    def release_pool(self) -> None:
        """Release pool, page tables and CUDA graphs. Then call `open_pool` or `close`; until then no step can run.

        Parts of the pool that others still reference stay allocated.
        """
        for name in ("pool", "_checks"):
            self.__dict__.pop(name, None)
        self._decoder = self._draft_decoder = self._tier = self._host_pages = self._sparse = self._chosen = None
        if self._draft is not None:
            self._draft.leave_pool()
        gc.collect()  # the graphs' plans and the pool reference each other
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def open_pool(
        self,
        num_pages: int | Sequence[int] | PlanPages,
        *,
        shard: Shard,
        layers_per_group: int | None = None,
        max_seq_len: int | None = None,
        max_running_requests: int | None = None,
        cuda_graph_batch_sizes: Sequence[int] = (),
        has_host_pages: bool = False,
        advise: Advise = advice_for,
        sparse_prefill: XAttention | None = None,
        chunk_tokens: int | None = None,
        num_speculative_tokens: int = 0,
        torch_compile_max_bs: int = 0,
    ) -> None:
        """Start again with the loaded weights, after `release_pool`. The ranks of a group do this together.

        Args: See the class.

        Raises:
            ConfigError: The shard is another rank's, or a count is wrong.
            OutOfMemory: There is no memory for pool, page tables or CUDA graphs.
            EngineError: The engine is closed or broken.
        """
        self._advise = advise
        self._configure(
            EngineSettings(
                shard=shard,
                layers_per_group=layers_per_group,
                max_seq_len=max_seq_len,
                max_running_requests=max_running_requests,
                cuda_graph_batch_sizes=cuda_graph_batch_sizes,
                has_host_pages=has_host_pages,
                sparse_prefill=sparse_prefill,
                chunk_tokens=chunk_tokens,
                num_speculative_tokens=num_speculative_tokens,
                torch_compile_max_bs=torch_compile_max_bs,
            )
        )
        self._guard.check_works()
        try:
            self._open_pool(num_pages)
        except RuntimeError as error:
            raise EngineError(f"the pool cannot be made: {one_line(error)}") from error

    @property
    def page_table_bytes(self) -> int:
        """Bytes of the page tables on the device."""
        return 0 if self._decoder is None else self._decoder.page_table_bytes

    @property
    def cuda_graph_bytes(self) -> int:
        """Bytes of the device that the CUDA graphs took."""
        decoders = (self._decoder, self._draft_decoder)
        return sum(decoder.cuda_graph_bytes for decoder in decoders if decoder is not None)

    @property
    def captured_batch_sizes(self) -> tuple[int, ...]:
        """Sizes of decode steps with a CUDA graph, ascending."""
        return () if self._decoder is None else self._decoder.captured_batch_sizes

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """Bytes of each workspace of block-sparse prefill that is allocated, by the name of its line in the memory plan."""
        return {} if self._sparse is None else self._sparse.storage_bytes

    @property
    def attention(self) -> str:
        """How prefill approximates attention; empty for full attention. With threshold 1, nothing is approximated."""
        policy = self._settings.sparse_prefill
        return "" if policy is None or policy.threshold == 1 else str(policy)

    @property
    def prefill_counts(self) -> PrefillCounts | None:
        """What block-sparse prefill did, up to a step that ended; None for full attention. Does not wait for the device."""
        return None if self._sparse is None else self._sparse.read_counts()

    def capture_cuda_graphs(self, batch_sizes: Sequence[int]) -> None:
        """Capture decode steps of these sizes, in place of earlier ones, if the engine has page tables on a GPU.

        A model that waits for the device within a step, such as one that looks experts up one by one, runs without graphs, and
        the log names it.

        Raises:
            ConfigError: A size is not one of a decode step.
            OutOfMemory: The device has too little memory left.
            EngineError: The capture failed.
        """
        check_batch_sizes(batch_sizes, 0 if self._decoder is None else self._decoder.max_rows)
        if self._decoder is not None:
            with self._step("capturing the CUDA graphs of decode steps", Phase.CUDA_GRAPHS):
                self._decoder.capture(batch_sizes)
                if self._draft_decoder is not None:
                    self._draft_decoder.capture([size for size in batch_sizes if size <= self._draft_decoder.max_rows])

    @property
    def host_block_bytes(self) -> int:
        """Bytes of the device that the buffers for host blocks take."""
        if self._host_pages is not None:
            return self._host_pages.num_bytes
        return 0 if self._decoder is None else self._decoder.host_block_bytes

    can_read_store: Final = True
    """Whether `use_host_pool` takes `stored`."""

    def use_host_pool(self, host: HostPool, *, block_bytes: int, stored: StoredKV | None = None) -> None:
        """Let steps attend to pages in host memory; once, before any step. See `host_tables` of `PrefillItem` and `DecodeItem`.

        On a GPU this allocates two buffers of up to `block_bytes`. For decode steps, it also runs a step for the dummy request,
        so that its kernels are compiled, and captures steps of the same sizes as the other graphs. The ranks of a group do this
        together.

        Args:
            host: Host pages of this engine's pool.
            block_bytes: Most bytes of a layer's K and V that are read together; replayed steps can read twice as much.
            stored: Reads the blocks of decode steps that lie in the store, see `DecodeItem.stored_blocks`.

        Raises:
            ConfigError: The engine has a host pool already, it was made for decode steps without `has_host_pages`, or
                `HostBlocks` refuses this one.
            OutOfMemory: The device has too little memory left.
            EngineError: The capture failed.
        """
        if self._tier is not None:
            raise ConfigError("the engine has a host pool already; it takes one, before its first step")
        if self._decoder is not None and not self._settings.has_host_pages:
            raise ConfigError("has_host_pages is false, so page tables are as wide as the pool; must be true for a host pool")
        tier = HostBlocks(self.pool, host, block_bytes=block_bytes, stored=stored)
        if self._sparse is not None:
            tier.check_holds(self._sparse.unit_tokens)
        if self._decoder is not None:
            with self._step("allocating the buffers for host blocks", Phase.HOST_BLOCKS):
                self._decoder.use_host_tier(tier)
        else:
            with self._step("allocating the buffers for host blocks", Phase.HOST_BLOCKS):
                self._host_pages = HostPages(self.pool, tier, has_fetcher=self._has_decode_kernels)
        self._tier = tier
        self._checks = self._make_checks(host.num_pages, 0 if stored is None else stored.pages_per_block)

    def prefill(self, items: Sequence[PrefillItem], on_layers_written: OnLayersWritten | None = None) -> dict[str, int]:
        """Run one prefill step over all items together; see `PrefillEngine.prefill`."""
        return self._tokens_of(self.prefill_batch(items, on_layers_written)) if items else {}

    def decode(self, items: Sequence[DecodeItem]) -> dict[str, int]:
        """Run one decode step, one token of every item; see `DecodeEngine.decode`."""
        return self._tokens_of(self.decode_batch(self._drafted(items))) if items else {}

    def begin_decode(self, items: Sequence[DecodeItem]) -> Callable[[], dict[str, int]]:
        """Queue one decode step of at least one item without waiting for the device; see `DecodeEngine`."""
        last, self._chosen = self._chosen, None
        if self._draft is not None:
            raise EngineError("begin_decode was called, and there is a draft model, which needs tokens on the host; call verify")
        batch = self.decode_batch(items, last)
        output = self.forward_batch(batch)
        with self._step(*use_of(batch)):
            self._chosen = self._shared(batch, output)
        return partial(self._read, batch, output)

    def verify(self, items: Sequence[DecodeItem]) -> dict[str, tuple[int, ...]]:
        """Run one decode step over the newest token and the draft tokens of every item; see `DecodeEngine`."""
        if not items:
            return {}
        batch = self.decode_batch(self._drafted(items))
        output = self.forward_batch(batch)
        with self._step(*use_of(batch)):
            return output.verified()

    def prefill_batch(self, items: Sequence[PrefillItem], on_layers_written: OnLayersWritten | None = None) -> ForwardBatch:
        """Check and plan a prefill step of at least one item.

        Raises:
            EngineError: An item does not fit the model or the pool.
        """
        items = tuple(items)
        checked = self._checks.check_prefill(items)
        tables = _as_arrays([own for own, _ in checked])
        token_ids = np.concatenate([np.array(item.token_ids, dtype=np.int64) for item in items])
        positions = np.concatenate([np.arange(item.first_token, item.end_token) for item in items])
        ends = np.cumsum([item.num_tokens for item in items])

        def on_written(layer: int) -> None:
            layers_done = layer + 1
            if on_layers_written is None:
                return
            if layers_done % self.layers_per_group == 0 or layers_done == self.layout.num_layers:
                on_layers_written(layers_done, self._recorded_event())

        with self._step(f"planning a prefill step of {len(token_ids)} tokens", Phase.PREFILL_STEP):
            host = self._host_step(items, [hosts for _, hosts in checked], ends)
            plan = PrefillPlan(items, tables, self.pool, self._dtype, on_written, host, self._sparse)
        wanted = tuple(
            WantedRow(request_id=item.request_id, row=int(end) - 1, sampling=item.sampling, position=item.end_token)
            for item, end in zip(items, ends, strict=True)
            if item.is_last
        )
        return ForwardBatch(wanted=wanted, token_ids=token_ids, positions=positions, plan=plan)

    def _host_step(
        self, items: Sequence[PrefillItem], hosts: Sequence[Sequence[Sequence[int]]], ends: NDArray[np.int64]
    ) -> HostStep | None:
        """Return the part of a prefill step whose KV of full attention lies in host memory; None if there is none."""
        host = self._host_pages
        if host is None:
            if any(any(map(len, own)) for own in hosts):
                raise EngineError("a prompt has pages in host memory; an engine for decode steps cannot compute it")
            return None
        chunks = [
            HostChunk(
                begin=int(end) - item.num_tokens,
                end=int(end),
                first_token=item.first_token,
                pages=np.array(own[host.tier.group], dtype=np.int64),
            )
            for item, own, end in zip(items, hosts, ends, strict=True)
            if own[host.tier.group]
        ]
        return HostStep(host, chunks, self._sparse) if chunks else None

    def decode_batch(self, items: Sequence[DecodeItem], last: ChosenTokens | None = None) -> ForwardBatch:
        """Check and plan a decode step of at least one item.

        Args:
            last: Tokens of the previous step, for unread items.

        Raises:
            EngineError: An item does not fit the model or the pool, or an unread item was not in the previous step.
        """
        items = self._checks.check_decode(items)
        unread = unread_rows(items, last)
        if self._decoder is not None and len(items) > self._decoder.max_running_requests:
            most = self._decoder.max_running_requests
            raise EngineError(f"the step has {len(items)} requests; max_running_requests is {most}")
        rows = [row for item in items for row in rows_of(item)]
        token_ids = np.array([row.token_id for row in rows], dtype=np.int64)
        positions = np.array([row.position for row in rows], dtype=np.int64)
        plan: StepPlan | None = None
        if self._decoder is None:
            with self._step(f"planning a decode step of {len(items)} requests", Phase.DECODE_STEP):
                tables = _as_arrays([item.page_tables for item in items])
                of_rows = [own for item, own in zip(items, tables, strict=True) for _ in item.token_ids]
                plan = GatherDecodePlan(rows, of_rows, self.pool, self._dtype, self._tier)
        wanted = tuple(
            WantedRow(request_id=row.request_id, row=number, sampling=row.sampling, position=row.position + 1)
            for number, row in enumerate(rows)
        )
        return ForwardBatch(
            wanted=wanted,
            token_ids=token_ids,
            positions=positions,
            plan=plan,
            decode_rows=tuple(rows),
            drafts={item.request_id: item.draft_token_ids for item in items if item.draft_token_ids},
            unread=unread,
        )

    def forward_batch(self, batch: ForwardBatch) -> ForwardOutput:
        """Run a planned step; does not wait for the device.

        Raises:
            OutOfMemory: There is no memory for the step. None of its kernels runs any more, and the next step can succeed.
            EngineError: The step failed; the engine of a group then refuses further steps.
        """
        with self._step(*use_of(batch)):
            logits = self._forward(batch)
            if logits is None:
                none = torch.empty(0, dtype=torch.int64)
                # A decode step has an event all the same: when the step is over, its pages are freed.
                over = self._recorded_event() if batch.decode_rows else None
                return ForwardOutput(request_ids=(), next_tokens=none.to(self._device), next_tokens_host=none, copied=over)
            is_finite = torch.isfinite(logits).all(dim=-1)
            # Looking for rows that are not finite would wait for the device. They are sampled from zeros and then replaced.
            drawn = sample_on_device(
                torch.where(is_finite.unsqueeze(-1), logits, 0),
                [one.sampling for one in batch.wanted],
                [one.position for one in batch.wanted],
            )
            next_tokens = torch.where(is_finite, drawn, NO_TOKEN)
            is_gpu = self._device.type == "cuda"
            host = torch.empty(len(batch.wanted), dtype=torch.int64, pin_memory=True) if is_gpu else next_tokens
            copied = None
            if is_gpu:
                host.copy_(next_tokens, non_blocking=True)
                copied = torch.cuda.current_stream(self._device).record_event()
            request_ids = tuple(one.request_id for one in batch.wanted)
            return ForwardOutput(
                request_ids=request_ids,
                next_tokens=next_tokens,
                next_tokens_host=host,
                copied=copied,
                drafts=batch.drafts,
            )

    def logits(self, batch: ForwardBatch) -> Tensor | None:
        """Run a planned step without choosing tokens, for comparisons of engines; does not wait for the device.

        Returns:
            [wanted rows, vocabulary], valid until the next step. None for a step that wants no token, and on all ranks of a group
            but the first.

        Raises:
            OutOfMemory, EngineError: As `forward_batch`.
        """
        with self._step(*use_of(batch)):
            return self._forward(batch)

    def close(self) -> None:
        """Release the model and leave the TP group; transfers under way can still read the pool. May be called twice."""
        self._guard.close()
        self._model = self._draft = None
        self._decoder = self._draft_decoder = None
        if self._group is not None:
            self._group.close()

    def _make_checks(self, num_host_pages: Sequence[int] | None = None, pages_per_stored_block: int = 0) -> StepChecks:
        return StepChecks(
            groups=self.pool.groups,
            num_pages=self.pool.num_pages,
            page_size=self.pool.page_size,
            max_context_tokens=self.max_context_tokens,
            vocab_size=self.vocab_size,
            num_host_pages=num_host_pages,
            pages_per_stored_block=pages_per_stored_block,
            max_draft_tokens=self._settings.num_speculative_tokens,
        )

    def _drafted(self, items: Sequence[DecodeItem]) -> Sequence[DecodeItem]:
        """Run the draft model over a decode step, if there is one; return the items with its draft tokens."""
        if self._draft is None:
            return items
        items = self._checks.check_decode(items)
        with self._step(f"computing draft tokens of {len(items)} requests", Phase.DECODE_STEP):
            return self._draft.drafted(items)

    def _tokens_of(self, batch: ForwardBatch) -> dict[str, int]:
        return self._read(batch, self.forward_batch(batch))

    def _read(self, batch: ForwardBatch, output: ForwardOutput) -> dict[str, int]:
        with self._step(*use_of(batch)):
            return output.tokens()

    def _shared(self, batch: ForwardBatch, output: ForwardOutput) -> ChosenTokens:
        """Copy the tokens of a step to the devices of all ranks. The next step reads them there."""
        if self.shard.tp_rank:
            tokens = torch.empty(len(batch.wanted), dtype=torch.int64, device=self._device)
        else:
            tokens = output.next_tokens.clamp(min=0)  # NO_TOKEN would be an index out of range
        if self._group is not None:
            self._group.share(tokens)
        return ChosenTokens(rows={one.request_id: place for place, one in enumerate(batch.wanted)}, tokens=tokens)

    def _forward(self, batch: ForwardBatch) -> Tensor | None:
        """Run the model over the rows of a step; return logits [wanted rows, vocab] on TP rank 0 only."""
        assert self._model is not None  # the guard refuses steps of a closed engine
        if batch.plan is None:
            assert self._decoder is not None  # decode_batch
            put_unread = None if batch.unread is None else batch.unread.put
            return self._model.joined(self._decoder.logits(batch.decode_rows, put_unread))
        token_ids, positions = (on_device(one, self._device).unsqueeze(0) for one in (batch.token_ids, batch.positions))
        if batch.unread is not None:
            batch.unread.put(token_ids[0])
        if batch.decode_rows:
            return self._model.joined(self._model.compute(token_ids, positions, batch.plan))
        hidden = self._model.hidden(token_ids, positions, batch.plan)
        if self._draft is not None:
            self._draft.hidden(token_ids, positions, batch.plan)  # for its KV; before a decode step, `_drafted` has computed it
        if self._sparse is not None:
            self._sparse.end_step()
        if not batch.wanted:
            return None
        if len(batch.wanted) != len(batch.token_ids):
            hidden = hidden[on_device(np.array([one.row for one in batch.wanted]), self._device)]
        return self._model.joined(self._model.own_logits(hidden))

    def _make_decoder(self, model: CausalModel, max_running_requests: int, max_rows: int) -> DeviceDecoder:
        from embedded_engine.device_decode import DeviceDecoder  # imports Triton, which a CPU does not need

        return DeviceDecoder(
            self.pool,
            max_running_requests=max_running_requests,
            max_rows=max_rows,
            max_seq_len=page_table_tokens(
                self.pool.groups,
                num_pages=self.pool.num_pages[0],
                page_size=self.pool.page_size,
                max_seq_len=self.max_context_tokens,
                has_host_pages=self._settings.has_host_pages,
            ),
            compute=model.compute,
            advice=self._advise(Phase.CUDA_GRAPHS),
            beside=self._decoder,
        )

    def _step(self, doing: str, phase: Phase) -> AbstractContextManager[None]:
        """Run a step, see `StepGuard.step`; `phase` is that of the advice."""
        return self._guard.step(doing, partial(self._advise, phase))

    def _recorded_event(self) -> Any:
        if self._device.type != "cuda":
            return None
        return torch.cuda.current_stream(self._device).record_event()


def _as_arrays(tables: Sequence[Sequence[Sequence[int]]]) -> list[Tables]:
    return [tuple(np.array(table, dtype=np.int64) for table in own) for own in tables]
