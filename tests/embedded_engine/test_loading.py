"""From settings to an engine, of either role."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from embedded_engine import tensor_parallel
from embedded_engine.engine import EmbeddedEngine
from embedded_engine.loading import load_engine
from embedded_engine.model_files import read_model_files
from embedded_engine.tensor_parallel import init_distributed
from tests.runtime.instances import prefill_config
from transfer.errors import ConfigError, EngineError
from transfer.layout import Shard


def test_gpus_that_are_not_there_are_refused_by_every_rank(demo_dir: Path, tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    config = prefill_config(demo_dir, device="cuda", first_device=count, parallel={"tp_size": 2})
    found = f"first_device is {count} and parallel.tp_size is 2, which takes {count + 2} GPUs; torch sees {count}: lower"
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=found):
            load_engine(config, rank=rank, rendezvous=tmp_path / "unused")


def test_joining_alone_ends_and_says_where(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    with pytest.raises(EngineError, match=f"rank 0 of 2 did not meet the others at {store}"):
        init_distributed(0, 2, store, timeout_s=0.2)


class PeakMemory:
    """The most memory of its own, beside mapped files, that this process has while the block runs; beyond what it had before."""

    def __enter__(self) -> PeakMemory:
        self._before = self._peak = _anonymous_bytes()
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._run)
        self._watch.start()
        return self

    def _run(self) -> None:
        while not self._is_over.wait(0.001):
            self._peak = max(self._peak, _anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._watch.join()
        self._peak = max(self._peak, _anonymous_bytes())

    @property
    def num_bytes(self) -> int:
        return self._peak - self._before


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("is_dummy", [False, True])
def test_loading_needs_no_second_copy_of_the_weights(tmp_path: Path, is_dummy: bool) -> None:
    """The model is built without memory (on "meta"), then each weight comes straight to its place."""
    config = LlamaConfig(
        vocab_size=2000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8, dtype="float32"
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    del model
    files = read_model_files(tmp_path, dummy_seed=0 if is_dummy else None)
    with PeakMemory() as peak:
        engine = EmbeddedEngine(files, shard=Shard(), num_pages=1)
    assert engine.weights_bytes > 120e6
    largest = 4096 * 1024 * 4
    assert peak.num_bytes < engine.weights_bytes + 3 * largest, f"{peak.num_bytes} for weights of {engine.weights_bytes}"


def test_both_kinds_of_mesh_that_transformers_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 passes a mesh and takes one; 5.23 takes a holder of one."""
    made = object()
    monkeypatch.setattr(tensor_parallel, "init_device_mesh", lambda *_, **__: made)
    loader: Any = tensor_parallel._meshed(LlamaForCausalLM, {}, torch.device("cpu"), 2)  # noqa: SLF001
    config = object()
    assert loader.prepare_distribute_model(config, device_mesh=None, device_map=None) == (config, torch.device("cpu"), made)
    *_, holder = loader.prepare_distribute_model(config, device_map=None)
    assert holder.get_mesh(("pp", "fsdp", "tp")) is made
