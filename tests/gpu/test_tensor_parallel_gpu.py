"""Tensor parallelism over NCCL on two GPUs: steps launched and replayed, their all-reduces inside the graph."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.model_files import read_model_files
from embedded_engine.tensor_parallel import init_distributed
from tests.engine.decode_scenario import MAX_RUNNING, MAX_SEQ_LEN, PROMPTS, tokens_of_a_life
from tests.engine.families import make_family
from tests.engine.steps import pages_for
from transfer.layer_groups import layer_groups
from transfer.layout import Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs: this torch sees fewer"),
]

TP_SIZE = 2
NUM_STEPS = 8
CAPTURED = (2, 4)


class InStep:
    """An engine whose tokens every rank hears of, as the leader tells them: rank 0 alone draws them."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self.pool = engine.pool

    def prefill(self, items: Sequence[Any]) -> dict[str, int]:
        return self._told(self._engine.prefill(items))

    def decode(self, items: Sequence[Any]) -> dict[str, int]:
        return self._told(self._engine.decode(items))

    def _told(self, tokens: dict[str, int]) -> dict[str, int]:
        box: list[Any] = [tokens]
        dist.broadcast_object_list(box, src=0, device=self.pool.device)
        told: dict[str, int] = box[0]
        return told


def make_engine(directory: Path, device: str, captured: tuple[int, ...], **settings: Any) -> EmbeddedEngine:
    files = read_model_files(directory)
    return EmbeddedEngine(
        files,
        num_pages=pages_for(layer_groups(files.layout()), 100, num_states=5),
        device=device,
        max_seq_len=MAX_SEQ_LEN,
        max_running_requests=MAX_RUNNING,
        cuda_graph_batch_sizes=captured,
        **settings,
    )


def run_rank(rank: int, directory: Path, folder: Path, prompts: dict[int, tuple[int, ...]], captured: tuple[int, ...]) -> None:
    torch.backends.cudnn.allow_tf32 = False
    device = f"cuda:{rank}"
    group = init_distributed(rank, TP_SIZE, f"file://{folder / 'store'}", device=device)
    shard = Shard(tp_size=TP_SIZE, tp_rank=rank, page_size=4)
    engine = make_engine(directory, device, captured, shard=shard, group=group)
    found = tokens_of_a_life(InStep(engine), prompts, NUM_STEPS)
    (folder / f"rank{rank}.json").write_text(json.dumps({"tokens": found, "captured": engine.captured_batch_sizes}))
    torch.cuda.synchronize()
    engine.close()


@pytest.mark.parametrize("captured", [(), CAPTURED], ids=["launched", "replayed"])
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", "qwen3_next"])
def test_two_gpus_draw_the_tokens_of_one_process(tmp_path: Path, family: str, captured: tuple[int, ...]) -> None:
    directory = make_family(family, tmp_path / "model")
    generator = torch.Generator().manual_seed(11)
    prompts = {length: tuple(torch.randint(3, 240, (length,), generator=generator).tolist()) for length in PROMPTS.values()}
    expected = tokens_of_a_life(make_engine(directory, "cpu", (), shard=Shard(page_size=4)), prompts, NUM_STEPS)
    multiprocessing.spawn(run_rank, args=(directory, tmp_path, prompts, captured), nprocs=TP_SIZE)
    for rank in range(TP_SIZE):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert told == {"tokens": expected, "captured": list(captured)}
