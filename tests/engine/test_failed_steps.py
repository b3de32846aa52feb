"""A step that breaks: which errors an engine survives, and what its node hears of the others."""

from __future__ import annotations

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
from transfer.errors import EngineError
from transfer.layout import Shard

SURVIVED = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
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


def failing_with(error: RuntimeError) -> Callable[..., Any]:
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


def outcome_of(worker: type, message: Any, error: EngineError, num_ranks: int) -> Any:
    """What a rank tells its leader of a step that fails with `error`."""
    outcomes: list[Any] = []
    fake = SimpleNamespace(
        _requests={"a": SimpleNamespace(steps_under_way=0, sampling=GREEDY, is_begun=True)},
        _allocator=SimpleNamespace(cover=lambda request_id, end: ((0,),), advance=lambda *_, **__: None),
        _engine=SimpleNamespace(shard=Shard(tp_size=num_ranks), prefill=failing_with(error), decode=failing_with(error)),
        _engine_lane=SimpleNamespace(submit=lambda work, done: outcomes.append(work())),
        _offload=None,
    )
    fake._item_of = partial(DecodeWorker._item_of, fake)
    worker._run_step(fake, message)
    return outcomes[0]


class Broken(EngineError):
    is_fatal = True


@pytest.mark.parametrize(("error", "num_ranks", "is_fatal"), [(EngineError, 1, False), (Broken, 1, True), (EngineError, 2, True)])
def test_a_node_hears_whether_its_engine_is_of_use(error: type[EngineError], num_ranks: int, is_fatal: bool) -> None:
    steps = [
        (
            PrefillWorker,
            of_prefill.RunStep(
                step=1,
                parts=(of_prefill.StepPart(request_id="a", token_ids=(5,), first_token=0, is_last=True),),
            ),
        ),
        (DecodeWorker, of_decode.RunStep(step=1, parts=(of_decode.StepPart(request_id="a", token_id=5, position=4),))),
    ]
    for worker, message in steps:
        outcome = outcome_of(worker, message, error("what broke"), num_ranks)
        assert outcome.reason == "what broke" and outcome.is_fatal is is_fatal
