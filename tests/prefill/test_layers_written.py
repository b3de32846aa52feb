"""When a chunk is computed: as soon as this rank has written those of its layers that are this rank's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prefill_node.rank_messages import PrefillStepPart, RunPrefillStep, StartRequest
from prefill_node.scheduler import page_needs
from tests.prefill.workers import Sender, decode_peer, new_worker
from tests.runtime.instances import instance
from tests.runtime.paged_memory import HeldThread
from transfer.chunk import ChunkPlan
from transfer.engine_types import SamplingParams
from transfer.layer_groups import layer_groups
from transfer.layout import DType, KVLayout, Shard
from transfer.pool.page_allocator import GroupAllocator

LAYOUT = KVLayout.uniform(num_layers=8, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT32)
PEER = decode_peer(instance(2, layout=LAYOUT))
STEP = RunPrefillStep(step=1, parts=(PrefillStepPart(request_id="r", token_ids=(1,) * 16, first_token=0, is_last=True),))


class Engine:
    """Writes one layer after the other, and remembers which chunks the sender is told of with each."""

    layout = LAYOUT

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.pool = type("Pool", (), {"device": "cpu"})()
        self.heard: list[int] = []
        self.chunks_after: dict[int, list[int]] = {}

    def prefill(self, items: Any, on_layers_written: Callable[[int, None], None]) -> dict[str, int]:
        for layers_done in range(1, len(self.shard.layers(LAYOUT)) + 1):
            self.heard.clear()
            on_layers_written(layers_done, None)
            if self.heard:
                self.chunks_after[layers_done] = list(self.heard)
        return {"r": 7}


@pytest.mark.parametrize(
    ("stages", "stage", "layers_per_group", "told"),
    [
        (1, 0, 0, {8: [0]}),
        (1, 0, 4, {4: [0], 8: [1]}),
        (2, 0, 0, {4: [0]}),
        (2, 1, 0, {4: [0]}),
        # Groups that lie in another stage alone are nothing to wait for: no route of this rank carries any of them.
        (2, 0, 3, {3: [0], 4: [1, 2]}),
        (2, 1, 3, {1: [0], 2: [1], 4: [2]}),
    ],
)
def test_a_chunk_is_computed_with_the_last_of_its_layers_here(
    stages: int, stage: int, layers_per_group: int, told: dict[int, list[int]]
) -> None:
    engine, thread = Engine(Shard(pp_size=stages, pp_rank=stage)), HeldThread()
    worker = new_worker(
        thread=thread,
        send=lambda message: None,
        engine=engine,
        allocator=GroupAllocator(page_needs(layer_groups(LAYOUT), 4, chunk_tokens=16), (4,)),
        sender=Sender(lambda request_id, chunk: engine.heard.append(chunk)),
        peer=lambda: PEER,
    )
    plan = ChunkPlan(chunk_tokens=16, layers_per_group=layers_per_group)
    worker.on_message(
        StartRequest(transfer_id="r", decode_incarnation=2, num_tokens=16, start_token=0, plan=plan, sampling=SamplingParams())
    )
    worker.on_message(STEP)
    thread.run_next()
    assert engine.chunks_after == told
