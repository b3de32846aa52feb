"""`EmbeddedEngine`: one rank of a Hugging Face model over kvferry's paged pool, for either tier.

Importing this module pays for torch and transformers, but starts no thread and no process group, so that a fork server may
import it once (`preload()`) and fork ranks from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from embedded_engine.model_config import one_line
from embedded_engine.model_files import ModelFiles, read_model_files
from embedded_engine.paged_attention import ATTENTION_NAME, AttentionPlan, DecodePlan, PrefillPlan
from embedded_engine.sampling import sample
from embedded_engine.tensor_parallel import TensorParallelGroup, load_causal_lm
from transfer.engine_types import DecodeItem, PrefillItem, RequestFault, SamplingParams
from transfer.errors import ConfigError, EngineError
from transfer.kv_pool import PagedKVPool
from transfer.layout import DType, KVLayout, Shard

OnLayersWritten = Callable[[int, Any], None]


def preload() -> None:
    """Import everything that an engine needs at run time; for a fork server, before it forks ranks."""
    for architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        _model_class(architecture)


class EmbeddedEngine:
    """One rank; implements `PrefillEngine` and `DecodeEngine`.

    Driven by one thread. The ranks of a group must be given the same steps in the same order; what an item gets wrong is found
    on every rank before the first collective. After a failed step of a group the engine refuses further ones: the ranks may
    have stopped at different places.

    Args:
        directory: A local Hugging Face directory (Llama or Qwen3), or its already checked `ModelFiles`.
        shard: This rank's cut; `tp_size` and `tp_rank` must be those of `group`.
        num_pages: Pages of this rank's pool.
        device: Where the rank computes and keeps its pool.
        dtype: What the model computes in; None takes the type that its weights are stored in.
        group: The rank's TP group (`init_distributed`); None for TP 1. The engine leaves it on `close()`.
        layers_per_group: How many layers `prefill` reports at a time; None reports them all at once.
        num_threads: CPU threads of a torch operation in this process; None leaves them as they are.

    Raises:
        ConfigError: The directory or a parallel size is wrong.
        EngineError: The weights cannot be loaded.
    """

    def __init__(
        self,
        directory: Path | str | ModelFiles,
        *,
        shard: Shard,
        num_pages: int,
        device: torch.device | str = "cpu",
        dtype: DType | None = None,
        group: TensorParallelGroup | None = None,
        layers_per_group: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.files = directory if isinstance(directory, ModelFiles) else read_model_files(directory)
        self.files.check_shard(shard)
        _check_settings(shard, group, num_pages, layers_per_group, num_threads)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.layout: KVLayout = self.files.layout(dtype)
        self.shard = shard
        self.model_fields: Mapping[str, str] = self.files.fields
        self.max_context_tokens = self.files.max_context_tokens
        self.vocab_size = self.files.vocab_size
        self.eos_token_ids = self.files.eos_token_ids
        self._device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, self.layout.dtype.value)
        self._group = group
        self._layers_per_group = layers_per_group or self.layout.num_layers
        self._model: PreTrainedModel | None = load_causal_lm(
            _model_class(self.files.architecture),
            self.files,
            dtype=self._dtype,
            device=self._device,
            attention=ATTENTION_NAME,
            group=group,
        )
        self.pool = PagedKVPool(layout=self.layout, shard=shard, num_pages=num_pages, device=self._device)
        self._failure: str | None = None

    def prefill(self, items: Sequence[PrefillItem], on_layers_written: OnLayersWritten | None = None) -> dict[str, int]:
        """Run one prefill step over all items together; see `PrefillEngine.prefill`."""
        if not items:
            return {}
        tables = self._check_step(items, [item.end_token for item in items])
        token_ids = np.concatenate([self._token_array(item.request_id, item.token_ids) for item in items])
        positions = np.concatenate([np.arange(item.first_token, item.end_token) for item in items])
        ends = np.cumsum([item.num_tokens for item in items])
        last = [index for index, item in enumerate(items) if item.is_last]

        def on_written(layer: int) -> None:
            layers_done = layer + 1
            if on_layers_written is None:
                return
            if layers_done % self._layers_per_group == 0 or layers_done == self.layout.num_layers:
                on_layers_written(layers_done, self._recorded_event())

        with self._step():
            plan = PrefillPlan(items, tables, self.pool, self._dtype, on_written)
            logits = self._forward(plan, token_ids, positions, [int(ends[index]) - 1 for index in last])
            chosen = [items[index] for index in last]
            return _sampled(logits, [(item.request_id, item.sampling, item.end_token) for item in chosen])

    def decode(self, items: Sequence[DecodeItem]) -> dict[str, int]:
        """Run one decode step, one token of every item; see `DecodeEngine.decode`."""
        if not items:
            return {}
        tables = self._check_step(items, [item.position + 1 for item in items])
        token_ids = np.concatenate([self._token_array(item.request_id, (item.token_id,)) for item in items])
        positions = np.array([item.position for item in items], dtype=np.int64)
        with self._step():
            plan = DecodePlan(items, tables, self.pool, self._dtype)
            logits = self._forward(plan, token_ids, positions, list(range(len(items))))
            return _sampled(logits, [(item.request_id, item.sampling, item.position + 1) for item in items])

    def close(self) -> None:
        """Drop the model and leave the TP group; the pool stays readable for transfers under way. May be called twice."""
        self._model = None
        if self._group is not None:
            self._group.close()

    def _forward(
        self, plan: AttentionPlan, token_ids: NDArray[np.int64], positions: NDArray[np.int64], rows: list[int]
    ) -> Tensor | None:
        """Run the model over one flat row of tokens; logits [len(rows), vocab] of those rows, on TP rank 0 only."""
        model = self._model
        assert model is not None  # _step() refuses a closed engine
        hidden = model.model(
            input_ids=torch.from_numpy(token_ids).unsqueeze(0).to(self._device),
            position_ids=torch.from_numpy(positions).unsqueeze(0).to(self._device),
            use_cache=False,
            paged_plan=plan,
        ).last_hidden_state[0]
        if not rows:
            return None
        if len(rows) != len(token_ids):
            hidden = hidden[rows]
        logits = functional.linear(hidden, model.lm_head.weight)
        return logits if self._group is None else self._group.gather_columns(logits)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """What surrounds every step: no autograd, and one kind of error for whatever breaks."""
        if self._model is None:
            raise EngineError("the engine is closed; a step needs an open one")
        if self._failure is not None:
            raise EngineError(f"the engine failed in an earlier step and must be restarted: {self._failure}")
        is_complete = False
        try:
            with torch.inference_mode():
                yield
            is_complete = True
        except BadLogits:
            # Every rank has run the whole step: the group is still in step.
            is_complete = True
            raise
        except RuntimeError as error:  # torch's: out of memory, a peer's closed connection, a collective's deadline
            who = f"rank {self.shard.tp_rank} of {self.shard.tp_size}"
            raise EngineError(f"the step failed on {who}: {one_line(error)}") from error
        finally:
            if not is_complete and self._group is not None:
                self._failure = f"rank {self.shard.tp_rank} of {self.shard.tp_size} did not finish a step"

    def _check_step(self, items: Sequence[PrefillItem | DecodeItem], ends: Sequence[int]) -> list[NDArray[np.int64]]:
        """Refuse a step that does not fit the model or the pool; the page tables as arrays.

        Args:
            items: The step.
            ends: Of each item, how many tokens of the request are in the pool after the step.
        """
        if len({item.request_id for item in items}) != len(items):
            raise EngineError("a request_id is in the step twice; a step has at most one item of a request")
        tables: list[NDArray[np.int64]] = []
        for item, end in zip(items, ends, strict=True):
            who = f"request {item.request_id!r}"
            if end > self.max_context_tokens:
                raise EngineError(f"{who} ends at token {end}; the model's context is {self.max_context_tokens} tokens")
            table = np.asarray(item.page_table, dtype=np.int64)[: -(-end // self.pool.page_size)]
            if len(table) * self.pool.page_size < end:
                raise EngineError(
                    f"{who} has {len(table)} pages of {self.pool.page_size} tokens; {end} tokens need "
                    f"{-(-end // self.pool.page_size)}"
                )
            if table.min() < 0 or table.max() >= self.pool.num_pages:
                raise EngineError(f"{who} has pages {table.min()} to {table.max()}; the pool's are in [0, {self.pool.num_pages})")
            tables.append(table)
        return tables

    def _token_array(self, request_id: str, token_ids: Sequence[int]) -> NDArray[np.int64]:
        tokens = np.asarray(token_ids, dtype=np.int64)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise EngineError(f"request {request_id!r} has token {wrong}; the model's token ids are in [0, {self.vocab_size})")
        return tokens

    def _recorded_event(self) -> Any:
        if self._device.type != "cuda":
            return None
        return torch.cuda.current_stream(self._device).record_event()


class BadLogits(RequestFault):
    """The model computed something that is not a number, for the requests that the message names."""


def _sampled(logits: Tensor | None, wanted: Sequence[tuple[str, SamplingParams, int]]) -> dict[str, int]:
    """request_id -> token, from one row of logits for each (request_id, sampling, position of the token)."""
    if logits is None:
        return {}
    finite = torch.isfinite(logits).all(dim=-1)
    fine = [one for one, is_fine in zip(wanted, finite.tolist(), strict=True) if is_fine]
    sampled = sample(logits[finite], [sampling for _, sampling, _ in fine], [position for _, _, position in fine]) if fine else []
    tokens = {request_id: token for (request_id, _, _), token in zip(fine, sampled, strict=True)}
    if len(fine) < len(wanted):
        bad = [request_id for request_id, _, _ in wanted if request_id not in tokens]
        reason = f"logits of request {', '.join(bad)} are not finite; its KV or the model's weights are damaged"
        raise BadLogits(reason, request_ids=bad, tokens=tokens)
    return tokens


def _model_class(architecture: str) -> type[PreTrainedModel]:
    # Looked up by name: transformers imports a model's module when its class is first asked for.
    found: type[PreTrainedModel] = getattr(transformers, architecture)
    return found


def _check_settings(
    shard: Shard, group: TensorParallelGroup | None, num_pages: int, layers_per_group: int | None, num_threads: int | None
) -> None:
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    if (shard.tp_rank, shard.tp_size) != (rank, size):
        raise ConfigError(
            f"shard is rank {shard.tp_rank} of {shard.tp_size}, the process group rank {rank} of {size}; they must be equal"
        )
    if shard.dtype is DType.INT8:
        raise ConfigError("shard dtype is int8; the embedded engine's pool must have a floating point dtype")
    for name, value in (("num_pages", num_pages), ("layers_per_group", layers_per_group), ("num_threads", num_threads)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; must be at least 1")
