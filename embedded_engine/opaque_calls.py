"""Calls that torch.compile must not trace: attention over the pool, and sums over the ranks of a group.

The arguments of a compiled layer are tensors only. So all layers of a kind, and all steps of a size, share its code. It calls
operators, and their bodies read the plan and the layer of the running step from a thread-local variable.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embedded_engine.attention import Scores
from embedded_engine.latent_attention import LatentHeads
from embedded_engine.step_plan import StepPlan


@dataclass(slots=True)
class CompiledStep:
    """A step that a thread runs with compiled layers.

    Args:
        plan: Its plan; None for a step that only compiles. Such a step computes no attention, writes no KV and calls no
            collective.
        attention: The attention layer of transformers that runs.
    """

    plan: StepPlan | None
    attention: Any = None


class _Thread(threading.local):
    step: CompiledStep | None = None


_thread = _Thread()


@contextmanager
def running(plan: StepPlan | None) -> Iterator[None]:
    """Run the layers of this thread compiled, with this plan; see `CompiledStep`."""
    _thread.step = CompiledStep(plan)
    try:
        yield
    finally:
        _thread.step = None


def running_step() -> CompiledStep | None:
    """Return the compiled step that this thread runs; None if it runs no such step."""
    return _thread.step


def _step() -> CompiledStep:
    assert _thread.step is not None  # only compiled layers call the operators
    return _thread.step


@torch.library.custom_op("kvferry::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Attend as `StepPlan.attend` does; see `Scores`. The result is contiguous."""
    step = _step()
    if step.plan is None:
        return _empty_result(query, value.shape[-1]).zero_()
    scores = Scores(scale=scale, softcap=softcap, sinks=sinks)
    return step.plan.attend(step.attention.layer_idx, query, key, value, scores).contiguous()


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
    return _empty_result(query, value.shape[-1])


@torch.library.custom_op("kvferry::attend_latent", mutates_args=())
def attend_latent(query: Tensor, latents: Tensor, scale: float, value_dim: int) -> Tensor:
    """Attend as `StepPlan.attend_latent` does, with heads of `value_dim` elements. The result is contiguous."""
    step = _step()
    if step.plan is None:
        return _empty_result(query, value_dim).zero_()
    heads, scores = LatentHeads(step.attention), Scores(scale=scale)
    return step.plan.attend_latent(step.attention.layer_idx, query, latents, heads, scores).contiguous()


@attend_latent.register_fake
def _(query: Tensor, latents: Tensor, scale: float, value_dim: int) -> Tensor:
    return _empty_result(query, value_dim)


def _empty_result(query: Tensor, value_dim: int) -> Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value_dim))


def sum_over_ranks(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over the ranks of the process group, in place. A step that only compiles does nothing."""
    if torch.compiler.is_compiling():
        _sum_over_ranks(tensor)
    elif _thread.step is None or _thread.step.plan is not None:
        dist.all_reduce(tensor)


@torch.library.custom_op("kvferry::sum_over_ranks", mutates_args=("tensor",))
def _sum_over_ranks(tensor: Tensor) -> None:
    sum_over_ranks(tensor)


@_sum_over_ranks.register_fake
def _(tensor: Tensor) -> None:
    return None
