"""Inputs of a memory plan: the device, the model, and the settings of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from planner.model_parts import MODEL_DTYPES, ModelShape
from planner.workspace import XAttention
from transfer.errors import ConfigError
from transfer.layer_groups import DECODE_STEPS_IN_FLIGHT, PREFILL_STEPS_IN_FLIGHT, LayerGroup, layer_groups
from transfer.layout import DType, KVLayout, Shard

GIB: Final = 1 << 30
MB: Final = 1 << 20
"""As in SGLang's formulas, whose MB are these."""

UNKNOWN_FRACTION: Final = 0.88
"""Static fraction where the heuristic does not apply. Source: SGLang's server_args."""

_BATCHES_BY_GIB: Final = (
    # device below so many GiB, chunked prefill size, (largest CUDA-graph batch with tp below 4, with tp from 4 on)
    (20, 2048, (8, 8)),
    (35, 2048, (24, 80)),
    (60, 4096, (32, 160)),
    (90, 8192, (256, 512)),
    (160, 8192, (256, 512)),
)
_BATCHES_ABOVE: Final = (16384, (512, 512))
_CPU_STEP_TOKENS: Final = 2048

SPECULATIVE_MB: Final[Mapping[str, int]] = {
    "eagle": 2 * 1024, "eagle3": 2 * 1024, "nextn": 2 * 1024, "dflash": 2 * 1024, "standalone": 6 * 1024, "ngram": 0,
}  # fmt: skip
"""Speculative algorithm (SGLang's name) -> MiB of the reserve for its draft model and the draft's KV."""
_DRAFT_LAYER_ALGORITHMS: Final = ("eagle", "nextn")  # the others have a separate draft model, or none

_FLAGS: Final = {
    "device_bytes": "--device-memory", "free_bytes": "--free-memory", "tp_size": "--tp", "pp_size": "--pp", "dp_size": "--dp",
    "page_size": "--page-size", "chunked_prefill_size": "--chunked-prefill-size", "tokens_in_flight": "tokens_in_flight",
    "max_running_requests": "--max-running-requests", "max_seq_len": "--max-seq-len", "max_total_tokens": "--max-total-tokens",
    "weights_bytes": "--weights", "checkpoint_bytes": "checkpoint_bytes",
}  # fmt: skip
"""Fields with a range from 1 to `_MOST` -> flag of `kvferry plan`; two have no flag."""

_MOST: Final = (1 << 63) - 1
"""Upper bound of numbers and sizes: products of several stay in the range of a float."""


class Policy(StrEnum):
    """Rule for the share of the device that KV may take."""

    STATIC_FRACTION = "static-fraction"  # SGLang: weights and KV together take a fraction of the device
    PAGE_COUNT = "page-count"  # mini-sglang: they take a fraction of what was free before


class Role(StrEnum):
    """The tier of the node."""

    PREFILL = "prefill"
    DECODE = "decode"


def default_batches(device_bytes: int, tp_size: int) -> tuple[int, int]:
    """Return chunked prefill size and largest CUDA-graph batch for a GPU of this size. Source: SGLang's server_args."""
    is_wide = tp_size >= 4
    for below_gib, step_tokens, graphs in _BATCHES_BY_GIB:
        if device_bytes < below_gib * GIB:
            return step_tokens, graphs[is_wide]
    step_tokens, graphs = _BATCHES_ABOVE
    return step_tokens, graphs[is_wide]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """All values that the plan of one rank depends on, checked.

    Args:
        device_bytes: Size of the rank's device; None if unknown. Of a host that several ranks share, this rank's part.
        free_bytes: Free memory before anything is loaded; None means all. At least one of the two sizes must be known.
        is_cpu: Whether the device is host memory, for which the reserve's formula of GPUs is not used.
        pp_rank: The pipeline stage to plan for.
        dp_size: Data parallel degree inside the `tp_size` ranks, with dp-attention.
        has_dp_attention: Shard attention and KV over ``tp_size / dp_size`` ranks, everything else over all.
        dtype: Dtype that the model computes in; None takes the stored one.
        kv_dtype: Element type of the pool; None takes `dtype`.
        chunked_prefill_size: Tokens of a prefill step; None chooses by the size of the device.
        tokens_in_flight: See `LayerGroup.peak_pages`. None counts the tokens of the maximum number of steps in flight: one token
            for each step on a decode rank, and `chunked_prefill_size` tokens for each step on a prefill rank.
        max_seq_len: Tokens of the longest sequence; None takes the model's context.
        has_page_tables: Whether page tables lie on the device, as those of decode steps on a GPU do.
        cuda_graph_batch_sizes: Batch sizes with a CUDA graph; None chooses by the size of the device.
        torch_compile_max_bs: Largest decode batch that torch.compile compiles; 0 disables compilation.
        speculative: Speculative algorithm, a key of `SPECULATIVE_MB` in any case.
        static_fraction: Share of the device for weights and KV; None uses the heuristic.
        memory_ratio: Share of the free memory for weights and KV, with the policy page-count.
        max_total_tokens: Upper bound of the pool's tokens.
        staging_bytes, ring_bytes: Memory of the transfer on this rank.
        offload_bytes: Buffers of a rank whose requests may have pages in host memory: two blocks that attention reads
            (`EmbeddedEngine.host_block_bytes`), and the buffers of `transfer.copy.page_mover.PageMover`.
        has_host_pages: Whether pages of a running request can lie in host memory, so that it can be longer than the pool.
        weights_bytes: Measured size of this rank's weights; None takes it from the checkpoint or estimates it.
        checkpoint_bytes: Size of the stored model; None if unknown.
        checkpoint_source: Where `checkpoint_bytes` comes from, for the formula.
        sparse_prefill: Policy of block-sparse prefill; None means full attention, which needs no workspaces.
        names: Flag of `kvferry plan` -> name of the same setting at the caller, for advice and errors.

    Raises:
        ConfigError: A value is out of range, or the device's memory or the model's dtype is unknown.
    """

    model: ModelShape
    role: Role
    device_bytes: int | None = None
    free_bytes: int | None = None
    is_cpu: bool = False
    tp_size: int = 1
    pp_size: int = 1
    pp_rank: int = 0
    dp_size: int = 1
    has_dp_attention: bool = False
    dtype: DType | None = None
    kv_dtype: DType | None = None
    page_size: int = 16
    chunked_prefill_size: int | None = None
    tokens_in_flight: int | None = None
    max_running_requests: int = 32
    max_seq_len: int | None = None
    has_page_tables: bool = True
    cuda_graph_batch_sizes: tuple[int, ...] | None = None
    torch_compile_max_bs: int = 0
    speculative: str | None = None
    static_fraction: float | None = None
    policy: Policy = Policy.STATIC_FRACTION
    memory_ratio: float = UNKNOWN_FRACTION
    max_total_tokens: int | None = None
    staging_bytes: int = 0
    ring_bytes: int = 0
    offload_bytes: int = 0
    has_host_pages: bool = False
    weights_bytes: int | None = None
    checkpoint_bytes: int | None = None
    checkpoint_source: str = ""
    sparse_prefill: XAttention | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device_bytes is None and self.free_bytes is None:
            raise self._wrong("device memory is unknown; set --device-memory, or --free-memory")
        for name, flag in _FLAGS.items():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise self._wrong(f"{flag} is {value}; it must be at least 1")
            if value is not None and value > _MOST:
                raise self._wrong(f"{flag} is {value}; it must be at most {_MOST}")
        for flag, size in (("--staging", self.staging_bytes), ("--ring", self.ring_bytes), ("offload_bytes", self.offload_bytes)):
            if size < 0:
                raise self._wrong(f"{flag} is {size}; it must be at least 0")
        if not 0 <= self.torch_compile_max_bs <= _MOST:
            raise self._wrong(f"--torch-compile-max-bs is {self.torch_compile_max_bs}; it must be from 0 to {_MOST}")
        graphs = self.cuda_graph_batch_sizes or (1,)
        if min(graphs) < 1:
            raise self._wrong(f"--cuda-graph-bs is {list(graphs)}; each must be at least 1")
        if max(graphs) > _MOST:
            raise self._wrong(f"--cuda-graph-bs is {list(graphs)}; each must be at most {_MOST}")
        for flag, share in (("--static-fraction", self.static_fraction), ("--memory-ratio", self.memory_ratio)):
            if share is not None and not 0 < share < 1:
                raise self._wrong(f"{flag} is {share}; it must be between 0 and 1")
        if self.device_bytes is not None and self.free_bytes is not None and self.free_bytes > self.device_bytes:
            raise self._wrong(f"--free-memory is {self.free_bytes}; it must be at most --device-memory, {self.device_bytes}")
        if self.dp_size > 1 and not self.has_dp_attention:
            raise self._wrong(
                f"--dp is {self.dp_size}; without --dp-attention it must be 1, because each replica is a separate node"
            )
        if self.tp_size % self.dp_size:
            raise self._wrong(f"--dp is {self.dp_size}; it must divide --tp, {self.tp_size}")
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise self._wrong(f"--max-total-tokens is {self.max_total_tokens}; it must be at least one page, {self.page_size}")
        if self.speculative is not None and self.speculative.lower() not in SPECULATIVE_MB:
            raise self._wrong(f"--speculative is {self.speculative!r}; it must be one of {', '.join(SPECULATIVE_MB)}")
        self._check_model()

    def _check_model(self) -> None:
        """Refuse values that do not fit the model."""
        if self.dtype is None and self.model.dtype is None:
            raise self._wrong(
                f"config.json does not contain the dtype of the weights; set --dtype to one of {', '.join(MODEL_DTYPES)}"
            )
        if self.pp_size > len(self.model.layers):
            raise self._wrong(f"--pp is {self.pp_size}; a model of {len(self.model.layers)} layers has at most as many stages")
        if self.max_seq_len is not None and self.max_seq_len > self.model.max_context_tokens:
            raise self._wrong(
                f"--max-seq-len is {self.max_seq_len}; the model was made for at most {self.model.max_context_tokens} tokens"
            )

    def _wrong(self, text: str) -> ConfigError:
        return ConfigError(self.in_names(text))

    def in_names(self, text: str) -> str:
        """Replace the flags in `text` by the caller's names."""
        for flag in sorted(self.names, key=len, reverse=True):
            text = text.replace(flag, self.names[flag])
        return text

    @property
    def total_bytes(self) -> int:
        """Size of the device, or its free memory if the size is unknown."""
        known = self.device_bytes if self.device_bytes is not None else self.free_bytes
        assert known is not None  # __post_init__
        return known

    @property
    def free_before_bytes(self) -> int:
        return self.total_bytes if self.free_bytes is None else self.free_bytes

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a prefill step."""
        if self.chunked_prefill_size is not None:
            return self.chunked_prefill_size
        return _CPU_STEP_TOKENS if self.is_cpu else default_batches(self.total_bytes, self.tp_size)[0]

    @property
    def cuda_graph_max_bs(self) -> int:
        """Largest batch with a CUDA graph; 0 means no graphs."""
        if self.cuda_graph_batch_sizes is not None:
            return max(self.cuda_graph_batch_sizes, default=0)
        return 0 if self.is_cpu else default_batches(self.total_bytes, self.tp_size)[1]

    @property
    def largest_compiled_bs(self) -> int:
        """Upper bound of the decode batches that are compiled. On a GPU, only batches with a CUDA graph are compiled."""
        return min(self.torch_compile_max_bs, self.max_running_requests if self.is_cpu else self.cuda_graph_max_bs)

    @property
    def sequence_tokens(self) -> int:
        return self.model.max_context_tokens if self.max_seq_len is None else self.max_seq_len

    @property
    def most_tokens_in_flight(self) -> int:
        if self.tokens_in_flight is not None:
            return self.tokens_in_flight
        return PREFILL_STEPS_IN_FLIGHT * self.chunk_tokens if self.role is Role.PREFILL else DECODE_STEPS_IN_FLIGHT

    @property
    def loads_draft_layers(self) -> bool:
        """Whether the model's own draft layers are loaded."""
        return self.speculative is not None and self.speculative.lower() in _DRAFT_LAYER_ALGORITHMS

    @property
    def attention_tp_size(self) -> int:
        return self.tp_size // self.dp_size

    @property
    def layout(self) -> KVLayout:
        return self.model.layout(self.dtype)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return layer_groups(self.layout)

    def fullest_shard(self) -> Shard:
        """Return the shard of the stage's rank with the most KV heads, where they do not divide evenly."""
        layout = self.layout
        shards = [
            Shard(
                tp_size=self.attention_tp_size,
                tp_rank=tp_rank,
                pp_size=self.pp_size,
                pp_rank=self.pp_rank,
                page_size=self.page_size,
                dtype=self.kv_dtype,
            )
            for tp_rank in range(self.attention_tp_size)
        ]
        return max(shards, key=lambda shard: sum(group.page_bytes(layout, shard) for group in self.groups))
