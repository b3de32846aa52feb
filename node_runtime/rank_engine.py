"""A rank's engine: the thread that drives it, its steps, and its memory compared with the plan.

The engine outlives a worker when the node changes its role.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog

from node_runtime.engine import engine_loader
from node_runtime.rank_messages import StepDone, StepFailed
from planner.memory_advice import Phase, advice_for
from planner.plan import MemoryPlan, Role, compare_with_real
from transfer.config import NodeConfig
from transfer.connector.rank_report import RankMemory
from transfer.engine_types import RequestFault
from transfer.errors import EngineError, OutOfMemory
from transfer.host_memory import host_memory
from transfer.out_of_memory import allocating
from transfer.worker_thread import WorkerThread

if TYPE_CHECKING:  # the leader names the entry point of ranks, and loads no torch for that
    import torch

_ENGINE_LINES: Final = {
    "weights": "weights_bytes",
    "page_tables": "page_table_bytes",
    "cuda_graphs": "cuda_graph_bytes",
    "inductor": "inductor_bytes",
}
"""Lines of a memory plan that only the engine can measure, and the engine's attribute for each, which may be missing."""

MAX_TOKEN_ID: Final = 2**32 - 1
"""Token ids travel as uint32 (proto/transfer/pb/kvferry.proto)."""

log = structlog.get_logger(__name__)


class RankEngine:
    """The engine of a rank's process, passed from worker to worker together with its thread.

    It keeps one thread: CUDA's current device and the gradient mode of torch are properties of a thread.

    Args:
        loop: Loop of the rank's workers. There is one worker at a time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._engine: Any = None
        self.thread = WorkerThread("engine", loop, self.crash)

    @property
    def can_switch(self) -> bool:
        """Whether the engine can also serve the other role; False if no engine is loaded."""
        return hasattr(self._engine, "switch_role")

    async def open(self, config: NodeConfig, **place: Any) -> Any:
        """Return the engine for the role of `config`: load it for the first worker, change its role for every later one.

        Args:
            place: Arguments of the engine's loader besides the settings, see `engine_loader`.

        Raises:
            TransferError: The engine cannot be loaded or changed. A loaded engine stays, and can return to its former role.
        """
        if self._engine is None:
            self._engine = await self.thread.call(lambda: engine_loader(config)(config, **place))
        else:
            if not self.can_switch:
                raise EngineError(f"engine is {config.engine}, which cannot change its role (it has no switch_role)")
            await self._release_worker()
            self._engine = await self.thread.call(lambda: self._engine.switch_role(config))
        return self._engine

    async def _release_worker(self) -> None:
        """Free the memory of the former worker, above all its ring or staging memory: the next worker's plan counts on it."""
        await self.rest()  # the thread still refers to its last work
        gc.unfreeze()  # undoes `process_setup.freeze_gc`
        gc.collect()

    async def rest(self) -> None:
        """Wait until the thread has done all its work."""
        await self.thread.call(lambda: None)

    async def close(self) -> None:
        """Close the engine and end its thread."""
        if self._engine is not None:
            await self.thread.call(self._engine.close)
        self.thread.close(timeout_s=5.0)

    def crash(self, error: BaseException) -> None:
        """End the process because of an unexpected error on a worker thread."""
        self._loop.call_exception_handler({"message": "a worker thread failed", "exception": error})


def run_step(
    compute: Callable[[], Mapping[str, int | Sequence[int]]],
    doing: str,
    *,
    step: int,
    request_ids: tuple[str, ...],
    device: torch.device | str,
    advice: str,
    num_ranks: int,
    begun_s: float | None = None,
) -> StepDone | StepFailed:
    """Run a step of any engine, and return its result for the leader.

    A failure is fatal in a group of ranks, because the others may wait in a collective.

    Args:
        compute: The step; returns request -> next token, or accepted draft tokens and the next token.
        doing, device, advice: See `transfer.out_of_memory.allocating`.
        step, request_ids: The step and its requests.
        num_ranks: Ranks of the engine's group.
        begun_s: When the step began, on the monotonic clock, if `compute` only waits for its end; None means now.
    """
    if begun_s is None:
        begun_s = time.monotonic()
    faults: dict[str, str] = {}
    try:
        with allocating(doing, device=device, advice=advice):
            tokens = compute()
    except RequestFault as fault:
        tokens, faults = fault.tokens, {request_id: str(fault) for request_id in fault.request_ids}
    except EngineError as error:
        return StepFailed(
            step=step,
            request_ids=request_ids,
            reason=str(error),
            is_fatal=error.is_fatal or num_ranks > 1,
            is_out_of_memory=isinstance(error, OutOfMemory),
        )
    found = {request_id: (own,) if isinstance(own, int) else tuple(own) for request_id, own in tokens.items()}
    faults |= {
        request_id: f"the engine returned token {token}; a token id is 0 to {MAX_TOKEN_ID}"
        for request_id, own in found.items()
        for token in own
        if not 0 <= token <= MAX_TOKEN_ID
    }
    sound = {request_id: own for request_id, own in found.items() if request_id not in faults}
    return StepDone(
        step=step,
        tokens={request_id: own[-1] for request_id, own in sound.items()},
        compute_s=time.monotonic() - begun_s,
        faults=faults,
        accepted={request_id: own[:-1] for request_id, own in sound.items() if len(own) > 1},
    )


def rank_advice(phase: Phase, config: NodeConfig, engine: Any, chosen: Mapping[str, object] | None = None) -> str:
    """Return the settings to change if `phase` finds no memory on a rank, with their current values.

    Args:
        engine: The rank's engine. Its memory plan, if there is one, has the values of some settings that are not set.
        chosen: Values of other settings that are not set.
    """
    plan: MemoryPlan | None = getattr(engine, "memory_plan", None)
    return advice_for(phase, config, plan=None if plan is None else plan.as_json(), chosen=chosen)


def device_bytes(device: torch.device) -> int:
    """Return the size of a GPU; 0 for host memory, of which no part belongs to a rank."""
    import torch

    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0


def rank_memory(engine: Any, transfer_bytes: Mapping[str, int]) -> RankMemory:
    """Compare the memory of a rank with its engine's plan, and log each difference as a warning.

    Args:
        engine: The rank's engine, with its pool. The result is empty if it makes no plan.
        transfer_bytes: Bytes of the rank's staging or ring memory, by the name of the plan's line.
    """
    import torch

    plan: MemoryPlan | None = getattr(engine, "memory_plan", None)
    if plan is None:
        return RankMemory()
    pool = engine.pool
    pools = {f"pool_{name}": num_bytes for name, num_bytes in pool.storage_bytes.items()}
    planned = {line.name for line in plan.lines}
    measured = {line: getattr(engine, name) for line, name in _ENGINE_LINES.items() if line in planned and hasattr(engine, name)}
    real = {**pools, **transfer_bytes, **measured, **getattr(engine, "workspace_bytes", {})}
    if pool.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(pool.device)
        real["free"] = free - (total - plan.device_bytes)  # the plan may count on a part of the device only
    warnings = compare_with_real(plan, real)
    asked = plan.inputs.max_total_tokens
    if asked is not None and plan.max_total_tokens < asked // plan.inputs.page_size * plan.inputs.page_size:
        warnings.append(f"pool: {asked:,} tokens are set, the plan has room for {plan.max_total_tokens:,}")
    if engine.shard.rank == 0:
        _log_plan(plan, measured_free_bytes=real["free"] if "free" in real else host_memory()[1])
    for warning in warnings:
        log.warning("memory_not_as_planned", difference=warning)
    known = getattr(engine, "memory_warnings", ())  # the engine has logged these
    return RankMemory(plan=plan.as_json(), real=real, warnings=(*known, *warnings))


def _log_plan(plan: MemoryPlan, *, measured_free_bytes: int) -> None:
    """Log the limits of the plan under SGLang's names, and the bytes of each line.

    Args:
        measured_free_bytes: Free memory of the device, or of the host, after everything that lasts was allocated.
    """
    inputs = plan.inputs
    step_tokens = inputs.chunk_tokens if inputs.role is Role.PREFILL else None  # SGLang has two limits for a step
    log.info(
        "memory_plan",
        max_total_num_tokens=plan.max_total_tokens,
        chunked_prefill_size=step_tokens,
        max_prefill_tokens=step_tokens,
        max_running_requests=inputs.max_running_requests,
        context_len=inputs.sequence_tokens,
        available_bytes=inputs.free_before_bytes - plan.weights_bytes,
        measured_free_bytes=measured_free_bytes,
        pages=plan.group_pages,
        fraction=plan.static_fraction,
        **{f"{line.name}_bytes": line.num_bytes for line in plan.lines},
    )
