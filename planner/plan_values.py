"""What a memory plan consists of: lines that add up to the device, the pool of each layer group, the workspaces."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plan_inputs import PlanInputs
from planner.workspace import Strategy
from transfer.errors import ConfigError
from transfer.layer_groups import GroupKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """One line of the plan.

    Args:
        name: Names it; `compare_with_real` and metrics go by it.
        num_bytes: Its size.
        formula: How the size came about.
        inside: The line that it is part of; empty for those that add up to the device.
    """

    name: str
    num_bytes: int
    formula: str
    inside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """The pool of one layer group.

    Args:
        name: The group's name, unique in a model.
        kind: For how long it keeps tokens.
        layers: Its layers on this stage, as global numbers.
        cell_bytes: Bytes of one token over those layers; of a state group, of one request.
        num_tokens: Tokens that its pages hold; of a state group, requests.
        num_pages: Its pages.
        page_size: Tokens per page.
        num_bytes: Bytes of all its pages.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    cell_bytes: int
    num_tokens: int
    num_pages: int
    page_size: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspacePlan:
    """A workspace as it comes out.

    Args:
        name: Its name.
        num_bytes: What it takes: at start, or later where it is lazy; 0 where nothing needs it.
        strategy: When it is allocated.
        is_allocated: Whether it is allocated at start.
        reason: How the size came about, or why it is not there.
    """

    name: str
    num_bytes: int
    strategy: Strategy
    is_allocated: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a rank's device will hold. Made by `make_plan`.

    Args:
        inputs: What it was made from.
        static_fraction: Share of the device for weights and KV; with the policy page-count, what its reserve comes to.
        reserved_bytes: What stays free of weights and KV.
        weights_bytes: This rank's weights.
        cell_bytes: KV of one token on this rank, of the group that decides how many tokens fit.
        max_total_tokens: Tokens that the pool holds.
        num_pages: Pages of the group that decides how many tokens fit.
        page_table_bytes: All page tables.
        groups: The pools, in the order of `transfer.layer_groups.layer_groups`.
        workspaces: The buffers of the engine's modes.
        free_bytes: What is expected to be free once the node runs: the reserve and what the pools leave over, less CUDA graphs.
        lines: Every line; those that are inside no other one add up to the device.
        advice: What could be set better.
    """

    inputs: PlanInputs
    static_fraction: float
    reserved_bytes: int
    weights_bytes: int
    cell_bytes: int
    max_total_tokens: int
    num_pages: int
    page_table_bytes: int
    groups: tuple[GroupPlan, ...]
    workspaces: tuple[WorkspacePlan, ...]
    free_bytes: int
    lines: tuple[PlanLine, ...]
    advice: tuple[str, ...]

    @property
    def device_bytes(self) -> int:
        return self.inputs.total_bytes

    @property
    def pool_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups)

    @property
    def group_pages(self) -> tuple[int, ...]:
        """Pages of each group's pool: what `KVPool` is made with."""
        return tuple(group.num_pages for group in self.groups)

    def planned_bytes(self, name: str) -> int:
        """Size of the line `name`, or of all pools together (``pool``), or of what stays free (``free``).

        Raises:
            ConfigError: There is no such line.
        """
        sizes = {line.name: line.num_bytes for line in self.lines} | {"pool": self.pool_bytes, "free": self.free_bytes}
        if name not in sizes:
            raise ConfigError(f"line is {name!r}; must be one of {', '.join(sizes)}")
        return sizes[name]

    def as_json(self) -> dict[str, object]:
        """The plan in plain numbers, texts, lists and objects."""
        inputs = self.inputs
        return {
            "architecture": inputs.model.architecture,
            "num_params": inputs.model.num_params,
            "role": str(inputs.role),
            "policy": str(inputs.policy),
            "tp_size": inputs.tp_size,
            "pp_size": inputs.pp_size,
            "pp_rank": inputs.pp_rank,
            "dp_size": inputs.dp_size,
            "chunked_prefill_size": inputs.chunk_tokens,
            "tokens_in_flight": inputs.most_tokens_in_flight,
            "cuda_graph_max_bs": inputs.cuda_graph_max_bs,
            "max_running_requests": inputs.max_running_requests,
            "max_seq_len": inputs.sequence_tokens,
            "device_bytes": self.device_bytes,
            "free_before_bytes": inputs.free_before_bytes,
            "static_fraction": self.static_fraction,
            "reserved_bytes": self.reserved_bytes,
            "weights_bytes": self.weights_bytes,
            "cell_bytes": self.cell_bytes,
            "max_total_tokens": self.max_total_tokens,
            "num_pages": self.num_pages,
            "page_size": inputs.page_size,
            "pool_bytes": self.pool_bytes,
            "page_table_bytes": self.page_table_bytes,
            "staging_bytes": inputs.staging_bytes,
            "ring_bytes": inputs.ring_bytes,
            "free_bytes": self.free_bytes,
            "groups": [
                {
                    "name": group.name,
                    "kind": str(group.kind),
                    "layers": list(group.layers),
                    "cell_bytes": group.cell_bytes,
                    "num_tokens": group.num_tokens,
                    "num_pages": group.num_pages,
                    "page_size": group.page_size,
                    "bytes": group.num_bytes,
                }
                for group in self.groups
            ],
            "workspaces": [
                {
                    "name": one.name,
                    "bytes": one.num_bytes,
                    "strategy": str(one.strategy),
                    "allocated": one.is_allocated,
                    "reason": one.reason,
                }
                for one in self.workspaces
            ],
            "lines": [
                {"name": line.name, "bytes": line.num_bytes, "formula": line.formula, "inside": line.inside}
                for line in self.lines
            ],
            "advice": list(self.advice),
        }
