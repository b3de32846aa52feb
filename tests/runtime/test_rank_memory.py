"""A rank reports its memory: the plan, the measured bytes, and a warning for each difference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from decode_node import rank_messages as decode_messages
from node_runtime.rank_engine import rank_memory
from planner.model_directory import ModelDirectory
from planner.model_shape import read_model_shape
from planner.node_plan import DeviceMemory, node_plan_inputs
from planner.plan import MemoryPlan, make_plan
from tests.runtime.instances import hello
from transfer.config import PrefillNodeConfig
from transfer.connector.rank_report import RankMemory
from transfer.connector.side_service import memory_to_proto
from transfer.host_memory import host_memory
from transfer.layout import Shard
from transfer.pb import kvferry_pb2 as pb
from transfer.pool.kv_pool import KVPool
from transfer.registry.plain_values import plain

WEIGHTS = 1 << 20
MODEL = ModelDirectory(
    shape=read_model_shape(
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 512, "torch_dtype": "float32",
        }
    ),
    checkpoint_bytes=None,
)  # fmt: skip


@pytest.fixture
def plan() -> MemoryPlan:
    config = PrefillNodeConfig.model_validate({"model": Path("m"), "pool": {"num_pages": 12}})
    device = DeviceMemory(total_bytes=64 << 20, free_bytes=64 << 20, is_cpu=True)
    return make_plan(node_plan_inputs(config, MODEL, Shard(), device, weights_bytes=WEIGHTS))


def engine(plan: MemoryPlan | None, num_pages: int = 12, weights_bytes: int = WEIGHTS, tp_rank: int = 0) -> Any:
    shard = Shard(tp_size=2, tp_rank=tp_rank) if tp_rank else Shard()
    pool = KVPool(layout=MODEL.shape.layout(), shard=shard, num_pages=num_pages)
    return SimpleNamespace(memory_plan=plan, pool=pool, weights_bytes=weights_bytes, shard=shard)


def test_what_is_as_planned_is_logged_once_and_warned_of_never(plan: MemoryPlan) -> None:
    with capture_logs() as logs:
        memory = rank_memory(engine(plan), {"staging": plan.inputs.staging_bytes})
    assert memory.warnings == () and [entry["event"] for entry in logs] == ["memory_plan"]
    assert (logs[0]["max_total_num_tokens"], logs[0]["pages"], logs[0]["weights_bytes"]) == (192, (12,), WEIGHTS)
    limits = ("chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "context_len", "available_bytes")
    assert [logs[0][name] for name in limits] == [512, 512, 32, 512, (64 << 20) - WEIGHTS]
    assert 0 < logs[0]["measured_free_bytes"] <= host_memory()[0]
    assert memory.plan == plan.as_json()
    assert memory.real == {"weights": WEIGHTS, "pool_full": 12 * 16 * 2 * 2 * 2 * 16 * 4, "staging": plan.inputs.staging_bytes}
    with capture_logs() as logs:
        rank_memory(engine(plan, tp_rank=1, num_pages=24), {})
    assert not logs, "one rank's plan stands for all"


def test_the_measured_free_memory_is_that_of_the_counted_part_of_a_gpu(plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts on 64 MiB of a GPU of 100 MiB, of which 50 MiB are free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 << 20, 100 << 20))
    on_gpu = engine(plan)
    on_gpu.pool = SimpleNamespace(storage_bytes={}, device=torch.device("cuda"))
    with capture_logs() as logs:
        real = rank_memory(on_gpu, {}).real
    assert real["free"] == logs[0]["measured_free_bytes"] == 14 << 20


def test_what_is_not_as_planned_is_a_warning_with_both_numbers(plan: MemoryPlan) -> None:
    with capture_logs() as logs:
        memory = rank_memory(engine(plan, num_pages=13), {"staging": plan.inputs.staging_bytes // 2})
    pool, staging = memory.warnings
    assert "pool_full: planned 96.0 KiB (98304 bytes), real 104.0 KiB (106496 bytes), +8.3 %" in pool and "-50.0 %" in staging
    assert [entry["difference"] for entry in logs if entry["log_level"] == "warning"] == list(memory.warnings)


def test_it_travels_to_the_leader_and_from_there_to_everybody(plan: MemoryPlan) -> None:
    first = rank_memory(engine(plan), {"staging": plan.inputs.staging_bytes})
    said = RankMemory(plan=first.plan, real=first.real, warnings=("pool: too large",))
    travelled = decode_messages.CODEC.decode(decode_messages.CODEC.encode(hello(0, memory=said)))
    assert travelled.memory == said
    found = memory_to_proto([first, said])
    assert found is not None and list(found.warnings) == ["rank 1: pool: too large"]
    assert (found.max_total_tokens, found.cell_bytes, found.policy) == (192, plan.cell_bytes, "static-fraction")
    lines = {line.name: line for line in found.lines}
    assert sum(line.planned_bytes for line in found.lines if not line.inside) == found.device_bytes == 64 << 20
    assert lines["weights"].real_bytes == WEIGHTS and not lines["reserve"].HasField("real_bytes")
    assert all(line.formula for line in found.lines)

    content = plain(pb.NodeStatus(memory_plan=found))["memory_plan"]
    assert content["max_total_tokens"] == 192 and content["warnings"] == ["rank 1: pool: too large"]
    assert {line["name"]: line["real_bytes"] for line in content["lines"]}["reserve"] is None
    assert plain(pb.NodeStatus())["memory_plan"] is None
