"""Block-sparse prefill on a real GPU: the compiled kernels, and whole models with KV on the device and in host memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.kernels import block_sparse
from embedded_engine.model_files import read_model_files
from planner.workspace import XAttention
from tests.embedded_engine.sparse_cases import CASES, SparseCase, assert_attends_sparsely
from tests.embedded_engine.steps import Directory, PageBook
from tests.embedded_engine.test_host_prefill import Hosted
from transfer.layout import DType, Shard, TokenOrder

pytestmark = pytest.mark.timeout(600)

DEVICE = "cuda"
CHUNK = 190
REAL = {
    "Llama-3-8B": SparseCase(
        heads=(32, 8), dim=128, num_earlier=3000, rows=1000, policy=XAttention(threshold=0.8), dtype=DType.BFLOAT16
    ),
    "one head of 256, float16": SparseCase(
        heads=(4, 1), dim=256, num_earlier=900, rows=300, policy=XAttention(threshold=0.8, stride=4), dtype=DType.FLOAT16
    ),
}


@pytest.mark.parametrize("case", [*CASES.values(), *REAL.values()], ids=[*CASES, *REAL])
def test_kernels_agree_with_the_reference(case: SparseCase) -> None:
    assert_attends_sparsely(case, block_sparse, DEVICE)


@pytest.mark.parametrize("shard", [Shard(page_size=4), Shard(page_size=128, order=TokenOrder.HND)], ids=["NHD", "HND"])
@pytest.mark.parametrize("threshold", [1, 0.5])
def test_logits_are_the_same_wherever_kv_lies(model: Directory, shard: Shard, threshold: float) -> None:
    """With all blocks they are those of full attention."""
    files = read_model_files(model("glm"))
    tokens = tuple(torch.randint(3, 240, (480,), generator=torch.Generator().manual_seed(1)).tolist())

    def logits(policy: XAttention | None, *, in_host: bool) -> Tensor:
        num_pages = -(-len(tokens) // shard.page_size)
        engine = EmbeddedEngine(
            files,
            shard=shard,
            num_pages=num_pages,
            device=DEVICE,
            dtype=DType.FLOAT32,
            sparse_prefill=policy,
            chunk_tokens=CHUNK,
        )
        book = PageBook.of(engine, {"a": len(tokens)})
        names = {"a": len(tokens)} if in_host else {"other": shard.page_size}
        hosted = Hosted(engine, names, pages_per_block=max(1, 128 // shard.page_size))
        found = None
        for begin in range(0, len(tokens), CHUNK):
            part = tokens[begin : begin + CHUNK]
            item = hosted.item("a", part, begin, book, is_last=begin + CHUNK >= len(tokens))
            found = engine.logits(engine.prefill_batch([item]))
        assert found is not None
        torch.cuda.synchronize()
        if policy is not None:
            counts = engine.prefill_counts
            assert counts is not None
            assert (counts.density == 1) == (threshold == 1)
            assert (counts.loaded_bytes > 0) == in_host
        return found.float().cpu()

    policy = XAttention(block_size=64, stride=8, threshold=threshold)
    on_device, in_host = (logits(policy, in_host=place) for place in (False, True))
    torch.testing.assert_close(in_host, on_device, atol=2e-3 * float(on_device.abs().max()), rtol=0)
    if threshold == 1:
        full = logits(None, in_host=False)
        torch.testing.assert_close(on_device, full, atol=2e-3 * float(full.abs().max()), rtol=0)
