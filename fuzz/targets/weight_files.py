"""Files of weights: the header of a safetensors file, and the index of several."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

from embedded_engine.model_files import StoredTensor, stored_tensors
from fuzz.target import Target, require, scratch_folder
from fuzz.trees import BORDERS, BYTE_SHARE, changed_bytes, changed_tree
from planner.model_directory import INDEX_NAME
from transfer.errors import ConfigError

_FOLDER = scratch_folder()
_WEIGHTS = "model-00001-of-00001.safetensors"
_DATA = bytes(64)


def check(data: bytes) -> None:
    """The index, and behind its length the one file that there is."""
    split = int.from_bytes(data[:2], "little")
    index, weights = data[2 : 2 + split], data[2 + split :]
    (_FOLDER / INDEX_NAME).write_bytes(index)
    (_FOLDER / _WEIGHTS).write_bytes(weights)
    tensors = list(stored_tensors(_FOLDER))
    require(tensors, "a model without tensors")
    for tensor in tensors:
        _check_tensor(tensor, len(weights))


def _check_tensor(tensor: StoredTensor, num_bytes: int) -> None:
    require(8 <= tensor.begin <= tensor.end <= num_bytes, f"{tensor.name} lies outside of its file")
    require(tensor.file == _FOLDER / _WEIGHTS, f"{tensor.file} is another file")


def _packed(index: Any, header: Any, data: bytes = _DATA, length: int | None = None) -> bytes:
    index_bytes, header_bytes = json.dumps(index).encode(), json.dumps(header).encode()
    size = len(header_bytes) if length is None else length % 2**64
    return struct.pack("<H", len(index_bytes)) + index_bytes + struct.pack("<Q", size) + header_bytes + data


def _parsed(data: bytes) -> list[Any]:
    split = int.from_bytes(data[:2], "little")
    weights = data[2 + split :]
    size = int.from_bytes(weights[:8], "little")
    return [json.loads(data[2 : 2 + split]), json.loads(weights[8 : 8 + size])]


def mutate(data: bytes, rng: random.Random) -> bytes:
    if rng.random() >= BYTE_SHARE:
        try:
            tree = _parsed(data)
            if rng.random() < 0.1:
                return _packed(tree[0], tree[1], length=rng.choice(BORDERS))
            index, header = changed_tree(tree, rng)
            return _packed(index, header, data=_DATA[: rng.choice((64, 64, 64, 63, 1, 0))])
        except Exception:  # no JSON any more, or nothing that it can say
            pass
    return changed_bytes(data, rng)


def seeds() -> list[bytes]:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [24], "data_offsets": [16, 64]},
    }
    index = {"metadata": {"total_size": 64}, "weight_map": {"a": _WEIGHTS, "b": _WEIGHTS}}
    return [_packed(index, header)]


TARGET = Target(
    name="weight_files",
    about="safetensors headers and their index (JSON)",
    modules=("embedded_engine.model_files", "planner.model_directory"),
    check=check,
    refuses=(ConfigError,),
    mutate=mutate,
    seeds=seeds,
)
