"""A model of transformers on a paged pool: its layers, its head, and the joined logits of a group."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from embedded_engine.architectures import Hook
from embedded_engine.latent_attention import hook_latent_attention
from embedded_engine.model_files import ModelFiles
from embedded_engine.paged_attention import ATTENTION_NAME, LATENT_ATTENTION_NAME
from embedded_engine.recurrent_state import hook_gated_delta_nets
from embedded_engine.step_plan import StepPlan
from embedded_engine.tensor_parallel import TensorParallelGroup, load_causal_lm


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

    def hidden(self, token_ids: Tensor, positions: Tensor, plan: StepPlan) -> Tensor:
        """Return [rows, dim] behind the last layer, from tokens [1, rows]."""
        output = self._model.model(input_ids=token_ids, position_ids=positions, use_cache=False, paged_plan=plan)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab] of this rank's part of the vocabulary."""
        return functional.linear(hidden, self._model.lm_head.weight)

    def compute(self, token_ids: Tensor, positions: Tensor, plan: StepPlan) -> Tensor:
        """Return [rows, vocab] of this rank's part of the vocabulary, from tokens [1, rows]."""
        return self.own_logits(self.hidden(token_ids, positions, plan))

    def joined(self, logits: Tensor) -> Tensor | None:
        """Return [rows, vocab] from the parts of all ranks on TP rank 0, None on the others."""
        whole = logits if self._group is None else self._group.gather_columns(logits)
        if whole is not None and self._softcap is not None:
            whole = torch.tanh(whole / self._softcap) * self._softcap
        return whole
