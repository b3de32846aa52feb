"""A rank's memory, as it came out: what its engine planned, held against what was allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import structlog
import torch

from planner.plan import MemoryPlan, compare_with_real
from transfer.connector.rank_report import RankMemory

log = structlog.get_logger(__name__)

_LINES_OF_ENGINES: Final = {"weights": "weights_bytes", "page_tables": "page_table_bytes", "cuda_graphs": "cuda_graph_bytes"}
"""Lines that only the engine can measure -> its attribute, which may be missing."""


def device_bytes(device: torch.device) -> int:
    """Size of a GPU; 0 for host memory, of which a rank has no part of its own."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0


def rank_memory(engine: Any, transfer_bytes: Mapping[str, int]) -> RankMemory:
    """What a rank reports once engine, pool and transfer memory are there; what is not as planned is a warning in its log.

    Args:
        engine: The rank's engine; one that makes no plan has none to be held against.
        transfer_bytes: The rank's own memory, staging or ring, by the name of its line in the plan.
    """
    plan: MemoryPlan | None = getattr(engine, "memory_plan", None)
    if plan is None:
        return RankMemory()
    pool = engine.pool
    pools = {f"pool_{name}": num_bytes for name, num_bytes in pool.storage_bytes.items()}
    real = {**pools, **transfer_bytes}
    for line, attribute in _LINES_OF_ENGINES.items():
        if hasattr(engine, attribute):
            real[line] = getattr(engine, attribute)
    if pool.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(pool.device)
        real["free"] = free - (total - plan.device_bytes)  # of a device of which only a part is counted on
    warnings = compare_with_real(plan, real)
    asked = plan.inputs.max_total_tokens
    if asked is not None and plan.max_total_tokens < asked // plan.inputs.page_size * plan.inputs.page_size:
        warnings.append(f"pool: {asked:,} tokens are set, the plan has room for {plan.max_total_tokens:,}")
    if engine.shard.rank == 0:
        sizes = {f"{line.name}_bytes": line.num_bytes for line in plan.lines}
        log.info(
            "memory_plan", max_total_tokens=plan.max_total_tokens, pages=plan.group_pages, fraction=plan.static_fraction, **sizes
        )
    for warning in warnings:
        log.warning("memory_not_as_planned", difference=warning)
    known = getattr(engine, "memory_warnings", ())  # in the log already
    return RankMemory(plan=plan.as_json(), real=real, warnings=(*known, *warnings))
