"""Softmax attention in plain torch, in memory that does not grow with the context.

Scores that are only scaled use torch's attention, which never stores them. It supports neither a cap nor sinks, and it does not
return the weights for merging two results. `RunningSoftmax` supports all three, block by block of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as functional
from torch import Tensor

from embedded_engine.kernels.block_sparse_arguments import RunningState

ATTENTION_BYTES: Final = 256 << 20
"""Upper bound of an attention call's temporary memory, for any context: scores, weights, repeated masks, and keys and values that
are computed for the call. It comes from the plan's reserve; blocks of this size keep a GPU busy."""

CAUSAL_KEYS: Final = 128
"""Keys per call if flash attention cannot be used. Bounds the memory of the mask."""

FLASH_MAX_DIM: Final = 256
FLASH_CAPABILITY: Final = (8, 0)
"""Bounds of torch's flash attention on GPUs: elements of a head, and the least compute capability."""

_SCORE_BYTES: Final = 8  # a score in float32, and as a weight in the values' type
_ELEMENT_BYTES: Final = 8  # an element of a key or value: a contiguous copy, and in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """From products of queries and keys to weights.

    Args:
        scale: Factor of the products.
        softcap: Bound that scores approach by tanh; None means no bound.
        sinks: [query heads], a score per head that takes part in the softmax without a value; None means no sinks.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores, *, takes_shared_heads: bool | None = None
) -> Tensor:
    """Attend without a copy of the K and V that query heads share.

    Args:
        query: [batch, query heads, rows, dim].
        key, value: [batch, KV heads, context, dim].
        mask: Added to the scores: [rows, context], or [batch, 1, 1, context] for single rows.
        takes_shared_heads: Whether torch's attention may get a mask together with shared KV heads; None means on a CPU only.

    Returns:
        [batch, query heads, rows, dim of the values].
    """
    num_kv_heads = key.shape[1]
    if scores.softcap is not None or scores.sinks is not None:
        running = RunningSoftmax(query, num_kv_heads, value.shape[-1], scores)
        running.add(key, value, mask)
        return running.result()
    num_heads, rows = query.shape[1:3]
    # With a single row per head the query heads of a KV head become rows: one product, not many. On a GPU always, because its
    # fast kernels take a mask or shared heads, not both.
    if rows > 1 and (query.device.type == "cpu" if takes_shared_heads is None else takes_shared_heads):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scores.scale, enable_gqa=num_heads != num_kv_heads
        )
    if mask is None or rows == 1:
        return _joined_attention(query, key, value, mask, scores.scale)
    shared = num_heads // num_kv_heads
    block = max(1, ATTENTION_BYTES // (shared * mask.shape[-1] * mask.element_size()))
    parts = [
        _joined_attention(query_part, key, value, mask_part.repeat(shared, 1), scores.scale)
        for query_part, mask_part in zip(query.split(block, dim=2), mask.split(block), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _joined_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend with the rows of the heads that share a KV head as rows of one head; `mask` has a row for each, or one for all."""
    batch, num_heads, rows, dim = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, dim)
    attended = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return attended.reshape(batch, num_heads, rows, -1)


class RunningSoftmax:
    """Attention of some rows over keys that come block by block; the state between blocks is float32.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).

    Args:
        query: [batch, query heads, rows, dim].
        value_dim: Elements of a head's value.
    """

    def __init__(self, query: Tensor, num_kv_heads: int, value_dim: int, scores: Scores) -> None:
        batch, num_heads, rows, dim = query.shape
        self._shape = (batch, num_heads, rows)
        self._dtype = query.dtype
        self._scores = scores
        self._query = query.reshape(batch * num_kv_heads, -1, dim)
        joined = self._query.shape[:2]
        self._total = torch.zeros((*joined, value_dim), dtype=torch.float32, device=query.device)
        if scores.sinks is None:
            self._largest = torch.full_like(self._total[..., :1], float("-inf"))
        else:
            self._largest = scores.sinks.float().view(1, -1, 1).expand(self._shape).reshape(*joined, 1)
        self._sum = torch.full_like(self._largest, 0.0 if scores.sinks is None else 1.0)

    def add(self, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        """Attend to more keys.

        Args:
            key, value: [batch, KV heads, keys, dim].
            mask: As in `attention`, for these keys.
        """
        per_key = _SCORE_BYTES * self._largest.numel() + _ELEMENT_BYTES * (key[:, :, :1].numel() + value[:, :, :1].numel())
        block = max(1, ATTENTION_BYTES // per_key)
        for begin in range(0, key.shape[2], block):
            keys = slice(begin, begin + block)
            self._add(key[:, :, keys].flatten(0, 1), value[:, :, keys].flatten(0, 1), None if mask is None else mask[..., keys])

    def attend(self, key: Tensor, value: Tensor) -> None:
        """Attend to more keys, each visible to all rows. Use torch's flash attention if it supports the inputs."""
        if not key.shape[2]:
            return  # torch divides by the number of keys
        if not self._has_flash(key, value):
            self.add(key, value, None)
            return
        query = self._query.reshape(key.shape[0], key.shape[1], -1, self._query.shape[-1])
        out, lse = _flash(query, key, value, self._scores.scale, is_causal=False)
        self._merge(out.reshape(self._total.shape), lse.reshape(self._sum.shape))

    def attend_causally(self, key: Tensor, value: Tensor) -> None:
        """Attend to the keys of the rows themselves, row i to keys 0 to i. Use flash attention as `attend` does."""
        rows, num_kv_heads = self._shape[2], key.shape[1]
        if not self._has_flash(key, value):
            positions = torch.arange(rows, device=key.device)
            for begin in range(0, rows, CAUSAL_KEYS):
                keys = slice(begin, begin + CAUSAL_KEYS)
                mask = torch.zeros((rows, len(positions[keys])), dtype=torch.float32, device=key.device)
                mask.masked_fill_(positions[:, None] < positions[keys], float("-inf"))
                self.add(key[:, :, keys], value[:, :, keys], mask)
            return
        # One query head of each KV head at a time: a causal kernel needs as many rows as keys, and heads are not expanded.
        query = self._query.reshape(key.shape[0], num_kv_heads, -1, rows, self._query.shape[-1])
        found = [_flash(query[:, :, shared], key, value, self._scores.scale, is_causal=True) for shared in range(query.shape[2])]
        out, lse = (torch.stack(parts, dim=2) for parts in zip(*found, strict=True))
        self._merge(out.reshape(self._total.shape), lse.reshape(self._sum.shape))

    def _has_flash(self, key: Tensor, value: Tensor) -> bool:
        dim = key.shape[-1]
        if self._scores.softcap is not None or value.shape[-1] > dim or key.dtype is not self._query.dtype:
            return False
        if key.device.type == "cpu":
            return True
        is_fit = key.dtype in (torch.float16, torch.bfloat16) and dim <= FLASH_MAX_DIM and dim % 8 == 0
        return is_fit and torch.cuda.get_device_capability(key.device) >= FLASH_CAPABILITY

    def _merge(self, part: Tensor, lse: Tensor) -> None:
        """Merge attention [n, rows, value dim] over other keys, with the logarithm of its sum of weights [n, rows, 1]."""
        largest = torch.maximum(self._largest, lse)
        shrunk, weight = torch.exp(self._largest - largest), torch.exp(lse - largest)
        self._sum = self._sum * shrunk + weight
        self._total.mul_(shrunk).add_(part.float() * weight)
        self._largest = largest

    def _add(self, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        weights = _product(self._query, key.transpose(1, 2)).mul_(self._scores.scale)
        if self._scores.softcap is not None:
            weights.div_(self._scores.softcap).tanh_().mul_(self._scores.softcap)
        if mask is not None:
            weights.view(*self._shape, -1).add_(mask)
        largest = torch.maximum(self._largest, weights.amax(dim=-1, keepdim=True))
        origin = largest.masked_fill(largest == float("-inf"), 0)  # a row that has attended to no key yet
        weights.sub_(origin).exp_()
        shrunk = torch.exp(self._largest - origin)
        self._sum = self._sum * shrunk + weights.sum(dim=-1, keepdim=True)
        self._total.mul_(shrunk).add_(_product(weights, value))
        self._largest = largest

    @property
    def state(self) -> RunningState:
        """The state of the only batch, by query head; kernels can change it in place."""
        heads, rows = self._shape[1:]
        return RunningState(
            total=self._total.view(heads, rows, -1), largest=self._largest.view(heads, rows), sum=self._sum.view(heads, rows)
        )

    def result(self) -> Tensor:
        """Return [batch, query heads, rows, dim of the values], in the query's dtype."""
        return (self._total / self._sum).to(self._dtype).view(*self._shape, -1)


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention [batch, heads, rows, value dim] and the logarithms of the sums of its weights [batch, heads, rows]."""
    value_dim = value.shape[-1]
    padded = functional.pad(value, (0, key.shape[-1] - value_dim)) if value_dim < key.shape[-1] else value
    if query.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, padded, 0.0, is_causal, scale=scale)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, padded, 0.0, is_causal, scale=scale)
    return found[0][..., :value_dim], found[1].float()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product [n, a, c] in float32 of [n, a, b] and [n, b, c]."""
    if right.device.type == "cuda" and right.dtype is not torch.float32:
        return torch.bmm(left.to(right.dtype), right, out_dtype=torch.float32)
    return torch.matmul(left.float(), right.float())
