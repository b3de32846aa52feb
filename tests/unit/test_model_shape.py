"""What is read off a config.json is what transformers makes of the same file: every layer's cache, and every weight."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from planner.model_parts import Part
from planner.model_shape import ModelShape, read_model_shape
from transfer.errors import ConfigError
from transfer.layout import DType, LayerKind, LayerSpec

CONFIGS = Path(__file__).parent / "configs"

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    "kv_lora_rank": 24, "q_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **MOE,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3, "num_experts": 4, "shared_expert_intermediate_size": 32, **MOE,
}  # fmt: skip
ALTERNATING = ["full_attention", "sliding_attention"] * 2

# Class in transformers, and what its config.json has besides SIZES. Most families twice: with the fields, and with the defaults.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-kv-heads-null": ("Llama", {"num_key_value_heads": None, "attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 2}),
    "qwen2-window": ("Qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3}),
    "qwen2-layer-types": ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "layer_types": ALTERNATING}),
    "qwen3": ("Qwen3", {}),
    "qwen3-head-dim": ("Qwen3", {"head_dim": 32, "attention_bias": True, "sliding_window": 8, "use_sliding_window": True}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, **MOE}),
    "qwen3-moe-mixed": ("Qwen3Moe", {"num_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "head_dim": 32, **MOE}),
    "qwen3-moe-dense": ("Qwen3Moe", {"num_experts": 0, **MOE}),
    "qwen3-next": ("Qwen3Next", {"head_dim": 16, **LINEAR}),
    "qwen3-next-interval": ("Qwen3Next", {"full_attention_interval": 2, "mlp_only_layers": [0], **LINEAR}),
    "mistral": ("Mistral", {}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "gemma2": ("Gemma2", {"head_dim": 16}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 8}),
    "gemma3-pattern": ("Gemma3", {"sliding_window_pattern": 2, "sliding_window": 8}),
    "gemma3-both-ways": ("Gemma3", {"sliding_window": 8, "use_bidirectional_attention": True}),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v2": ("DeepseekV2", {**MLA}),
    "deepseek-v2-lite": ("DeepseekV2", {**MLA, "q_lora_rank": None, "first_k_dense_replace": 0, "attention_bias": True}),
    "deepseek-v3": ("DeepseekV3", {**MLA}),
    "deepseek-v3-bias": ("DeepseekV3", {**MLA, "attention_bias": True, "n_shared_experts": 2}),
}


def _config(case: str) -> dict[str, Any]:
    name, more = CASES[case]
    return {"architectures": [f"{name}ForCausalLM"], "torch_dtype": "float32", **SIZES, **more}


def _model(case: str) -> Any:
    """The same configuration as a model of transformers, with random weights."""
    import transformers

    name, _ = CASES[case]
    config_class = transformers.Gemma3TextConfig if name == "Gemma3" else getattr(transformers, f"{name}Config")
    raw = {key: value for key, value in _config(case).items() if key != "architectures"}
    return getattr(transformers, f"{name}ForCausalLM")(config_class.from_dict(raw)).eval()


def _kept(layer: Any) -> dict[str, int]:
    """What a cache layer keeps of the request in it: heads, elements of K and V per head and token, or of state; window."""
    if getattr(layer, "conv_states", None):
        states = [layer.conv_states[0], layer.recurrent_states[0]]
        return {"state": sum(state.numel() for state in states)}
    sizes = {"heads": layer.keys.shape[1], "k": layer.keys.shape[3], "v": layer.values.shape[3]}
    return sizes | {"window": getattr(layer, "sliding_window", 0)}


def _said(spec: LayerSpec) -> dict[str, int]:
    if spec.kind is LayerKind.RECURRENT_STATE:
        return {"state": spec.num_kv_heads * spec.k_head_dim}
    sizes = {"heads": spec.num_kv_heads, "k": spec.k_head_dim, "v": spec.v_head_dim}
    return sizes | {"window": spec.window_tokens}


@pytest.mark.parametrize("case", CASES)
def test_layers_and_weights_are_those_of_transformers(case: str) -> None:
    import torch

    model = _model(case)
    with torch.inference_mode():
        cached = model(torch.arange(1, 6)[None], use_cache=True).past_key_values
    shape = read_model_shape(_config(case))
    said = [_said(layer.kv) for layer in shape.layers]
    kept = [_kept(layer) for layer in cached.layers]
    if shape.layers[0].kv.kind is LayerKind.MLA:  # two caches there, of one latent head; one buffer here
        assert all(one["heads"] == 1 and one["window"] == 0 for one in kept)
        kept = [one | {"k": one["k"] + one["v"], "v": 0} for one in kept]
    assert said == kept
    assert shape.layout().dtype is DType.FLOAT32
    num_params = sum(tensor.numel() for tensor in model.parameters())
    num_params += sum(tensor.numel() for name, tensor in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert shape.num_params == num_params
    assert shape.weights_bytes() == 4 * num_params
    assert shape.hidden_size == 64 and shape.max_context_tokens == 256


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_that_transformers_wrote_out_says_the_same(case: str) -> None:
    """It writes every default, and derives some fields from others; the embedded engine reads such a dictionary."""
    import transformers

    name, _ = CASES[case]
    config_class = transformers.Gemma3TextConfig if name == "Gemma3" else getattr(transformers, f"{name}Config")
    written = config_class.from_dict({key: value for key, value in _config(case).items() if key != "architectures"}).to_dict()
    shape, again = read_model_shape(_config(case)), read_model_shape(written | {"architectures": [f"{name}ForCausalLM"]})
    assert again.layout(DType.FLOAT32) == shape.layout()
    assert (again.num_params, again.max_context_tokens) == (shape.num_params, shape.max_context_tokens)


def test_recurrent_states_are_kept_by_key_head_in_float32() -> None:
    """Per key head: two value heads' states of 8 x 12, and 3 columns of 2 x 8 + 2 x 12 convolved values."""
    layers = read_model_shape(_config("qwen3-next")).layers
    state = LayerSpec(
        kind=LayerKind.RECURRENT_STATE, num_kv_heads=2, k_head_dim=2 * 8 * 12 + 3 * 40, v_head_dim=0, dtype=DType.FLOAT32
    )
    assert [layer.kv for layer in layers] == [state, state, state, LayerSpec(num_kv_heads=2, k_head_dim=16, v_head_dim=16)]


def test_every_family_is_compared() -> None:
    with pytest.raises(ConfigError, match="must be one of") as caught:
        read_model_shape({"architectures": ["NobodysForCausalLM"]})
    listed = str(caught.value).partition("one of ")[2].partition(", or ")[0].split(", ")
    known = {name for name in listed if not name.startswith("ChatGLM")}
    assert known == {f"{name}ForCausalLM" for name, _ in CASES.values()}


def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return config


def _groups(shape: ModelShape) -> list[tuple[LayerKind, int]]:
    kinds = [layer.kv.kind for layer in shape.layers]
    return [(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds)]


@pytest.mark.parametrize(
    ("name", "num_params", "groups"),
    [
        # Parameters as the model cards and the sizes of the published checkpoints give them.
        ("llama-3-70b", 70_553_706_496, [(LayerKind.ATTENTION, 80)]),
        ("qwen3-8b", 8_190_735_360, [(LayerKind.ATTENTION, 36)]),
        ("glm-4-9b-chat-1m", 9_483_857_920, [(LayerKind.ATTENTION, 40)]),
        ("deepseek-v3.1", 671_026_419_200, [(LayerKind.MLA, 61)]),
        ("qwen3-next-80b-a3b", 79_674_391_296, [(LayerKind.RECURRENT_STATE, 36), (LayerKind.ATTENTION, 12)]),
        ("gpt-oss-20b", 20_914_757_184, [(LayerKind.SLIDING_WINDOW, 12), (LayerKind.ATTENTION, 12)]),
    ],
)
def test_published_models(name: str, num_params: int, groups: list[tuple[LayerKind, int]]) -> None:
    shape = read_model_shape(published(name))
    assert shape.num_params == num_params
    assert _groups(shape) == groups


def test_a_multimodal_model_is_its_language_model_and_a_tower() -> None:
    """Gemma-3 27B: five layers of window 1,024 and one of full attention, ten times, then two windows more."""
    shape = read_model_shape(published("gemma-3-27b"))
    assert [layer.kv.window_tokens for layer in shape.layers] == ([1024] * 5 + [0]) * 10 + [1024] * 2
    assert (shape.architecture, shape.dtype) == ("Gemma3ForConditionalGeneration", DType.BFLOAT16)
    assert (shape.hidden_size, shape.max_context_tokens, shape.num_query_heads) == (5376, 131_072, 32)
    # Tower: 27 x (4 x 1152^2 + 2 x 1152 x 4304), projection: 1152 x 5376.
    assert shape.vision is not None and shape.vision.num_params == 417_263_616
    assert shape.num_params == 27_009_346_304 + 417_263_616  # the language model, its head tied to the embeddings


def test_text_of_a_multimodal_model_goes_by_its_model_type() -> None:
    text = {key: value for key, value in _config("mistral").items() if key not in ("architectures", "torch_dtype")}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "dtype": "float16", "tie_word_embeddings": False}
    shape = read_model_shape({**config, "text_config": {**text, "model_type": "mistral"}})
    assert shape.dtype is DType.FLOAT16 and shape.vision is None
    assert [layer.kv.window_tokens for layer in shape.layers] == [4096] * 4
    assert read_model_shape({**text, "model_type": "llama"}).architecture == "LlamaForCausalLM"  # no architectures at all


def test_chatglm_without_groups_and_with_biases() -> None:
    config = {**published("glm-4-9b-chat-1m"), "multi_query_attention": False, "add_bias_linear": True}
    shape = read_model_shape(config)
    assert shape.layers[0].kv.num_kv_heads == 32
    assert shape.num_params - read_model_shape({**config, "add_bias_linear": False}).num_params == 40 * (4096 + 2 * 13696 + 4096)


def test_layout_takes_a_dtype_or_the_stored_one() -> None:
    shape = read_model_shape(published("qwen3-8b"))
    assert shape.layout().dtype is DType.BFLOAT16
    assert shape.layout(DType.FLOAT16).dtype is DType.FLOAT16
    unsaid = read_model_shape(published("gpt-oss-20b"))
    assert unsaid.dtype is None
    with pytest.raises(ConfigError, match=r"dtype is not in config\.json"):
        unsaid.layout()


def test_weights_of_a_rank_of_llama_70b() -> None:
    """By hand, tp 4: 16 of 64 query heads, 2 of 8 KV heads, a quarter of the MLP and of the head; embeddings and norms whole."""
    layer = 16 * 2 * 128 * 8192 + 2 * 2 * 128 * 8192 + 3 * 8192 * 28672 // 4 + 2 * 8192
    assert read_model_shape(published("llama-3-70b")).weights_bytes(tp_size=4) == 2 * (
        80 * layer + 128256 * 8192 + 8192 + 128256 * 8192 // 4
    )


def test_stages_have_their_own_layers_and_the_ends_of_the_model() -> None:
    shape = read_model_shape(published("llama-3-70b"))
    first, second = (shape.weights_bytes(pp_size=2, pp_rank=stage) for stage in (0, 1))
    assert first + second == shape.weights_bytes() == 141_107_412_992  # as published
    assert second - first == 2 * 8192  # the last norm; embeddings and head are alike


def test_quantised_linears_take_a_byte_and_the_rest_does_not() -> None:
    shape = read_model_shape(published("deepseek-v3.1"))
    plain = sum(one.num_params for one in (*shape.first_stage, *shape.last_stage) if one.part is Part.OTHER)
    plain += sum(one.num_params for layer in shape.layers for one in layer.weights if one.part is Part.OTHER)
    assert shape.weights_bytes() == (shape.num_params - plain) + 2 * plain
    assert shape.weights_bytes(dtype=DType.FLOAT32) == (shape.num_params - plain) + 4 * plain
    assert shape.weights_bytes(tp_size=8, attention_tp_size=1) > shape.weights_bytes(tp_size=8)
    assert shape.weights_bytes(with_draft=True) - shape.weights_bytes() > 11e9  # the layer that predicts one token further
    assert shape.checkpoint_bytes() > shape.weights_bytes(with_draft=True) + 2 * 2 * 129280 * 7168 - 1


@pytest.mark.parametrize(("quantisation", "bits"), [({"quant_method": "mxfp4"}, 4.25), ({"quant_method": "awq", "bits": 4}, 4)])
def test_bits_of_quantised_weights(quantisation: dict[str, object], bits: float) -> None:
    """mxfp4: the experts, with a scale for each 32 weights; the others: attention too."""
    config = _config("mixtral")
    num_quantised = 4 * 4 * 3 * 64 * 80  # layers x experts x matrices
    if quantisation["quant_method"] != "mxfp4":
        num_quantised += 4 * (2 * 4 + 2 * 2) * 16 * 64  # layers x heads of q, o, k and v x head size
    quantised = read_model_shape({**config, "quantization_config": quantisation})
    saved = read_model_shape(config).weights_bytes() - quantised.weights_bytes()
    assert saved == num_quantised * (32 - bits) / 8
    assert quantised.quantised_bits[Part.EXPERTS] == bits


LLAMA = _config("llama")
WRONG: dict[str, tuple[Mapping[str, object], str]] = {
    "unknown": (
        {"architectures": ["MambaForCausalLM"]},
        "architectures is ['MambaForCausalLM']; must be one of LlamaForCausalLM, ",
    ),
    "two": ({"architectures": ["A", "B"]}, "architectures is ['A', 'B']; must be a list of one name"),
    "model type": ({"architectures": None, "model_type": 3}, "model_type is 3; must be a text"),
    "missing": ({"num_hidden_layers": None}, "num_hidden_layers is None; must be a positive integer"),
    "kv heads": ({"num_key_value_heads": 3}, "num_key_value_heads is 3; must be a divisor of num_attention_heads, 4"),
    "flag": ({"attention_bias": 1}, "attention_bias is 1; must be true or false"),
    "dtype": ({"torch_dtype": "float64"}, "torch_dtype is 'float64'; must be one of float32, bfloat16, float16"),
    "quantisation": (
        {"quantization_config": {"quant_method": "hqq"}},
        "quantization_config.quant_method is 'hqq'; must be fp8, mxfp4, awq or gptq",
    ),
    "many layers": ({"num_hidden_layers": 4097}, "num_hidden_layers is 4097; must be a positive integer, at most 4096"),
    "unwritable": (
        {"vocab_size": 10**9000},
        "vocab_size is a number of thousands of digits; must be a positive integer, at most",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_with_its_value(case: str) -> None:
    change, message = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        read_model_shape({**LLAMA, **change}, source="model/config.json")
    assert str(caught.value).startswith(f"model/config.json: {message}")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("case", ["qwen3-moe", "qwen3-next", "mixtral", "gpt-oss", "deepseek-v3"])
def test_a_field_on_which_no_size_depends_refuses_no_plan(case: str) -> None:
    assert read_model_shape({**_config(case), "num_experts_per_tok": "two"}) == read_model_shape(_config(case))


def test_of_two_names_of_one_field_the_class_takes_its_own() -> None:
    config = _config("qwen3-moe")
    assert read_model_shape({**config, "num_local_experts": "many"}) == read_model_shape(config)
    renamed = {"num_local_experts" if name == "num_experts" else name: value for name, value in config.items()}
    assert read_model_shape(renamed) == read_model_shape(config)


def _is_read_or_refused(config: Mapping[str, Any]) -> None:
    try:
        shape = read_model_shape(config)
        shape.layout(DType.FLOAT16)
        sizes = [
            shape.num_params,
            shape.weights_bytes(with_draft=True, dtype=DType.FLOAT16),
            shape.checkpoint_bytes(DType.FLOAT16),
        ]
    except ConfigError as error:
        assert str(error).startswith("config.json: ") and " must be " in str(error) and len(str(error)) < 1000
    else:
        assert all(math.isfinite(float(size)) for size in sizes), "numbers that a plan can reckon with"


ALL_CONFIGS = {case: _config(case) for case in CASES} | {path.stem: published(path.stem) for path in CONFIGS.glob("*.json")}
ONE_OF_EACH = {str(config["architectures"][0]): config for config in reversed(ALL_CONFIGS.values())}  # the simplest of a family
FIELDS = sorted({name for config in ALL_CONFIGS.values() for name in config})
# What is wrong in most fields, and what is right in some. fuzz/targets/model_config.py tries much more.
SAID: list[Any] = [
    None, True, "\ud800", "llama", -1, 0, 1, 3, 4096, 65537, 10**9, 1 << 40, 10**320, 10**9000, 4.0, float("nan"), [],
    ALTERNATING, [10**320], [[[[[]]]]], {}, {"num_hidden_layers": 10**9}, {"hidden_size": 10**320},
    {"quant_method": "awq", "bits": 10**320},
]  # fmt: skip


@pytest.mark.parametrize("case", sorted(ONE_OF_EACH))
def test_whatever_a_field_says_is_read_or_refused(case: str) -> None:
    config = ONE_OF_EACH[case]
    for name in FIELDS:
        for value in SAID:
            _is_read_or_refused({**config, name: value})
    for part in (part for part in config if isinstance(config[part], dict)):
        for name in {*FIELDS, *config[part]}:
            for value in SAID:
                _is_read_or_refused({**config, part: {**config[part], name: value}})
