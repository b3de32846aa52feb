"""Decode over device and host memory on a real GPU: against everything on the device, against the CPU, and beside copies."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.forward_batch import ForwardBatch
from embedded_engine.model_files import read_model_files
from kvferry.demo.model import make_demo_model
from tests.embedded_engine.families import FAMILIES
from tests.embedded_engine.steps import Directory, Prompts, pages_for
from tests.embedded_engine.test_tiered_decode import WITHOUT_FULL_ATTENTION
from tests.embedded_engine.tiers import full_group, largest_slice
from tests.gpu.small_engines import prompts_of
from tests.gpu.tiered_requests import LAUNCHED, LENGTHS, NUM_ROWS, NUM_TOKENS, REPLAYED, note_replays, roomy_engine, tiered_tokens
from transfer.copy.page_mover import PageMove, PageMover
from transfer.engine_types import DecodeItem
from transfer.layer_groups import NO_PAGE, layer_groups
from transfer.layout import DType, Shard
from transfer.pool.host_pool import HostPool

pytestmark = pytest.mark.timeout(600)  # the first of each shape compiles its kernels

MODELS = ("llama", *(name for name in FAMILIES if name not in WITHOUT_FULL_ATTENTION))
TOLERANCES = {DType.FLOAT32: 2e-3, DType.BFLOAT16: 6e-2}
"""Of logits, whose largest are some units: what another order of sums comes to behind a few layers."""


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return prompts_of(LENGTHS.values())


@pytest.mark.parametrize("pages_per_block", [LAUNCHED, REPLAYED], ids=["launched", "replayed"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_cpu(
    model: Directory, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, name: str, pages_per_block: int
) -> None:
    """In float32, with steps that are launched because they read more than both buffers hold, or with replayed ones."""
    replayed = note_replays(monkeypatch)
    on_cpu = tiered_tokens(roomy_engine(model(name), "cpu"), prompts, pages_per_block)
    engine = roomy_engine(model(name), "cuda", captured=(NUM_ROWS,))
    assert tiered_tokens(engine, prompts, pages_per_block) == on_cpu
    # A model that waits for the device in mid-step, as some experts do, has no graphs.
    assert replayed == [NUM_ROWS] * (NUM_TOKENS - 1 if engine.captured_batch_sizes and pages_per_block == REPLAYED else 0)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
def test_tokens_with_blocks_in_the_store_are_those_of_the_cpu(
    model: Directory, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its steps are launched, although both buffers hold the pages in host memory."""
    replayed = note_replays(monkeypatch)
    on_cpu = tiered_tokens(roomy_engine(model(name), "cpu"), prompts, REPLAYED)
    engine = roomy_engine(model(name), "cuda", captured=(NUM_ROWS,))
    assert tiered_tokens(engine, prompts, REPLAYED, stored_pages=3) == on_cpu
    assert not replayed


class LongRequest:
    """A request of many pages, once all on the device and once but for its newest pages in host memory.

    Args:
        directory: The model.
        dtype: What it computes in, and its pool has.
        num_tokens: Of the request.
        num_device_pages: Newest pages that stay.
        is_replayed: Whether its steps, of one row and of two, come from CUDA graphs.
    """

    def __init__(
        self, directory: Path, *, dtype: DType, is_replayed: bool, num_tokens: int = 3000, num_device_pages: int = 3
    ) -> None:
        self.pages_per_block = 100 if is_replayed else 20
        self.num_tokens = num_tokens
        self.page_size = 16
        num_pages = -(-num_tokens // self.page_size)
        files = read_model_files(directory)
        groups = layer_groups(files.layout())
        self.engine = EmbeddedEngine(
            files,
            shard=Shard(page_size=self.page_size),
            num_pages=pages_for(groups, num_pages + 8, num_states=3),
            device="cuda",
            dtype=dtype,
            max_running_requests=2,
            cuda_graph_batch_sizes=(1, 2) if is_replayed else (),
            has_host_pages=True,
        )
        self.group = full_group(groups)
        for layer in range(files.layout().num_layers):
            for is_v in (False, True)[: files.layout().layers[layer].num_buffers]:
                self.engine.pool.buffer(layer, is_v=is_v).normal_()
        self.host = HostPool(
            self.engine.pool, num_pages=[num_pages if index == self.group else 0 for index in range(len(groups))]
        )
        self.engine.use_host_pool(self.host, block_bytes=self.pages_per_block * largest_slice(self.host, self.group))
        pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(4)).tolist()
        host_pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5)).tolist()
        self.num_in_host = num_in_host = num_pages - num_device_pages
        self.moved = [PageMove(group=self.group, device_pages=pages[:num_in_host], host_pages=host_pages[:num_in_host])]
        self.mover = PageMover(self.engine.pool, self.host, buffer_bytes=8 * max(self.host.page_bytes))
        self.mover.save(self.moved)
        others = [[0] if group.page_size(16) == 1 else pages for group in groups]
        self._tables = [tuple(pages if index == self.group else other) for index, other in enumerate(others)]
        self._host_pages = tuple(host_pages)
        self.on_device = self.item(0)
        self.tiered = self.item(num_in_host)

    def item(self, num_in_host: int) -> DecodeItem:
        """Its next step, with so many pages in host memory, at most those that have been moved there."""
        left = [
            (NO_PAGE,) * num_in_host + table[num_in_host:] if index == self.group else table
            for index, table in enumerate(self._tables)
        ]
        hosts = [self._host_pages[:num_in_host] if index == self.group else () for index in range(len(self._tables))]
        return DecodeItem(
            request_id="a",
            token_id=7,
            position=self.num_tokens - 1,
            page_tables=tuple(left),
            host_tables=tuple(hosts) if num_in_host else (),
        )

    def queued(self, batch: ForwardBatch) -> Tensor:
        """Logits of a step that is not waited for."""
        found = self.engine.logits(batch)
        assert found is not None
        return found.float().clone()

    def logits(self, items: Sequence[DecodeItem]) -> Tensor:
        found = self.queued(self.engine.decode_batch(items))
        torch.cuda.synchronize()
        return found


both_ways = pytest.mark.parametrize("is_replayed", [False, True], ids=["launched", "replayed"])


@pytest.fixture
def long_context(tmp_path: Path) -> Path:
    """The demo model with room for long requests."""
    directory = make_demo_model(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return directory


@both_ways
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=str)
def test_a_long_request_is_attended_to_as_if_it_were_on_the_device(
    long_context: Path, monkeypatch: pytest.MonkeyPatch, dtype: DType, is_replayed: bool
) -> None:
    request = LongRequest(long_context, dtype=dtype, is_replayed=is_replayed)
    expected = request.logits([request.on_device])
    tolerance = TOLERANCES[dtype] * float(expected.abs().max())
    replayed = note_replays(monkeypatch)
    torch.testing.assert_close(request.logits([request.tiered]), expected, rtol=0, atol=tolerance)
    assert replayed == [1] * is_replayed
    assert request.engine.host_block_bytes == 2 * request.pages_per_block * largest_slice(request.host, 0)


@both_ways
def test_buffers_are_never_read_before_they_are_filled_nor_filled_before_they_are_read(
    long_context: Path, is_replayed: bool
) -> None:
    """Many steps in a row, none of them waited for, beside a copy of other pages and work on another stream: the same bits."""
    request = LongRequest(long_context, dtype=DType.BFLOAT16, is_replayed=is_replayed)
    expected = request.logits([request.tiered])
    batch = request.engine.decode_batch([request.tiered])
    is_over = threading.Event()

    def save() -> None:
        while not is_over.is_set():
            request.mover.save(request.moved)  # what is there already: the pages' bytes do not change

    thread = threading.Thread(target=save)
    thread.start()
    try:
        matrix = torch.randn(4096, 4096, device="cuda")
        other = torch.cuda.Stream()
        found: list[Tensor] = []
        for _ in range(30):
            with torch.cuda.stream(other):
                matrix = torch.tanh(matrix @ matrix)
            found.append(request.queued(batch))
        torch.cuda.synchronize()
    finally:
        is_over.set()
        thread.join(60)
    assert all(torch.equal(one, expected) for one in found)
