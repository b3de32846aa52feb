"""Decoder layers that torch.compile compiles at start, for decode steps.

All decoder layers share one compiled function: layers of the same kind have the same code, and their weights are its arguments.
So the compile time does not grow with the number of layers. Recurrent layers, embeddings and the head are not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import torch._dynamo
from torch import Tensor, nn

from embedded_engine import opaque_calls
from embedded_engine.step_plan import StepPlan

MAX_LAYER_KINDS: Final = 32
"""Maximum number of kinds of layers for one size. If layers do not share code, they exceed it, and compilation fails."""

_DYNAMIC_ROWS: Final = (1, 8)
"""Rows of the steps that produce code for any number of rows. torch compiles a dimension of size 1 separately."""


class CompiledLayers:
    """The decoder layers of a model. Within `running`, they run compiled.

    Args:
        layers: Decoder layers of a transformers model.
        is_dynamic: Whether to compile code for any number of rows up to a maximum, instead of separate code for each size.
    """

    def __init__(self, layers: Sequence[nn.Module], *, is_dynamic: bool) -> None:
        self._is_dynamic = is_dynamic
        self._sizes: frozenset[int] = frozenset()
        self._compiled: Callable[..., Any] = torch.compile(_forward, fullgraph=True, dynamic=is_dynamic)
        for layer in layers:
            layer.forward = partial(self._run, layer)

    def compile(self, sizes: Sequence[int], step: Callable[[int], object]) -> None:
        """Compile the layers for steps of these numbers of rows, which replace earlier ones.

        Args:
            step: Runs the model over a number of rows without a plan.
        """
        self._sizes = frozenset()
        compiled = _DYNAMIC_ROWS[: max(sizes)] if self._is_dynamic else sizes
        limit = MAX_LAYER_KINDS * len(compiled)
        with torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=limit), opaque_calls.running(None):
            for size in compiled:
                step(size)
        self._sizes = frozenset(sizes)

    @contextmanager
    def running(self, num_rows: int, plan: StepPlan) -> Iterator[None]:
        """Run the layers of a step compiled, if they were compiled for its number of rows."""
        if num_rows not in self._sizes:
            yield
            return
        # No later step compiles: if its tensors differ from those at start, its layers run uncompiled.
        with torch.compiler.set_stance("eager_on_recompile"), opaque_calls.running(plan):
            yield

    def _run(self, layer: Any, hidden: Tensor, **named: Any) -> Any:
        step = opaque_calls.running_step()
        if step is None:
            return _forward(layer, hidden, **named)
        if not hasattr(layer, "self_attn"):  # a recurrent layer
            return hidden if step.plan is None else _forward(layer, hidden, **named)
        step.attention = layer.self_attn
        return self._compiled(layer, hidden, **{**named, "paged_plan": None})


def _forward(layer: nn.Module, hidden: Tensor, **named: Any) -> Any:
    return type(layer).forward(layer, hidden, **named)
