"""Tensor parallelism over NCCL on two GPUs: steps launched and replayed, their all-reduces inside the graph."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.tensor_parallel import init_distributed
from tests.embedded_engine.decode_scenario import PROMPTS, tokens_of_a_life
from tests.embedded_engine.families import make_family
from tests.embedded_engine.steps import Prompts
from tests.gpu.small_engines import make_engine, prompts_of
from tests.gpu.tiered_requests import LAUNCHED, LENGTHS, NUM_ROWS, NUM_TOKENS, REPLAYED, note_replays, roomy_engine, tiered_tokens
from transfer.layout import Shard
from transfer.worker_thread import WorkerThread

pytestmark = [
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
        self.use_host_pool = engine.use_host_pool

    def prefill(self, items: Sequence[Any]) -> dict[str, int]:
        return self._told(self._engine.prefill(items))

    def decode(self, items: Sequence[Any]) -> dict[str, int]:
        return self._told(self._engine.decode(items))

    def _told(self, tokens: dict[str, int]) -> dict[str, int]:
        box: list[Any] = [tokens]
        dist.broadcast_object_list(box, src=0, device=self.pool.device)
        told: dict[str, int] = box[0]
        return told


def join_group(rank: int, folder: Path) -> tuple[str, dist.ProcessGroup, Shard]:
    """The rank's device, the group of both, and its cut."""
    torch.backends.cudnn.allow_tf32 = False
    device = f"cuda:{rank}"
    group = init_distributed(rank, TP_SIZE, f"file://{folder / 'store'}", device=device)
    return device, group, Shard(tp_size=TP_SIZE, tp_rank=rank, page_size=4)


def run_rank(
    rank: int,
    directory: Path,
    folder: Path,
    prompts: Prompts,
    captured: tuple[int, ...],
    has_lane: bool,
) -> None:
    device, group, shard = join_group(rank, folder)

    def live() -> dict[str, Any]:
        current = torch.cuda.current_device()
        engine = make_engine(directory, device, captured=captured, shard=shard, group=group)
        tokens = tokens_of_a_life(InStep(engine), prompts, NUM_STEPS)
        found = {"tokens": tokens, "captured": engine.captured_batch_sizes, "current_device": current}
        torch.cuda.synchronize(device)
        engine.close()
        return found

    found = asyncio.run(on_a_lane(live)) if has_lane else live()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


async def on_a_lane(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` in the thread that a node gives its engine."""
    crashes: list[BaseException] = []
    thread = WorkerThread("engine", asyncio.get_running_loop(), crashes.append)
    found = await thread.call(work)
    assert thread.close(timeout_s=30) and not crashes
    return found


@pytest.mark.parametrize(
    ("family", "captured", "has_lane"),
    [
        *((family, captured, False) for family in ("gemma3", "deepseek_v3", "qwen3_next") for captured in ((), CAPTURED)),
        *(("gemma3", captured, True) for captured in ((), CAPTURED)),
    ],
    ids=lambda value: {(): "launched", CAPTURED: "replayed", False: "main thread", True: "thread"}.get(value, value),
)
def test_two_gpus_draw_the_tokens_of_one_process(tmp_path: Path, family: str, captured: tuple[int, ...], has_lane: bool) -> None:
    """On a thread the engine's thread is not the one that joined the group, and its current device is the first on every rank."""
    directory = make_family(family, tmp_path / "model")
    prompts = prompts_of(PROMPTS.values())
    expected = tokens_of_a_life(make_engine(directory, "cpu"), prompts, NUM_STEPS)
    multiprocessing.spawn(run_rank, args=(directory, tmp_path, prompts, captured, has_lane), nprocs=TP_SIZE)
    for rank in range(TP_SIZE):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert told == {"tokens": expected, "captured": list(captured), "current_device": 0 if has_lane else rank}


def run_tiered_rank(rank: int, directory: Path, folder: Path, prompts: Prompts, pages_per_block: int) -> None:
    device, group, shard = join_group(rank, folder)
    with pytest.MonkeyPatch.context() as patch:
        replayed = note_replays(patch)
        engine = roomy_engine(directory, device, captured=(NUM_ROWS,), shard=shard, group=group)
        found = {"tokens": tiered_tokens(InStep(engine), prompts, pages_per_block), "replayed": replayed}
    engine.close()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("pages_per_block", [LAUNCHED, REPLAYED], ids=["launched", "replayed"])
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", "qwen3_next"])
def test_two_gpus_read_their_host_memory(tmp_path: Path, family: str, pages_per_block: int) -> None:
    """Each rank its own part of a request's pages, in steps whose all-reduces are captured with the fetches."""
    directory = make_family(family, tmp_path / "model")
    prompts = prompts_of(LENGTHS.values())
    expected = tiered_tokens(roomy_engine(directory, "cpu"), prompts, pages_per_block)
    multiprocessing.spawn(run_tiered_rank, args=(directory, tmp_path, prompts, pages_per_block), nprocs=TP_SIZE)
    replayed = [NUM_ROWS] * (NUM_TOKENS - 1 if pages_per_block == REPLAYED else 0)
    for rank in range(TP_SIZE):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == {"tokens": expected, "replayed": replayed}
