"""Calls of the decode kernels: what the interpreted and the compiled kernels are compared with their references on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embedded_engine.kernels.arguments import DecodeCall, WriteCall
from embedded_engine.kernels.reference import reference_decode_attention, reference_merge_partial, reference_write_rows
from transfer.layout import DType, TokenOrder
from transfer.pool.kv_pool import as_words, convert

MODEL_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
POOL_DTYPES = (*MODEL_DTYPES, DType.FLOAT8_E4M3)
MHA, GQA, UNEVEN_GQA = (2, 2), (4, 2), (21, 3)  # query and KV heads
LENGTHS = (300, 1, 0, 129)
COLUMNS = 544


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """One geometry; `v_dim` without a V buffer is MLA."""

    heads: tuple[int, int] = GQA
    k_dim: int = 32
    v_dim: int = 32
    has_v: bool = True
    page_size: int = 16
    order: TokenOrder = TokenOrder.NHD
    dtype: DType = DType.FLOAT32
    pool_dtype: DType | None = None
    window_tokens: int = 0
    has_sinks: bool = False
    softcap: float | None = None
    lengths: tuple[int, ...] = LENGTHS
    passed_tokens: int = 0  # the first so many tokens of each request have no slot any more
    seed: int = 0

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        """Keyword arguments of a call; the pool lies in a larger tensor, with NaN wherever no request has a token.

        Row 0 of the table is of nobody and full of slots; the last one is the dummy request's, to which requests of length 0
        point, and so do two more requests at the end: one with tokens that has the dummy row, one with a row that there is not.
        """
        generator = torch.Generator().manual_seed(self.seed)
        query_heads, kv_heads = self.heads
        num_pages = sum(-(-length // self.page_size) for length in self.lengths) + 3
        model, pool = (getattr(torch, dtype.value) for dtype in (self.dtype, self.pool_dtype or self.dtype))
        pages = torch.randperm(num_pages, generator=generator)
        slots = torch.full((len(self.lengths) + 2, COLUMNS), -1, dtype=torch.int32)
        slots[0] = torch.arange(COLUMNS) % (num_pages * self.page_size)
        used = 0
        for row, length in enumerate(self.lengths, start=1):
            count = -(-length // self.page_size)
            own = pages[used : used + count, None] * self.page_size + torch.arange(self.page_size)
            slots[row, : count * self.page_size] = own.reshape(-1)[:COLUMNS]
            slots[row, length:] = num_pages * self.page_size + 7  # behind the request's tokens: anything, never followed
            slots[row, : self.passed_tokens] = -1
            slots[row, : self.passed_tokens : 2] = num_pages * self.page_size  # outside the pool on its other side
            used += count
        dummy = len(slots) - 1
        rows = [row if length else dummy for row, length in enumerate(self.lengths, start=1)]
        filled = slots[1:][(slots[1:] >= 0) & (slots[1:] < num_pages * self.page_size)].long().unique()
        buffers = [
            _buffer(_random(filled, kv_heads, dim, generator), filled, num_pages, self.page_size, self.order, pool)
            for dim in ((self.k_dim, self.v_dim) if self.has_v else (self.k_dim,))
        ]
        sinks = torch.randn(query_heads, generator=generator) * 2
        wide = torch.randn(len(rows) + 2, query_heads, self.k_dim + 8, generator=generator).to(model)
        return {
            "query": wide.to(device)[..., : self.k_dim],
            "k": to_device(buffers[0], device),
            "v": to_device(buffers[1], device) if self.has_v else None,
            "v_dim": None if self.has_v else self.v_dim,
            "order": self.order,
            "slots": slots.to(device),
            "rows": torch.tensor([*rows, dummy, len(slots)], dtype=torch.int32, device=device),
            "lengths": torch.tensor([*self.lengths, 1, 5], dtype=torch.int32, device=device),
            "scale": self.k_dim**-0.5,
            "window_tokens": self.window_tokens,
            "sinks": sinks.to(device) if self.has_sinks else None,
            "softcap": self.softcap,
        }


def _random(slots: Tensor, heads: int, dim: int, generator: torch.Generator) -> Tensor:
    return torch.randn(len(slots), heads, dim, generator=generator)


def _buffer(values: Tensor, slots: Tensor, num_pages: int, page_size: int, order: TokenOrder, dtype: torch.dtype) -> Tensor:
    """A pool buffer of `dtype` that holds `values` at `slots` and NaN elsewhere; its pages and heads do not follow each other."""
    heads, dim = values.shape[1:]
    if order is TokenOrder.NHD:
        buffer = torch.full((num_pages, page_size, heads + 1, dim + 16), float("nan")).to(dtype)[:, :, :heads, :dim]
        view = buffer
    else:
        buffer = torch.full((num_pages, heads + 1, page_size, dim + 16), float("nan")).to(dtype)[:, :heads, :, :dim]
        view = buffer.transpose(1, 2)
    element = next(one for one in DType if one.value == str(dtype).removeprefix("torch."))
    as_words(view)[slots // page_size, slots % page_size] = as_words(convert(values, element))
    return buffer


def to_device(buffer: Tensor, device: str) -> Tensor:
    """The same memory layout on another device; `Tensor.to` would make it contiguous."""
    if device == "cpu":
        return buffer
    return _whole(buffer).to(device).as_strided(buffer.shape, buffer.stride(), buffer.storage_offset())


TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def assert_attends(case: DecodeCase, device: str = "cpu", num_splits: int | None = None) -> None:
    """The kernel's output and log-sum-exp are the reference's; requests without tokens give exact zeros."""
    from embedded_engine.kernels.paged_decode import paged_decode_attention

    call = DecodeCall(**case.arguments(device))
    expected, expected_lse = reference_decode_attention(call)
    out, lse = paged_decode_attention(call, num_splits=num_splits)
    tolerance = TOLERANCES[out.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance)
    assert not out.isnan().any() and not lse.isnan().any()
    assert out[-2:].eq(0).all() and lse.dtype is torch.float32


def attention_cases() -> dict[str, DecodeCase]:
    """A grid that meets every branch of the kernel at least once."""
    found = {
        f"{name} {order.value} pages of {page_size}": DecodeCase(heads=heads, page_size=page_size, order=order)
        for name, heads, page_size in (("MHA", MHA, 16), ("GQA", GQA, 1), ("GQA", GQA, 16), ("uneven GQA", UNEVEN_GQA, 48))
        for order in TokenOrder
    }
    found |= {f"window {window}": DecodeCase(window_tokens=window, seed=window) for window in (1, 64, 130, 4096)}
    found |= {f"k {k} v {v}": DecodeCase(k_dim=k, v_dim=v) for k, v in ((8, 8), (80, 80), (24, 16), (96, 48), (60, 20))}
    found |= {
        f"{dtype.value} over {pool.value}": DecodeCase(dtype=dtype, pool_dtype=pool, lengths=(150, 1))
        for dtype in MODEL_DTYPES
        for pool in POOL_DTYPES
    }
    mla = {"heads": (20, 1), "has_v": False}
    found |= {
        "MLA": DecodeCase(**mla, k_dim=80, v_dim=64),  # type: ignore[arg-type]
        "MLA HND": DecodeCase(**mla, k_dim=80, v_dim=64, order=TokenOrder.HND),  # type: ignore[arg-type]
        "MLA float8": DecodeCase(**mla, k_dim=80, v_dim=64, dtype=DType.BFLOAT16, pool_dtype=DType.FLOAT8_E4M3),  # type: ignore[arg-type]
        "MLA whose V is no power of two": DecodeCase(**mla, k_dim=40, v_dim=24),  # type: ignore[arg-type]
        "all query heads in two tiles": DecodeCase(heads=(80, 1), k_dim=16, v_dim=16, lengths=(150,)),
        "sinks": DecodeCase(has_sinks=True),
        "sinks and window": DecodeCase(has_sinks=True, window_tokens=100),
        "softcap": DecodeCase(softcap=1.5),
        "softcap, window and sinks": DecodeCase(softcap=30.0, window_tokens=33, has_sinks=True),
        "passed tokens": DecodeCase(passed_tokens=200, window_tokens=90),
        "holes without a window": DecodeCase(passed_tokens=200),
        "no tokens at all": DecodeCase(lengths=(0, 0), has_sinks=True),
    }
    return found


def assert_writes(dtype: DType, pool_dtype: DType, order: TokenOrder, *, has_v: bool = True, device: str = "cpu") -> None:
    """The kernel leaves the very bytes that the reference leaves, in the rows' slots and everywhere else."""
    from embedded_engine.kernels.write_rows import write_rows

    generator = torch.Generator().manual_seed(3)
    num_pages, page_size, heads, dims = 5, 6, 3, (40, 24)
    num_slots = num_pages * page_size
    slots = torch.tensor([7, -1, 0, num_slots - 1, num_slots, 12], dtype=torch.int32)
    everywhere = torch.arange(num_slots)
    pool = getattr(torch, pool_dtype.value)
    olds = [_buffer(_random(everywhere, heads, dim, generator), everywhere, num_pages, page_size, order, pool) for dim in dims]
    news = []
    for dim in dims:
        wide = torch.randn(len(slots), heads + 2, dim, generator=generator)
        wide *= 10 ** (torch.rand(wide.shape, generator=generator) * 10 - 4)  # far beyond what float16 and float8 hold
        wide.view(-1)[::97] = float("nan")
        wide.view(-1)[5::101] = float("-inf")
        news.append(wide.to(getattr(torch, dtype.value)).to(device)[:, 1:-1])
    found, expected = ([to_device(old, device) if device != "cpu" else _copy(old) for old in olds] for _ in range(2))
    new_v, slots = (news[1] if has_v else None), slots.to(device)
    for write, (k, v) in ((write_rows, found), (reference_write_rows, expected)):
        write(WriteCall(k=k, v=v if has_v else None, new_k=news[0], new_v=new_v, slots=slots, order=order))
    for ours, theirs in zip(found, expected, strict=True):
        ours, theirs = _whole(ours), _whole(theirs)
        is_nan = theirs.float().isnan()
        assert torch.equal(ours.float().isnan(), is_nan)
        assert torch.equal(as_words(ours)[~is_nan], as_words(theirs)[~is_nan])
    assert not torch.equal(as_words(_whole(found[0])).cpu(), as_words(_whole(olds[0])))


def _copy(buffer: Tensor) -> Tensor:
    return _whole(buffer).clone().as_strided(buffer.shape, buffer.stride(), buffer.storage_offset())


def _whole(buffer: Tensor) -> Tensor:
    """The memory that the buffer is a part of, its margins included."""
    return torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(buffer.untyped_storage())


def assert_merges(dtype: torch.dtype) -> None:
    """Rows of whose two parts one or both saw nothing, and one that is no number."""
    from embedded_engine.kernels.merge_partial import merge_partial

    generator = torch.Generator().manual_seed(5)
    total, part = torch.randn(6, 3, 20, generator=generator), torch.randn(6, 5, 24, generator=generator).to(dtype)[:, 1:4, :20]
    lses = [torch.randn(6, 3, generator=generator) * 4 for _ in range(2)]
    lses[0][0], lses[1][1], lses[0][2], lses[1][2] = (float("-inf"),) * 4
    total[[0, 2]], lses[1][5, 1] = 0.0, float("nan")
    ours, theirs = [(total.clone(), lses[0].clone()) for _ in range(2)]
    merge_partial(*ours, part, lses[1])
    reference_merge_partial(*theirs, part, lses[1])
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.equal(ours[0][1], total[1]) and ours[0][2].eq(0).all() and ours[0][5, 1].isnan().all()
