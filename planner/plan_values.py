"""Values of a memory plan: lines that add up to the device, the pool of each layer group, the workspaces."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from planner.plan_inputs import PlanInputs
from planner.workspace import Workspace
from transfer.errors import ConfigError
from transfer.layer_groups import GroupKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """One line of the plan.

    Args:
        name: Key for `compare_with_real` and for metrics.
        formula: How the size came about.
        inside: Name of the line that contains this one; empty for lines that add up to the device.
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
        layers: Its layers on this stage, as global numbers.
        cell_bytes: Bytes of one token over those layers; of a state group, of one request.
        num_tokens: Tokens that its pages hold; of a state group, requests.
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
class MemoryPlan:
    """The memory of a rank's device. Made by `make_plan`.

    Args:
        static_fraction: Share of the device for weights and KV; with the policy page-count, the share that its reserve leaves.
        reserved_bytes: Bytes that weights and KV leave free.
        cell_bytes: KV of one token on this rank, in the group that limits the number of tokens.
        max_total_tokens, num_pages: Tokens and pages of that group.
        groups: The pools, in the order of `transfer.layer_groups.layer_groups`.
        free_bytes: Expected free memory of a running node: the reserve and the memory left over by the pools, minus that of CUDA
            graphs and compiled steps.
        lines: All lines; those that are not inside another one add up to the device.
        advice: Settings that could be better.
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
    workspaces: tuple[Workspace, ...]
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
        """Pages of each group's pool, for `KVPool`."""
        return tuple(group.num_pages for group in self.groups)

    def planned_bytes(self, name: str) -> int:
        """Return the size of the line `name`, of all pools together (``pool``), or of the free memory (``free``).

        Raises:
            ConfigError: There is no such line.
        """
        sizes = {line.name: line.num_bytes for line in self.lines} | {"pool": self.pool_bytes, "free": self.free_bytes}
        if name not in sizes:
            raise ConfigError(f"line is {name!r}; must be one of {', '.join(sizes)}")
        return sizes[name]

    def as_json(self) -> dict[str, object]:
        """Return the plan in plain numbers, texts, lists and objects."""
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
            "torch_compile_max_bs": inputs.torch_compile_max_bs,
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
            "groups": [_as_json(group) for group in self.groups],
            "workspaces": [_as_json(one) | {"allocated": one.is_allocated} for one in self.workspaces],
            "lines": [_as_json(line) for line in self.lines],
            "advice": list(self.advice),
        }


def _as_json(value: GroupPlan | Workspace | PlanLine) -> dict[str, Any]:
    """Return the fields of a value. Names in JSON have no ``num_`` or ``is_`` where that is unambiguous."""
    names = {"num_bytes": "bytes", "is_allocated": "allocated"}
    plain = {name: list(one) if isinstance(one, tuple) else one for name, one in asdict(value).items()}
    return {names.get(name, name): str(one) if isinstance(one, str) else one for name, one in plain.items()}
