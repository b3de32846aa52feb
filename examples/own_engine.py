"""The least that an engine which schedules by itself must write to hand the KV of its prompts to another instance.

    $ .venv/bin/python examples/own_engine.py

Two processes: one "computes" a prompt in chunks, two tokens' pages at a time, the other fetches its KV into pages of another size
while that goes on. There is no model: KV are numbers that both sides can work out, so that the second can look at every one.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from multiprocessing.connection import Connection

import torch

from kvferry.engines.connector import DECODE, PREFILL, ConnectorEngine, Free, PromptState, Settled, Sides
from kvferry.engines.connector_leader import ConnectorLeader
from kvferry.engines.connector_rank import ConnectorRank
from transfer.config import ConnectorConfig
from transfer.layout import DType, KVLayout, Shard
from transfer.load_config import load_config
from transfer.pool.kv_pool import LayerBuffers, PoolView

LAYERS, HEADS, DIM, PAGES = 4, 2, 16, 64
PROMPT = tuple(range(100, 400))
TIMEOUT_S = 60.0


class Engine:
    """An engine's own cache: a K and a V tensor [pages, page_size, heads, dim] for each layer."""

    def __init__(self, sides: Sides, page_size: int, prefill_nodes: tuple[str, ...] = ()) -> None:
        self.page_size = page_size
        self.k = [torch.zeros(PAGES, page_size, HEADS, DIM) for _ in range(LAYERS)]
        self.v = [torch.zeros(PAGES, page_size, HEADS, DIM) for _ in range(LAYERS)]
        layout = KVLayout.uniform(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=DType.FLOAT32)
        shard = Shard(page_size=page_size)
        pool = PoolView(  # nothing is copied: kvferry reads and writes these very tensors
            layout=layout, shard=shard, buffers=[LayerBuffers(k=k, v=v) for k, v in zip(self.k, self.v, strict=True)]
        )
        facts = ConnectorEngine(
            layout=layout,
            shard=shard,
            pool=pool,
            model_fields={"architecture": "numbers"},
            max_context_tokens=1024,
            vocab_size=1000,
        )
        config = load_config(ConnectorConfig, flags={"tls.insecure": 1, "peers.prefill_nodes": prefill_nodes or None})
        name = f"own-engine-{sides.name}-{multiprocessing.current_process().pid}"
        self.rank = ConnectorRank(config, instance=name, rank=0, sides=sides, engine=facts)
        self.leader = ConnectorLeader(config, instance=name, num_ranks=1, sides=sides)
        self.leader.start()

    def pages_for(self, num_tokens: int) -> list[int]:
        """An allocator, as far as one prompt needs it: from the end, so that no page is where another would look for it."""
        return list(range(PAGES - 1, PAGES - 1 - -(-num_tokens // self.page_size), -1))

    def close(self) -> None:
        self.leader.close()
        self.rank.close()


def value(layer: int, is_v: bool, token: int, token_id: int) -> float:
    return layer * 1000.0 + is_v * 500.0 + token + token_id / 1000.0


def prefill_side(pipe: Connection) -> None:
    """Compute the prompt, and keep its pages until they are free."""
    engine = Engine(PREFILL, page_size=16)
    pipe.send(engine.leader.address)
    pages = engine.pages_for(len(PROMPT))
    engine.leader.offer("my prompt", "transfer-1", PROMPT)
    engine.leader.begin("my prompt")
    for begin, end in itertools.pairwise([*range(0, len(PROMPT), 32), len(PROMPT)]):
        for token in range(begin, end):
            page, offset = pages[token // engine.page_size], token % engine.page_size
            for layer in range(LAYERS):
                engine.k[layer][page, offset] = value(layer, False, token, PROMPT[token])
                engine.v[layer][page, offset] = value(layer, True, token, PROMPT[token])
        engine.rank.progress("my prompt", [pages], end)  # on a GPU with an event behind which that is so
    engine.rank.finish("my prompt")
    engine.leader.finish("my prompt")
    news = wait_for(engine.rank)
    assert news == Free(name="my prompt", failure=""), news
    pipe.send("the pages are free again")
    pipe.recv()
    engine.close()


def decode_side(source: str) -> Engine:
    """Fetch the prompt's KV into pages of 24 tokens, and look at it."""
    engine = Engine(DECODE, page_size=24, prefill_nodes=(source,))
    engine.leader.want("their prompt", "transfer-1", source, PROMPT)
    deadline = time.monotonic() + TIMEOUT_S
    while (view := engine.leader.view("their prompt")) is None or view.state is PromptState.WAITING:
        assert time.monotonic() < deadline, "the other side has not begun to send"
        time.sleep(0.001)  # an engine would do something else: nothing is held here for the prompt yet
    assert view.state is PromptState.READY, view.failure
    pages = engine.pages_for(len(PROMPT))
    engine.leader.bind("their prompt", [pages])
    news = wait_for(engine.rank)
    assert news == Settled(name="their prompt", failure="", note=b""), news
    for token, token_id in enumerate(PROMPT):
        page, offset = pages[token // engine.page_size], token % engine.page_size
        for layer in range(LAYERS):
            for is_v, cache in ((False, engine.k), (True, engine.v)):
                found = cache[layer][page, offset]
                assert torch.equal(found, torch.full_like(found, value(layer, is_v, token, token_id))), (layer, is_v, token)
    return engine


def wait_for(rank: ConnectorRank) -> object:
    deadline = time.monotonic() + TIMEOUT_S
    while not (news := [one for one in rank.poll_events() if isinstance(one, Free | Settled)]):
        assert time.monotonic() < deadline, "nothing has happened"
        time.sleep(0.001)
    return news[0]


def main() -> None:
    pipe, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=prefill_side, args=(theirs,))
    other.start()
    try:
        engine = decode_side(pipe.recv())
        print(f"{len(PROMPT)} tokens of {LAYERS} layers, from pages of 16 into pages of 24: every number is right")
        print("prefill:", pipe.recv())
        pipe.send("done")
        engine.close()
        other.join(TIMEOUT_S)
        assert other.exitcode == 0, other.exitcode
    finally:
        if other.is_alive():
            other.kill()
            other.join()


if __name__ == "__main__":
    main()
