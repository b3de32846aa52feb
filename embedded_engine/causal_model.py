"""A model of transformers on a paged pool: its layers, its head, and the joined logits of a group."""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog
import torch
import torch.nn.functional as functional
from torch import Tensor

from embedded_engine.architectures import Hook
from embedded_engine.compiled_layers import CompiledLayers
from embedded_engine.latent_attention import hook_latent_attention
from embedded_engine.model_config import one_line
from embedded_engine.model_files import ModelFiles
from embedded_engine.paged_attention import ATTENTION_NAME, LATENT_ATTENTION_NAME
from embedded_engine.recurrent_state import hook_gated_delta_nets
from embedded_engine.step_plan import StepPlan
from embedded_engine.tensor_parallel import TensorParallelGroup, load_causal_lm
from transfer.out_of_memory import is_out_of_memory

log = structlog.get_logger(__name__)


class CausalModel:
    """One rank's part of a model.

    Args:
        dtype: Dtype that it computes in.
        group: The rank's TP group; None for TP 1.
        advice: The settings to change if there is no memory for its weights.
        first_layer: Number of its first layer in the layout of the pool.

    Attributes:
        weights_bytes: Bytes of this rank's weights.

    Raises:
        EngineError: The weights cannot be loaded.
        OutOfMemory: There is no memory for them.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorParallelGroup | None,
        advice: str,
        first_layer: int = 0,
    ) -> None:
        self._group = group
        self._compiled: CompiledLayers | None = None
        self._softcap: float | None = getattr(files.config, "final_logit_softcapping", None)
        hook = files.family.hook
        attention = LATENT_ATTENTION_NAME if hook is Hook.LATENT else ATTENTION_NAME
        self._model = load_causal_lm(files, dtype=dtype, device=device, attention=attention, group=group, advice=advice)
        if hook is Hook.LATENT:
            hook_latent_attention(self._model)
        elif hook is Hook.GATED_DELTA_NET:
            hook_gated_delta_nets(self._model)
        if first_layer:
            # Without a cache of transformers, only the attention functions read the number of a layer.
            for module in self._model.modules():
                number = getattr(module, "layer_idx", None)
                if isinstance(number, int):
                    module.__dict__["layer_idx"] = number + first_layer
        self.weights_bytes = sum(parameter.numel() * parameter.element_size() for parameter in self._model.parameters())

    def compile_decode(self, sizes: Sequence[int], *, is_dynamic: bool) -> None:
        """Compile the decoder layers for `compute` with these numbers of rows.

        Compiling writes no KV and calls no collective.

        Args:
            sizes: They replace those of earlier calls. If there are none, all steps run uncompiled.
            is_dynamic: See `CompiledLayers`.
        """
        if not sizes:
            self._compiled = None
            return

        def step(num_rows: int) -> None:
            zeros = torch.zeros((1, num_rows), dtype=torch.int64, device=self._model.lm_head.weight.device)
            self.hidden(zeros, zeros, None)

        self._compiled = CompiledLayers(self._model.model.layers, is_dynamic=is_dynamic)
        self._compiled.compile(sizes, step)

    def hidden(self, token_ids: Tensor, positions: Tensor, plan: StepPlan | None) -> Tensor:
        """Return [rows, dim] after the last layer, from tokens [1, rows]. A plan of None only compiles the layers."""
        output = self._model.model(input_ids=token_ids, position_ids=positions, use_cache=False, paged_plan=plan)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab] of this rank's part of the vocabulary."""
        return functional.linear(hidden, self._model.lm_head.weight)

    def compute(self, token_ids: Tensor, positions: Tensor, plan: StepPlan) -> Tensor:
        """Return [rows, vocab] of this rank's part of the vocabulary, from tokens [1, rows] of a decode step."""
        if self._compiled is None:
            return self.own_logits(self.hidden(token_ids, positions, plan))
        with self._compiled.running(token_ids.shape[1], plan):
            return self.own_logits(self.hidden(token_ids, positions, plan))

    def joined(self, logits: Tensor) -> Tensor | None:
        """Return [rows, vocab] from the parts of all ranks on TP rank 0, None on the others."""
        whole = logits if self._group is None else self._group.gather_columns(logits)
        if whole is not None and self._softcap is not None:
            whole = torch.tanh(whole / self._softcap) * self._softcap
        return whole


def compile_decode_steps(models: Sequence[CausalModel], sizes: Sequence[int], *, is_dynamic: bool) -> None:
    """Compile the layers of models for decode steps of these numbers of rows. Log success, or the reason of a failure.

    If torch.compile fails, for example because there is no C++ compiler, all steps run uncompiled.

    Args:
        is_dynamic: See `CompiledLayers`.

    Raises:
        RuntimeError: The device has too little memory.
    """
    begun_s = time.monotonic()
    try:
        for model in models:
            model.compile_decode(sizes, is_dynamic=is_dynamic)
    except Exception as error:  # a missing compiler or header, a full disk: torch raises errors of many types
        for model in models:
            model.compile_decode((), is_dynamic=is_dynamic)
        if is_out_of_memory(error):
            raise
        log.warning(
            "torch_compile_unusable",
            reason=f"{type(error).__name__}: {one_line(error)}",
            advice="decode steps run uncompiled: fix the cause, or set torch_compile to false",
        )
        return
    log.info("decode_steps_compiled", max_bs=max(sizes), seconds=round(time.monotonic() - begun_s, 1))
