"""An embedded engine's pool is what its memory plan says, or the engine says why there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from embedded_engine import causal_model
from embedded_engine.engine import EmbeddedEngine
from embedded_engine.loading import MemoryPlanner, load_engine
from embedded_engine.model_files import read_model_files
from embedded_engine.tensor_parallel import TensorParallelGroup
from planner.model_directory import read_model_directory
from planner.node_plan import check_fits
from planner.plan import PlanInputs, Role, make_plan
from tests.runtime.instances import decode_config, prefill_config
from transfer.config import CPU_POOL_PAGES
from transfer.errors import ConfigError, MemoryPlanError
from transfer.layout import Shard
from transfer.pool.host_pool import HostPool

MIB = 1 << 20


def load(tmp_path: Path, demo_dir: Path, **settings: object) -> EmbeddedEngine:
    return load_engine(decode_config(demo_dir, **settings), rank=0, rendezvous=tmp_path / "unused")


def test_the_pool_has_the_pages_that_were_planned_and_the_plan_knows_the_weights(demo_dir: Path, tmp_path: Path) -> None:
    with capture_logs() as logs:
        engine = load(tmp_path, demo_dir, memory={"device_memory": 120 * MIB}, ring={"capacity_bytes": 8 * MIB})
    plan = engine.memory_plan
    assert plan is not None and engine.pool.num_pages == plan.group_pages
    assert plan.weights_bytes == engine.weights_bytes
    assert abs(engine.weights_bytes - (demo_dir / "model.safetensors").stat().st_size) < 64_000, "but for the file's header"
    assert 0 < plan.num_pages < CPU_POOL_PAGES, "120 MiB less weights, ring and reserve have less room than a CPU's default"
    budget = int(120 * MIB * 0.88) - engine.weights_bytes - (8 + 4) * MIB - plan.page_table_bytes
    assert plan.num_pages == budget // (16 * plan.cell_bytes)
    assert not [entry for entry in logs if entry["event"] == "weights_not_as_estimated"]


@pytest.mark.parametrize(
    ("family", "has_host_pages", "columns"),
    [
        ("llama", False, 64),
        ("llama", True, 4096),  # the context of the model
        ("gemma2", False, 64),
        ("mistral", False, 512),  # windows alone: a request can be longer than the pool
    ],
)
def test_page_tables_are_as_wide_as_planned(
    family_dir: Callable[[str], Path], family: str, has_host_pages: bool, columns: int
) -> None:
    plan = make_plan(
        PlanInputs(
            model=read_model_directory(family_dir(family)).shape,
            role=Role.DECODE,
            device_bytes=64 * MIB,
            is_cpu=True,
            page_size=4,
            max_total_tokens=50,
            max_running_requests=2,
            has_host_pages=has_host_pages,
        )
    )
    engine = EmbeddedEngine(
        family_dir(family),
        shard=Shard(page_size=4),
        num_pages=plan.group_pages,
        max_running_requests=2,
        has_host_pages=has_host_pages,
        has_decode_kernels=True,
    )
    assert engine.page_table_bytes == plan.page_table_bytes == len(plan.groups) * 3 * columns * 4


def test_page_tables_as_wide_as_the_pool_take_no_host_pages(demo_dir: Path) -> None:
    engine = EmbeddedEngine(demo_dir, shard=Shard(page_size=4), num_pages=4, max_running_requests=1, has_decode_kernels=True)
    with pytest.raises(ConfigError, match="has_host_pages is false, so page tables are as wide as the pool; must be true"):
        engine.use_host_pool(HostPool(engine.pool, num_pages=[4]), block_bytes=MIB)


def test_what_cannot_fit_is_refused_before_anything_is_loaded(
    demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_model, "load_causal_lm", None)  # the weights must not be loaded
    with pytest.raises(MemoryPlanError, match=r"no page of KV fits: of 30\.0 MiB the largest terms are weights"):
        load(tmp_path, demo_dir, memory={"device_memory": 30 * MIB}, ring={"capacity_bytes": MIB})
    with pytest.raises(ConfigError, match="max_seq_len is 5000; the model was made for at most 4096"):
        load(tmp_path, demo_dir, limits={"max_seq_len": 5000})


class Group(TensorParallelGroup):
    """Two ranks; `answers` returns what each of them gave, from the number that this one gave."""

    def __init__(self, answers: Callable[[int], list[int]]) -> None:
        super().__init__(rank=0, size=2, device=torch.device("cpu"))
        self.gather_number = answers  # type: ignore[method-assign]


def test_ranks_take_the_least_and_refuse_devices_that_differ(demo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = read_model_files(demo_dir)
    free = [7 * 1024 * MIB, 6 * 1024 * MIB]
    group = Group(lambda value: free)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * 1024 * MIB, 16 * 1024 * MIB))
    planner = MemoryPlanner(prefill_config(demo_dir), files, Shard(tp_size=2), torch.device("cuda"), group)
    assert (planner.plan.inputs.device_bytes, planner.plan.inputs.free_bytes) == (16 * 1024 * MIB, 6 * 1024 * MIB)
    free[1] = 4 * 1024 * MIB
    with pytest.raises(MemoryPlanError, match=r"differs by more than 2\.0 GiB: rank 1 has 4\.0 GiB, rank 0 has 7\.0 GiB"):
        MemoryPlanner(prefill_config(demo_dir), files, Shard(tp_size=2), torch.device("cuda"), group)
    on_cpu = MemoryPlanner(prefill_config(demo_dir), files, Shard(tp_size=2), torch.device("cpu"), group)
    assert on_cpu.plan.inputs.free_bytes == 4 * 1024 * MIB, "one host, seen at two moments: no device differs"


def test_ranks_whose_devices_differ_by_a_little_have_the_same_pages(demo_dir: Path) -> None:
    fewer: dict[int, int] = {}
    group = Group(lambda value: [value, fewer.get(value, value)])
    files = read_model_files(demo_dir)
    config = decode_config(demo_dir, pool={"num_pages": 100_000}, memory={"device_memory": 200 * MIB})
    planner = MemoryPlanner(config, files, Shard(tp_size=2), torch.device("cpu"), group)
    loaded_bytes = planner.plan.weights_bytes
    (alone,) = planner(loaded_bytes)
    fewer[alone * 16] = (alone - 7) * 16  # of the other rank's tokens; everything else is alike
    assert planner(loaded_bytes) == (alone - 7,)
    assert planner.plan.max_total_tokens == (alone - 7) * 16


def test_the_plan_goes_by_what_the_weights_are_stored_in(demo_dir: Path, tmp_path: Path) -> None:
    """A config.json that says nothing of it, or something else, plans no pool of another dtype than the engine's."""
    for number, said in enumerate((None, "bfloat16")):
        model = tmp_path / f"model{number}"
        shutil.copytree(demo_dir, model)
        config = json.loads((model / "config.json").read_text())
        config.pop("dtype", None), config.pop("torch_dtype", None)
        (model / "config.json").write_text(json.dumps(config | ({} if said is None else {"dtype": said})))
        engine = load(tmp_path, model)
        assert engine.memory_plan is not None
        assert engine.memory_plan.pool_bytes == engine.pool.num_bytes == CPU_POOL_PAGES * 16 * engine.memory_plan.cell_bytes
        check_fits(decode_config(model))
