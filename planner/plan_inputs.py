"""What a memory plan is made from: the device, the model, and the flags of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from planner.model_parts import MODEL_DTYPES, ModelShape
from planner.workspace import Mode, Workspace
from transfer.errors import ConfigError
from transfer.layer_groups import PREFILL_STEPS_IN_FLIGHT, LayerGroup, layer_groups
from transfer.layout import DType, KVLayout, Shard

GIB: Final = 1 << 30
MB: Final = 1 << 20
"""As in SGLang's formulas, whose MB are these."""

UNKNOWN_FRACTION: Final = 0.88
"""Static fraction of a device of which the heuristic knows nothing. Source: SGLang's server_args."""

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
"""Speculative algorithms, by SGLang's names, and what the reserve grows by for each: its draft, with the KV of that."""
_DRAFT_LAYER_ALGORITHMS: Final = ("eagle", "nextn")  # the others bring a draft model of their own, or none

_FLAGS: Final = {
    "device_bytes": "--device-memory", "free_bytes": "--free-memory", "tp_size": "--tp", "pp_size": "--pp", "dp_size": "--dp",
    "page_size": "--page-size", "chunked_prefill_size": "--chunked-prefill-size", "tokens_in_flight": "tokens_in_flight",
    "max_running_requests": "--max-running-requests", "max_seq_len": "--max-seq-len", "max_total_tokens": "--max-total-tokens",
    "weights_bytes": "--weights", "checkpoint_bytes": "checkpoint_bytes",
}  # fmt: skip
"""What must be from 1 to `_MOST`, by the flags of `kvferry plan`; two have none."""

_MOST: Final = (1 << 63) - 1
"""Of a number or a size: more than there is of anything, and products of several stay in the range of a float."""


class Policy(StrEnum):
    """How much of the device KV may take."""

    STATIC_FRACTION = "static-fraction"  # SGLang: weights and KV together take a fraction of the device
    PAGE_COUNT = "page-count"  # mini-sglang: they take a fraction of what was free before


class Role(StrEnum):
    """The tier of the node."""

    PREFILL = "prefill"
    DECODE = "decode"


def default_batches(device_bytes: int, tp_size: int) -> tuple[int, int]:
    """Chunked prefill size and largest CUDA-graph batch for a GPU of this size. Source: SGLang's server_args."""
    is_wide = tp_size >= 4
    for below_gib, step_tokens, graphs in _BATCHES_BY_GIB:
        if device_bytes < below_gib * GIB:
            return step_tokens, graphs[is_wide]
    step_tokens, graphs = _BATCHES_ABOVE
    return step_tokens, graphs[is_wide]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """Everything that the plan of one rank depends on; checked when it is made.

    Args:
        model: The model.
        role: The tier.
        device_bytes: Size of the rank's device; None where it is unknown. Of a host that several ranks share, this rank's part.
        free_bytes: What of it is free before anything is loaded; None: all. One of the two must be known.
        is_cpu: Whether the device is a host's memory: the reserve's formula, which speaks of GPUs, is not used.
        tp_size, pp_size: Parallel degrees.
        pp_rank: The pipeline stage that is planned for.
        dp_size: Data parallel degree inside the `tp_size` ranks, with dp-attention.
        has_dp_attention: Attention and KV are cut over ``tp_size / dp_size`` ranks, everything else over all.
        dtype: What the model computes in; None: what it is stored in.
        kv_dtype: Element type of the pool; None: `dtype`.
        page_size: Tokens per page.
        chunked_prefill_size: Tokens of a prefill step; None: by the size of the device.
        tokens_in_flight: See `LayerGroup.peak_pages`; None: of a prefill rank the tokens of the steps that it can have been sent,
            each of `chunked_prefill_size`, where nobody knows how prompts are cut into chunks; of a decode rank 1.
        max_running_requests: Requests at once.
        max_seq_len: Tokens of the longest sequence; None: the model's context.
        has_page_tables: Whether page tables lie on the device, as those of decode steps on a GPU do.
        cuda_graph_batch_sizes: Batch sizes of which CUDA graphs are captured; None: by the size of the device.
        speculative: Speculative algorithm, one of `SPECULATIVE_MB`, however capitalised; None: none.
        static_fraction: Share of the device for weights and KV; None: by the heuristic.
        policy: How much KV may take.
        memory_ratio: Share of the free memory for weights and KV, with the policy page-count.
        max_total_tokens: Upper bound of the pool's tokens.
        staging_bytes, ring_bytes: Memory of the transfer on this rank.
        offload_bytes: Buffers of a decode rank whose requests may have pages in host memory: two blocks that attention reads
            (`EmbeddedEngine.host_block_bytes`), and what pages are packed in (`transfer.copy.page_mover.PageMover`).
        weights_bytes: Measured size of this rank's weights; None: taken from the checkpoint, or estimated.
        checkpoint_bytes: Size of the stored model; None: unknown.
        checkpoint_source: Where that comes from, for people.
        workspaces: Buffers that modes of the engine need.
        has_kv_offload: Whether KV is offloaded to host memory during prefill.
        names: What the flags of `kvferry plan` are called where this plan is made, for its advice and its errors.

    Raises:
        ConfigError: A value is out of its range, or the device's memory or what the model computes in is unknown. Messages speak
            of flags, or of what `names` has for them.
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
    speculative: str | None = None
    static_fraction: float | None = None
    policy: Policy = Policy.STATIC_FRACTION
    memory_ratio: float = UNKNOWN_FRACTION
    max_total_tokens: int | None = None
    staging_bytes: int = 0
    ring_bytes: int = 0
    offload_bytes: int = 0
    weights_bytes: int | None = None
    checkpoint_bytes: int | None = None
    checkpoint_source: str = ""
    workspaces: tuple[Workspace, ...] = ()
    has_kv_offload: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device_bytes is None and self.free_bytes is None:
            raise self._wrong(
                "device memory is unknown; it must be given with --device-memory, or what is free with --free-memory"
            )
        for name, flag in _FLAGS.items():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise self._wrong(f"{flag} is {value}; it must be at least 1")
            if value is not None and value > _MOST:
                raise self._wrong(f"{flag} is {value}; it must be at most {_MOST}")
        for flag, size in (("--staging", self.staging_bytes), ("--ring", self.ring_bytes), ("offload_bytes", self.offload_bytes)):
            if size < 0:
                raise self._wrong(f"{flag} is {size}; it must be at least 0")
        if min(self.cuda_graph_batch_sizes or (1,)) < 1:
            raise self._wrong(f"--cuda-graph-bs is {list(self.cuda_graph_batch_sizes or ())}; each must be at least 1")
        if max(self.cuda_graph_batch_sizes or (1,)) > _MOST:
            raise self._wrong(f"--cuda-graph-bs is {list(self.cuda_graph_batch_sizes or ())}; each must be at most {_MOST}")
        for flag, share in (("--static-fraction", self.static_fraction), ("--memory-ratio", self.memory_ratio)):
            if share is not None and not 0 < share < 1:
                raise self._wrong(f"{flag} is {share}; it must be between 0 and 1")
        if self.device_bytes is not None and self.free_bytes is not None and self.free_bytes > self.device_bytes:
            raise self._wrong(f"--free-memory is {self.free_bytes}; it must be at most --device-memory, {self.device_bytes}")
        if self.dp_size > 1 and not self.has_dp_attention:
            raise self._wrong(f"--dp is {self.dp_size}; without --dp-attention every replica is a node of its own, it must be 1")
        if self.tp_size % self.dp_size:
            raise self._wrong(f"--dp is {self.dp_size}; it must divide --tp, {self.tp_size}")
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise self._wrong(f"--max-total-tokens is {self.max_total_tokens}; it must be at least one page, {self.page_size}")
        if self.speculative is not None and self.speculative.lower() not in SPECULATIVE_MB:
            raise self._wrong(f"--speculative is {self.speculative!r}; it must be one of {', '.join(SPECULATIVE_MB)}")
        self._check_model()

    def _check_model(self) -> None:
        """What goes together with no plan of this model."""
        if self.dtype is None and self.model.dtype is None:
            raise self._wrong(
                f"config.json does not say what the model is stored in; give --dtype, one of {', '.join(MODEL_DTYPES)}"
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
        """A text that speaks of flags, in the words of whoever plans."""
        for flag in sorted(self.names, key=len, reverse=True):
            text = text.replace(flag, self.names[flag])
        return text

    @property
    def total_bytes(self) -> int:
        """Size of the device; what is free of it, where no more is known."""
        known = self.device_bytes if self.device_bytes is not None else self.free_bytes
        assert known is not None  # __post_init__
        return known

    @property
    def free_before_bytes(self) -> int:
        return self.total_bytes if self.free_bytes is None else self.free_bytes

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a prefill step, which those who speak of chunked prefill call a chunk."""
        if self.chunked_prefill_size is not None:
            return self.chunked_prefill_size
        return _CPU_STEP_TOKENS if self.is_cpu else default_batches(self.total_bytes, self.tp_size)[0]

    @property
    def cuda_graph_max_bs(self) -> int:
        """The largest batch of which a CUDA graph is captured; 0: none."""
        if self.cuda_graph_batch_sizes is not None:
            return max(self.cuda_graph_batch_sizes, default=0)
        return 0 if self.is_cpu else default_batches(self.total_bytes, self.tp_size)[1]

    @property
    def sequence_tokens(self) -> int:
        return self.model.max_context_tokens if self.max_seq_len is None else self.max_seq_len

    @property
    def most_tokens_in_flight(self) -> int:
        if self.tokens_in_flight is not None:
            return self.tokens_in_flight
        return PREFILL_STEPS_IN_FLIGHT * self.chunk_tokens if self.role is Role.PREFILL else 1

    @property
    def loads_draft_layers(self) -> bool:
        """Whether the model's own layers for further tokens are loaded."""
        return self.speculative is not None and self.speculative.lower() in _DRAFT_LAYER_ALGORITHMS

    @property
    def attention_tp_size(self) -> int:
        return self.tp_size // self.dp_size

    @property
    def mode(self) -> Mode:
        return Mode.OFFLOAD if self.has_kv_offload else Mode.DEVICE

    @property
    def layout(self) -> KVLayout:
        return self.model.layout(self.dtype)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return layer_groups(self.layout)

    def fullest_shard(self) -> Shard:
        """The cut of the rank of the stage that has the most KV heads, where they do not divide evenly."""
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
