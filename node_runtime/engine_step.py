"""One step of a rank's engine: its tokens, or why it failed and whether the rank can go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transfer.engine_types import RequestFault
from transfer.errors import EngineError, OutOfMemory
from transfer.out_of_memory import allocating

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedStep:
    """A step that is over.

    Args:
        tokens: Request -> its next token.
        compute_s: Seconds that the step took.
        faults: Request -> why it has no token.
    """

    tokens: Mapping[str, int]
    compute_s: float
    faults: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStep:
    """A step without any token.

    Args:
        reason: One line for operators.
        is_fatal: Whether the engine can run no further step. True for any failure in a group of ranks, whose others may wait
            in a collective.
        is_out_of_memory: Whether the step found no memory.
    """

    reason: str
    is_fatal: bool
    is_out_of_memory: bool


def run_step(
    compute: Callable[[], Mapping[str, int]], doing: str, *, device: torch.device | str, advice: str, num_ranks: int
) -> ComputedStep | FailedStep:
    """Run a step of any engine; an out-of-memory error of any kind is reported as one.

    Args:
        compute: The step; returns request -> token.
        doing, device, advice: Those of `transfer.out_of_memory.allocating`.
        num_ranks: Ranks of the engine's group.
    """
    started = time.monotonic()
    try:
        with allocating(doing, device=device, advice=advice):
            tokens = compute()
    except RequestFault as fault:
        faults = {request_id: str(fault) for request_id in fault.request_ids}
        return ComputedStep(tokens=fault.tokens, compute_s=time.monotonic() - started, faults=faults)
    except EngineError as error:
        is_fatal = error.is_fatal or num_ranks > 1
        return FailedStep(reason=str(error), is_fatal=is_fatal, is_out_of_memory=isinstance(error, OutOfMemory))
    return ComputedStep(tokens=tokens, compute_s=time.monotonic() - started)
