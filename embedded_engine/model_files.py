"""Read and check a local Hugging Face directory before any weight is loaded.

A mistake in the directory or in a parallel size is reported here in one line. The libraries below answer the same mistakes with
pages of text, with randomly initialised weights, or by asking the network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers
import xxhash
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from embedded_engine.architectures import ARCHITECTURES, Architecture, check_cut
from embedded_engine.model_config import architecture_of, check_is_plain, no_weights, one_line
from planner.config_fields import ConfigFields, shown
from planner.model_directory import INDEX_NAME, WEIGHTS_NAME, read_config, read_json
from planner.model_families import MODEL_TYPES
from planner.model_shape import ModelShape, read_model_shape
from transfer.errors import ConfigError
from transfer.layout import DType, KVLayout, Shard

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angle depends on the position alone. "dynamic" and "longrope" change the angles with the longest
sequence so far, which a paged cache that outlives the step cannot follow."""

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
"""Fields of a configuration that decide which numbers a model computes, in any family."""

WHOLE_DIGEST_LIMIT_BYTES = 64 * 1024 * 1024
SAMPLES_PER_TENSOR = 16
SAMPLE_BYTES = 4096
MAX_FILE_NAME_BYTES = 255  # the limit of Linux file systems; messages contain the name


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """The place of one tensor in a safetensors file; `begin` and `end` are bytes from the start of the file."""

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
    """A checked model directory: its configuration and the places of its tensors. Made by `read_model_files`.

    With a `dummy_seed` there are no tensors: the weights are generated, see `embedded_engine.dummy_weights`.
    """

    directory: Path
    architecture: str
    config: PretrainedConfig
    shape: ModelShape
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
        """Element type of most of the model's bytes; for dummy weights, the dtype in config.json."""
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
        """Return the model's KV, computed in `dtype`; None means the stored dtype."""
        return self.shape.layout(self.stored_dtype if dtype is None else dtype)

    @cached_property
    def weights_digest(self) -> str:
        """See `weights_digest`."""
        assert self.dummy_seed is None
        return weights_digest(self.tensors)

    @cached_property
    def fields(self) -> dict[str, str]:
        """Fields that must be equal on both sides of a transfer, as name -> text; the directory's path does not matter."""
        named = {name: str(getattr(self.config, name)) for name in MODEL_FIELDS if getattr(self.config, name, None) is not None}
        named["architecture"] = self.architecture
        named["rope"] = json.dumps(_without_none(self.config.rope_parameters), sort_keys=True)
        is_dummy = self.dummy_seed is not None
        named["weights"] = f"dummy:{self.dummy_seed}" if is_dummy else f"xxh3-128:{self.weights_digest}"
        return named

    def check_shard(self, shard: Shard) -> None:
        """Refuse a shard that the embedded engine cannot serve.

        Raises:
            ConfigError: Pipeline parallelism, or a TP size that does not divide a sharded size; the message names both.
        """
        if shard.pp_size != 1:
            raise ConfigError(
                f"pp_size is {shard.pp_size}; the embedded engine cuts by tensor parallelism only, pp_size must be 1"
            )
        check_cut(self.architecture, shard.tp_size, self.config.to_dict())


def read_model_files(directory: Path | str, *, dummy_seed: int | None = None) -> ModelFiles:
    """Read and check a local Hugging Face model directory; loads no weights and never asks the network.

    Args:
        dummy_seed: Generate the weights from this seed; then config.json is enough. A quantised model is generated as a plain one
            of the same shape.

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
    architecture = architecture_of(directory, raw)
    config = _config(directory, architecture, raw)
    _check_supported(directory, config)
    return ModelFiles(
        directory=directory,
        architecture=architecture,
        config=config,
        # From the configuration as transformers reads it, which is what it builds.
        shape=read_model_shape(config.to_dict(), source=str(directory / "config.json")),
        tensors=tuple(stored_tensors(directory)) if dummy_seed is None else (),
        eos_token_ids=_eos_token_ids(directory, raw),
        dummy_seed=dummy_seed,
    )


def _config(directory: Path, architecture: str, raw: dict[str, Any]) -> PretrainedConfig:
    path = directory / "config.json"
    model_type = MODEL_TYPES[architecture]
    if raw.get("model_type", model_type) != model_type:
        raise ConfigError(f"{path}: model_type is {raw['model_type']!r}; must be {model_type!r} for {architecture}")
    check_is_plain(directory, raw)
    fields = ConfigFields(raw, f"{path}: ")
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        fields.count(name)  # transformers would take its default for a missing one
    try:
        config_class: type[PretrainedConfig] = getattr(transformers, ARCHITECTURES[architecture].config_class)
        config = config_class.from_dict(raw)
    except Exception as error:  # the validators of a configuration class raise errors of any type
        raise ConfigError(f"{path} does not describe a {architecture}: {one_line(error)}") from error
    return config


def _check_supported(directory: Path, config: PretrainedConfig) -> None:
    path = directory / "config.json"
    rope: dict[str, Any] = config.rope_parameters
    nested = [value for value in rope.values() if isinstance(value, dict)]  # one for each layer type, if they differ
    for rope_type in (one.get("rope_type", "default") for one in nested or [rope]):
        if rope_type not in STATIC_ROPE_TYPES:
            raise ConfigError(f"{path}: rope_type is {rope_type!r}; must be one of {', '.join(STATIC_ROPE_TYPES)}")
    if getattr(config, "use_bidirectional_attention", None):
        raise ConfigError(f"{path}: use_bidirectional_attention is set; must be a model that attends to earlier tokens only")


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    plain = {name: _without_none(value) if isinstance(value, dict) else value for name, value in values.items()}
    return {name: value for name, value in plain.items() if value is not None}


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

    Models up to 64 MiB are read whole. Of larger models the digest covers each tensor's name, dtype and shape, and 16 blocks of
    4 KiB spread evenly over it, with its first and last bytes. That distinguishes two models or two fine-tunes in a second, but
    misses one flipped bit in a terabyte.
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
    """Yield the tensors of a model directory's safetensors files.

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
    """Return the tensors of one safetensors file. The library checks the header, and every range against the file's size.

    The library does not say where a tensor lies, so the header is read once more: u64 little-endian size, then JSON.
    """
    try:
        with path.open("rb") as file, safe_open(path, framework="numpy"):
            header_bytes = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(header_bytes))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or one_line(error)}") from error
    except (SafetensorError, ValueError) as error:
        raise ConfigError(f"{path} is damaged or not a safetensors file: {one_line(error)}; it must be copied again") from error
    header.pop("__metadata__", None)
    if not all(map(str.isprintable, header)):
        raise ConfigError(f"{path} is not a safetensors file: its header has a name that cannot be printed")
    if not header:
        raise ConfigError(f"{path} holds no tensors; must hold the model's weights")
    begin = 8 + header_bytes
    return [
        StoredTensor(
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            file=path,
            begin=begin + entry["data_offsets"][0],
            end=begin + entry["data_offsets"][1],
        )
        for name, entry in header.items()
    ]


def _digested_ranges(tensor: StoredTensor, *, is_whole: bool) -> list[tuple[int, int]]:
    if is_whole or tensor.num_bytes <= SAMPLES_PER_TENSOR * SAMPLE_BYTES:
        return [(tensor.begin, tensor.end)]
    last = tensor.num_bytes - SAMPLE_BYTES
    begins = [tensor.begin + last * index // (SAMPLES_PER_TENSOR - 1) for index in range(SAMPLES_PER_TENSOR)]
    return [(begin, begin + SAMPLE_BYTES) for begin in begins]
