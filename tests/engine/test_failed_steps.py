"""A step that breaks: which errors an engine survives, and what its node hears of the others."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import decode_node.rank_messages as of_decode
import prefill_node.rank_messages as of_prefill
from decode_node.worker import DecodeWorker
from embedded_engine.engine import EmbeddedEngine
from prefill_node.worker import PrefillWorker
from transfer.engine_types import GREEDY, DecodeItem, PrefillItem
from transfer.errors import EngineError, OutOfMemory
from transfer.layout import Shard

NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory", 2),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
]
SURVIVED = [
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
]
FATAL = [
    torch.AcceleratorError("an illegal memory access was encountered", 700),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("cuBLAS error: CUBLAS_STATUS_EXECUTION_FAILED"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
]
ITEM = PrefillItem(request_id="a", token_ids=(5,) * 4, first_token=0, page_tables=((0,),), is_last=True)
NEXT = DecodeItem(request_id="a", token_id=5, position=4, page_tables=((0,),))


def failing_with(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", SURVIVED, ids=str)
def test_a_step_that_fails_alone(demo_dir: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    engine = EmbeddedEngine(demo_dir, shard=Shard(), num_pages=2)
    expected = engine.prefill([ITEM])
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_hidden", failing_with(error))
        with pytest.raises(EngineError, match="the step failed on rank 0 of 1: ") as failed:
            engine.decode([NEXT])
    assert not failed.value.is_fatal
    assert engine.prefill([ITEM]) == expected


@pytest.mark.parametrize("error", NO_MEMORY, ids=repr)
def test_a_step_that_finds_no_memory_names_the_settings(
    demo_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = EmbeddedEngine(demo_dir, shard=Shard(), num_pages=2)
    expected = engine.prefill([ITEM])
    decode = "a decode step of 1 requests on rank 0 of 1: .*; lower memory.static_fraction or limits.max_running_requests"
    prefill = "a prefill step of 4 tokens on rank 0 of 1: .*; lower memory.static_fraction, limits.max_step_tokens or"
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_hidden", failing_with(error))
        with pytest.raises(OutOfMemory, match=f"^out of memory while computing {decode}") as failed:
            engine.decode([NEXT])
        assert not failed.value.is_fatal
        with pytest.raises(OutOfMemory, match=f"^out of memory while computing {prefill}") as failed:
            engine.prefill([ITEM])
        assert not failed.value.is_fatal
    assert engine.prefill([ITEM]) == expected


def test_a_step_that_finds_no_memory_keeps_none(demo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmbeddedEngine(demo_dir, shard=Shard(), num_pages=2)
    held: list[weakref.ref[torch.Tensor]] = []

    def compute(*_: Any, **__: Any) -> Any:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        raise NO_MEMORY[0]

    monkeypatch.setattr(engine, "_hidden", compute)
    with pytest.raises(OutOfMemory) as failed:
        engine.prefill([ITEM])
    assert held[0]() is None, f"with {failed.value} still there"


@pytest.mark.parametrize("error", [NO_MEMORY[0], SURVIVED[0]], ids=repr)
@pytest.mark.parametrize("is_lost", [False, True], ids=["the device goes on", "the device is lost"])
def test_a_failed_step_is_over_on_the_device_before_its_pages_are_given_on(
    demo_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_lost: bool
) -> None:
    """Its first layers may still be writing KV when a later one finds no memory."""
    engine = EmbeddedEngine(demo_dir, shard=Shard(), num_pages=2)
    waits: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        waits.append(device)
        if is_lost:
            raise torch.AcceleratorError("an illegal memory access was encountered", 700)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1)
    monkeypatch.setattr(engine, "_forward", failing_with(error))
    batch = engine.decode_batch([NEXT])
    monkeypatch.setattr(engine, "_device", torch.device("cuda"))
    with pytest.raises(EngineError) as failed:
        engine.forward_batch(batch)
    assert waits == [torch.device("cuda")]
    assert failed.value.is_fatal is is_lost
    assert ("; then the device failed: " in str(failed.value)) is is_lost


@pytest.mark.parametrize("error", FATAL, ids=str)
def test_a_gpu_that_can_no_longer_be_used(demo_dir: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    engine = EmbeddedEngine(demo_dir, shard=Shard(), num_pages=2)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_hidden", failing_with(error))
        with pytest.raises(EngineError, match="the step failed on rank 0 of 1: ") as failed:
            engine.decode([NEXT])
    assert failed.value.is_fatal
    for step in (lambda: engine.prefill([ITEM]), lambda: engine.decode([NEXT])):
        with pytest.raises(EngineError, match="failed in an earlier step and must be restarted: the step failed") as later:
            step()
        assert later.value.is_fatal


def outcome_of(worker: type, message: Any, error: Exception, num_ranks: int) -> Any:
    """What a rank tells its leader of a step that fails with `error`."""
    outcomes: list[Any] = []
    fake = SimpleNamespace(
        _requests={"a": SimpleNamespace(steps_under_way=0, sampling=GREEDY, is_begun=True)},
        _allocator=SimpleNamespace(cover=lambda request_id, end: ((0,),), advance=lambda *_, **__: None),
        _engine=SimpleNamespace(
            shard=Shard(tp_size=num_ranks),
            pool=SimpleNamespace(device=torch.device("cpu")),
            prefill=failing_with(error),
            decode=failing_with(error),
        ),
        _engine_lane=SimpleNamespace(submit=lambda work, done: outcomes.append(work())),
        _offload=None,
    )
    fake._item_of = partial(DecodeWorker._item_of, fake)
    worker._run_step(fake, message)
    return outcomes[0]


class Broken(EngineError):
    is_fatal = True


def steps_of_both_roles() -> list[tuple[type, Any]]:
    return [
        (
            PrefillWorker,
            of_prefill.RunStep(
                step=1,
                parts=(of_prefill.StepPart(request_id="a", token_ids=(5,), first_token=0, is_last=True),),
            ),
        ),
        (DecodeWorker, of_decode.RunStep(step=1, parts=(of_decode.StepPart(request_id="a", token_id=5, position=4),))),
    ]


@pytest.mark.parametrize(("error", "num_ranks", "is_fatal"), [(EngineError, 1, False), (Broken, 1, True), (EngineError, 2, True)])
def test_a_node_hears_whether_its_engine_is_of_use(error: type[EngineError], num_ranks: int, is_fatal: bool) -> None:
    for worker, message in steps_of_both_roles():
        outcome = outcome_of(worker, message, error("what broke"), num_ranks)
        assert outcome.reason == "what broke" and outcome.is_fatal is is_fatal and not outcome.is_out_of_memory


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("error", NO_MEMORY, ids=repr)
def test_a_node_hears_that_any_engine_found_no_memory(error: Exception, num_ranks: int) -> None:
    """Also an engine that knows nothing of kvferry's errors. A group of ranks cannot go on: its others wait in a collective."""
    kinds = ("a prefill step of 1 tokens", "a decode step of 1 requests")
    for (worker, message), kind in zip(steps_of_both_roles(), kinds, strict=True):
        outcome = outcome_of(worker, message, error, num_ranks)
        assert outcome.is_out_of_memory and outcome.is_fatal is (num_ranks > 1)
        assert outcome.reason.startswith(f"out of memory while computing {kind}: ")
        assert "; lower memory.static_fraction" in outcome.reason
