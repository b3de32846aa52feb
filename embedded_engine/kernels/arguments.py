"""What the kernels and their references are called with, and every check that they rely on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from transfer.errors import ConfigError, LayoutError
from transfer.layout import TokenOrder

MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What a model computes in."""

POOL_DTYPES = (*MODEL_DTYPES, torch.float8_e4m3fn)
"""What a pool may hold for these kernels; int8 carries no scale here, so nothing can be computed from it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeCall:
    """One attention call of a decode step: one query token per request, over the pages of its own tokens.

    A request without tokens (length 0, or a row outside the page table) attends to nothing, and so does the dummy request whose
    row holds no slots: its output is zeros.

    Args:
        query: [B, query heads, k_dim] in a model's dtype; query head h reads KV head ``h // (query heads / KV heads)``.
        k: The K buffer of a pool: [pages, page_size, KV heads, k_dim] (NHD) or [pages, KV heads, page_size, k_dim] (HND). Only
            the elements of a head must be adjacent.
        v: Its V buffer, with v_dim for k_dim; None where V is the beginning of K's own rows (MLA's latent).
        v_dim: Elements of V in a row of K; only where `v` is None.
        order: How both buffers lie.
        slots: int32 [rows, columns]: the page table, ``slots[row, t]`` is the slot of token t. A slot outside the pool, such as
            the -1 of a token that has passed a window, is attended to by nobody.
        rows: int32 [B]: each request's row of `slots`.
        lengths: int32 [B]: each request's tokens, the newest one included; beyond the columns they are cut off.
        scale: Factor of the scores.
        window_tokens: Attend to the last so many tokens; 0 to all.
        sinks: [query heads]: a logit per head that takes part in the softmax without a value.
        softcap: Scores become ``softcap * tanh(score / softcap)``.
        out: [B, query heads, v_dim] in the query's dtype, where the result is to be put; None allocates it.

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
    out: Tensor | None = None

    def __post_init__(self) -> None:
        query, device = self.query, self.query.device
        _check(query.dim() == 3, "query", query, "must be [B, query heads, k_dim]")
        _check(query.dtype in MODEL_DTYPES and query.stride(2) == 1, "query", query, "must be floating point, elements adjacent")
        _check_buffer("k", self.k, device)
        if self.k.shape[3] != query.shape[2]:
            raise LayoutError(f"k has {self.k.shape[3]} elements per head; query has {query.shape[2]}")
        self._check_v()
        num_kv_heads = self.k_view.shape[2]
        if query.shape[1] == 0 or query.shape[1] % num_kv_heads:
            raise LayoutError(f"query has {query.shape[1]} heads; must be a multiple of k's {num_kv_heads}")
        _check(self.slots.dim() == 2 and self.slots.dtype is torch.int32, "slots", self.slots, "must be int32 [rows, columns]")
        _check(self.slots.stride(1) == 1 and self.slots.device == device, "slots", self.slots, f"must be on {device}, row by row")
        for name, tensor in (("rows", self.rows), ("lengths", self.lengths)):
            is_fine = tensor.dtype is torch.int32 and tensor.shape == query.shape[:1]
            _check(is_fine, name, tensor, f"must be int32 [{query.shape[0]}]")
            _check(tensor.is_contiguous() and tensor.device == device, name, tensor, f"must be contiguous on {device}")
        if self.sinks is not None:
            is_fine = self.sinks.dtype in MODEL_DTYPES and self.sinks.shape == query.shape[1:2]
            _check(is_fine, "sinks", self.sinks, f"must be floating point [{query.shape[1]}]")
            _check(
                self.sinks.is_contiguous() and self.sinks.device == device,
                "sinks",
                self.sinks,
                f"must be contiguous on {device}",
            )
        if self.out is not None:
            is_fine = self.out.dtype is query.dtype and tuple(self.out.shape) == self.out_shape
            _check(is_fine, "out", self.out, f"must be {query.dtype} {self.out_shape}")
            _check(self.out.stride(2) == 1 and self.out.device == device, "out", self.out, f"must be on {device}, head by head")
        self._check_numbers()

    @property
    def k_view(self) -> Tensor:
        """[pages, page_size, KV heads, k_dim], whatever the order; shared."""
        return _token_major(self.k, self.order)

    @property
    def v_view(self) -> Tensor:
        """[pages, page_size, KV heads, v_dim], whatever the order; shared, and a part of K where there is no V."""
        return self.k_view[..., : self.v_dim] if self.v is None else _token_major(self.v, self.order)

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (*self.query.shape[:2], self.v_view.shape[3])

    @property
    def group_heads(self) -> int:
        """Query heads that share a KV head."""
        return self.query.shape[1] // self.k_view.shape[2]

    def _check_v(self) -> None:
        if self.v is None:
            if self.v_dim is None or not 0 < self.v_dim <= self.k.shape[3]:
                raise ConfigError(f"v_dim is {self.v_dim}; without v it must be in [1, {self.k.shape[3]}], k's elements per head")
            return
        if self.v_dim is not None:
            raise ConfigError(f"v_dim is {self.v_dim}; where v is given it must be left out")
        _check_buffer("v", self.v, self.query.device)
        _check_alike(self.k, self.v)

    def _check_numbers(self) -> None:
        if not math.isfinite(self.scale):
            raise ConfigError(f"scale is {self.scale}; must be finite")
        if self.window_tokens < 0:
            raise ConfigError(f"window_tokens is {self.window_tokens}; must be 0 (no window) or positive")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ConfigError(f"softcap is {self.softcap}; must be None (no cap) or positive and finite")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteCall:
    """New K and V rows, one per request, for the slots of a pool.

    Args:
        k: The pool's K buffer, as in `DecodeCall`.
        v: Its V buffer; None where the layer has none.
        new_k: [B, KV heads, k_dim] in a model's dtype, elements of a head adjacent.
        new_v: [B, KV heads, v_dim], likewise; None where `v` is.
        slots: int32 [B], distinct; a slot outside the pool (-1: a request that pads the batch) is skipped.
        order: How both buffers lie.

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
        device, num_rows = self.k.device, self.slots.shape[0] if self.slots.dim() == 1 else -1
        _check(num_rows >= 0 and self.slots.dtype is torch.int32, "slots", self.slots, "must be int32 [B]")
        _check(self.slots.is_contiguous() and self.slots.device == device, "slots", self.slots, f"must be contiguous on {device}")
        for name, buffer, new in (("k", self.k, self.new_k), ("v", self.v, self.new_v)):
            if buffer is None or new is None:
                continue
            _check_buffer(name, buffer, device)
            view = _token_major(buffer, self.order)
            shape = (num_rows, *view.shape[2:])
            is_fine = new.dtype in MODEL_DTYPES and tuple(new.shape) == shape
            _check(is_fine, f"new_{name}", new, f"must be floating point {shape}")
            _check(new.stride(2) == 1 and new.device == device, f"new_{name}", new, f"must be on {device}, head by head")
        if self.v is not None:
            _check_alike(self.k, self.v)

    @property
    def k_view(self) -> Tensor:
        """[pages, page_size, KV heads, k_dim], whatever the order; shared."""
        return _token_major(self.k, self.order)

    @property
    def v_view(self) -> Tensor | None:
        """[pages, page_size, KV heads, v_dim], whatever the order; shared."""
        return None if self.v is None else _token_major(self.v, self.order)


def _token_major(buffer: Tensor, order: TokenOrder) -> Tensor:
    return buffer if order is TokenOrder.NHD else buffer.transpose(1, 2)


def _check_buffer(name: str, buffer: Tensor, device: torch.device) -> None:
    _check(buffer.dim() == 4 and buffer.numel() > 0, name, buffer, "must have 4 dimensions and be not empty")
    _check(buffer.dtype in POOL_DTYPES, name, buffer, f"must be one of {', '.join(str(dtype) for dtype in POOL_DTYPES)}")
    _check(buffer.stride(3) == 1 and buffer.device == device, name, buffer, f"must be on {device}, a head's elements adjacent")


def _check_alike(k: Tensor, v: Tensor) -> None:
    if v.dtype is not k.dtype or v.shape[:3] != k.shape[:3]:
        rule = f"but for the last dimension it must be as k, {k.dtype} {tuple(k.shape)}"
        raise LayoutError(f"v is {v.dtype} {tuple(v.shape)}; {rule}")


def _check(is_fine: bool, name: str, tensor: Tensor, rule: str) -> None:
    if not is_fine:
        raise LayoutError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, stride {tensor.stride()}, on {tensor.device}; {rule}")
