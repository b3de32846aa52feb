"""The memory that a plan leaves free for activations, CUDA graphs and libraries, by one of two published policies.

Sources: SGLang, ``server_args._handle_gpu_memory_settings`` and ``adjust_mem_fraction_for_vlm``; mini-sglang,
``engine._determine_num_pages``. All of SGLang's figures are MB of 2**20 bytes. SGLang has no separate estimate for compiled
steps: its reserve includes their workspace. Here, the estimate is a part of the reserve, as large as the part for the CUDA graphs
of the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.model_parts import VisionSizes
from planner.plan_inputs import MB, SPECULATIVE_MB, UNKNOWN_FRACTION, PlanInputs, Policy
from transfer.errors import MemoryPlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """The memory that stays free.

    Args:
        static_fraction: Share of the device that weights and KV may take.
        num_bytes: The rest of the device.
        cuda_graph_bytes: Part of it that CUDA graphs are expected to take.
        inductor_bytes: Further part of it that steps compiled by torch.compile (Inductor) are expected to take.
    """

    static_fraction: float
    num_bytes: int
    formula: str
    cuda_graph_bytes: int
    cuda_graph_formula: str
    inductor_bytes: int
    inductor_formula: str


def make_reserve(inputs: PlanInputs) -> Reserve:
    """Return the reserve by the policy of the inputs.

    Raises:
        MemoryPlanError: The heuristic asks for more than the device has.
    """
    total = inputs.total_bytes
    if inputs.policy is Policy.PAGE_COUNT:
        free = inputs.free_before_bytes
        num_bytes = free - int(inputs.memory_ratio * free)
        fraction = round((total - num_bytes) / total, 3)
        formula = f"free before x (1 - memory ratio {inputs.memory_ratio})"
    else:
        fraction, how = _static_fraction(inputs)
        num_bytes = total - int(total * fraction)
        formula = f"device x (1 - static fraction {fraction:.4g}): {how}"
    graph_mb, graph_formula = _cuda_graph_mb(inputs)
    graph_bytes = min(num_bytes, int(graph_mb * MB))
    return Reserve(
        static_fraction=fraction,
        num_bytes=num_bytes,
        formula=formula,
        cuda_graph_bytes=graph_bytes,
        cuda_graph_formula=f"{graph_formula} MB",
        inductor_bytes=min(num_bytes - graph_bytes, 2 * inputs.largest_compiled_bs * MB),
        inductor_formula=f"2 x {inputs.largest_compiled_bs} MB, an estimate for steps compiled by torch.compile",
    )


def _static_fraction(inputs: PlanInputs) -> tuple[float, str]:
    if inputs.static_fraction is not None:
        return inputs.static_fraction, "as given"
    if inputs.is_cpu:
        return UNKNOWN_FRACTION, "on a CPU"
    if inputs.device_bytes is None:
        return UNKNOWN_FRACTION, "the device's size is unknown"
    total_mb = inputs.device_bytes / MB
    graph_mb, graph_formula = _cuda_graph_mb(inputs)
    step_tokens = max(inputs.chunk_tokens, 2048)
    reserved = 512 + 1.5 * step_tokens + graph_mb + 1024 * inputs.tp_size * inputs.pp_size / 8
    formula = f"512 + 1.5 x {step_tokens} + {graph_formula} + 1024 x {inputs.tp_size} x {inputs.pp_size} / 8"
    if total_mb > 60 * 1024 and reserved < 10 * 1024:
        reserved = 10 * 1024
        formula = f"at least 10 x 1024 above 60 x 1024 ({formula})"
    draft_mb = SPECULATIVE_MB[inputs.speculative.lower()] if inputs.speculative is not None else 0
    if draft_mb:
        reserved += draft_mb
        formula += f" + {draft_mb} for {inputs.speculative}, its draft's KV included"
    fraction = round((total_mb - reserved) / total_mb, 3)
    formula += f" = {reserved:,.0f} of {total_mb:,.0f} MB"
    if inputs.model.vision is not None:
        factor = _vision_factor(inputs.model.vision)
        fraction *= factor
        formula += f", then x {factor:.4f} for the vision tower"
    if fraction <= 0:
        help_text = "a smaller --chunked-prefill-size or --cuda-graph-max-bs, or --static-fraction, would help"
        raise MemoryPlanError(
            f"the device has {total_mb:,.0f} MB, and {reserved:,.0f} MB of it are to stay free ({formula}); "
            f"{inputs.in_names(help_text)}"
        )
    return fraction, formula


def _cuda_graph_mb(inputs: PlanInputs) -> tuple[float, str]:
    batch = inputs.cuda_graph_max_bs
    size, formula = 2.0 * batch, f"2 x {batch}"
    if inputs.has_dp_attention:
        size += 3 * batch * inputs.dp_size
        formula += f" + 3 x {batch} x {inputs.dp_size}"
        if batch > 300:
            size += 1.5 * batch * inputs.dp_size
            formula += f" + 1.5 x {batch} x {inputs.dp_size}"
    return size, formula


def _vision_factor(vision: VisionSizes) -> float:
    """Return 0.95 for a tower of the size of ViT-L/14, a tenth less for each further such size; from 0.8 to 1.05 of 0.95."""
    size = vision.num_layers * vision.hidden_size**2 / (24 * 1024**2)
    return 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (size - 1.0)))
