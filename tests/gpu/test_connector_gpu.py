"""Two connectors with their pools on GPUs, in two processes: tensors as vLLM keeps them there, sent behind its events."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from kvferry.engines.connector import PREFILL
from tests.connector.instances import DIM, HEADS, LAYERS, LAYOUT, PAGES, Instance, prompt_of, target, write
from tests.gpu.busy import occupy
from transfer.layout import Shard, TokenOrder
from transfer.pool.kv_pool import KVPool, LayerBuffers, PoolView

PROMPT = prompt_of(300)
BUSY_CYCLES = 200_000_000  # a tenth of a second: anyone who does not wait for the event reads what was there before


def vllm_pool(shard: Shard, device: str) -> KVPool:
    """As vLLM 0.32 keeps KV on a GPU: one tensor [blocks, heads, tokens, K | V] for each layer, in either order of memory."""
    heads, page_size = len(shard.heads(HEADS)), shard.page_size
    buffers = []
    for _ in range(LAYERS):
        if shard.order is TokenOrder.HND:
            cache = torch.zeros(PAGES, heads, page_size, 2 * DIM, device=device)
        else:
            cache = torch.zeros(PAGES, page_size, heads, 2 * DIM, device=device)
        buffers.append(LayerBuffers(k=cache[..., :DIM], v=cache[..., DIM:]))
    return PoolView(layout=LAYOUT, shard=shard, buffers=buffers)


def settings(transport: str, kernels: str) -> dict[str, object]:
    return {"transport.name": transport, "kernels": kernels, "device": "cuda", "ring.capacity_bytes": 1 << 22}


def prefill_side(pipe: Connection, transport: str, kernels: str, order: TokenOrder) -> None:
    source = Instance(
        PREFILL,
        tp_size=2,
        settings=settings(transport, kernels),
        pool_of=lambda shard: vllm_pool(Shard(tp_size=2, tp_rank=shard.tp_rank, page_size=16, order=order), "cuda:0"),
    )
    try:
        pipe.send(source.leader.address)
        pages = list(range(3, 3 + 19))
        source.leader.offer("a", "t", PROMPT)
        source.leader.begin("a")
        for begin, end in ((0, 130), (130, 300)):
            for rank, pool in zip(source.ranks, source.pools, strict=True):
                occupy(BUSY_CYCLES)
                write(pool, pages, PROMPT, begin, end)
                event = torch.cuda.Event()
                event.record()
                rank.progress("a", [pages], end, event)
        source.finish("a")
        pipe.send(source.freed("a").failure)
        source.assert_idle()
        pipe.recv()
    finally:
        source.close()


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize(
    ("transport", "kernels"), [("ucx", "triton"), ("cuda_ipc", "triton"), ("cuda_ipc", "torch"), ("nixl", "triton")]
)
def test_a_prompt_in_vllms_tensors(transport: str, kernels: str, order: TokenOrder) -> None:
    device = f"cuda:{torch.cuda.device_count() - 1}"
    torch.cuda.set_device(device)
    pipe, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=prefill_side, args=(theirs, transport, kernels, order))
    other.start()
    try:
        assert pipe.poll(120), "the prefill side has not started"
        address = pipe.recv()
        decode = target(
            address, page_size=32, pool_of=lambda shard: vllm_pool(Shard(page_size=32), device), **settings(transport, kernels)
        )
        try:
            decode.leader.want("b", "t", address, PROMPT)
            decode.wait_until_ready("b")
            pages = list(range(PAGES - 1, PAGES - 11, -1))
            decode.leader.bind("b", [pages])
            assert decode.settled("b").failure == ""
            decode.assert_has(pages, PROMPT)
            decode.assert_idle()
            assert pipe.poll(60) and pipe.recv() == ""
            pipe.send("done")
        finally:
            decode.close()
        other.join(60)
        assert other.exitcode == 0
    finally:
        if other.is_alive():
            other.kill()
            other.join()
