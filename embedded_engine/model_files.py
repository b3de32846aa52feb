"""What a local Hugging Face directory says about itself, checked before any weight is loaded.

Everything that can be wrong with a model directory or a parallel size is found here and said in one line, because the
libraries below answer the same mistakes with pages of text, with randomly initialised weights, or by asking the network.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers
import xxhash
from transformers import PretrainedConfig

from embedded_engine.architectures import ARCHITECTURES, Architecture, check_cut
from embedded_engine.model_config import architecture_of, check_is_plain, no_weights, one_line
from planner.config_fields import shown
from planner.model_directory import INDEX_NAME, WEIGHTS_NAME, read_config, read_json
from planner.model_shape import read_model_shape
from transfer.errors import ConfigError
from transfer.layout import DType, KVLayout, Shard

LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")
"""Kinds of layers that the embedded engine runs."""

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angle of a position never depends on what else is in the batch. "dynamic" and "longrope" change the
angles with the longest sequence seen, which a paged cache that outlives the step cannot follow."""

WEIGHT_DTYPES: Mapping[str, DType] = {"F32": DType.FLOAT32, "BF16": DType.BFLOAT16, "F16": DType.FLOAT16}
"""Element types that a model may be stored in: the safetensors name -> ours."""

MODEL_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "hidden_activation", "rms_norm_eps", "attention_bias", "mlp_bias", "tie_word_embeddings",
    "max_position_embeddings", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "sliding_window",
    "layer_types", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave",
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size",
    "shared_expert_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts", "num_local_experts",
    "num_experts_per_tok", "n_group", "topk_group", "topk_method", "norm_topk_prob", "routed_scaling_factor", "swiglu_alpha",
    "swiglu_limit",
)  # fmt: skip
"""What of a configuration decides which numbers a model computes, in any family."""

WHOLE_DIGEST_LIMIT_BYTES = 64 * 1024 * 1024
SAMPLES_PER_TENSOR = 16
SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100 * 1024 * 1024  # the limit of the safetensors format itself
MAX_FILE_NAME_BYTES = 255  # the limit of Linux file systems; messages contain the name


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies in a safetensors file; `begin` and `end` are offsets in bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A checked model directory: its configuration and where its tensors lie. Made by `read_model_files`.

    With a `dummy_seed` there are no tensors: the weights are made up from it, see `embedded_engine.dummy_weights`.
    """

    directory: Path
    architecture: str
    config: PretrainedConfig
    tensors: tuple[StoredTensor, ...]
    eos_token_ids: tuple[int, ...]
    dummy_seed: int | None = None

    @property
    def family(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_context_tokens(self) -> int:
        return int(self.config.max_position_embeddings)

    @cached_property
    def stored_dtype(self) -> DType:
        """Element type that most of the model's bytes are stored in; of dummy weights, the one that config.json names."""
        if self.dummy_seed is not None:
            named = str(self.config.dtype).removeprefix("torch.")
            if named not in WEIGHT_DTYPES.values():
                wanted = ", ".join(WEIGHT_DTYPES.values())
                raise ConfigError(f"{self.directory}: config.json says dtype {named}; dummy weights need one of {wanted}")
            return DType(named)
        num_bytes: dict[str, int] = {}
        for tensor in self.tensors:
            num_bytes[tensor.dtype] = num_bytes.get(tensor.dtype, 0) + tensor.num_bytes
        name = max(num_bytes, key=lambda dtype: num_bytes[dtype])
        if name not in WEIGHT_DTYPES:
            raise ConfigError(f"{self.directory}: weights are stored as {name}; must be one of {', '.join(WEIGHT_DTYPES)}")
        return WEIGHT_DTYPES[name]

    def layout(self, dtype: DType | None = None) -> KVLayout:
        """The model's KV, computed in `dtype` (the stored one where None)."""
        # Of the configuration as transformers has understood it, which is what it will build.
        shape = read_model_shape(self.config.to_dict(), source=str(self.directory / "config.json"))
        return shape.layout(self.stored_dtype if dtype is None else dtype)

    @cached_property
    def weights_digest(self) -> str:
        """See `weights_digest`."""
        assert self.dummy_seed is None
        return weights_digest(self.tensors)

    @cached_property
    def fields(self) -> dict[str, str]:
        """What must be equal on both sides of a transfer, as name -> text; does not depend on where the directory is."""
        named = {name: str(getattr(self.config, name)) for name in MODEL_FIELDS if getattr(self.config, name, None) is not None}
        named["architecture"] = self.architecture
        named["rope"] = json.dumps(_without_none(self.config.rope_parameters), sort_keys=True)
        is_dummy = self.dummy_seed is not None
        named["weights"] = f"dummy:{self.dummy_seed}" if is_dummy else f"xxh3-128:{self.weights_digest}"
        return named

    def check_shard(self, shard: Shard) -> None:
        """Refuse a cut that the embedded engine cannot serve.

        Raises:
            ConfigError: Pipeline parallelism, or a TP size that does not divide what it cuts; the message names both.
        """
        if shard.pp_size != 1:
            raise ConfigError(
                f"pp_size is {shard.pp_size}; the embedded engine cuts by tensor parallelism only, pp_size must be 1"
            )
        check_cut(self.architecture, shard.tp_size, self.config.to_dict())


def read_model_files(directory: Path | str, *, dummy_seed: int | None = None) -> ModelFiles:
    """Read and check a local Hugging Face model directory; loads no weights and never asks the network.

    Args:
        directory: Where config.json and the safetensors files are.
        dummy_seed: Make the weights up from this seed: config.json alone is then enough. Of a quantised model the plain one of
            the same shape is made up.

    Raises:
        ConfigError: The directory, its config.json or its safetensors files are missing, damaged, or of a model that the
            embedded engine does not run.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ConfigError(f"model is {str(directory)!r}, which is not a directory; must be a local Hugging Face model directory")
    raw = read_config(directory)
    if dummy_seed is not None:
        raw.pop("quantization_config", None)
    architecture = _architecture(directory, raw)
    config = _config(directory, architecture, raw)
    _check_supported(directory, config)
    return ModelFiles(
        directory=directory,
        architecture=architecture,
        config=config,
        tensors=tuple(stored_tensors(directory)) if dummy_seed is None else (),
        eos_token_ids=_eos_token_ids(directory, raw),
        dummy_seed=dummy_seed,
    )


def _architecture(directory: Path, raw: dict[str, Any]) -> str:
    architecture = architecture_of(directory, raw)
    expected = ARCHITECTURES[architecture].model_type
    if raw.get("model_type", expected) != expected:
        raise ConfigError(
            f"{directory / 'config.json'}: model_type is {raw['model_type']!r}; must be {expected!r} for {architecture}"
        )
    check_is_plain(directory, raw)
    return architecture


def _config(directory: Path, architecture: str, raw: dict[str, Any]) -> PretrainedConfig:
    path = directory / "config.json"
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for name in (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        value = raw.get(name)
        if value is None and name not in sizes:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{path}: {name} is {value!r}; must be a positive integer")
    try:
        config_class: type[PretrainedConfig] = getattr(transformers, ARCHITECTURES[architecture].config_class)
        config = config_class.from_dict(raw)
    except Exception as error:  # a config class raises whatever its validators do; all of it means: this file is wrong
        raise ConfigError(f"{path} does not describe a {architecture}: {one_line(error)}") from error
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"{path}: num_key_value_heads is {config.num_key_value_heads}; must divide num_attention_heads "
            f"{config.num_attention_heads}"
        )
    return config


def _check_supported(directory: Path, config: PretrainedConfig) -> None:
    path = directory / "config.json"
    for rope in _rope_parameters(config):
        rope_type = rope.get("rope_type", "default")
        if rope_type not in STATIC_ROPE_TYPES:
            raise ConfigError(f"{path}: rope_type is {rope_type!r}; must be one of {', '.join(STATIC_ROPE_TYPES)}")
    kinds = _layer_types(config)
    if len(kinds) != config.num_hidden_layers:
        raise ConfigError(f"{path}: layer_types has {len(kinds)} entries; num_hidden_layers is {config.num_hidden_layers}")
    unknown = sorted(set(kinds) - set(LAYER_TYPES))
    if unknown:
        raise ConfigError(f"{path}: layer_types has {', '.join(unknown)}; must be {', '.join(LAYER_TYPES)}")
    if "sliding_attention" in kinds and not (isinstance(config.sliding_window, int) and config.sliding_window > 0):
        raise ConfigError(f"{path}: sliding_window is {config.sliding_window!r}; must be a positive integer")
    if getattr(config, "use_bidirectional_attention", None):
        raise ConfigError(f"{path}: use_bidirectional_attention is set; must be a model that attends to earlier tokens only")


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The rotary embedding of the model, or of each layer type where they differ."""
    rope: dict[str, Any] = config.rope_parameters
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    plain = {name: _without_none(value) if isinstance(value, dict) else value for name, value in values.items()}
    return {name: value for name, value in plain.items() if value is not None}


def _layer_types(config: PretrainedConfig) -> tuple[str, ...]:
    """One of `LAYER_TYPES` for every layer, in transformers' words."""
    named = getattr(config, "layer_types", None)
    if named is not None:
        return tuple(named)
    # Mistral has one window for all of its layers, or none.
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return (kind,) * int(config.num_hidden_layers)


def _eos_token_ids(directory: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    if path.exists():
        raw = {**raw, **{k: v for k, v in read_json(path).items() if k == "eos_token_id" and v is not None}}
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ConfigError(f"{directory}: eos_token_id is {value!r}; must be a token id or a list of them")
    return tuple(ids)


def weights_digest(tensors: Iterable[StoredTensor]) -> str:
    """32 hex digits (xxh3-128) of the weights; the same however the files are named or split.

    Models up to 64 MiB are read whole. Of larger ones every tensor's name, dtype and shape is taken and 16 blocks of 4 KiB
    spread evenly over it, first and last bytes included: enough to tell two models or two fine-tunes apart in a second, not
    enough to notice one flipped bit in a terabyte.
    """
    tensors = sorted(tensors, key=lambda tensor: tensor.name)
    digest = xxhash.xxh3_128()
    is_whole = sum(tensor.num_bytes for tensor in tensors) <= WHOLE_DIGEST_LIMIT_BYTES
    for tensor in tensors:
        digest.update(json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
        with tensor.file.open("rb") as file:
            for begin, end in _digested_ranges(tensor, is_whole=is_whole):
                file.seek(begin)
                digest.update(file.read(end - begin))
    return digest.hexdigest()


def stored_tensors(directory: Path) -> Iterator[StoredTensor]:
    """Where the tensors of a model directory's safetensors files lie.

    Raises:
        ConfigError: There are no such files, or one of them is damaged.
    """
    index_path = directory / INDEX_NAME
    if (directory / WEIGHTS_NAME).exists():
        yield from _file_tensors(directory / WEIGHTS_NAME)
        return
    if not index_path.exists():
        raise no_weights(directory)
    weight_map = read_json(index_path).get("weight_map")
    right = f"must map each tensor to the name of a file in the same directory, at most {MAX_FILE_NAME_BYTES} bytes"
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index_path}: weight_map is {shown(weight_map)}; {right}")
    for name, file_name in weight_map.items():
        if not (name.isprintable() and _is_file_name(file_name)):
            raise ConfigError(f"{index_path}: weight_map places tensor {shown(name)} in {shown(file_name)}; it {right}")
    for file_name in sorted(set(weight_map.values())):
        tensors = {tensor.name: tensor for tensor in _file_tensors(directory / file_name)}
        for name in (name for name, file in weight_map.items() if file == file_name):
            if name not in tensors:
                raise ConfigError(f"{index_path}: weight_map places {shown(name)} in {file_name}, which does not hold it")
        yield from tensors.values()


def _is_file_name(value: object) -> bool:
    is_name = isinstance(value, str) and value.isprintable() and Path(value).name == value
    return is_name and len(os.fsencode(str(value))) <= MAX_FILE_NAME_BYTES


def _file_tensors(path: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file, every range checked against the file's size.

    Source: the format's description in the safetensors README: u64 little-endian header size, JSON header, tensor bytes.
    """
    try:
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size_bytes - 8):
                raise ConfigError(f"{path} is not a safetensors file: header of {header_bytes} bytes in a file of {size_bytes}")
            header = json.loads(file.read(header_bytes))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise ConfigError(f"{path} is not a safetensors file: its header is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not a safetensors file: its header is not valid JSON: {one_line(error)}") from error
    try:
        data_begin = 8 + header_bytes
        if not all(map(str.isprintable, header)):
            raise ValueError("a name that cannot be printed")
        tensors = [
            StoredTensor(
                name=name,
                dtype=str(entry["dtype"]),
                shape=tuple(_whole(size) for size in entry["shape"]),
                file=path,
                begin=data_begin + _whole(entry["data_offsets"][0]),
                end=data_begin + _whole(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a safetensors file: its header is damaged: {one_line(error)}") from error
    for tensor in tensors:
        if not data_begin <= tensor.begin <= tensor.end <= size_bytes:
            raise ConfigError(
                f"{path} is damaged: tensor {shown(tensor.name)} ends at byte {shown(tensor.end)}, the file has {size_bytes}; "
                "it must be copied again"
            )
    if not tensors:
        raise ConfigError(f"{path} holds no tensors; must hold the model's weights")
    return tensors


def _whole(value: object) -> int:
    """A size or an offset; JSON as Python reads it also has fractions, infinities and texts in their places."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.100} where a size or an offset belongs")
    return value


def _digested_ranges(tensor: StoredTensor, *, is_whole: bool) -> list[tuple[int, int]]:
    if is_whole or tensor.num_bytes <= SAMPLES_PER_TENSOR * SAMPLE_BYTES:
        return [(tensor.begin, tensor.end)]
    last = tensor.num_bytes - SAMPLE_BYTES
    begins = [tensor.begin + last * index // (SAMPLES_PER_TENSOR - 1) for index in range(SAMPLES_PER_TENSOR)]
    return [(begin, begin + SAMPLE_BYTES) for begin in begins]
