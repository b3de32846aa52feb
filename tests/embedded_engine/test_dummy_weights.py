"""Weights made up from config.json: finite, reproducible, and the same model in every cut."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from embedded_engine.dummy_weights import DummyTensor
from embedded_engine.engine import EmbeddedEngine
from embedded_engine.model_files import read_model_files
from tests.embedded_engine.families import FAMILIES
from tests.embedded_engine.steps import PageBook, decode_all, make_engine, prefill_all
from tests.embedded_engine.test_model_files import edit_config
from transfer.errors import ConfigError
from transfer.layout import DType, Shard


def bare(directory: Path, target: Path) -> Path:
    """A directory with the model's config.json and nothing else."""
    target.mkdir()
    shutil.copy(directory / "config.json", target)
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_config_json_is_enough(family_dir: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    assert len(generated(bare(family_dir(family), tmp_path / family), seed=0)) == 12


def test_a_seed_is_a_model(demo_dir: Path, tmp_path: Path) -> None:
    directory = bare(demo_dir, tmp_path / "bare")
    assert generated(directory, seed=0) == generated(directory, seed=0) != generated(directory, seed=1)


def generated(directory: Path, seed: int) -> list[int]:
    engine = make_engine(directory, Shard(), dummy_seed=seed)
    assert engine.model_fields["weights"] == f"dummy:{seed}"
    book = PageBook.of(engine, {"a": 40})
    first = prefill_all(engine, {"a": tuple(range(3, 23))}, book)
    return decode_all(engine, first, {"a": 20}, book, 12)["a"]


@pytest.mark.parametrize("shape", [(6, 10), (8, 300_001), (3, 2, 1000, 700), (5,), (2_000_003, 3)])
def test_a_part_is_that_part_of_the_whole(shape: tuple[int, ...]) -> None:
    tensor = DummyTensor("model.layers.0.mlp.up_proj.weight", shape, 4)
    whole = tensor[...]
    assert list(whole.shape) == tensor.get_shape() == list(shape)
    assert whole.isfinite().all()
    assert whole.untyped_storage().nbytes() == whole.numel() * 4, "nothing else is kept alive"
    for begin, end in ((0, shape[0] // 2), (shape[0] // 2, shape[0]), (1, 2)):
        rest = (slice(None),) * (len(shape) - 1)
        assert torch.equal(tensor[(slice(begin, end), *rest)], whole[begin:end])
    if len(shape) > 1:
        columns = (*(slice(0, size) for size in shape[:-1]), slice(shape[-1] // 2, shape[-1]))
        assert torch.equal(tensor[columns], whole[columns])
        assert tensor[columns].untyped_storage().nbytes() == whole[columns].numel() * 4


def test_the_element_type_comes_from_config_json_or_from_the_caller(demo_dir: Path, tmp_path: Path) -> None:
    directory = bare(demo_dir, tmp_path / "bare")
    assert read_model_files(directory, dummy_seed=0).layout().dtype is DType.FLOAT32
    edit_config(directory, dtype="bfloat16")
    engine = EmbeddedEngine(read_model_files(directory, dummy_seed=0), shard=Shard(), num_pages=1)
    assert engine.layout.dtype is DType.BFLOAT16
    edit_config(directory, dtype="absent")
    files = read_model_files(directory, dummy_seed=0)
    assert files.layout(DType.FLOAT16).dtype is DType.FLOAT16
    with pytest.raises(ConfigError, match=r"config\.json says dtype None; dummy weights need one of float32, bfloat16, float16"):
        files.layout()
