"""The settings of an engine that do not depend on the loaded weights, with their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from embedded_engine.architectures import check_can_speculate
from embedded_engine.model_files import ModelFiles
from planner.workspace import Workspace, XAttention, check_has_sparse_prefill, sparse_prefill_workspaces
from transfer.errors import ConfigError
from transfer.layout import DType, KVLayout, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Each is described at `EmbeddedEngine`."""

    shard: Shard
    layers_per_group: int | None
    max_seq_len: int | None
    max_running_requests: int | None
    cuda_graph_batch_sizes: Sequence[int]
    has_host_pages: bool
    sparse_prefill: XAttention | None
    chunk_tokens: int | None
    num_speculative_tokens: int
    torch_compile_max_bs: int

    def check(self, files: ModelFiles, draft: ModelFiles | None, *, rank: int, size: int) -> None:
        """Check the settings for a model and its draft model.

        Args:
            rank, size: Those of the process group.

        Raises:
            ConfigError: A setting is wrong, or does not fit a model or the group.
        """
        for one in (files, *(() if draft is None else (draft,))):
            one.check_shard(self.shard)
        shard = self.shard
        if (shard.tp_rank, shard.tp_size) != (rank, size):
            raise ConfigError(
                f"shard is rank {shard.tp_rank} of {shard.tp_size}, the process group rank {rank} of {size}; they must be equal"
            )
        if shard.dtype is DType.INT8:
            raise ConfigError("shard dtype is int8; the embedded engine's pool must have a floating point dtype")
        check_is_positive("layers_per_group", self.layers_per_group)
        check_is_positive("max_running_requests", self.max_running_requests)
        if self.num_speculative_tokens < 0:
            raise ConfigError(f"num_speculative_tokens is {self.num_speculative_tokens}; must be 0 or more")
        if self.torch_compile_max_bs < 0:
            raise ConfigError(f"torch_compile_max_bs is {self.torch_compile_max_bs}; must be 0 or more")
        if self.num_speculative_tokens or draft is not None:
            check_can_speculate(files.architecture)
        check_batch_sizes(self.cuda_graph_batch_sizes, (self.max_running_requests or 0) * (1 + self.num_speculative_tokens))
        if self.sparse_prefill is None:
            return
        if draft is not None:
            raise ConfigError(
                "prefill.sparse_policy is xattention, and speculative.model is given; the workspaces of block-sparse prefill are "
                "those of one model: remove one of them"
            )
        if self.chunk_tokens is None:
            raise ConfigError("sparse_prefill is given and chunk_tokens is not; its workspaces need both")
        check_is_positive("chunk_tokens", self.chunk_tokens)

    def max_context_tokens(self, files: ModelFiles, draft: ModelFiles | None) -> int:
        """Return the tokens of the longest request."""
        most = [one.max_context_tokens for one in (files, draft) if one is not None]
        return min(*most, self.max_seq_len or most[0])

    def sparse_workspaces(self, files: ModelFiles, layout: KVLayout, max_seq_len: int) -> tuple[Workspace, ...]:
        """Return the workspaces of block-sparse prefill; none for full attention. Call `check` before.

        Raises:
            ConfigError: The model has no block-sparse prefill.
        """
        if self.sparse_prefill is None:
            return ()
        assert self.chunk_tokens is not None, "it is checked"
        try:
            check_has_sparse_prefill(layout)
        except ConfigError as error:
            raise ConfigError(f"prefill.sparse_policy is xattention; {files.architecture} {error}") from None
        return sparse_prefill_workspaces(
            self.sparse_prefill,
            num_heads=files.config.num_attention_heads // self.shard.tp_size,
            chunk_tokens=self.chunk_tokens,
            max_seq_len=max_seq_len,
        )


def check_is_positive(name: str, value: int | None) -> None:
    """Raise ConfigError for a value below 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{name} is {value}; must be at least 1")


def check_batch_sizes(batch_sizes: Sequence[int], max_rows: int) -> None:
    """Raise ConfigError for a size that is not one of a decode step."""
    wrong = [size for size in batch_sizes if not 1 <= size <= max_rows]
    if wrong:
        raise ConfigError(
            f"cuda_graph_batch_sizes has {wrong[0]}; a decode step has between 1 and {max_rows} rows "
            "(max_running_requests x (1 + num_speculative_tokens))"
        )
