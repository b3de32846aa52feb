"""Model directories and steps that are wrong: one line, with the value and what would be right; what makes two models equal."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from embedded_engine import model_files
from embedded_engine.architectures import check_cut
from embedded_engine.engine import EmbeddedEngine
from embedded_engine.model_files import read_model_files
from transfer.engine_types import PrefillItem
from transfer.errors import ConfigError, EngineError, TransferError
from transfer.layout import Shard

Edit = Callable[[Path], None]


@pytest.fixture
def copied(demo_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_dir, tmp_path / "copy"))


@pytest.fixture(scope="module")
def engine(demo_dir: Path) -> EmbeddedEngine:
    return EmbeddedEngine(demo_dir, shard=Shard(), num_pages=10)


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in raw.items() if value != "absent"}))


def message_of(error_type: type[TransferError], action: Callable[[], object]) -> str:
    with pytest.raises(error_type) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500, text
    return text


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda d: shutil.rmtree(d), ["not a directory", "must be a local Hugging Face model directory"]),
        (lambda d: (d / "config.json").write_text("{"), ["config.json is not valid JSON"]),
        (lambda d: edit_config(d, architectures=["MambaForCausalLM"]), ["MambaForCausalLM", "Qwen3ForCausalLM"]),
        (lambda d: edit_config(d, quantization_config={"quant_method": "fp8"}), ["quantization_config", "plain weights"]),
        (lambda d: edit_config(d, num_hidden_layers=-3), ["num_hidden_layers is -3"]),
        (lambda d: edit_config(d, num_key_value_heads=7), ["num_key_value_heads is 7", "a divisor of num_attention_heads, 24"]),
        (lambda d: edit_config(d, hidden_size=100), ["does not describe a LlamaForCausalLM", "100"]),
        (
            lambda d: edit_config(d, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            ["rope_type is 'dynamic'", "llama3"],
        ),
        (lambda d: (d / "model.safetensors").unlink(), ["neither model.safetensors nor model.safetensors.index.json"]),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 4096), ["not a safetensors file"]),
        (
            lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
            ["model.safetensors is damaged", "must be copied again"],
        ),
    ],
)
def test_a_wrong_directory_is_refused(copied: Path, edit: Edit, named: list[str]) -> None:
    edit(copied)
    text = message_of(ConfigError, lambda: read_model_files(copied))
    assert all(part in text for part in [str(copied), *named]), text


@pytest.mark.parametrize(
    ("family", "values", "named"),
    [
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
    ],
)
def test_layers_that_the_engine_does_not_run_are_refused(
    family_dir: Callable[[str], Path], tmp_path: Path, family: str, values: dict[str, Any], named: str
) -> None:
    copied = Path(shutil.copytree(family_dir(family), tmp_path / "copy"))
    edit_config(copied, **values)
    assert named in message_of(ConfigError, lambda: read_model_files(copied))


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ([], "weight_map is []; must map"),
        ({"a\nb": "weights.safetensors"}, "places tensor 'a\\nb' in 'weights.safetensors'; it must map"),
        ({"a": "../model.safetensors"}, "places tensor 'a' in '../model.safetensors'; it must map each tensor to the name of a"),
        ({"a": 1}, "places tensor 'a' in 1; it must map"),
        ({"a" * 9999: "b" * 256}, "at most 255 bytes"),
        ({"nothing.weight": "weights.safetensors"}, "places 'nothing.weight' in weights.safetensors"),
    ],
)
def test_a_wrong_index_is_refused(copied: Path, weight_map: Any, named: str) -> None:
    (copied / "model.safetensors").rename(copied / "weights.safetensors")
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    message = message_of(ConfigError, lambda: read_model_files(copied))
    assert named in message and len(message) < 700


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (b"[" * 100_000, "is damaged or not a safetensors file"),
        (
            b'{"a\\nb": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
            "its header has a name that cannot be printed",
        ),
        (
            b'{"a": {"dtype": "F32", "shape": [-Infinity], "data_offsets": [0, 0]}}',
            "is damaged or not a safetensors file: Error while deserializing header: invalid JSON",
        ),
    ],
    ids=["nested", "unprintable", "endless"],
)
def test_a_hostile_header_is_refused(copied: Path, header: bytes, named: str) -> None:
    (copied / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    message = message_of(ConfigError, lambda: read_model_files(copied))
    assert named in message and len(message.splitlines()) == 1


def change_tensor(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    changed = change(tensors.pop(name))
    save_file(tensors | ({} if changed is None else {name: changed}), directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensor: None, "missing keys"),
        (lambda tensor: tensor[:-1].clone(), "model.layers.3.mlp.up_proj.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused_instead_of_made_up(
    copied: Path, change: Callable[[torch.Tensor], torch.Tensor | None], named: str
) -> None:
    change_tensor(copied, "model.layers.3.mlp.up_proj.weight", change)
    text = message_of(EngineError, lambda: EmbeddedEngine(copied, shard=Shard(), num_pages=1))
    assert named in text and str(copied) in text


def test_weights_of_a_type_that_is_no_float_are_refused(copied: Path) -> None:
    save_file({"a": torch.zeros(4, dtype=torch.int32)}, copied / "model.safetensors")
    assert "I32" in message_of(ConfigError, lambda: read_model_files(copied).layout())


DIVISIBLE = {
    "num_key_value_heads": 6,
    "num_attention_heads": 6,
    "intermediate_size": 96,
    "vocab_size": 240,
    "num_hidden_layers": 4,
}
EXPERTS = {"moe_intermediate_size": 2048, "shared_expert_intermediate_size": 512}


@pytest.mark.parametrize(
    ("name", "fields", "has_experts"),
    [
        ("DeepseekV3ForCausalLM", {"first_k_dense_replace": 4}, False),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 5}, False),
        ("Qwen3NextForCausalLM", {"decoder_sparse_step": 2, "mlp_only_layers": [1, 3]}, False),
        ("DeepseekV3ForCausalLM", {"first_k_dense_replace": 3}, True),
        ("Qwen3MoeForCausalLM", {"num_experts": 8}, True),
        ("Qwen3NextForCausalLM", {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_experts": 8}, True),
    ],
)
def test_sizes_of_experts_count_only_if_a_layer_has_experts(name: str, fields: dict[str, Any], has_experts: bool) -> None:
    says = "is 3, which does not divide moe_intermediate_size \\(2048\\)"
    with pytest.raises(ConfigError, match=says) if has_experts else nullcontext():
        check_cut(name, 3, DIVISIBLE | EXPERTS | fields)


@pytest.mark.parametrize("tp_size", [5, 7, 8, 24])
def test_a_tp_size_that_does_not_divide_is_refused(demo_dir: Path, tp_size: int) -> None:
    text = message_of(ConfigError, lambda: read_model_files(demo_dir).check_shard(Shard(tp_size=tp_size)))
    assert (
        f"(--tp) is {tp_size}, which does not divide num_key_value_heads (12)" in text
        and "must be one of 1, 2, 3, 4, 6, 12" in text
    )


def test_each_cut_size_is_checked(demo_dir: Path, copied: Path) -> None:
    for tp_size in (1, 2, 3, 4, 6, 12):
        read_model_files(demo_dir).check_shard(Shard(tp_size=tp_size))
    for name, value in (("vocab_size", 769), ("intermediate_size", 575)):
        shutil.copy(demo_dir / "config.json", copied)
        edit_config(copied, **{name: value})
        assert f"{name} ({value})" in message_of(ConfigError, lambda: read_model_files(copied).check_shard(Shard(tp_size=2)))
    assert "pp_size is 2" in message_of(ConfigError, lambda: read_model_files(demo_dir).check_shard(Shard(pp_size=2)))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"token_ids": (5, 768)}, "token 768; the model's token ids are in [0, 768)"),
        ({"first_token": 4090, "token_ids": (1,) * 7}, "ends at token 4097; the model's context is 4096"),
        ({"first_token": 16, "page_tables": ([1],)}, "has 1 pages of 16 tokens; 21 tokens need 2"),
        ({"page_tables": ([10],)}, "pages 10 to 10; the pool's are in [0, 10)"),
    ],
)
def test_items_that_do_not_fit_are_refused(engine: EmbeddedEngine, values: dict[str, Any], named: str) -> None:
    fitting: dict[str, Any] = {
        "request_id": "r1",
        "token_ids": (1,) * 5,
        "first_token": 0,
        "page_tables": ([3],),
        "is_last": True,
    }
    text = message_of(EngineError, lambda: engine.prefill([PrefillItem(**(fitting | values))]))
    assert named in text and "'r1'" in text
    assert engine.prefill([PrefillItem(**fitting)]), "the engine goes on"


def test_fields_are_equal_for_equal_models_and_do_not_depend_on_the_path(demo_dir: Path, copied: Path, qwen_dir: Path) -> None:
    fields = read_model_files(demo_dir).fields
    assert read_model_files(copied).fields == fields
    # Written the way older transformers wrote it, and split into two files: still the same model.
    edit_config(copied, rope_parameters="absent", rope_theta=10000.0, rope_scaling=None)
    tensors = load_file(copied / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[:30], "b.safetensors": names[30:]}
    for file, own in halves.items():
        save_file({name: tensors[name] for name in own}, copied / file)
    (copied / "model.safetensors").unlink()
    weight_map = {name: file for file, own in halves.items() for name in own}
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_model_files(copied).fields == fields
    assert read_model_files(qwen_dir).fields["architecture"] == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("family", "values", "field"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"vocab_size": 780}, "vocab_size"),
        ("gemma3", {"sliding_window": 20}, "sliding_window"),
        ("deepseek_v3_moe", {"routed_scaling_factor": 2.0}, "routed_scaling_factor"),
        ("qwen3_next", {"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim"),
    ],
)
def test_fields_differ_with_the_architecture(
    family_dir: Callable[[str], Path], tmp_path: Path, family: str, values: dict[str, Any], field: str
) -> None:
    copied = Path(shutil.copytree(family_dir(family), tmp_path / "copy"))
    edit_config(copied, **values)
    ours, theirs = read_model_files(family_dir(family)).fields, read_model_files(copied).fields
    assert {name for name in ours if ours[name] != theirs[name]} == {field}


@pytest.mark.parametrize("limit_bytes", [model_files.WHOLE_DIGEST_LIMIT_BYTES, 0])
def test_fields_differ_with_the_weights(demo_dir: Path, copied: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int) -> None:
    monkeypatch.setattr(model_files, "WHOLE_DIGEST_LIMIT_BYTES", limit_bytes)
    seen = {read_model_files(demo_dir).weights_digest}

    def digest_after(change: Callable[[torch.Tensor], torch.Tensor | None], name: str) -> str:
        shutil.copy(demo_dir / "model.safetensors", copied)
        change_tensor(copied, name, change)
        return read_model_files(copied).weights_digest

    def last_bit(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1).view(torch.int32)[-1] ^= 1
        return tensor

    def first_bit(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1).view(torch.int32)[0] ^= 1
        return tensor

    for name in ("lm_head.weight", "model.norm.weight", "model.layers.7.mlp.down_proj.weight"):
        seen.add(digest_after(last_bit, name))
    seen.add(digest_after(first_bit, "lm_head.weight"))
    seen.add(digest_after(lambda tensor: tensor.reshape(tensor.shape[::-1]), "model.layers.0.self_attn.o_proj.weight"))
    seen.add(digest_after(lambda tensor: tensor.to(torch.bfloat16), "model.norm.weight"))
    assert len(seen) == 7
