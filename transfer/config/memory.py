"""Sections for a rank's memory: its part of the model, pool, staging memory and ring."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from transfer.config.values import Count, CountOrZero, Section, SizeBytes, no_bool, whole
from transfer.layout import DType, TokenOrder
from transfer.ring import ALIGNMENT_BYTES

CPU_POOL_PAGES: Final = 1024
"""Default pages of a pool on cpu, so that a first try does not use a laptop's whole memory."""


class ParallelConfig(Section):
    """Parallel degrees of the model over this node's rank processes."""

    tp_size: Count = Field(default=1, description="Tensor parallel degree: rank processes of this node, one per device.")
    pp_size: Annotated[Literal[1], BeforeValidator(whole)] = Field(
        default=1, description="Pipeline parallel degree; the embedded engine has one stage."
    )
    threads_per_rank: Count = Field(default=1, description="CPU threads that a rank computes with.")


class PoolConfig(Section):
    """The paged KV pool of each rank."""

    page_size: Count = Field(default=16, description="Tokens per page. The other tier may use another size.")
    num_pages: Count | None = Field(
        default=None,
        description=(
            "Maximum pages of each rank's pool; the memory plan can only lower it. Sliding windows and recurrent states get as "
            f"many as these tokens need. null: as many as fit on cuda, {CPU_POOL_PAGES} on cpu."
        ),
    )
    num_tokens: Count | None = Field(
        default=None,
        description="Maximum tokens of each rank's pool, rounded up to whole pages. Not together with pool.num_pages.",
    )
    order: TokenOrder = Field(default=TokenOrder.NHD, description="Order of the dimensions inside a page.")
    dtype: DType | None = Field(default=None, description="Element type of the pool; null means that of the computation.")

    @model_validator(mode="after")
    def _resolve_pages(self) -> Self:
        if self.num_tokens is not None:
            if self.num_pages not in (None, -(-self.num_tokens // self.page_size)):
                raise ValueError(f"num_pages is {self.num_pages} and num_tokens is {self.num_tokens}; set one of them")
            object.__setattr__(self, "num_pages", -(-self.num_tokens // self.page_size))
        return self


class PrefillConfig(Section):
    """Attention of prefill steps."""

    sparse_policy: Literal["none", "xattention"] = Field(
        default="none",
        description=(
            "none: full attention. xattention: each block of queries attends only to the blocks of keys that an estimate "
            "selects, so tokens can differ. Only for models without sliding windows, MLA and soft caps."
        ),
    )
    sparse_block_size: Annotated[Literal[64, 128], BeforeValidator(whole)] = Field(
        default=128, description="Tokens of a block of queries or keys; it must be a multiple or a divisor of pool.page_size."
    )
    sparse_stride: Annotated[Literal[4, 8, 16, 32], BeforeValidator(whole)] = Field(
        default=16,
        description="Number of queries and keys that the estimate scores together. Smaller values are more exact and slower.",
    )
    sparse_threshold: Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=1)] = Field(
        default=0.9,
        description="Fraction of the estimated attention that the selected blocks must contain. 1 selects all blocks.",
    )
    workspace_strategy: Literal["chunk_bounded", "lazy"] = Field(
        default="chunk_bounded",
        description="When the buffers of the estimate are allocated: chunk_bounded at start, lazy with the first prompt.",
    )


class MemoryConfig(Section):
    """Inputs of each rank's memory plan, see docs/memory.md."""

    device_memory: SizeBytes | None = Field(
        default=None,
        description="Memory of a rank's device; null reads it from the device; on cpu the ranks share the machine's memory.",
    )
    policy: Literal["static-fraction", "page-count"] = Field(
        default="static-fraction", description="Reserve for activations: a fraction of the device, or of its free memory."
    )
    static_fraction: Annotated[float, BeforeValidator(no_bool), Field(gt=0, lt=1)] | None = Field(
        default=None, description="Fraction of the device for weights and pool. null: computed from the other settings."
    )
    memory_ratio: Annotated[float, BeforeValidator(no_bool), Field(gt=0, lt=1)] = Field(
        default=0.88, description="With the policy page-count: fraction of the memory free before loading, for weights and pool."
    )


class ChunkConfig(Section):
    """Chunks of a prompt, for its computation and transfer. Decode nodes learn them when they join."""

    chunk_tokens: Count = Field(
        default=128,
        description=(
            "Tokens per chunk. Default on a GPU: the smallest power of two whose KV is at least 256 MiB on a rank, at least "
            "512 and at most one engine step. vLLM, without microbatches and with chunk.layers_per_group null: the largest "
            "power of two whose KV of one layer is at most 32 MiB, within the same limits."
        ),
    )
    layers_per_group: CountOrZero | None = Field(
        default=None,
        description=(
            "Layers per chunk. The first layers are sent while the last are computed. 0: all. null: chosen for each decode "
            "node by chunk.piece_bytes."
        ),
    )
    piece_bytes: SizeBytes | None = Field(
        default=None,
        description=(
            "Maximum bytes of a chunk from one rank to another, reached by fewer layers per chunk. Replaces "
            "chunk.layers_per_group. null: from the measured links, bandwidth x cost of a piece."
        ),
    )

    @model_validator(mode="after")
    def _check_one_way_to_cut(self) -> Self:
        if self.piece_bytes is not None and self.layers_per_group is not None:
            raise ValueError(
                f"piece_bytes is {self.piece_bytes} and layers_per_group is {self.layers_per_group}; set one of them"
            )
        return self


class StagingConfig(Section):
    """Memory in which a prefill rank gathers chunks before it writes them."""

    num_slots: Annotated[int, BeforeValidator(no_bool), Field(ge=2)] = Field(
        default=4,
        description=(
            "Staging memory of a rank, in slots of the largest piece. Smaller pieces give more slots in the same memory. "
            "Pieces of one peer share a slot. Overlap needs at least 2."
        ),
    )
    slot_bytes: SizeBytes | None = Field(
        default=None,
        description=(
            "Size of a slot: the largest staged piece. null: this rank's largest chunk; on a GPU, the staging memory is then "
            "at most 1.5 GiB and a 64th of the device."
        ),
    )


class RingConfig(Section):
    """Staging memory of a decode rank, into which prefill ranks write."""

    capacity_bytes: SizeBytes | None = Field(
        default=None,
        description=(
            f"Size of each rank's ring, a multiple of {ALIGNMENT_BYTES}; larger than the largest chunk. null: 64 MiB in host "
            "memory; on a GPU 2 GiB, or a 32nd of the device if that is less."
        ),
    )

    @model_validator(mode="after")
    def _check_alignment(self) -> Self:
        if self.capacity_bytes is not None and self.capacity_bytes % ALIGNMENT_BYTES:
            raise ValueError(
                f"capacity_bytes is {self.capacity_bytes}; it must be a multiple of {ALIGNMENT_BYTES}, for example 64MiB"
            )
        return self
