"""Recurrent state: gated delta nets (Qwen3-Next) with their states in the pool, one row per request.

transformers' layer reads and writes its states through a cache object. Here that object holds the states of one request, or of
all requests of a decode step. A row of the pool has, for each key head, the recurrent state of its value heads and the last
inputs of the convolution of its channels, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from embedded_engine.step_plan import StepPlan
from transfer.errors import EngineError

NEEDED_TRANSFORMERS = "5.21"
"""The first release whose gated delta nets read their states from their cache object."""


class _States:
    """The cache interface of a gated delta net, over the states of one call.

    Args:
        convolution: [requests, channels, width], the last inputs of the convolution; changed in place by the layer.
        recurrent: [requests, value heads, key dim, value dim].
    """

    def __init__(self, convolution: Tensor, recurrent: Tensor) -> None:
        self.convolution = convolution
        self.recurrent = recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.convolution

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, inputs: Tensor, layer_idx: int, **_: Any) -> Tensor:
        """Keep the newest inputs; return all inputs, with the earlier ones in front."""
        joined = torch.cat((self.convolution.to(inputs.dtype), inputs), dim=-1)
        self.convolution = joined[..., -self.convolution.shape[-1] :]
        return joined

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **_: Any) -> Tensor:
        self.recurrent = state
        return state


class PooledDeltaNet:
    """One gated delta net of this rank, with its states in the pool.

    Args:
        module: transformers' layer, already sharded.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._forward = type(module).forward
        # Once for all requests of a step, and so with one collective under tensor parallelism.
        self._project_output = module.out_proj
        module.out_proj = nn.Identity()
        self._key_heads: int = module.num_k_heads
        self._value_heads_each: int = module.num_v_heads // module.num_k_heads

    def forward(self, hidden_states: Tensor, *, paged_plan: StepPlan, **_: Any) -> Tensor:
        mixed = paged_plan.advance(self._module.layer_idx, hidden_states, self._advance)
        projected: Tensor = self._project_output(mixed)
        return projected

    def _advance(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        states = self._unpack(rows)
        output: Tensor = self._forward(self._module, hidden, cache_params=states)
        return output, self._pack(states)

    def _unpack(self, rows: Tensor) -> _States:
        """Return the states of `rows` [requests, key heads, elements] in the layer's shapes."""
        module, num_requests = self._module, rows.shape[0]
        value_dim = self._value_heads_each * module.head_v_dim
        recurrent, queries, keys, values = rows.split(
            [module.head_k_dim * value_dim, *(dim * module.conv_kernel_size for dim in self._channels)], dim=-1
        )
        channels = (part.reshape(num_requests, -1, module.conv_kernel_size) for part in (queries, keys, values))
        return _States(
            convolution=torch.cat(tuple(channels), dim=1),
            recurrent=recurrent.reshape(num_requests, module.num_v_heads, module.head_k_dim, module.head_v_dim),
        )

    def _pack(self, states: _States) -> Tensor:
        num_requests = states.recurrent.shape[0]
        channels = states.convolution.split([self._key_heads * dim for dim in self._channels], dim=1)
        parts = (part.reshape(num_requests, self._key_heads, -1).float() for part in (states.recurrent, *channels))
        return torch.cat(tuple(parts), dim=-1)

    @property
    def _channels(self) -> tuple[int, int, int]:
        """Channels of the convolution per key head: its query, its key, and the values of its value heads."""
        module = self._module
        return module.head_k_dim, module.head_k_dim, self._value_heads_each * module.head_v_dim


def hook_gated_delta_nets(model: PreTrainedModel) -> None:
    """Make every gated delta net of a model keep its states in the pool.

    Raises:
        EngineError: transformers is older than `NEEDED_TRANSFORMERS`.
    """
    if not hasattr(Cache, "get_conv_state"):
        raise EngineError(
            f"{type(model).__name__} has gated delta nets, which take transformers {NEEDED_TRANSFORMERS} or newer; "
            f"{transformers.__version__} is installed: pip install 'transformers>={NEEDED_TRANSFORMERS}'"
        )
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.forward = PooledDeltaNet(layer.linear_attn).forward


def cut_gated_delta_nets(model: PreTrainedModel, tp_rank: int, tp_size: int) -> None:
    """Reduce each gated delta net to this rank's key heads; its input projections are sharded already.

    The tensors here are small, or no plan of transformers can shard them: the channels of the convolution are those of all
    queries, then all keys, then all values.
    """
    for layer in model.model.layers:
        if not hasattr(layer, "linear_attn"):
            continue
        module = layer.linear_attn
        parts = module.conv1d.weight.split([module.key_dim, module.key_dim, module.value_dim])
        own = torch.cat([part.chunk(tp_size)[tp_rank] for part in parts])
        module.conv1d.weight = nn.Parameter(own, requires_grad=False)
        for name in ("A_log", "dt_bias"):
            whole = module.get_parameter(name)
            setattr(module, name, nn.Parameter(whole.chunk(tp_size)[tp_rank].clone(), requires_grad=False))
        for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"):
            setattr(module, name, getattr(module, name) // tp_size)
