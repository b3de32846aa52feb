"""When a chunk is computed: as soon as this rank has written those of its layers that are this rank's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from prefill_node.rank_messages import RunStep, StepPart
from prefill_node.worker import PrefillWorker
from transfer.chunk import ChunkPlan, split_into_chunks
from transfer.layout import DType, KVLayout, Shard

LAYOUT = KVLayout.uniform(num_layers=8, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT32)
STEP = RunStep(step=1, parts=(StepPart(request_id="r", token_ids=(1,) * 16, first_token=0, is_last=True),))


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
    plan = ChunkPlan(chunk_tokens=16, layers_per_group=layers_per_group)
    chunks = split_into_chunks(plan, num_tokens=16, num_layers=8)
    heard: list[int] = []
    worker = SimpleNamespace(
        _engine=SimpleNamespace(shard=Shard(pp_size=stages, pp_rank=stage), layout=LAYOUT),
        _sender=SimpleNamespace(chunk_computed=lambda request_id, chunk, event: heard.append(chunk)),
        _requests={"r": SimpleNamespace(chunks=chunks, reported=set())},
    )
    seen: dict[int, list[int]] = {}
    for layers_done in range(1, 8 // stages + 1):
        heard.clear()
        PrefillWorker._on_layers_written(cast(Any, worker), STEP, layers_done, None)
        seen[layers_done] = list(heard)
    assert {layers: chunk for layers, chunk in seen.items() if chunk} == told
