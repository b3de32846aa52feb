"""What a memory plan says beside its numbers: what would help where nothing fits, and what could be set better."""

from __future__ import annotations

from typing import Final

from transfer.errors import MemoryPlanError
from transfer.layer_groups import GroupKind
from transfer.memory.plan_inputs import GIB, PlanInputs, Policy
from transfer.memory.plan_reserve import Reserve
from transfer.memory.plan_values import GroupPlan, PlanLine, WorkspacePlan, shown
from transfer.memory.workspace import Strategy

_NAMED_TERMS: Final = 3
_FLAGS: Final = {
    "in_use": "end what else runs on the device",
    "weights": "a larger --tp or --pp, or a quantised model",
    "staging": "a smaller --staging",
    "ring": "a smaller --ring",
    "page_tables": "a smaller --max-seq-len or --max-running-requests",
    "pool_state": "a smaller --max-running-requests",
    "k_expanded": "--workspace-strategy chunk_bounded",
    "v_expanded": "--workspace-strategy chunk_bounded",
}


def does_not_fit(inputs: PlanInputs, lines: list[PlanLine], short_by: int) -> MemoryPlanError:
    largest = [line for line in sorted(lines, key=lambda line: -line.num_bytes)[:_NAMED_TERMS] if line.num_bytes]
    terms = ", ".join(f"{line.name} {shown(line.num_bytes)}" for line in largest)
    flags = []
    for line in largest:
        if line.name == "reserve":
            ratio = "--memory-ratio" if inputs.policy is Policy.PAGE_COUNT else "--static-fraction"
            gpu = "" if inputs.is_cpu else ", or a smaller --chunked-prefill-size or --cuda-graph-max-bs"
            flags.append(f"a larger {ratio}{gpu}")
        else:
            flags.append(_FLAGS.get(line.name, "a smaller --max-seq-len"))
    return MemoryPlanError(
        f"no page of KV fits: of {shown(inputs.total_bytes)} the largest terms are {terms}; it is {shown(-short_by)} too little. "
        + inputs.in_names(f"What would help: {'; '.join(dict.fromkeys(flags))}")
    )


def advice_on(
    inputs: PlanInputs,
    reserve: Reserve,
    groups: tuple[GroupPlan, ...],
    workspaces: tuple[WorkspacePlan, ...],
    free_bytes: int,
    num_pages: int,
) -> list[str]:
    advice = [] if inputs.is_cpu else _advice_on_free(inputs, reserve, free_bytes)
    lazy = sum(one.num_bytes for one in workspaces if one.strategy is Strategy.LAZY)
    if lazy:
        fits = "which fits" if lazy <= free_bytes else "which does NOT fit: use --workspace-strategy chunk_bounded"
        advice.append(f"lazy workspaces will take {shown(lazy)} of the {shown(free_bytes)} that stay free, {fits}")
    tokens = num_pages * inputs.page_size
    has_full = any(group.kind is GroupKind.FULL and group.layers for group in groups)
    if has_full and tokens < inputs.sequence_tokens:
        advice.append(
            f"the pool holds {tokens:,} tokens, a sequence may have {inputs.sequence_tokens:,}: longer ones are refused; "
            f"--max-seq-len {tokens} says so, and makes page tables smaller"
        )
        advice += _advice_on_windows(inputs, groups)
    return [inputs.in_names(line) for line in advice]


def _advice_on_windows(inputs: PlanInputs, groups: tuple[GroupPlan, ...]) -> list[str]:
    """Windows are kept for as many requests as may run; where they take most of the pool, fewer would leave longer ones room."""
    windows = sum(group.num_bytes for group in groups if group.kind is GroupKind.WINDOW)
    if 2 * windows <= sum(group.num_bytes for group in groups) or inputs.max_running_requests == 1:
        return []
    return [
        f"windows of {inputs.max_running_requests} requests take {shown(windows)} of the pools: a smaller --max-running-requests "
        "leaves more for tokens that are kept"
    ]


def _advice_on_free(inputs: PlanInputs, reserve: Reserve, free_bytes: int) -> list[str]:
    """Source: SGLang's hyperparameter tuning guide; its GB are GiB."""
    stays = f"{shown(free_bytes)} stay free"
    if free_bytes > 10 * GIB:
        if inputs.policy is Policy.PAGE_COUNT:
            flag = f"--memory-ratio {min(0.99, inputs.memory_ratio + 0.01):.2f}"
        else:
            flag = f"--static-fraction {min(0.99, reserve.static_fraction + 0.01):.3f}"
        return [f"{stays}, more than 10 GB: raise the fraction by 0.01, {flag}"]
    if free_bytes < 2 * GIB:
        return [f"{stays}, less than 2 GB: lower --chunked-prefill-size or --cuda-graph-max-bs, or memory will run out"]
    if free_bytes < 3 * GIB:
        return [f"{stays}, less than 3 GB: lower --chunked-prefill-size or --cuda-graph-max-bs if memory runs out"]
    if 5 * GIB <= free_bytes <= 8 * GIB:
        return [f"{stays}, between 5 and 8 GB: good"]
    return []
