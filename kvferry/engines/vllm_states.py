"""Recurrent states in vLLM's blocks: Mamba, gated delta nets and short convolutions.

A block of such a layer has the state after one token: the last inputs of a convolution, and behind them a recurrent state of each
head. vLLM registers the bytes of both, ``int8 [blocks, 1, 1, bytes]``. Tensor parallelism divides heads. The channels of a
convolution are those of several projections, one after the other, so each of these parts is divided by itself:

- gated delta net: queries, keys, values; the first two have the key heads, and values have the value heads;
- Mamba-2: inputs, B, C; inputs have the heads, B and C have groups. With one group, every rank has a copy of it.

Each part is a layer of kvferry's layout. ``VLLM_SSM_CONV_STATE_LAYOUT`` is the order inside a convolution's state. With ``DS``,
all inputs of a channel are adjacent. With ``SD``, the default, all channels of an input are: then each input is a part, because
a GPU copies adjacent elements only.

Source: vLLM 0.32.0 and 0.33.0, ``v1/kv_cache_interface.py``, ``model_executor/layers/mamba/mamba_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from transfer.errors import LayoutError
from transfer.layout import DType, LayerKind, LayerSpec, Range

STATE_SPEC: Final = "MambaSpec"

_OF_HEADS: Final = ("GDN_ATTN", "MAMBA2")
_OF_CHANNELS: Final = ("MAMBA1", "SHORT_CONV")
_WITHOUT_CONVOLUTION: Final = ("LINEAR",)
KNOWN_STATES: Final = (*_OF_HEADS, *_OF_CHANNELS, *_WITHOUT_CONVOLUTION)
_NUM_TENSORS: Final = {"GDN_ATTN": 2, "MAMBA2": 2, "MAMBA1": 2, "SHORT_CONV": 1, "LINEAR": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """What vLLM reports about the state of one layer, on one rank.

    Args:
        kind: Name of its ``mamba_type``, for example ``GDN_ATTN``.
        shapes, dtypes: Of each tensor in a block.
        is_replicated: Whether each tensor parallel rank has the whole state.
        num_draft_blocks: Further blocks of a request, for the states of drafts.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_replicated: bool = False
    num_draft_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """Elements of a state that tensor parallelism divides by head.

    Args:
        tensor: Index of its tensor.
        row: Index of the convolution's input; None means all inputs, or a recurrent state.
        channels: Its range in the tensor's dimension of channels or heads.
        num_heads: Heads on this rank.
        dim: Elements of a head.
        is_group: Whether the heads are the groups of Mamba-2.
    """

    tensor: int
    row: int | None = None
    channels: Range
    num_heads: int
    dim: int
    dtype: DType
    is_group: bool = False

    def view(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the part of all blocks, [blocks, 1, heads, dim], shared and not copied. `tensors` are [blocks, ...]."""
        whole = tensors[self.tensor]
        inside = whole if self.row is None else whole[:, self.row]
        return inside[:, self.channels.begin : self.channels.end].view(len(whole), 1, self.num_heads, self.dim)

    def spec(self, *, tp_size: int, num_groups: int) -> LayerSpec:
        """Return the part in the whole model.

        Args:
            num_groups: Groups of Mamba-2 in the whole model; 0 means unknown.

        Raises:
            LayoutError: Ranks have one group each, and it is unknown whether all have the same.
        """
        total = self.num_heads * tp_size
        if self.is_group and tp_size > 1 and self.num_heads == 1:
            if num_groups not in (1, tp_size):
                raise LayoutError(
                    f"each of {tp_size} ranks has 1 group of B and C, and config.json says {num_groups or 'nothing'}; must be 1 "
                    f"or {tp_size}: use tensor_parallel_size 1"
                )
            total = num_groups
        return LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=total, k_head_dim=self.dim, v_head_dim=0, dtype=self.dtype)


def check_state(name: str, state: StateFacts | None, *, tp_size: int) -> None:
    """Check that a layer's state can be moved. Raise LayoutError with the layer's name if not."""
    if state is None or state.kind not in KNOWN_STATES:
        kind = "unknown" if state is None else state.kind
        raise LayoutError(f"layer {name} keeps a recurrent state of kind {kind}; kvferry moves {', '.join(KNOWN_STATES)}")
    if state.num_draft_blocks:
        raise LayoutError(
            f"layer {name} keeps {state.num_draft_blocks} further states for speculative decoding, which cannot be moved yet; "
            "start vLLM without --speculative-config"
        )
    if len(state.shapes) != _NUM_TENSORS[state.kind]:
        raise LayoutError(
            f"layer {name} keeps {len(state.shapes)} tensors per state of kind {state.kind}; must be {_NUM_TENSORS[state.kind]}: "
            "start vLLM without use_replayssm"
        )
    if state.is_replicated and tp_size > 1:
        raise LayoutError(
            f"layer {name} keeps its whole state on each of {tp_size} ranks; kvferry moves states that ranks divide: use "
            "tensor_parallel_size 1"
        )
    try:
        parts_of(state)
    except LayoutError as error:
        raise LayoutError(f"layer {name}: {error}") from None


def parts_of(state: StateFacts) -> tuple[StatePart, ...]:
    """Return the parts of a state, in the order of the layout. Raise LayoutError if its shapes are not those of its kind."""
    return tuple(_parts(state))


def state_views(name: str, state: StateFacts, cache: Tensor, num_blocks: int) -> Iterator[Tensor]:
    """Yield each part of a layer's state in all blocks, see `StatePart.view`.

    Args:
        cache: The layer's tensor of ``register_kv_caches``.

    Raises:
        LayoutError: The tensor does not have the bytes of the facts.
    """
    sizes = [DType(dtype).num_bytes * math.prod(shape) for dtype, shape in zip(state.dtypes, state.shapes, strict=True)]
    wanted = (num_blocks, 1, 1, sum(sizes))
    if tuple(cache.shape) != wanted or cache.element_size() != 1 or cache.stride(-1) != 1:
        raise LayoutError(
            f"layer {name} has a tensor {cache.dtype} {tuple(cache.shape)}, strides {cache.stride()}; must be bytes {wanted} "
            "[blocks, 1, 1, state], adjacent in each block"
        )
    of_blocks = cache.view(num_blocks, -1).split(sizes, dim=1)
    tensors = [
        one.view(getattr(torch, dtype)).view(num_blocks, *shape)
        for one, dtype, shape in zip(of_blocks, state.dtypes, state.shapes, strict=True)
    ]
    for part in parts_of(state):
        yield part.view(tensors)


def _parts(state: StateFacts) -> Iterator[StatePart]:
    dtypes = [_dtype(dtype) for dtype in state.dtypes]
    *_, recurrent = state.shapes
    if state.kind in _WITHOUT_CONVOLUTION:
        yield _recurrent(state, 0, dtypes[0])
        return
    num_inputs, num_channels, is_dim_first = _convolution(state)
    runs: list[tuple[int, int, bool]] = [(num_channels, num_channels, False)]  # channels, heads, whether they are groups
    if state.kind in _OF_HEADS:
        heads, value_dim, key_dim = recurrent
        values, others = heads * value_dim, num_channels - heads * value_dim
        if others <= 0 or others % (2 * key_dim):
            raise LayoutError(
                f"a state of kind {state.kind} has shapes {state.shapes}; a convolution of {num_channels} channels is not "
                f"{values} of the heads and twice a multiple of {key_dim}"
            )
        is_mamba2 = state.kind == "MAMBA2"
        pair = [(others // 2, others // 2 // key_dim, is_mamba2)] * 2
        runs = [(values, heads, False), *pair] if is_mamba2 else [*pair, (values, heads, False)]
    begin = 0
    for length, heads, is_group in runs:
        for row in (None,) if is_dim_first else range(num_inputs):
            yield StatePart(
                tensor=0,
                row=row,
                channels=Range(begin=begin, end=begin + length),
                num_heads=heads,
                dim=length // heads * (num_inputs if row is None else 1),
                dtype=dtypes[0],
                is_group=is_group,
            )
        begin += length
    if len(state.shapes) > 1:
        yield _recurrent(state, 1, dtypes[1])


def _convolution(state: StateFacts) -> tuple[int, int, bool]:
    """Return the inputs and channels of a convolution's state, and whether channels come first.

    It has one input less than the kernel is wide, mostly 3, and at least a channel for each element of a head.
    """
    first, second = state.shapes[0]
    if first == second:
        raise LayoutError(f"a convolution's state is {state.shapes[0]}; kvferry cannot tell inputs and channels apart")
    return min(first, second), max(first, second), first > second


def _recurrent(state: StateFacts, tensor: int, dtype: DType) -> StatePart:
    heads, *dims = state.shapes[tensor]
    return StatePart(tensor=tensor, channels=Range(begin=0, end=heads), num_heads=heads, dim=math.prod(dims), dtype=dtype)


def _dtype(name: str) -> DType:
    try:
        return DType(name)
    except ValueError:
        raise LayoutError(f"a state has dtype {name}; must be one of {', '.join(DType)}") from None
