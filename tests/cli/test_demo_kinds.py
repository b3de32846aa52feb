"""Demo models of every kind: how they are made, kept, and cut. Whether every part of their KV matters: tests/cluster/long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from embedded_engine.model_files import read_model_files
from kvferry.demo.kinds import ModelKind, cached_demo_model
from kvferry.demo.model import make_demo_model
from kvferry.demo.options import DemoOptions
from transfer.errors import ConfigError
from transfer.layout import Shard


@pytest.mark.parametrize("kind", [ModelKind.SLIDING, ModelKind.MLA, ModelKind.HYBRID])
def test_tensor_parallel_degrees_that_divide(tmp_path: Path, kind: ModelKind) -> None:
    files = read_model_files(make_demo_model(tmp_path / kind, kind=kind))
    for tp_size in (1, 2, 3, 4, 6, 12):
        files.check_shard(Shard(tp_size=tp_size))


def test_a_kind_is_the_same_every_time_and_another_for_another_seed(tmp_path: Path) -> None:
    """The hybrid has every way in which weights are made."""
    first = make_demo_model(tmp_path / "first", kind=ModelKind.HYBRID)
    before = torch.random.get_rng_state()
    again = make_demo_model(tmp_path / "again", kind=ModelKind.HYBRID)
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random state is left alone"
    names = sorted(path.name for path in first.iterdir())
    assert all((again / name).read_bytes() == (first / name).read_bytes() for name in names)
    make_demo_model(again, kind=ModelKind.HYBRID, seed=1)
    assert (again / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


def test_every_kind_has_a_directory_of_its_own_between_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []

    async def make(command: list[str]) -> None:
        made.append(command[command.index("--kind") + 1])
        Path(command[-1]).mkdir()

    monkeypatch.chdir(tmp_path)
    found = [asyncio.run(cached_demo_model(kind, run=make)) for kind in (*ModelKind, *ModelKind)]
    assert made == list(ModelKind) and len(set(found)) == len(ModelKind)


def test_kind_and_directory_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model-kind is mla; it is of the model that is made"):
        DemoOptions(model=tmp_path, model_kind=ModelKind.MLA)
