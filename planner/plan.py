"""The memory plan of a rank, made before any memory is allocated. docs/memory-model.md explains every line.

`make_plan` turns `PlanInputs` into a `MemoryPlan`, whose lines add up to the device. A model that does not fit raises a
`MemoryPlanError` with the largest terms and the flags that would help, instead of running out of memory later.

Sources: the static fraction and the number of tokens are SGLang's (``server_args``, ``model_runner.profile_max_num_token``), the
page count is mini-sglang's (``engine._determine_num_pages``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from planner.plan_advice import advice_on, does_not_fit
from planner.plan_inputs import GIB, PlanInputs, Policy, Role
from planner.plan_pools import PoolSizing
from planner.plan_reserve import make_reserve
from planner.plan_values import GroupPlan, MemoryPlan, PlanLine
from planner.workspace import Workspace, check_has_sparse_prefill, sparse_prefill_workspaces
from transfer.errors import ConfigError, MemoryPlanError
from transfer.host_memory import shown
from transfer.layer_groups import PREFILL_STEPS_IN_FLIGHT, GroupKind

__all__ = [
    "GroupPlan",
    "MemoryPlan",
    "PlanInputs",
    "PlanLine",
    "Policy",
    "Role",
    "agree_on_free_bytes",
    "compare_with_real",
    "make_plan",
]

MAX_DIFFERENCE_BYTES: Final = 2 * GIB
"""Ranks whose free memory differs by more do not start: another process uses one of their devices."""
MAX_REAL_DIFFERENCE: Final = 0.05


def make_plan(inputs: PlanInputs) -> MemoryPlan:
    """Plan the memory of a rank's device.

    Raises:
        ConfigError: The inputs do not fit the model.
        LayoutError: The model cannot be sharded like that.
        MemoryPlanError: Not one page of KV fits; the message has the largest terms and the flags that would help.
    """
    shard = inputs.fullest_shard()
    weights_bytes, weights_formula = _weights(inputs)
    workspaces = _workspaces(inputs)
    used = inputs.total_bytes - inputs.free_before_bytes
    fixed = [
        PlanLine(name="in_use", num_bytes=used, formula="device - free before"),
        PlanLine(name="weights", num_bytes=weights_bytes, formula=weights_formula),
        PlanLine(name="staging", num_bytes=inputs.staging_bytes, formula="staging slots and probe buffer"),
        PlanLine(name="ring", num_bytes=inputs.ring_bytes, formula="ring and probe buffer"),
    ]
    buffers = [PlanLine(name="offload", num_bytes=inputs.offload_bytes, formula="as set")] if inputs.offload_bytes else []
    buffers += [PlanLine(name=one.name, num_bytes=one.num_bytes, formula=one.reason) for one in workspaces if one.is_allocated]
    reserve = make_reserve(inputs)
    reserve_line = PlanLine(name="reserve", num_bytes=reserve.num_bytes, formula=reserve.formula)
    budget = inputs.total_bytes - reserve.num_bytes - sum(line.num_bytes for line in (*fixed, *buffers))
    sizing = PoolSizing(inputs, shard)
    num_pages = sizing.most_pages(budget)
    if num_pages < 1:
        one_page = [sizing.page_tables(1), *sizing.lines(sizing.groups(1))]
        missing = sum(line.num_bytes for line in one_page) - budget
        raise does_not_fit(inputs, [*fixed, *buffers, reserve_line, *one_page], missing)
    most_tokens = num_pages * inputs.page_size
    is_memory_the_limit = sizing.cost(num_pages + 1) > sizing.cost(num_pages)
    if inputs.max_total_tokens is not None and inputs.max_total_tokens // inputs.page_size < num_pages:
        num_pages = inputs.max_total_tokens // inputs.page_size
        is_memory_the_limit = False
    groups = sizing.groups(num_pages)
    deciding = next((group for group in groups if group.cell_bytes and group.kind is not GroupKind.STATE), groups[0])
    page_tables = sizing.page_tables(num_pages)
    left = budget - page_tables.num_bytes - sum(group.num_bytes for group in groups)
    inductor = PlanLine(name="inductor", num_bytes=reserve.inductor_bytes, formula=reserve.inductor_formula, inside="reserve")
    captured_bytes = reserve.cuda_graph_bytes + reserve.inductor_bytes
    lines = [
        *fixed,
        page_tables,
        *buffers,
        *sizing.lines(groups),
        reserve_line,
        PlanLine(name="cuda_graphs", num_bytes=reserve.cuda_graph_bytes, formula=reserve.cuda_graph_formula, inside="reserve"),
        *([inductor] if inputs.torch_compile_max_bs else []),
        PlanLine(
            name="activations",
            num_bytes=reserve.num_bytes - captured_bytes,
            formula="the rest of the reserve: activations, and what the libraries take",
            inside="reserve",
        ),
        PlanLine(name="left", num_bytes=left, formula=_left_formula(inputs, num_pages, most_tokens)),
    ]
    plan = MemoryPlan(
        inputs=inputs,
        static_fraction=reserve.static_fraction,
        reserved_bytes=reserve.num_bytes,
        weights_bytes=weights_bytes,
        cell_bytes=deciding.cell_bytes,
        max_total_tokens=num_pages * inputs.page_size,
        num_pages=num_pages,
        page_table_bytes=page_tables.num_bytes,
        groups=groups,
        workspaces=workspaces,
        free_bytes=reserve.num_bytes + left - captured_bytes,
        lines=tuple(lines),
        advice=(),
    )
    return replace(plan, advice=tuple(advice_on(plan, is_memory_the_limit=is_memory_the_limit)))


def agree_on_free_bytes(free_by_rank: Mapping[int, int]) -> int:
    """Return the least free memory of any rank, which every rank may count on.

    Raises:
        MemoryPlanError: Two ranks differ by more than 2 GiB.
    """
    if not free_by_rank:
        raise ConfigError("free_by_rank is empty; every rank must report its free memory")
    least = min(free_by_rank, key=lambda rank: (free_by_rank[rank], rank))
    most = max(free_by_rank, key=lambda rank: (free_by_rank[rank], -rank))
    if free_by_rank[most] - free_by_rank[least] > MAX_DIFFERENCE_BYTES:
        raise MemoryPlanError(
            f"free memory differs by more than {shown(MAX_DIFFERENCE_BYTES)}: rank {least} has {shown(free_by_rank[least])}, "
            f"rank {most} has {shown(free_by_rank[most])}; another process must have taken the memory of rank {least}'s device"
        )
    return free_by_rank[least]


def compare_with_real(plan: MemoryPlan, real: Mapping[str, int]) -> list[str]:
    """Return one phrase for each line that differs from the plan by more than 5 %, with both numbers.

    A line inside the reserve is an allowance: it is reported only if it takes more.

    Args:
        real: Measured bytes by the name of a line, see `MemoryPlan.planned_bytes`.
    """
    warnings = []
    allowances = {line.name for line in plan.lines if line.inside}
    for name, measured in real.items():
        planned = plan.planned_bytes(name)
        difference = measured - planned if name in allowances else abs(measured - planned)
        if difference > MAX_REAL_DIFFERENCE * planned:
            change = f", {100 * (measured - planned) / planned:+.1f} %" if planned else ""
            warnings.append(
                f"{name}: planned {shown(planned)} ({planned} bytes), real {shown(measured)} ({measured} bytes){change}"
            )
    return warnings


def _weights(inputs: PlanInputs) -> tuple[int, str]:
    if inputs.weights_bytes is not None:
        return inputs.weights_bytes, "measured"
    model = inputs.model
    estimate = model.weights_bytes(
        tp_size=inputs.tp_size,
        attention_tp_size=inputs.attention_tp_size,
        pp_size=inputs.pp_size,
        pp_rank=inputs.pp_rank,
        dtype=inputs.dtype,
        with_draft=inputs.loads_draft_layers,
    )
    if inputs.checkpoint_bytes is None:
        draft_params = sum(weights.num_params for weights in model.draft) if inputs.loads_draft_layers else 0
        draft = f" and {draft_params:,} of draft layers" if draft_params else ""
        return estimate, f"estimated from the configuration: {model.num_params:,} parameters{draft}, this rank's part"
    whole = model.checkpoint_bytes(inputs.dtype)
    size = -(-inputs.checkpoint_bytes * estimate // whole)
    return size, f"{inputs.checkpoint_bytes:,} B ({inputs.checkpoint_source}) x {estimate / whole:.4f}, this rank's part"


def _workspaces(inputs: PlanInputs) -> tuple[Workspace, ...]:
    if inputs.sparse_prefill is None:
        return ()
    try:
        check_has_sparse_prefill(inputs.layout)
    except ConfigError as error:
        raise ConfigError(inputs.in_names(f"--sparse-policy is xattention; {inputs.model.architecture} {error}")) from None
    return sparse_prefill_workspaces(
        inputs.sparse_prefill,
        num_heads=-(-inputs.model.num_query_heads // inputs.attention_tp_size),
        chunk_tokens=inputs.most_tokens_in_flight // PREFILL_STEPS_IN_FLIGHT,
        max_seq_len=inputs.sequence_tokens,
    )


def _left_formula(inputs: PlanInputs, num_pages: int, most_tokens: int) -> str:
    if num_pages * inputs.page_size < most_tokens:
        return f"max_total_tokens is {inputs.max_total_tokens:,}; {most_tokens:,} tokens would fit"
    return "less than one more page takes, or more than every request at once can use"
