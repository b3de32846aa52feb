"""Decode steps as on a GPU: what is captured and when, with stand-ins for CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embedded_engine import device_decode
from embedded_engine.engine import EmbeddedEngine
from embedded_engine.graphs import CannotBeCaptured, DecodeGraphs
from tests.embedded_engine.test_failed_steps import NO_MEMORY
from transfer.engine_types import DecodeItem
from transfer.errors import EngineError, OutOfMemory
from transfer.layout import Shard

VOCABULARY = 7


class FakeCuda:
    """What `DecodeGraphs` asks of torch.cuda: a graph is the launches of its capture, made again at every replay.

    Attributes:
        events: Everything that happened, in order.
        waits: Whether a step waits for the device.
        reserved_bytes: Of this process; a capture of n rows takes n.
        graphs: That were made.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[Any] = []
        self.waits = False
        self.reserved_bytes = 1000
        self.is_strict = False
        self.capturing: FakeGraph | None = None
        self.error: Exception | None = None
        self.graphs: list[FakeGraph] = []
        nothing = contextlib.nullcontext
        fakes: dict[str, Any] = {
            "device": lambda device: nothing(),
            "stream": lambda stream: nothing(),
            "Stream": lambda device: FakeStream(),
            "current_stream": lambda: FakeStream(),
            "graph_pool_handle": lambda: "pool",
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "memory_reserved": lambda device: self.reserved_bytes,
            "mem_get_info": None,  # of all processes of the device
            "set_sync_debug_mode": self.set_sync_debug_mode,
            "CUDAGraph": self.new_graph,
            "graph": self.graph,
        }
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)

    def new_graph(self) -> FakeGraph:
        self.graphs.append(FakeGraph())
        return self.graphs[-1]

    def set_sync_debug_mode(self, mode: str) -> None:
        self.is_strict = mode == "error"

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph, *, pool: str, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert pool == "pool"
        if self.error is not None:
            raise self.error
        self.capturing = graph
        yield
        self.capturing = None

    def load(self, size: int) -> None:
        assert self.capturing is None, "the host's copy would be captured"
        self.events.append(("load", size))

    def step(self, size: int) -> Tensor:
        if self.waits and self.is_strict:
            raise RuntimeError("called a synchronizing CUDA operation")
        kind = "capture" if self.capturing is not None else "check" if self.is_strict else "run"
        self.events.append((kind, size))
        if self.capturing is not None:
            self.reserved_bytes += size
            self.capturing.size = size
        return torch.full((size, VOCABULARY), float(size))


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeGraph:
    size = 0
    num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def captured(cuda: FakeCuda, *sizes: int) -> DecodeGraphs:
    return DecodeGraphs(sizes, cuda.load, cuda.step, torch.device("cpu"), advice="lower cuda_graph_max_bs (now 4)")


def test_every_size_is_warm_before_the_largest_is_captured_first(cuda: FakeCuda) -> None:
    graphs = captured(cuda, 4, 1, 2, 4)
    warm = [event for size in (1, 2, 4) for event in (("load", size), ("run", size), ("load", size), ("check", size))]
    assert cuda.events == warm + [event for size in (4, 2, 1) for event in (("load", size), ("capture", size))]
    assert graphs.batch_sizes == (1, 2, 4) and graphs.num_bytes == 4 + 2 + 1
    assert not cuda.is_strict


def test_a_step_takes_the_next_larger_graph(cuda: FakeCuda) -> None:
    graphs = captured(cuda, 1, 2, 4, 8)
    assert [graphs.size_for(rows) for rows in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, None]
    assert graphs.replay(2).shape == (2, VOCABULARY) and graphs.replay(8).shape == (8, VOCABULARY)
    assert {graph.size: graph.num_replays for graph in cuda.graphs} == {1: 0, 2: 1, 4: 0, 8: 1}


def test_a_step_that_waits_is_found_before_anything_is_captured(cuda: FakeCuda) -> None:
    cuda.waits = True
    with pytest.raises(CannotBeCaptured, match="a decode step waits for the device: called a synchronizing CUDA operation"):
        captured(cuda, 1, 2)
    assert not [event for event in cuda.events if event[0] == "capture"] and not cuda.is_strict


def test_a_capture_that_fails_names_the_setting(cuda: FakeCuda) -> None:
    cuda.error = RuntimeError("operation not permitted")
    with pytest.raises(EngineError, match=r"a decode step of 2 tokens could not be captured: .* cuda_graph_max_bs 0") as failed:
        captured(cuda, 1, 2)
    assert not isinstance(failed.value, CannotBeCaptured)


@pytest.mark.parametrize("error", NO_MEMORY, ids=repr)
def test_a_capture_without_memory_names_its_step_and_the_setting(cuda: FakeCuda, error: Exception) -> None:
    cuda.error = error
    says = "^out of memory while capturing the CUDA graph of a decode step of 4 tokens: .* free; lower cuda_graph_max_bs .now 4.$"
    with pytest.raises(OutOfMemory, match=says):
        captured(cuda, 1, 4)
    cuda.error = None
    captured(cuda, 1, 4)


@pytest.mark.parametrize("behind", [-3, 160, 2**40, 2**70])
def test_a_step_uses_the_pages_that_were_checked_and_no_others(
    demo_dir: Path, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    settings: dict[str, Any] = {"max_running_requests": 2, "max_seq_len": 64, "has_decode_kernels": True}
    engine = EmbeddedEngine(demo_dir, shard=Shard(page_size=4), num_pages=8, **settings)
    loaded: list[DecodeItem] = []

    def logits(self: device_decode.DeviceDecoder, items: Sequence[DecodeItem], put_unread: object) -> Tensor:
        loaded.extend(items)
        return torch.zeros(len(items), engine.vocab_size)

    monkeypatch.setattr(device_decode.DeviceDecoder, "logits", logits)
    table = [3, 1, behind]  # seven tokens are in the first two
    batch = engine.decode_batch([DecodeItem(request_id="a", token_id=5, position=6, page_tables=(table,))])
    table[:] = [-1, behind]
    assert engine.forward_batch(batch).tokens() == {"a": 0}
    assert [one.page_tables for one in loaded] == [((3, 1),)]
