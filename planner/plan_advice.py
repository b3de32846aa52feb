"""Advice beside the numbers of a memory plan: settings that help if nothing fits, and settings that could be better."""

from __future__ import annotations

from typing import Final

from planner.plan_inputs import GIB, PlanInputs, Policy, Role
from planner.plan_values import MemoryPlan, PlanLine
from transfer.errors import MemoryPlanError
from transfer.host_memory import shown
from transfer.layer_groups import GroupKind

_NAMED_TERMS: Final = 3
_LEAST_SHARE: Final = 0.01
"""Terms that are a smaller share of the missing bytes are not named: they would not help."""
_ADVISED_DEVICE: Final = 20 * GIB
"""The advice on free memory is for devices of at least this size; its numbers shrink with smaller devices."""
_FLAGS: Final = {
    "in_use": "end what else runs on the device",
    "weights": "a larger --tp or --pp, or a quantised model",
    "staging": "a smaller --staging",
    "ring": "a smaller --ring",
    "page_tables": "a smaller --max-seq-len or --max-running-requests",
    "pool_state": "a smaller --max-running-requests",
    "block_lse": "a smaller --chunk-tokens or --max-seq-len, or a larger --sparse-stride",
}


def does_not_fit(inputs: PlanInputs, lines: list[PlanLine], missing: int) -> MemoryPlanError:
    """Return the error of a plan without room for a page.

    Args:
        lines: The lines of the plan with one page of KV.
        missing: Bytes that the device is too small.
    """
    largest = sorted(lines, key=lambda line: -line.num_bytes)[:_NAMED_TERMS]
    named = [line for line in largest if line.num_bytes >= _LEAST_SHARE * missing]
    terms = ", ".join(f"{line.name} {shown(line.num_bytes)}" for line in named)
    flags = []
    for line in named:
        if line.name == "reserve":
            ratio = "--memory-ratio" if inputs.policy is Policy.PAGE_COUNT else "--static-fraction"
            gpu = "" if inputs.is_cpu else ", or a smaller --chunked-prefill-size or --cuda-graph-max-bs"
            flags.append(f"a larger {ratio}{gpu}")
        else:
            of_pool = "a smaller --page-size" if line.name.startswith("pool_") else "a smaller --max-seq-len"
            flags.append(_FLAGS.get(line.name, of_pool))
    return MemoryPlanError(
        f"no page of KV fits: of {shown(inputs.total_bytes)} the largest terms are {terms}; it is {shown(missing)} too little. "
        + inputs.in_names(f"What would help: {'; '.join(dict.fromkeys(flags))}")
    )


def advice_on(plan: MemoryPlan, *, is_memory_the_limit: bool) -> list[str]:
    """Return advice on settings that could be better.

    Args:
        is_memory_the_limit: Whether more memory would make the pools larger.
    """
    inputs = plan.inputs
    advice = [] if inputs.is_cpu else _advice_on_free(plan, is_memory_the_limit)
    lazy = sum(one.num_bytes for one in plan.workspaces if not one.is_allocated)
    if lazy:
        fits = "which fits" if lazy <= plan.free_bytes else "which does NOT fit: use --workspace-strategy chunk_bounded"
        advice.append(
            inputs.in_names(f"lazy workspaces will take {shown(lazy)} of the {shown(plan.free_bytes)} that stay free, {fits}")
        )
    if any(group.kind is GroupKind.FULL and group.layers for group in plan.groups):
        tokens = plan.max_total_tokens
        if tokens < inputs.sequence_tokens and inputs.role is Role.PREFILL and inputs.has_host_pages:
            advice.append(
                f"the pool holds {tokens:,} tokens; a longer prompt is kept in host memory, which takes {plan.cell_bytes:,} B a "
                f"token, {shown(inputs.sequence_tokens * plan.cell_bytes)} for {inputs.sequence_tokens:,}"
            )
        elif tokens < inputs.sequence_tokens and not inputs.has_host_pages:
            advice.append(
                f"the pool holds {tokens:,} tokens, a sequence may have {inputs.sequence_tokens:,}: longer ones are refused; "
                f"set --max-seq-len to {tokens} or less"
            )
        advice += _advice_on_windows(plan) if is_memory_the_limit else []
    return [inputs.in_names(line) for line in advice]


def _advice_on_windows(plan: MemoryPlan) -> list[str]:
    """Advise fewer requests if their windows take most of the pools."""
    windows = sum(group.num_bytes for group in plan.groups if group.kind is GroupKind.WINDOW)
    requests = plan.inputs.max_running_requests
    has_room_for_all = plan.max_total_tokens >= requests * plan.inputs.sequence_tokens
    if 2 * windows <= plan.pool_bytes or requests == 1 or has_room_for_all:
        return []
    flags = "--max-running-requests or --chunk-tokens" if plan.inputs.role is Role.PREFILL else "--max-running-requests"
    return [
        f"windows of {requests} requests take {shown(windows)} of the {shown(plan.pool_bytes)} of KV: "
        f"a smaller {flags} leaves more for tokens that are kept"
    ]


def _advice_on_free(plan: MemoryPlan, is_memory_the_limit: bool) -> list[str]:
    """Source: SGLang's hyperparameter tuning guide; its GB are GiB."""
    scale = min(1.0, plan.device_bytes / _ADVISED_DEVICE)
    stays, free_gib = f"{shown(plan.free_bytes)} stay free", plan.free_bytes / GIB
    if free_gib > 10 * scale:
        if not is_memory_the_limit:
            most = plan.inputs.max_total_tokens
            is_set = most is not None and most // plan.inputs.page_size == plan.num_pages
            return [f"{stays}, more than {10 * scale:.2g} GB: raise or remove --max-total-tokens"] if is_set else []
        return [f"{stays}, more than {10 * scale:.2g} GB: raise the fraction by 0.01, {_fraction(plan, 0.01)}"]
    if free_gib < 3 * scale:
        bound, when = (2, ", or memory will run out") if free_gib < 2 * scale else (3, " if memory runs out")
        advice = [f"{stays}, less than {bound * scale:.2g} GB: lower --chunked-prefill-size or --cuda-graph-max-bs{when}"]
        return advice + _advice_on_costly_options(plan)
    if 5 * scale <= free_gib <= 8 * scale:
        return [f"{stays}, between {5 * scale:.2g} and {8 * scale:.2g} GB: good"]
    return []


def _fraction(plan: MemoryPlan, change: float) -> str:
    """Return the flag of the plan's fraction with a changed value."""
    if plan.inputs.policy is Policy.PAGE_COUNT:
        return f"--memory-ratio {min(0.99, max(0.01, plan.inputs.memory_ratio + change)):.2f}"
    return f"--static-fraction {min(0.99, max(0.01, plan.static_fraction + change)):.3f}"


def _advice_on_costly_options(plan: MemoryPlan) -> list[str]:
    """Advise on options that take memory outside the weights and the pool. Source: SGLang's hyperparameter tuning guide."""
    advice, inputs = list[str](), plan.inputs
    if inputs.has_dp_attention or inputs.speculative is not None:
        option = "--dp-attention" if inputs.has_dp_attention else "--speculative"
        advice.append(f"{option} makes each CUDA graph larger: lower --cuda-graph-max-bs first")
    if inputs.model.vision is not None:
        advice.append(f"a vision model needs memory to encode images: lower the fraction by 0.05, {_fraction(plan, -0.05)}")
    return advice
