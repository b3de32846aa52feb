"""An engine of your own inside the daemons, as small as it can be: `load` is what the setting `engine` names.

    $ PYTHONPATH=examples .venv/bin/prefill-node serve --set engine=toy_engine:load --model DIR --insecure ...
    $ .venv/bin/python examples/toy_engine.py

The second command starts both tiers with it, two prefill ranks and one decode rank, and looks at the tokens. It computes nothing:
K holds a text's tokens and V their positions. The next token is a hash of the text as it is read back from the pool, so KV that
were lost, mixed up or put into a wrong place on the way would give another one.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from torch import Tensor

from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from prefill_node.engine import OnLayersWritten
from transfer.config import NodeConfig
from transfer.engine_types import DecodeItem, PrefillItem, RequestFault
from transfer.layout import DType, KVLayout, Shard
from transfer.pb import kvferry_pb2 as pb
from transfer.pool.kv_pool import KVPool

VOCAB_SIZE = 500
HEADS = 4


def next_token(text: Sequence[int]) -> int:
    return zlib.crc32(repr(list(text)).encode()) % VOCAB_SIZE


class ToyEngine:
    """One rank; both a `PrefillEngine` and a `DecodeEngine`."""

    def __init__(self, shard: Shard, num_pages: int) -> None:
        self.layout = KVLayout.uniform(num_layers=3, num_kv_heads=HEADS, head_dim=8, dtype=DType.FLOAT32)
        self.shard = shard
        self.pool = KVPool(layout=self.layout, shard=shard, num_pages=num_pages)
        self.model_fields: Mapping[str, str] = {"architecture": "toy"}
        self.max_context_tokens = 2048
        self.vocab_size = VOCAB_SIZE
        self.eos_token_ids: Sequence[int] = ()
        heads = shard.heads(HEADS)
        self._head = torch.arange(heads.begin, heads.end)[:, None]  # [heads, 1]: every head of the model holds something else

    def prefill(self, items: Sequence[PrefillItem], on_layers_written: OnLayersWritten | None = None) -> dict[str, int]:
        for layer in range(self.layout.num_layers):
            for item in items:
                self._write(layer, item.page_table, item.first_token, item.token_ids)
            if on_layers_written is not None:
                on_layers_written(layer + 1, None)  # None: on the CPU the pool may be read at once
        return self._sample({item.request_id: (item.page_table, item.end_token) for item in items if item.is_last})

    def decode(self, items: Sequence[DecodeItem]) -> dict[str, int]:
        for layer in range(self.layout.num_layers):
            for item in items:
                self._write(layer, item.page_table, item.position, (item.token_id,))
        return self._sample({item.request_id: (item.page_table, item.position + 1) for item in items})

    def close(self) -> None:
        return

    def _slots(self, page_table: Sequence[int], begin: int, end: int) -> Tensor:
        tokens, size = torch.arange(begin, end), self.pool.page_size
        return torch.tensor(page_table)[tokens // size] * size + tokens % size

    def _write(self, layer: int, page_table: Sequence[int], begin: int, token_ids: Sequence[int]) -> None:
        end = begin + len(token_ids)
        shape = (len(token_ids), len(self._head), 8)
        k = (torch.tensor(token_ids)[:, None, None] * HEADS + self._head).float().expand(shape)
        v = (torch.arange(begin, end)[:, None, None] * HEADS + self._head).float().expand(shape)
        self.pool.write(layer, self._slots(page_table, begin, end), k, v)

    def _sample(self, ends: Mapping[str, tuple[Sequence[int], int]]) -> dict[str, int]:
        """The next token of every text that the pool holds; on rank 0, as an engine's sampler would."""
        tokens: dict[str, int] = {}
        damaged: list[str] = []
        for request_id, (page_table, end) in ends.items():
            slots = self._slots(page_table, 0, end)
            parts = [self.pool.read(layer, slots) for layer in range(self.layout.num_layers)]
            k, v = (torch.stack(side) - self._head for side in zip(*parts, strict=True))  # [layers, tokens, heads, 8]
            text = k[0, :, 0, 0]
            if (k != text[:, None, None]).any() or (v != HEADS * torch.arange(end)[:, None, None]).any():
                damaged.append(request_id)
            else:
                tokens[request_id] = next_token([int(token) for token in text / HEADS])
        tokens = tokens if self.shard.rank == 0 else {}
        if damaged:
            raise RequestFault("the KV in the pool is not what was written", request_ids=damaged, tokens=tokens)
        return tokens


def load(config: NodeConfig, *, rank: int, rendezvous: Path) -> ToyEngine:
    """Called in each rank's process; `rendezvous` is a fresh file at which ranks that need each other can meet."""
    pool = config.pool
    shard = Shard(tp_size=config.parallel.tp_size, tp_rank=rank, page_size=pool.page_size, order=pool.order, dtype=pool.dtype)
    return ToyEngine(shard, pool.num_pages or 1024)


async def main() -> None:
    prompt, num_tokens = [number * 37 % VOCAB_SIZE for number in range(700)], 40
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)  # what the daemons themselves want of --model
        (model / "config.json").write_text("{}")
        Tokenizer(models.BPE()).save(str(model / "tokenizer.json"))
        engine = {"engine": "toy_engine:load"}
        spec = ClusterSpec(
            prefill=TierSpec(model=model, tp_size=2, page_size=16, pool_tokens=4096, settings=engine),
            decode=TierSpec(model=model, tp_size=1, page_size=64, order="HND", pool_tokens=4096, settings=engine),
            layers_per_group=1,
        )
        here = Path(__file__).resolve().parent
        path = os.pathsep.join(map(str, (here, here.parent)))
        async with LocalCluster(spec, environment={"PYTHONPATH": path}) as cluster, NodeClient(cluster.decode.address) as client:
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), max_new_tokens=num_tokens)
            text = list(prompt)
            async for event in client.generate(request):
                text.extend(event.tokens.token_ids)
                if event.HasField("done"):
                    print(f"moved {event.done.stats.bytes:,} bytes in {event.done.stats.writes} writes")
    assert len(text) == len(prompt) + num_tokens
    assert all(text[end] == next_token(text[:end]) for end in range(len(prompt), len(text)))
    print(f"all {num_tokens} tokens are what the text before them gives")


if __name__ == "__main__":
    asyncio.run(main())
