"""A GPU whose memory really runs out: while weights load, a pool is allocated, CUDA graphs are captured, and in steps."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from embedded_engine.engine import EmbeddedEngine
from kvferry.local_cluster.spec import child_environment
from node_runtime import exit_codes
from tests.embedded_engine.steps import Directory
from tests.gpu.small_engines import make_engine, prompts_of
from transfer.engine_types import DecodeItem, PrefillItem
from transfer.errors import OutOfMemory
from transfer.layout import Shard

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = (1 << 30, 32 << 20, 2 << 20, 1 << 20, 64 << 10, 4 << 10, 512)
"""Sizes of the allocations that fill the device. The smallest is the minimum of torch's allocator."""

SHOWN = r"cuda(:0)? has [\d.,]+ (B|KiB|MiB|GiB) of [\d.]+ GiB free \(this process holds [\d.,]+ (MiB|GiB)\)"
CAPTURED = (2, 4)
PROMPTS = prompts_of((120, 100))
LONG = PrefillItem(request_id="a", token_ids=PROMPTS[120], first_token=0, page_tables=(tuple(range(40)),), is_last=True)
SHORT = PrefillItem(request_id="b", token_ids=PROMPTS[100], first_token=0, page_tables=(tuple(range(40, 80)),), is_last=True)
NEXT_OF_SHORT = DecodeItem(request_id="b", token_id=7, position=100, page_tables=SHORT.page_tables)


class Ballast:
    """Allocate every free byte of the device through torch's allocator."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def fill(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for size in BLOCKS:
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    self._blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))

    def drop(self) -> None:
        self._blocks.clear()
        torch.cuda.empty_cache()


@pytest.fixture
def ballast() -> Iterator[Ballast]:
    one = Ballast()
    yield one
    one.drop()


def out_of_memory_in(work: Callable[[], Any]) -> str:
    """Return the line of the error. The error itself, whose traceback holds tensors, is dropped."""
    with pytest.raises(OutOfMemory) as failed:
        work()
    assert not failed.value.is_fatal
    said = str(failed.value)
    assert "\n" not in said and re.search(SHOWN, said), said
    return said


def engine_of(model: Directory, captured: Sequence[int] = ()) -> EmbeddedEngine:
    return make_engine(model("llama"), "cuda", captured=captured, max_seq_len=200)


def tokens_of(engine: EmbeddedEngine) -> list[dict[str, int]]:
    return [engine.prefill([LONG]), engine.prefill([SHORT]), engine.decode([NEXT_OF_SHORT])]


def test_weights(model: Directory, ballast: Ballast) -> None:
    tokens = tokens_of(engine_of(model))
    ballast.fill()
    said = out_of_memory_in(lambda: engine_of(model))
    assert said.startswith("out of memory while loading the weights: ")
    assert said.endswith("; raise parallel.tp_size, or end other processes that use this memory")
    ballast.drop()
    assert tokens_of(engine_of(model)) == tokens


def test_a_pool(model: Directory) -> None:
    """The pool would need the whole device, but weights and context already hold a part of it."""
    engine = engine_of(model)
    page_bytes = engine.pool.groups[0].page_bytes(engine.layout, engine.shard)
    total = torch.cuda.mem_get_info()[1]
    count = total // page_bytes
    said = out_of_memory_in(lambda: EmbeddedEngine(model("llama"), shard=Shard(page_size=4), num_pages=count, device="cuda"))
    asked = f"{count * page_bytes / (1 << 30):,.1f} GiB asked for, "
    assert said.startswith(f"out of memory while allocating the KV pool of {count} pages: {asked}")
    assert said.endswith("; lower memory.static_fraction or pool.num_pages")
    engine.release_pool()
    again = out_of_memory_in(lambda: engine.open_pool(count, shard=Shard(page_size=4)))
    assert "while allocating the KV pool" in again
    engine.open_pool(100, shard=Shard(page_size=4), max_running_requests=4)
    assert tokens_of(engine) == tokens_of(engine_of(model))


def test_the_capture_of_a_graph(model: Directory, ballast: Ballast, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    tokens = tokens_of(engine)
    handle = torch.cuda.graph_pool_handle

    def fill_first() -> Any:
        with torch.cuda.stream(torch.cuda.default_stream()):  # as another process would; the stream of captures keeps its segment
            ballast.fill()  # between the steps that warm up and the first capture
        return handle()

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "graph_pool_handle", fill_first)
        said = out_of_memory_in(lambda: engine.capture_cuda_graphs(CAPTURED))
    assert said.startswith("out of memory while capturing the CUDA graph of a decode step of 4 tokens: ")
    assert said.endswith(
        "; lower cuda_graph_max_bs (0 runs without graphs), speculative.num_speculative_tokens or memory.static_fraction"
    )
    ballast.drop()
    assert tokens_of(engine) == tokens, "steps are launched without graphs"
    engine.capture_cuda_graphs(CAPTURED)
    assert engine.captured_batch_sizes == CAPTURED and tokens_of(engine) == tokens


@pytest.mark.parametrize("captured", [(), CAPTURED], ids=["launched", "replayed"])
def test_steps(model: Directory, ballast: Ballast, captured: tuple[int, ...]) -> None:
    """Only the failed step's request fails. Memory is released, and the KV of other requests does not change."""
    engine = engine_of(model, captured)
    tokens = tokens_of(engine)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    for _ in range(2):
        ballast.fill()
        prefill = out_of_memory_in(lambda: engine.prefill([LONG]))
        decode = out_of_memory_in(lambda: engine.decode([NEXT_OF_SHORT]))
        ballast.drop()
        assert re.match("out of memory while (planning|computing) a prefill step of 120 tokens on rank 0 of 1: ", prefill)
        assert prefill.endswith("; lower memory.static_fraction, limits.max_step_tokens or chunk.chunk_tokens")
        assert decode.startswith("out of memory while computing a decode step of 1 requests on rank 0 of 1: ")
        assert decode.endswith(
            "; lower memory.static_fraction, limits.max_running_requests or speculative.num_speculative_tokens"
        )
        assert torch.cuda.memory_allocated() == allocated, "nothing of a failed step is kept"
        assert engine.decode([NEXT_OF_SHORT]) == tokens[2], "the KV of the other request is as it was"
        assert tokens_of(engine) == tokens


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_ends_with_the_code_that_no_supervisor_restarts(model: Directory, role: str) -> None:
    """Its plan assigns most of the device to the pool, but the process may allocate only a twentieth."""
    transport = "ucx" if importlib.util.find_spec("ucxx") else "cuda_ipc"
    settings = {"engine": "tests.gpu.capped_engine:load_engine", "device": "cuda", "transport.name": transport}
    command = [
        sys.executable,
        "-m",
        f"{role}_node",
        "serve",
        "--port=0",
        "--http-port=0",
        "--insecure",
        "--model",
        str(model("llama")),
    ]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    ended = subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == exit_codes.DOES_NOT_FIT, ended.stdout + ended.stderr
    said = ended.stdout + ended.stderr
    lines = [line for line in said.splitlines() if "out of memory while allocating the KV pool of" in line]
    assert len(lines) == 1, said
    assert re.search(r"lower memory\.static_fraction \(now 0\.\d+\) or pool\.num_pages \(now \d+\)", lines[0]), said
    assert "Traceback" not in said
