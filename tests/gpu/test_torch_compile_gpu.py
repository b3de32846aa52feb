"""Decode steps with compiled layers on a real GPU: replayed from CUDA graphs, and compared with the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embedded_engine.engine import EmbeddedEngine
from tests.embedded_engine.decode_scenario import PROMPTS, tokens_of_a_life
from tests.embedded_engine.steps import Directory, Prompts
from tests.gpu.busy import occupy
from tests.gpu.small_engines import make_engine, prompts_of
from transfer.engine_types import DecodeItem, PrefillItem
from transfer.layout import DType
from transfer.pool.kv_pool import KVPool

pytestmark = pytest.mark.timeout(900)  # each model is compiled

NUM_STEPS = 8
CAPTURED = (2, 4)
COMPILED_MAX_BS = 2
"""Steps of two rows are compiled, those of four are not."""

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return prompts_of(PROMPTS.values())


def compiled_engine(directory: Path, dtype: DType | None = None) -> EmbeddedEngine:
    settings = {} if dtype is None else {"dtype": dtype}
    return make_engine(directory, "cuda", captured=CAPTURED, torch_compile_max_bs=COMPILED_MAX_BS, **settings)


def items_of(pool: KVPool, names: Sequence[str]) -> list[DecodeItem]:
    """A step of requests at position 3, each with a fourth of every group's pages."""
    found = []
    for index, name in enumerate(names):
        tables = tuple(tuple(range(index * (count // 4), (index + 1) * (count // 4))) for count in pool.num_pages)
        found.append(DecodeItem(request_id=name, token_id=7, position=3, page_tables=tables))
    return found


def prefill(engine: EmbeddedEngine, items: Sequence[DecodeItem]) -> None:
    tokens = (5, 9, 4)
    for item in items:
        tables = item.page_tables
        engine.prefill(
            [PrefillItem(request_id=item.request_id, token_ids=tokens, first_token=0, page_tables=tables, is_last=True)]
        )


def inductor_kernels(step: Callable[[], object]) -> int:
    """Return the number of kernels of a step that Inductor generated, by the names that Inductor gives them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert names, "the profiler saw no kernels"
    return sum(name.startswith(("triton_poi_", "triton_red_", "triton_per_", "triton_tem_")) for name in names)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_tokens_are_those_of_the_cpu(model: Directory, prompts: Prompts, name: str, record_property: Record) -> None:
    """In float32, with batches that grow, shrink and are padded, windows that move, and pages that are reused."""
    directory = model(name)
    on_cpu = tokens_of_a_life(make_engine(directory, "cpu"), prompts, NUM_STEPS)
    engine = compiled_engine(directory)
    assert tokens_of_a_life(engine, prompts, NUM_STEPS) == on_cpu
    assert engine.captured_batch_sizes == CAPTURED
    record_property("captured", f"{name} compiled: {engine.inductor_bytes} bytes, graphs {engine.cuda_graph_bytes} bytes")


def test_the_graphs_of_small_batches_hold_compiled_kernels_and_others_do_not(model: Directory) -> None:
    engine = compiled_engine(model("llama"))
    items = items_of(engine.pool, "abcd")
    prefill(engine, items)
    for size, is_compiled in ((1, True), (2, True), (3, False), (4, False)):
        engine.decode(items[:size])
        assert (inductor_kernels(lambda size=size: engine.decode(items[:size])) > 0) == is_compiled, size


def test_a_compiled_step_waits_for_nothing(model: Directory) -> None:
    engine = compiled_engine(model("llama"))
    items = items_of(engine.pool, "a")
    prefill(engine, items)
    expected = engine.decode(items)
    torch.cuda.synchronize()
    occupy(400_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = engine.forward_batch(engine.decode_batch(items))
        assert output.copied is not None and not output.copied.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.tokens() == expected


def test_logits_of_half_precision_are_close(model: Directory) -> None:
    """Inductor keeps float32 within a fused kernel, and separate kernels round, so not all bits are equal."""
    found: list[Tensor] = []
    for engine in (
        make_engine(model("llama"), "cuda", captured=CAPTURED, dtype=DType.BFLOAT16),
        compiled_engine(model("llama"), DType.BFLOAT16),
    ):
        items = items_of(engine.pool, "ab")
        prefill(engine, items)
        logits = engine.logits(engine.decode_batch(items))
        assert logits is not None
        found.append(logits.float().clone())
    plain, compiled = found
    assert float(plain.std()) > 0.1
    assert float((compiled - plain).norm() / plain.norm()) < 0.03
