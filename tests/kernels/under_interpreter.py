"""One case for each Triton kernel under its interpreter; run by test_triton.py in a process that sets TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.kernel_cases import Case, address_only, assert_agrees, assert_same_pools
from tests.kernels.page_cases import PageCase, Side, assert_moves
from transfer.copy import add_digest
from transfer.copy.device_page_mover import DevicePageMovement
from transfer.copy.digest import DIGEST_WORDS, digest
from transfer.copy.head_slice import TritonCopier, Tuning
from transfer.copy.kernel_choice import triton_defect
from transfer.copy.launch import Launcher, Stream, current_stream
from transfer.layout import DType, KVLayout, LayerSpec, Range, Shard, TokenOrder
from transfer.pool.kv_pool import PagedKVPool


@pytest.mark.parametrize("wire_dtype", [DType.BFLOAT16, DType.FLOAT8_E4M3], ids=["copied", "narrowed"])
def test_heads_are_gathered_and_scattered(wire_dtype: DType) -> None:
    case = Case(
        layout=KVLayout(layers=(LayerSpec(num_kv_heads=3, k_head_dim=8, v_head_dim=5),) * 2, dtype=DType.BFLOAT16),
        shard=Shard(page_size=4, order=TokenOrder.HND),
        num_pages=5,
        heads=Range(begin=1, end=3),
        wire_dtype=wire_dtype,
        pages=(4, 0, 2),
        tokens=Range(begin=3, end=11),
        num_tokens=11,
        first_page=1,
        scales={(1, True): 0.37},
    )
    assert_agrees(case, TritonCopier, has_kernels=True)


CONVERTIBLE = [dtype for dtype in DType if dtype is not DType.INT8]


@pytest.mark.parametrize(("k_dim", "v_dim"), [(32, 16), (24, 40)], ids=["exact", "padded"])
@pytest.mark.parametrize("pair", list(itertools.permutations(CONVERTIBLE, 2)), ids="-".join)
def test_converted_heads_are_digested_in_the_same_pass(pair: tuple[DType, DType], k_dim: int, v_dim: int) -> None:
    """In tiles of 64 words: rows with and without padding to their pieces, and pieces that begin inside a page."""
    element, wire_dtype = pair
    case = Case(
        layout=KVLayout(layers=(LayerSpec(num_kv_heads=3, k_head_dim=k_dim, v_head_dim=v_dim),) * 2, dtype=element),
        shard=Shard(page_size=4, order=TokenOrder.HND if k_dim == 24 else TokenOrder.NHD),
        num_pages=5,
        heads=Range(begin=1, end=3),
        wire_dtype=wire_dtype,
        pages=(4, 0, 2),
        tokens=Range(begin=3, end=11),
        num_tokens=11,
        scales={(1, True): 0.37},
    )
    in_small_tiles = partial(TritonCopier, tuning=Tuning(digest_words=64))
    assert case.plan(in_small_tiles, case.pool("cpu", seed=1)).can_digest
    assert_agrees(case, in_small_tiles, has_kernels=True)


def five_buffers(
    *,
    v_head_dims: Sequence[int],
    scales: Mapping[tuple[int, bool], float],
    order: TokenOrder = TokenOrder.NHD,
    first_page: int = 0,
) -> Case:
    """Return a case of layers with these sizes of V, of which 0 is no buffer. Elements are narrowed to 8 bits."""
    layers = tuple(LayerSpec(num_kv_heads=3, k_head_dim=16, v_head_dim=dim) for dim in v_head_dims)
    return Case(
        layout=KVLayout(layers=layers, dtype=DType.BFLOAT16),
        shard=Shard(page_size=4, order=order),
        num_pages=5,
        heads=Range(begin=1, end=3),
        wire_dtype=DType.FLOAT8_E4M3,
        pages=(4, 0, 2),
        tokens=Range(begin=3, end=11),
        num_tokens=11,
        first_page=first_page,
        scales=scales,
    )


Grid = tuple[int, int, int]


@pytest.fixture
def launched_grids(monkeypatch: pytest.MonkeyPatch) -> list[Grid]:
    """The grids of all launches so far. Memory with an address only may be a host's."""
    honest, found = Launcher.__call__, list[Grid]()

    def recorded(launcher: Launcher, stream: Stream, grid: Grid, arguments: tuple[int, ...]) -> None:
        found.append(grid)
        honest(launcher, stream, grid, arguments)

    monkeypatch.setattr(Launcher, "__call__", recorded)
    monkeypatch.setattr("transfer.copy.head_slice._TritonPlan._check_address_only", lambda *_: None)
    return found


@pytest.mark.parametrize(
    ("peer_programs", "grids"),
    [(0, [(3, 5, 1), (3, 2, 1), (3, 3, 1)]), (4, [(4, 1, 1)] * 3), (64, [(15, 1, 1)] * 3)],
    ids=["one per tile", "few", "some without a tile"],
)
def test_a_plan_is_gathered_into_a_peers_memory_and_in_halves(
    peer_programs: int, grids: list[Grid], launched_grids: list[Grid]
) -> None:
    """Five buffers of three tiles, some scaled. Together, the halves write the bytes of the plan and have its digest."""
    case = five_buffers(v_head_dims=(16, 16, 0), scales={(0, True): 0.37, (1, True): 4.0, (2, False): 0.5})
    pool, pages = case.pool("cpu", seed=1), torch.tensor(case.pages)
    assert not case.plan(TritonCopier, pool).can_halve, "a small plan is not worth it"
    tuning = Tuning(halved_bytes=0, digest_words=16, peer_programs=peer_programs)
    plan = case.plan(partial(TritonCopier, tuning=tuning), pool)
    assert plan.can_halve and len(plan.buffers) == 5
    wires = [torch.full((plan.num_wire_bytes,), 7, dtype=torch.uint8) for _ in range(3)]
    expected, found, total = (torch.zeros(1, dtype=torch.int64) for _ in range(3))
    (local, whole, halves), (_, to_whole, to_halves) = wires, map(address_only, wires)
    plan.gather(pages, local, digest=expected)
    plan.gather(pages, to_whole, digest=found)
    assert torch.equal(whole, local) and torch.equal(found, expected)
    plan.gather_half(0, pages, to_halves, first_page=0, digest=total)
    first = sum(buffer.num_bytes for buffer in plan.buffers[:2])
    assert torch.equal(halves[:first], whole[:first]) and (halves[first:] == 7).all()
    plan.gather_half(1, pages, to_halves, first_page=0, digest=total)
    assert torch.equal(halves, whole) and torch.equal(total, expected)
    assert launched_grids == [(3, 5, 1), *grids]


def test_gathers_into_a_peers_memory_have_large_tiles_without_a_digest_too(launched_grids: list[Grid]) -> None:
    """Rows of 12 bytes are not whole words, like those of an indexer's scales. Two buffers of three tiles of 16 rows."""
    case = Case(
        layout=KVLayout(layers=(LayerSpec(num_kv_heads=1, k_head_dim=12, v_head_dim=0),) * 2, dtype=DType.INT8),
        shard=Shard(page_size=4),
        num_pages=12,
        heads=Range(begin=0, end=1),
        wire_dtype=DType.INT8,
        pages=tuple(range(11, 1, -1)),
        tokens=Range(begin=3, end=40),
        num_tokens=40,
    )
    pool, pages = case.pool("cpu", seed=1), torch.tensor(case.pages)
    plan = case.plan(partial(TritonCopier, tuning=Tuning(copy_words=8, peer_words=64)), pool)
    local, peers = case.wire("cpu"), case.wire("cpu")
    plan.gather(pages, local)
    plan.gather(pages, address_only(peers))
    assert not plan.can_digest and torch.equal(peers, local)
    assert launched_grids == [(19, 2, 1), (6, 1, 1)]


def test_scatters_in_halves_write_what_the_whole_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half runs before the wire has the second. If it runs before its own bytes arrive, the digest differs."""
    scales = {(0, True): 0.37, (1, False): 4.0, (3, False): 0.5}
    case = five_buffers(v_head_dims=(16, 0, 0, 0), scales=scales, order=TokenOrder.HND, first_page=2)
    halved, table, wire = partial(TritonCopier, tuning=Tuning(halved_bytes=0)), case.table("cpu"), case.wire("cpu")
    case.plan(TritonCopier, case.pool("cpu", seed=1)).gather(table, wire, first_page=2)
    stream = current_stream(wire.device)
    monkeypatch.setattr(Launcher, "launch_of", lambda launcher, *how: partial(launcher, stream, *how))
    found: list[tuple[PagedKVPool, Tensor]] = []
    for kind in ("whole", "halves", "early"):
        pool, total = case.pool("cpu", seed=2), torch.zeros(1, dtype=torch.int64)
        plan, source = case.plan(halved, pool), torch.zeros_like(wire)
        launches: Any = plan.scatter_kernels(table, source, first_page=2, digest=total)
        assert len(plan.buffers) == 5 and len(launches) == 2
        second = plan.buffers[2].offset_bytes
        if kind == "halves":
            source[:second] = wire[:second]
        if kind == "whole":
            plan.scatter(table, wire, first_page=2, digest=total)
        else:
            launches[0]()
            source.copy_(wire)
            launches[1]()
        found.append((pool, total))
    (whole, digest_of_whole), (pool, total), (_, early) = found
    assert_same_pools(pool, whole)
    assert torch.equal(total, digest_of_whole) and not torch.equal(early, digest_of_whole)


def test_words_are_summed() -> None:
    wire = torch.randint(256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert triton_defect(wire.device) == ""
    total = torch.full((1,), 3, dtype=torch.int64)
    add_digest(total, wire, 17_333)
    assert (int(total) - 3) % 2**64 == digest(wire[:17_333], DIGEST_WORDS)


@pytest.mark.parametrize("side", ["save", "load", "copy"])
def test_pages_are_moved(side: Side) -> None:
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=3, head_dim=12, dtype=DType.FLOAT32)
    sizes = {"num_pages": 7, "num_host_pages": 6, "buffer_pages": 2}
    case = PageCase(layout=layout, shard=Shard(page_size=4), is_consecutive=False, is_view=True, seed=3, **sizes)
    assert_moves(case, side, lambda pool, host, size: DevicePageMovement(pool, host, buffer_bytes=size))
