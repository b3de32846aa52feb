"""The compiled decode kernels on a real GPU, against the references on the same device, and under CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from embedded_engine.kernels.arguments import DecodeCall, WriteCall
from embedded_engine.sampling import sample_on_device
from tests.embedded_engine.decode_cases import (
    MODEL_DTYPES,
    POOL_DTYPES,
    DecodeCase,
    assert_attends,
    assert_writes,
    attention_cases,
)
from tests.gpu.busy import occupy
from transfer.engine_types import SamplingParams
from transfer.layout import DType, TokenOrder
from transfer.pool.page_table import PageTable

pytestmark = pytest.mark.timeout(900)  # each case compiles its own kernels

CASES = attention_cases()
LONG = (540, 1, 129, 0, 64, 513, 33)
DEEPSEEK = DecodeCase(heads=(128, 1), k_dim=576, v_dim=512, has_v=False, page_size=64, dtype=DType.BFLOAT16, lengths=LONG)
REAL_SHAPES = {
    "Llama-3-70B, TP 8": DecodeCase(heads=(8, 1), k_dim=128, v_dim=128, dtype=DType.BFLOAT16, lengths=LONG),
    "Qwen3-8B": DecodeCase(heads=(32, 8), k_dim=128, v_dim=128, dtype=DType.BFLOAT16, lengths=LONG),
    "Qwen3-8B in float32": DecodeCase(heads=(32, 8), k_dim=128, v_dim=128, lengths=LONG),
    "Gemma-2, HND": DecodeCase(
        heads=(8, 4),
        k_dim=256,
        v_dim=256,
        dtype=DType.BFLOAT16,
        order=TokenOrder.HND,
        softcap=50.0,
        window_tokens=400,
        lengths=LONG,
    ),
    "GPT-OSS": DecodeCase(
        heads=(64, 8), k_dim=64, v_dim=64, dtype=DType.BFLOAT16, has_sinks=True, window_tokens=128, lengths=LONG
    ),
    "head of 192, V of 128": DecodeCase(heads=(16, 4), k_dim=192, v_dim=128, dtype=DType.FLOAT16, lengths=LONG),
    "DeepSeek-V3": DEEPSEEK,
    "DeepSeek-V3, TP 8": replace(DEEPSEEK, heads=(16, 1)),
    "DeepSeek-V3 in float8": replace(DEEPSEEK, pool_dtype=DType.FLOAT8_E4M3),
    "DeepSeek-V3 in float32": replace(DEEPSEEK, heads=(16, 1), dtype=DType.FLOAT32),
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name: str) -> None:
    assert_attends(CASES[name], "cuda")


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("name", REAL_SHAPES)
def test_shapes_of_real_models(name: str, num_splits: int | None) -> None:
    assert_attends(REAL_SHAPES[name], "cuda", num_splits)


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("pool_dtype", POOL_DTYPES)
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_written_rows_are_the_reference_s(dtype: DType, pool_dtype: DType, order: TokenOrder) -> None:
    assert_writes(dtype, pool_dtype, order, device="cuda")
    assert_writes(dtype, pool_dtype, order, device="cuda", has_v=False)


def test_offsets_beyond_32_bits() -> None:
    """A K buffer of 2**32 elements and more, with the request's tokens on its last pages."""
    num_pages, page_size = (1 << 32) // (64 * 1024) + 8, 64
    k = torch.zeros(num_pages, page_size, 8, 128, dtype=torch.float8_e4m3fn, device="cuda")
    v = torch.zeros_like(k)
    filled = torch.randn(8, page_size, 8, 128, generator=torch.Generator().manual_seed(4)).cuda()
    k[-8:], v[-8:] = filled.to(k.dtype), filled.flip(0).to(k.dtype)
    num_slots = num_pages * page_size
    slots = torch.arange(num_slots - 1, num_slots - 513, -1, dtype=torch.int32, device="cuda")[None]
    query = torch.randn(1, 16, 128, generator=torch.Generator().manual_seed(5)).cuda().bfloat16()
    arguments = call(query, k, v, slots, rows=[0], lengths=[512])
    small = arguments | {"k": k[-8:], "v": v[-8:], "slots": slots - (num_slots - 512)}
    assert torch.equal(attend(arguments)[0], attend(small)[0])
    from embedded_engine.kernels.write_rows import write_rows

    new = torch.full((1, 8, 128), 2.0, device="cuda", dtype=torch.bfloat16)
    last = torch.tensor([num_slots - 1], dtype=torch.int32, device="cuda")
    write_rows(WriteCall(k=k, v=v, new_k=new, new_v=new, slots=last))
    assert k[-1, -1].float().eq(2).all() and v[-1, -1].float().eq(2).all() and k[0, 0].float().eq(0).all()


def test_the_page_table_is_written_behind_the_current_stream() -> None:
    """Many small steps behind a slow one: the pinned memory of a copy is not reused under it."""
    on_gpu, on_cpu = (PageTable(num_rows=9, max_seq_len=640, page_size=16, device=device) for device in ("cuda", "cpu"))
    occupy(1_000_000_000)
    for step in range(200):
        items = [(str((step + offset) % 11), tuple(range(step, step + 1 + step % 40)), 1) for offset in range(8)]
        assert on_gpu.rows_of(items) == on_cpu.rows_of(items)
    assert torch.equal(on_gpu.slots.cpu(), on_cpu.slots)


def test_sampling_waits_for_nothing_and_agrees_with_the_cpu() -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(60, 50_000, generator=generator) * 3
    values = [(0.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.9, 0), (1.0, 1.0, 40), (1.3, 0.95, 1000)]
    params = [SamplingParams(temperature=t, top_p=p, top_k=k, seed=row) for row in range(12) for t, p, k in values]
    on_gpu, positions = logits.cuda(), list(range(60))
    sample_on_device(on_gpu, params, positions)  # the first call loads kernels and pins memory, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sample_on_device(on_gpu, params, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens.is_cuda and tokens.tolist() == sample_on_device(logits, params, positions).tolist()


def attend(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    from embedded_engine.kernels.paged_decode import paged_decode_attention

    return paged_decode_attention(DecodeCall(**arguments))


def call(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, *, rows: list[int], lengths: list[int]
) -> dict[str, Any]:
    on_device = {"dtype": torch.int32, "device": query.device}
    return {
        "query": query,
        "k": k,
        "v": v,
        "slots": slots,
        "rows": torch.tensor(rows, **on_device),  # type: ignore[arg-type]
        "lengths": torch.tensor(lengths, **on_device),  # type: ignore[arg-type]
        "scale": query.shape[2] ** -0.5,
    }
