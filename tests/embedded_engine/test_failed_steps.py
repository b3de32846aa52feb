"""A step that breaks: which errors an engine survives, and what its node hears of the others."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from embedded_engine import engine as engine_module
from embedded_engine.engine import EmbeddedEngine
from embedded_engine.failed_steps import end_failed_step
from node_runtime.rank_engine import run_step
from node_runtime.rank_messages import StepDone, StepFailed
from transfer.engine_types import DecodeItem, PrefillItem, RequestFault
from transfer.errors import EngineError, OutOfMemory
from transfer.layout import Shard

NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory", 2),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
]
SURVIVED = RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")
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


@pytest.fixture
def engine(demo_dir: Path) -> EmbeddedEngine:
    return EmbeddedEngine(demo_dir, shard=Shard(), num_pages=2)


def test_a_step_that_fails_alone(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine.prefill([ITEM])
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "sample_on_device", failing_with(SURVIVED))
        with pytest.raises(EngineError, match="the step failed on rank 0 of 1: ") as failed:
            engine.decode([NEXT])
    assert not failed.value.is_fatal
    assert engine.prefill([ITEM]) == expected


@pytest.mark.parametrize("error", NO_MEMORY, ids=repr)
def test_a_step_that_finds_no_memory_names_the_settings(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    expected = engine.prefill([ITEM])
    decode = "a decode step of 1 requests on rank 0 of 1: .*; lower memory.static_fraction, limits.max_running_requests or "
    prefill = "a prefill step of 4 tokens on rank 0 of 1: .*; lower memory.static_fraction, limits.max_step_tokens or"
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "sample_on_device", failing_with(error))
        for says, step in ((decode, lambda: engine.decode([NEXT])), (prefill, lambda: engine.prefill([ITEM]))):
            with pytest.raises(OutOfMemory, match=f"^out of memory while computing {says}") as failed:
                step()
            assert not failed.value.is_fatal
    assert engine.prefill([ITEM]) == expected


def test_a_step_that_finds_no_memory_keeps_none(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def compute(*_: Any, **__: Any) -> Any:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        raise NO_MEMORY[0]

    monkeypatch.setattr(engine_module, "sample_on_device", compute)
    with pytest.raises(OutOfMemory) as failed:
        engine.prefill([ITEM])
    assert held[0]() is None, f"with {failed.value} still there"


@pytest.mark.parametrize("error", [NO_MEMORY[0], SURVIVED], ids=repr)
@pytest.mark.parametrize("is_lost", [False, True], ids=["the device goes on", "the device is lost"])
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "in a group"])
def test_a_failed_step_is_over_on_the_device_before_its_pages_are_given_on(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError, is_lost: bool, is_alone: bool
) -> None:
    """Its first layers may still be writing KV when a later one finds no memory. Of a group no pages are given on."""
    waits: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        waits.append(device)
        if is_lost:
            raise torch.AcceleratorError("an illegal memory access was encountered", 700)

    for name, fake in (
        ("synchronize", synchronize),
        ("empty_cache", lambda: None),
        ("mem_get_info", lambda device: (1, 2)),
        ("memory_reserved", lambda device: 1),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    device = torch.device("cuda")
    failure = end_failed_step(error, "computing", "lower it", rank="rank 0 of 1", device=device, is_alone=is_alone)
    assert waits == [device] * is_alone
    assert failure.is_fatal is (is_lost and is_alone)
    assert ("; then the device failed: " in str(failure)) is (is_lost and is_alone)


@pytest.mark.parametrize("error", FATAL, ids=str)
def test_a_gpu_that_can_no_longer_be_used(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "sample_on_device", failing_with(error))
        with pytest.raises(EngineError, match="the step failed on rank 0 of 1: ") as failed:
            engine.decode([NEXT])
    assert failed.value.is_fatal
    for step in (lambda: engine.prefill([ITEM]), lambda: engine.decode([NEXT])):
        with pytest.raises(EngineError, match="failed in an earlier step and must be restarted: the step failed") as later:
            step()
        assert later.value.is_fatal


class Broken(EngineError):
    is_fatal = True


def outcome_of(error: Exception, num_ranks: int = 1) -> StepDone | StepFailed:
    return run_step(
        failing_with(error), "computing a step", step=3, request_ids=("r",), device="cpu", advice="lower it", num_ranks=num_ranks
    )


@pytest.mark.parametrize(("error", "num_ranks", "is_fatal"), [(EngineError, 1, False), (Broken, 1, True), (EngineError, 2, True)])
def test_a_node_hears_whether_its_engine_is_of_use(error: type[EngineError], num_ranks: int, is_fatal: bool) -> None:
    expected = StepFailed(step=3, request_ids=("r",), reason="what broke", is_fatal=is_fatal, is_out_of_memory=False)
    assert outcome_of(error("what broke"), num_ranks) == expected


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("error", NO_MEMORY, ids=repr)
def test_a_node_hears_that_any_engine_found_no_memory(error: Exception, num_ranks: int) -> None:
    """Also an engine that knows nothing of kvferry's errors. A group of ranks cannot go on: its others wait in a collective."""
    outcome = outcome_of(error, num_ranks)
    assert isinstance(outcome, StepFailed)
    assert outcome.is_out_of_memory and outcome.is_fatal is (num_ranks > 1)
    assert outcome.reason.startswith("out of memory while computing a step: ") and outcome.reason.endswith("; lower it")


def test_a_fault_of_one_request_leaves_the_others_their_tokens() -> None:
    outcome = outcome_of(RequestFault("not finite", request_ids=["bad"], tokens={"good": 7}), num_ranks=2)
    assert isinstance(outcome, StepDone)
    assert (outcome.tokens, outcome.faults) == ({"good": 7}, {"bad": "not finite"})


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_cannot_be_sent_fails_its_own_request(token: int) -> None:
    outcome = run_step(
        lambda: {"bad": token, "good": 7},
        "computing a step",
        step=3,
        request_ids=("bad", "good"),
        device="cpu",
        advice="lower it",
        num_ranks=1,
    )
    assert isinstance(outcome, StepDone)
    assert outcome.tokens == {"good": 7}
    assert outcome.faults == {"bad": f"the engine returned token {token}; a token id is 0 to 4294967295"}
