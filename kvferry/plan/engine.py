"""Whether the embedded engine would run what is planned: the plan knows more models and cuts than that engine does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embedded_engine.architectures import ARCHITECTURES, check_cut
from planner.plan import PlanInputs
from transfer.errors import ConfigError


def advice_on_embedded_engine(inputs: PlanInputs, config: Mapping[str, Any]) -> list[str]:
    """One line where it would refuse the model or the cut; none where it would not, as far as ``config.json`` tells."""
    reasons = _refusals(inputs, config)
    if not reasons:
        return []
    return [f"the embedded engine would refuse this, an engine of your own may not: {'; '.join(reasons)}"]


def _refusals(inputs: PlanInputs, config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures")
    if not named:
        return ["config.json names no architecture"]
    if named[0] not in ARCHITECTURES:
        return [f"it does not run {named[0]}"]
    reasons = []
    if inputs.model.quantisation is not None:
        reasons.append("its weights must be plain ones, not quantised")
    if inputs.pp_size > 1 or inputs.has_dp_attention:
        reasons.append("it is cut by --tp alone")
    try:
        check_cut(named[0], inputs.tp_size, config)
    except ConfigError as error:
        reasons.append(str(error).replace("tp_size", "--tp"))
    return reasons
