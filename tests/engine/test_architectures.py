"""Which TP sizes a configuration allows: what is not in the model is not cut."""

from __future__ import annotations

from typing import Any

import pytest

from embedded_engine.architectures import check_cut
from transfer.errors import ConfigError

DIVISIBLE = {
    "num_key_value_heads": 6,
    "num_attention_heads": 6,
    "intermediate_size": 96,
    "vocab_size": 240,
    "num_hidden_layers": 4,
}
EXPERTS = {"moe_intermediate_size": 2048, "shared_expert_intermediate_size": 512}

DENSE = [
    ("DeepseekV3ForCausalLM", {"first_k_dense_replace": 4}),
    ("DeepseekV2ForCausalLM", {"first_k_dense_replace": 9}),
    ("Qwen3MoeForCausalLM", {"num_experts": 0}),
    ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 5}),
    ("Qwen3NextForCausalLM", {"decoder_sparse_step": 2, "mlp_only_layers": [1, 3]}),
]
WITH_EXPERTS = [
    ("DeepseekV3ForCausalLM", {"first_k_dense_replace": 3}),
    ("DeepseekV2ForCausalLM", {"first_k_dense_replace": 0}),
    ("Qwen3MoeForCausalLM", {"num_experts": 8}),
    ("Qwen3MoeForCausalLM", {}),
    ("Qwen3NextForCausalLM", {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_experts": 8}),
]


@pytest.mark.parametrize(("name", "fields"), DENSE)
def test_sizes_of_experts_that_no_layer_has_forbid_nothing(name: str, fields: dict[str, Any]) -> None:
    check_cut(name, 3, DIVISIBLE | EXPERTS | fields)


@pytest.mark.parametrize(("name", "fields"), WITH_EXPERTS)
def test_sizes_of_experts_are_cut_where_a_layer_has_them(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tp_size is 3, which does not divide the model's moe_intermediate_size 2048"):
        check_cut(name, 3, DIVISIBLE | EXPERTS | fields)
