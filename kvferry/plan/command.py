"""`kvferry plan`: plan the memory of a node's devices without a device, weights or torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from embedded_engine.architectures import ARCHITECTURES, check_can_speculate, check_cut
from kvferry.plan.device import Device
from kvferry.plan.options import PlanOptions, device_for, make_plan_for
from kvferry.plan.view import print_comparison, print_plan
from node_runtime import exit_codes
from planner.model_directory import ModelDirectory, read_config, read_model_directory
from planner.plan import MemoryPlan, PlanInputs
from transfer.errors import ConfigError, MemoryPlanError, TransferError
from transfer.layer_groups import GroupKind
from transfer.layout import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """An option that a plan can count with, although no engine of this repository runs it.

    Args:
        name: The option, as the output names it.
        is_used: Whether a plan has it.
        reason: The state of the embedded engine, and of vLLM and SGLang with the connectors.
    """

    name: str
    is_used: Callable[[PlanInputs], bool]
    reason: str


_NOT_RUN: Final = (
    _Option(
        name="--dp-attention",
        is_used=lambda inputs: inputs.has_dp_attention,
        reason="the embedded engine is sharded by --tp alone; the backend for SGLang accepts it, but no test runs it",
    ),
    _Option(
        name="--speculative",
        is_used=lambda inputs: inputs.speculative is not None and inputs.speculative.lower() not in ("ngram", "standalone"),
        reason="the embedded engine has ngram and standalone; the connectors for vLLM and SGLang refuse all of them",
    ),
    _Option(
        name="a vision model",
        is_used=lambda inputs: inputs.model.vision is not None,
        reason="the embedded engine takes no images; the connector for vLLM accepts requests with images, but no test runs one",
    ),
)


def run_plan(model: Path, options: PlanOptions, *, is_json: bool, png: Path | None, compare: str | None) -> int:
    """Make the plan, print it, and return the exit code.

    Raises:
        TransferError: The model, a flag or the plan is wrong; nothing has been printed.
    """
    directory = read_model_directory(model)
    config = read_config(model)
    asked = [("as given", options)]
    if compare is not None:
        asked.append((compare, options.changed(compare)))
    plans = [(name, *_plan(directory, config, one, name if one is not options else "")) for name, one in asked]
    _, plan, device = plans[0]
    if png is not None:
        from kvferry.plan.view import write_picture

        write_picture([(name if len(plans) > 1 else "", one) for name, one, _ in plans], png)
    if is_json:
        content = plan.as_json() | {"model": str(model), "device": device.text}
        if compare is not None:
            content = {"plan": content, "compared": plans[1][1].as_json() | {"change": compare}}
        print(json.dumps(content, indent=2))
        return exit_codes.OK
    console = Console(highlight=False)
    if compare is None:
        print_plan(console, plan, device)
    else:
        print_comparison(console, plan, plans[1][1], compare)
    return exit_codes.OK


def _plan(directory: ModelDirectory, config: Mapping[str, Any], options: PlanOptions, change: str) -> tuple[MemoryPlan, Device]:
    """Return the plan and its device. Errors name the change that caused them, and a device that was detected."""
    device = device_for(options)
    try:
        plan = make_plan_for(options, directory, device)
    except TransferError as error:
        where = f"with {change}: " if change else ""
        is_detected = isinstance(error, MemoryPlanError) and options.device_memory is None
        raise type(error)(f"{where}{error}" + (f" (device: {device.text})" if is_detected else "")) from error
    return replace(plan, advice=(*plan.advice, *_advice_on_engines(plan.inputs, config))), device


def _advice_on_engines(inputs: PlanInputs, config: Mapping[str, Any]) -> list[str]:
    """Return a line for each option that no engine of this repository runs, and one for all that the embedded engine refuses.

    The plan supports more options and models, for engines of other authors.
    """
    used = [option for option in _NOT_RUN if option.is_used(inputs)]
    advice = [f"no engine of this repository runs {option.name}: {option.reason}" for option in used]
    reasons = _refusals(inputs, config)
    if reasons:
        advice.append(f"the embedded engine would refuse this, an engine of your own may not: {'; '.join(reasons)}")
    return advice


def _refusals(inputs: PlanInputs, config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures")
    if not named:
        return ["config.json names no architecture"]
    if named[0] not in ARCHITECTURES:
        return [f"it does not run {named[0]}"]
    reasons = list[str]()
    if inputs.model.quantised_bits:
        reasons.append("its weights must be plain ones, not quantised")
    if inputs.pp_size > 1:
        reasons.append("it is sharded by --tp alone")
    if inputs.kv_dtype is DType.INT8:
        reasons.append("its pool must have a floating point dtype")
    if inputs.has_host_pages and inputs.groups[0].kind is not GroupKind.FULL:
        reasons.append("it offloads full attention only, and the model has none")
    try:
        check_cut(named[0], inputs.tp_size, config)
        if inputs.speculative is not None:
            check_can_speculate(named[0])
    except ConfigError as error:
        reasons.append(
            str(error).replace("parallel.tp_size (--tp)", "--tp").replace("speculative.method is set", "--speculative is given")
        )
    return reasons
