"""Tensor parallelism over processes: one group per instance, and a model that transformers' plan shards over it.

transformers shards the weights while it loads them and wraps every sharded layer so that it can also train. For inference the
wrapping is removed: a rank has plain modules over plain local tensors, and one all-reduce behind each row-wise layer, in a group
with our deadline.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from embedded_engine.architectures import Hook
from embedded_engine.dummy_weights import dummy_state
from embedded_engine.model_config import one_line
from embedded_engine.model_files import ModelFiles
from embedded_engine.opaque_calls import sum_over_ranks
from embedded_engine.recurrent_state import cut_gated_delta_nets
from transfer.errors import ConfigError, EngineError
from transfer.out_of_memory import allocating, is_out_of_memory, num_ooms, out_of_memory

DEFAULT_TIMEOUT_S = 30.0


class TensorParallelGroup:
    """The process group of one instance. Made by `init_distributed`; `close()` leaves it."""

    def __init__(self, *, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._is_open = True

    def sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the ranks, in place.

        Raises:
            RuntimeError: A rank is gone, or the deadline passed.
        """
        sum_over_ranks(tensor)

    def share(self, tensor: Tensor) -> None:
        """Replace `tensor` by that of rank 0, in place.

        Raises:
            RuntimeError: A rank is gone, or the deadline passed.
        """
        dist.broadcast(tensor, src=0)

    def gather_columns(self, local: Tensor) -> Tensor | None:
        """Join every rank's [rows, columns] by columns, in rank order, on rank 0; return None on the others."""
        local = local.contiguous()
        if self.rank:
            dist.gather(local, dst=0)
            return None
        parts = [torch.empty_like(local) for _ in range(self.size)]
        dist.gather(local, parts, dst=0)
        return torch.cat(parts, dim=-1)

    def gather_number(self, value: int) -> list[int]:
        """Return the number that each rank gave, in rank order, on every rank.

        Raises:
            EngineError: A rank is gone, or the deadline passed.
        """
        mine = torch.tensor([value], dtype=torch.int64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(found, mine)
        except RuntimeError as error:
            raise EngineError(f"the ranks could not compare their free memory: {one_line(error)}") from error
        return [int(one) for one in found]

    def close(self) -> None:
        """Leave the group without waiting for the others. May be called twice."""
        if self._is_open:
            self._is_open = False
            dist.destroy_process_group()


def init_distributed(
    rank: int,
    world_size: int,
    init_method: str,
    *,
    device: torch.device | str = "cpu",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> TensorParallelGroup:
    """Join the group of one instance, and wait until every rank has joined.

    Args:
        world_size: TP size, at least 2 (a single rank needs no group).
        init_method: Where the ranks meet: ``file:///path`` (a fresh file) or ``tcp://127.0.0.1:port``.
        device: The rank's device: gloo on CPU, NCCL on CUDA.
        timeout_s: Deadline of joining and of each collective.

    Raises:
        ConfigError: A value is wrong.
        EngineError: The ranks did not meet in time.
    """
    if world_size < 2 or not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank} of {world_size}; a group has at least 2 ranks, counted from 0")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s is {timeout_s}; it must be positive")
    if not init_method.startswith(("file://", "tcp://")):
        raise ConfigError(f"init_method is {init_method!r}; must be file:///path or tcp://host:port")
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(f"rank {rank} of {world_size} did not meet the others at {init_method}: {one_line(error)}") from error
    return TensorParallelGroup(rank=rank, size=world_size, device=device)


def load_causal_lm(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    group: TensorParallelGroup | None,
    advice: str,
) -> PreTrainedModel:
    """Load a model's weights through transformers, sharded over `group` if there is one.

    Args:
        files: The checked directory.
        attention: Name of a registered attention function.
        advice: The settings to change if the weights do not fit.

    Raises:
        EngineError: The weights do not fit the configuration: unreadable, missing, or of another shape.
        OutOfMemory: The weights do not fit the memory that is free.
    """
    model_class: type[PreTrainedModel] = getattr(transformers, files.architecture)  # imports the module of the class
    doing = "loading the weights" + ("" if group is None else f" of rank {group.rank} of {group.size}")
    num_ooms_before = num_ooms(device)
    options: dict[str, Any] = {}
    loader: Any = model_class
    if files.dummy_seed is not None:
        options["state_dict"] = dummy_state(model_class, files.config, files.dummy_seed)
    if group is not None:
        loader = _meshed(model_class, files.family.tp_styles, device, group.size)
        options["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=group.size)
    try:
        with _quiet_transformers():
            model, report = loader.from_pretrained(
                files.directory if files.dummy_seed is None else None,
                config=files.config,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, in one line that names the tensor
                **options,
            )
    except Exception as error:  # the loaders below raise errors of any type
        # transformers catches errors while it joins the tensors of experts, and raises an error without their cause.
        if is_out_of_memory(error) or num_ooms(device) > num_ooms_before:
            raise out_of_memory(error, doing, device=device, advice=advice) from error
        raise EngineError(f"{files.directory}: the weights cannot be loaded: {one_line(error)}") from error
    # transformers fills missing tensors with random numbers and only logs it.
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        if report.get(problem):
            first = sorted(map(str, report[problem]))[0]
            raise EngineError(
                f"{files.directory}: the weights do not fit config.json: {len(report[problem])} {problem.replace('_', ' ')}, "
                f"the first is {first}; the directory must hold one complete {files.architecture}"
            )
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with allocating(doing, device=device, advice=advice, num_bytes=num_bytes):
        if group is not None:
            _unwrap(model, group)
            if files.family.hook is Hook.GATED_DELTA_NET:
                cut_gated_delta_nets(model, group.rank, group.size)
        loaded: PreTrainedModel = model.requires_grad_(False).to(device).eval()
    return loaded


@dataclass(frozen=True, slots=True)
class _TensorParallelMesh:
    """The mesh holder of transformers, with tensor parallelism as its only axis."""

    mesh: DeviceMesh

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        return self.mesh


def _meshed(
    model_class: type[PreTrainedModel], tp_styles: Mapping[str, str], device: torch.device, size: int
) -> type[PreTrainedModel]:
    """Return a subclass that loads onto our device, with `tp_styles` in its plan.

    transformers would use the machine's accelerator and an environment variable: CPU ranks could then not run on a machine with a
    GPU, and its sub-groups would have another deadline.
    """

    def init_parallel_plans(self: Any) -> None:
        model_class.init_parallel_plans(self)
        self.tp_plan = {**self.tp_plan, **tp_styles}

    def prepare_distribute_model(
        cls: type[PreTrainedModel], /, distributed_config: DistributedConfig, device_map: Any = None, **of_older: Any
    ) -> tuple[DistributedConfig, torch.device, DeviceMesh | _TensorParallelMesh]:
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("tp",))
        # transformers 5.17 passes a mesh, and takes one.
        return distributed_config, device, mesh if "device_mesh" in of_older else _TensorParallelMesh(mesh)

    body = {
        "prepare_distribute_model": classmethod(prepare_distribute_model),
        "init_parallel_plans": init_parallel_plans,
        "__module__": model_class.__module__,
    }
    return type(model_class.__name__, (model_class,), body)


_LOCAL_STYLES = (None, "colwise", "packed_colwise", "colwise_gather_output", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Styles whose layers need no other rank: the module's own forward over its part of the weights."""


def _unwrap(model: PreTrainedModel, group: TensorParallelGroup) -> None:
    """Replace sharded parameters by this rank's plain tensors, and wrapped layers by plain ones with one collective each."""
    plan: dict[str, str] = model.tp_plan
    local: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        style = plan.get(".".join("*" if part.isdigit() else part for part in name.split(".")))
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                # One plain tensor per shared one: tied embeddings stay tied.
                plain = local.setdefault(id(parameter), nn.Parameter(parameter.to_local(), requires_grad=False))
                module.register_parameter(parameter_name, plain)
        module.__dict__.pop("forward", None)
        if style == "rowwise":
            _reduce_rows(module, group)
        elif style == "moe_tp_experts":
            _reduce_experts(module, group)
        elif style == "embedding_rowwise":
            _reduce_vocabulary(module, group)
        elif style not in _LOCAL_STYLES:
            raise EngineError(f"tensor parallel style of {name} is {style!r}, which the embedded engine does not know")


def _reduce_rows(module: nn.Module, group: TensorParallelGroup) -> None:
    """Sum the partial outputs of a layer whose input features are sharded, then add the bias once."""
    weight: Tensor = module.get_parameter("weight")
    bias = module._parameters.get("bias")

    def forward(hidden: Tensor) -> Tensor:
        partial = functional.linear(hidden, weight)
        group.sum(partial)
        return partial if bias is None else partial + bias

    module.forward = forward


def _reduce_experts(module: Any, group: TensorParallelGroup) -> None:
    """Sum the partial outputs of experts that are sharded like a dense MLP."""
    compute = module.forward  # of the class

    def forward(*routed: Tensor) -> Tensor:
        partial: Tensor = compute(*routed)
        group.sum(partial)
        return partial

    module.forward = forward


def _reduce_vocabulary(module: Any, group: TensorParallelGroup) -> None:
    """Look up a sharded vocabulary: each rank looks its own tokens up, other rows are zero, and the ranks' results are summed."""
    num_rows = module.get_parameter("weight").shape[0]
    first = group.rank * num_rows
    look_up = module.forward  # of the class: some families scale the embeddings
    module.padding_idx = None  # only matters for training, and may be another rank's row

    def forward(token_ids: Tensor) -> Tensor:
        rows = token_ids - first
        is_foreign = (rows < 0) | (rows >= num_rows)
        found: Tensor = look_up(rows.masked_fill(is_foreign, 0))
        found.masked_fill_(is_foreign.unsqueeze(-1), 0)
        group.sum(found)
        return found

    module.forward = forward


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Load without progress bars and warnings on stderr; important problems are checked and raised instead."""
    settings: Any = transformers_logging
    verbosity = settings.get_verbosity()
    has_bars = settings.is_progress_bar_enabled()
    settings.set_verbosity(logging.ERROR)
    settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.set_verbosity(verbosity)
        if has_bars:
            settings.enable_progress_bar()
