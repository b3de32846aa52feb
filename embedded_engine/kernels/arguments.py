"""Arguments of the kernels and their references, with every check that they rely on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transfer.errors import ConfigError, LayoutError
from transfer.layout import TokenOrder

MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that a model computes in."""

POOL_DTYPES = (*MODEL_DTYPES, torch.float8_e4m3fn)
"""Dtypes of a pool that these kernels read; int8 has no scale here, so nothing can be computed from it."""

_INDEX = (torch.int32,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeCall:
    """One attention call of a decode step: one query token per request, over the pages of its own tokens.

    A request without tokens (length 0, or a row outside the page table) attends to nothing, and so does the dummy request, whose
    row holds no slots: the output is zeros.

    Args:
        query: [B, query heads, k_dim] in a model's dtype; query head h reads KV head ``h // (query heads / KV heads)``.
        k: The K buffer of a pool: [pages, page_size, KV heads, k_dim] (NHD) or [pages, KV heads, page_size, k_dim] (HND). Only
            the elements of a head must be adjacent.
        v: Its V buffer, with v_dim for k_dim; None if V is the beginning of K's rows (MLA's latent).
        v_dim: Elements of V in a row of K; only if `v` is None.
        slots: int32 [rows, columns]: the page table, ``slots[row, t]`` is the slot of token t. A slot outside the pool, such as
            the -1 of a token that has passed a window, is skipped.
        rows: int32 [B]: each request's row of `slots`.
        lengths: int32 [B]: each request's tokens, the newest one included, cut at the number of columns.
        scale: Factor of the scores.
        window_tokens: Attend to this many last tokens; 0 means all.
        sinks: [query heads]: a logit per head that takes part in the softmax without a value.
        softcap: Scores become ``softcap * tanh(score / softcap)``.

    Raises:
        LayoutError: A tensor has the wrong shape, dtype, stride or device.
        ConfigError: A number is out of its range.
    """

    query: Tensor
    k: Tensor
    v: Tensor | None
    v_dim: int | None = None
    order: TokenOrder = TokenOrder.NHD
    slots: Tensor
    rows: Tensor
    lengths: Tensor
    scale: float
    window_tokens: int = 0
    sinks: Tensor | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        device = self.query.device
        check_tensor("query", self.query, (None, None, None), MODEL_DTYPES, device)
        num_requests, num_heads, k_dim = self.query.shape
        _check_buffer("k", self.k, device)
        if self.k.shape[3] != k_dim:
            raise LayoutError(f"k has {self.k.shape[3]} elements per head; query has {k_dim}")
        if self.v is not None:
            if self.v_dim is not None:
                raise ConfigError(f"v_dim is {self.v_dim}; where v is given it must be left out")
            _check_buffer("v", self.v, device)
            _check_alike(self.k, self.v)
        elif self.v_dim is None or not 0 < self.v_dim <= k_dim:
            raise ConfigError(f"v_dim is {self.v_dim}; without v it must be in [1, {k_dim}], k's elements per head")
        num_kv_heads = self.k_view.shape[2]
        if num_heads == 0 or num_heads % num_kv_heads:
            raise LayoutError(f"query has {num_heads} heads; must be a multiple of k's {num_kv_heads}")
        check_tensor("slots", self.slots, (None, None), _INDEX, device)
        check_tensor("rows", self.rows, (num_requests,), _INDEX, device)
        check_tensor("lengths", self.lengths, (num_requests,), _INDEX, device)
        if self.sinks is not None:
            check_tensor("sinks", self.sinks, (num_heads,), MODEL_DTYPES, device)
        if not math.isfinite(self.scale):
            raise ConfigError(f"scale is {self.scale}; must be finite")
        if self.window_tokens < 0:
            raise ConfigError(f"window_tokens is {self.window_tokens}; must be 0 (no window) or positive")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ConfigError(f"softcap is {self.softcap}; must be None (no cap) or positive and finite")

    @property
    def k_view(self) -> Tensor:
        """View of K as [pages, page_size, KV heads, k_dim] in either order."""
        return _token_major(self.k, self.order)

    @property
    def v_view(self) -> Tensor:
        """View of V as [pages, page_size, KV heads, v_dim] in either order; a part of K if there is no V."""
        return self.k_view[..., : self.v_dim] if self.v is None else _token_major(self.v, self.order)

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (*self.query.shape[:2], self.v_view.shape[3])

    @property
    def group_heads(self) -> int:
        """Query heads that share a KV head."""
        return self.query.shape[1] // self.k_view.shape[2]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteCall:
    """New K and V rows, one per request, for the slots of a pool.

    Args:
        k, v: The pool's buffers, as in `DecodeCall`; `v` is None if the layer has none.
        new_k: [B, KV heads, k_dim] in a model's dtype, elements of a head adjacent.
        new_v: [B, KV heads, v_dim], likewise; None if `v` is.
        slots: int32 [B], distinct; a slot outside the pool (-1: a request that pads the batch) is skipped.

    Raises:
        LayoutError: A tensor has the wrong shape, dtype, stride or device.
    """

    k: Tensor
    v: Tensor | None
    new_k: Tensor
    new_v: Tensor | None
    slots: Tensor
    order: TokenOrder = TokenOrder.NHD

    def __post_init__(self) -> None:
        if (self.v is None) != (self.new_v is None):
            has = ("no v, but new_v", "v, but no new_v")[self.new_v is None]
            raise LayoutError(f"{has} is given; must be both or neither")
        device = self.k.device
        check_tensor("slots", self.slots, (None,), _INDEX, device)
        for name, buffer, new in (("k", self.k, self.new_k), ("v", self.v, self.new_v)):
            if buffer is not None and new is not None:
                _check_buffer(name, buffer, device)
                shape = (len(self.slots), *_token_major(buffer, self.order).shape[2:])
                check_tensor(f"new_{name}", new, shape, MODEL_DTYPES, device)
        if self.v is not None:
            _check_alike(self.k, self.v)

    @property
    def k_view(self) -> Tensor:
        """View of K as [pages, page_size, KV heads, k_dim] in either order."""
        return _token_major(self.k, self.order)

    @property
    def v_view(self) -> Tensor | None:
        """View of V as [pages, page_size, KV heads, v_dim] in either order."""
        return None if self.v is None else _token_major(self.v, self.order)


def check_tensor(
    name: str, tensor: Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Refuse a tensor that is not of this shape, dtype and device, or whose last elements are not adjacent.

    Args:
        shape: Its sizes; None means any size.

    Raises:
        LayoutError: The message names the tensor and the rule.
    """
    has_shape = len(shape) == tensor.dim() and all(size in (None, found) for size, found in zip(shape, tensor.shape, strict=True))
    is_adjacent = has_shape and (tensor.shape[-1] == 1 or tensor.stride(-1) == 1)
    if not is_adjacent or tensor.dtype not in dtypes or tensor.device != device:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        allowed = " or ".join(map(str, dtypes))
        raise LayoutError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, stride {tensor.stride()}, on {tensor.device}; "
            f"must be {allowed} [{sizes}] on {device}, its last elements adjacent"
        )


def _token_major(buffer: Tensor, order: TokenOrder) -> Tensor:
    return buffer if order is TokenOrder.NHD else buffer.transpose(1, 2)


def _check_buffer(name: str, buffer: Tensor, device: torch.device) -> None:
    check_tensor(name, buffer, (None, None, None, None), POOL_DTYPES, device)
    if not buffer.numel():
        raise LayoutError(f"{name} is {tuple(buffer.shape)}; must not be empty")


def _check_alike(k: Tensor, v: Tensor) -> None:
    if v.dtype is not k.dtype or v.shape[:3] != k.shape[:3]:
        rule = f"but for the last dimension it must be as k, {k.dtype} {tuple(k.shape)}"
        raise LayoutError(f"v is {v.dtype} {tuple(v.shape)}; {rule}")
