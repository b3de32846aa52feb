"""The memory plan of an embedded engine's rank: made before the weights are loaded, and once more when their size is known."""

from __future__ import annotations

from dataclasses import replace

import structlog
import torch

from embedded_engine.engine import LoadedWeights
from embedded_engine.model_files import ModelFiles
from embedded_engine.tensor_parallel import TensorParallelGroup
from planner.model_directory import read_model_directory
from planner.node_plan import DeviceMemory, node_plan_inputs
from planner.plan import MemoryPlan, agree_on_free_bytes, compare_with_real, make_plan
from transfer.config import NodeConfig
from transfer.layout import Shard

log = structlog.get_logger(__name__)


class MemoryPlanner:
    """Plans one rank's memory, together with the other ranks of its group.

    Made before anything is loaded, it refuses a model that cannot fit. Called with the loaded weights, it says how many pages
    there are.

    Args:
        config: The node's settings.
        files: The model directory, checked.
        shard: The rank's cut.
        device: The rank's device.
        group: The rank's TP group; None for TP 1.
        loaded_bytes: Bytes of the rank's weights where they are on the device already; 0 where they are still to come.

    Raises:
        ConfigError: The settings do not go together with the model.
        MemoryPlanError: Not one page of KV would fit, or the ranks' devices differ by too much.
    """

    def __init__(
        self,
        config: NodeConfig,
        files: ModelFiles,
        shard: Shard,
        device: torch.device,
        group: TensorParallelGroup | None,
        *,
        loaded_bytes: int = 0,
    ) -> None:
        self._config = config
        self._shard = shard
        self._device = device
        self._group = group
        model = read_model_directory(config.model)
        # What config.json says of the dtype can be wrong or missing; the engine goes by the weights.
        self._model = replace(model, shape=replace(model.shape, dtype=files.stored_dtype))
        self.warnings: list[str] = []
        self.plan: MemoryPlan = make_plan(node_plan_inputs(config, self._model, shard, self._measure_before(loaded_bytes)))

    def __call__(self, weights: LoadedWeights) -> tuple[int, ...]:
        """Pages of each layer group, the same on every rank, with the weights where they will stay."""
        _of_all_ranks(0, self._group)  # a rank that still loads would look as if it had more room than it will have
        before = self._measure_before(weights.num_bytes)
        self.warnings = compare_with_real(self.plan, {"weights": weights.num_bytes})
        for difference in self.warnings:
            log.warning("weights_not_as_estimated", difference=difference)
        inputs = node_plan_inputs(self._config, self._model, self._shard, before, weights_bytes=weights.num_bytes)
        self.plan = make_plan(inputs)
        # The leader counts one number of pages for all ranks, and their devices may differ by a little.
        least = min(_of_all_ranks(self.plan.max_total_tokens, self._group))
        if least < self.plan.max_total_tokens:
            self.plan = make_plan(replace(inputs, max_total_tokens=least))
        return self.plan.group_pages

    def _measure_before(self, weights_bytes: int) -> DeviceMemory:
        """What there was before the weights, which are loaded, were."""
        now = self._measure()
        free_bytes = now.free_bytes + weights_bytes
        total_bytes = max(now.total_bytes, free_bytes) if now.is_cpu else now.total_bytes
        return replace(now, total_bytes=total_bytes, free_bytes=min(total_bytes, free_bytes))

    def _measure(self) -> DeviceMemory:
        """What this rank's device has, and the least that is free on any rank's."""
        if self._device.type != "cuda":
            host = DeviceMemory.of_host(1 if self._group is None else self._group.size)
            part = min(_of_all_ranks(host.total_bytes, self._group))  # of one host, measured at slightly different times
            return replace(host, total_bytes=part, free_bytes=part)
        free, total = torch.cuda.mem_get_info(self._device)
        agreed = agree_on_free_bytes(dict(enumerate(_of_all_ranks(free, self._group))))
        return DeviceMemory(total_bytes=total, free_bytes=max(1, agreed), is_cpu=False)


def _of_all_ranks(value: int, group: TensorParallelGroup | None) -> list[int]:
    """What each rank has given, in rank order."""
    return [value] if group is None else group.gather_number(value)
