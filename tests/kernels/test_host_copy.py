"""Both host-memory implementations agree with the reference bit for bit, and the NumPy one copies as few pieces as it can."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.kernel_cases import Case, assert_agrees, assert_same_pools, cases, fill
from transfer.copy import Kernels, compiled_copy, head_slice_copier, host_copy
from transfer.copy.compiled_copy import IS_BUILT, CompiledCopier
from transfer.copy.digest import DIGEST_WORDS, DIGEST_XXH3, HostDigest, digest
from transfer.copy.host_copy import HostCopier, TokenRun, plan_tokens
from transfer.copy.piece_copier import PieceCopy
from transfer.copy.torch_copy import TorchCopier
from transfer.layout import DType, KVLayout, Range, Shard, TokenOrder, WireBuffer
from transfer.pool.kv_pool import LayerBuffers, PagedKVPool, as_words

needs_compiled = pytest.mark.skipif(not IS_BUILT, reason="transfer.copy._host_copy is not built: make setup builds it")


@pytest.mark.parametrize("limits", [{}, {"MIN_BYTES_FOR_TORCH": 0}, {"BLOCK_BYTES": 1}, {"BLOCK_BYTES": 700}], ids=str)
@settings(max_examples=50)
@given(case=st.one_of(cases(), cases(max_page_size=256, max_pages=30, max_dim=3)))
def test_agrees_with_the_reference(limits: dict[str, int], case: Case) -> None:
    """As it is; where every gather is large enough for torch; and where a scatter takes many blocks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(host_copy, name, value)
        assert_agrees(case, HostCopier)


@needs_compiled
@pytest.mark.parametrize("constants", [{}, {"MIN_STREAMED_BYTES": 0}, {"HAS_AVX2": False}], ids=str)
@settings(max_examples=100)
@given(case=st.one_of(cases(), cases(max_page_size=256, max_pages=30, max_dim=3)))
def test_compiled_code_agrees_with_the_reference(constants: dict[str, Any], case: Case) -> None:
    """As it is; past the caches; and as on a processor without AVX2."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(compiled_copy, name, value)
        assert_agrees(case, CompiledCopier)


@needs_compiled
@pytest.mark.parametrize("has_avx2", [True, False])
@pytest.mark.parametrize("page_bytes", [64, 100, 1024, 4096])
@pytest.mark.parametrize("num_pages", [1, 2, 3, 16, 17, 33, 50])
def test_digests_of_compiled_code_are_those_of_other_releases(
    num_pages: int, page_bytes: int, has_avx2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At sizes around the limits of XXH3: short inputs, whole and part stripes, and blocks of 1,024 bytes."""
    monkeypatch.setattr(compiled_copy, "HAS_AVX2", has_avx2 and compiled_copy.HAS_AVX2)
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=page_bytes, dtype=DType.INT8)
    pool = PagedKVPool(layout=layout, shard=Shard(page_size=1), num_pages=64)
    pool.buffer(0, is_v=False).random_()
    num_bytes, heads = num_pages * page_bytes, Range(begin=0, end=1)
    tokens = Range(begin=0, end=num_pages)
    buffer = WireBuffer(layer=0, is_v=False, tokens=tokens, row_bytes=page_bytes, offset_bytes=0)
    plan = CompiledCopier(pool, heads=heads, wire_dtype=DType.INT8).plan([buffer])
    for algorithm, expected in ((DIGEST_XXH3, lambda wire: xxhash.xxh3_64_intdigest(wire.numpy())), (DIGEST_WORDS, by_numpy)):
        for copy in (plan.gather, plan.scatter):
            wire, found = torch.randint(256, (num_bytes,), dtype=torch.uint8), HostDigest(algorithm)
            copy(torch.randperm(64), wire, digest=found)
            assert found.value() == expected(wire)


def by_numpy(wire: torch.Tensor) -> int:
    return digest(wire, DIGEST_WORDS)


@settings(max_examples=50)
@given(data=st.data(), page_size=st.integers(1, 9), num_pages=st.integers(1, 40))
def test_a_plan_covers_each_token_once(data: st.DataObject, page_size: int, num_pages: int) -> None:
    pages = data.draw(st.one_of(st.permutations(range(num_pages)), st.just(list(range(num_pages)))))
    begin = data.draw(st.integers(0, num_pages * page_size - 1))
    end = data.draw(st.integers(begin + 1, num_pages * page_size))
    plan = plan_tokens(torch.tensor(pages), Range(begin=begin, end=end), page_size)
    found: dict[int, int] = {}
    parts = list(plan.runs)
    if plan.scattered is not None:
        parts += [
            TokenRun(page=page, num_pages=1, begin=0, end=page_size, wire_token=plan.wire_token + index * page_size)
            for index, page in enumerate(plan.scattered.tolist())
        ]
    for run in parts:
        token = run.wire_token
        for page in range(run.page, run.page + run.num_pages):
            for offset in range(run.begin, run.end):
                assert token not in found
                found[token] = page * page_size + offset
                token += 1
    expected = {token - begin: pages[token // page_size] * page_size + token % page_size for token in range(begin, end)}
    assert found == expected


def interleaved() -> list[LayerBuffers]:
    """K and V of a block beside each other, as vLLM keeps them: no buffer is contiguous."""
    return [LayerBuffers(k=both[:, 0], v=both[:, 1]) for both in (torch.full((7, 2, 4, 4, 6), 7.0) for _ in range(2))]


def uneven() -> list[LayerBuffers]:
    """Three buffers in one allocation with a gap before the last, and the fourth as far away from it in another one."""
    first, second = (torch.full((6, 7, 4, 4, 6), 7.0) for _ in range(2))
    return [LayerBuffers(k=first[0], v=first[1]), LayerBuffers(k=first[3], v=second[5])]


@pytest.mark.parametrize("wire_dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("own", [interleaved, uneven])
@pytest.mark.parametrize("implementation", [HostCopier, pytest.param(CompiledCopier, marks=needs_compiled)])
def test_works_on_an_engines_own_tensors(
    implementation: type[HostCopier], own: Callable[[], list[LayerBuffers]], wire_dtype: DType
) -> None:
    layout, shard = KVLayout.uniform(num_layers=2, num_kv_heads=4, head_dim=6, dtype=DType.FLOAT32), Shard(page_size=4)
    pool, *targets = (PagedKVPool(layout=layout, shard=shard, num_pages=7, buffers=own()) for _ in range(3))
    fill(pool, seed=1)
    element_bytes = wire_dtype.num_bytes
    buffers = [
        WireBuffer(
            layer=layer,
            is_v=is_v,
            tokens=Range(begin=3, end=18),
            row_bytes=2 * 6 * element_bytes,
            offset_bytes=index * 15 * 12 * element_bytes,
        )
        for index, (layer, is_v) in enumerate([(0, False), (0, True), (1, False), (1, True)])
    ]
    wires = [torch.zeros(4 * 15 * 12 * element_bytes, dtype=torch.uint8) for _ in range(2)]
    pages = torch.tensor([6, 0, 2, 3, 5])
    for kind, target, wire in zip((implementation, TorchCopier), targets, wires, strict=True):
        kind(pool, heads=Range(begin=1, end=3), wire_dtype=wire_dtype).plan(buffers).gather(pages, wire)
        kind(target, heads=Range(begin=1, end=3), wire_dtype=wire_dtype).plan(buffers).scatter(pages, wires[0])
    assert torch.equal(*wires) and bool(wires[0].any())
    assert_same_pools(*targets)
    assert not torch.equal(targets[0].buffer(0, is_v=False), own()[0].k)


def test_nan_bits_survive_a_copy() -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, dtype=DType.BFLOAT16)
    pool = PagedKVPool(layout=layout, shard=Shard(page_size=1), num_pages=1)
    bits = torch.tensor([0x7FA1, 0x7FC0, 0x7F81, 0x7FFF], dtype=torch.int16)
    as_words(pool.buffer(0, is_v=False)).view(-1).copy_(bits)
    wire = torch.zeros(8, dtype=torch.uint8)
    buffer = WireBuffer(layer=0, is_v=False, tokens=Range(begin=0, end=1), row_bytes=8, offset_bytes=0)
    HostCopier(pool, heads=Range(begin=0, end=1), wire_dtype=DType.BFLOAT16).plan([buffer]).gather(torch.tensor([0]), wire)
    assert torch.equal(wire.view(torch.int16), bits)


@pytest.mark.parametrize("order", list(TokenOrder))
def test_offsets_beyond_32_bits(order: TokenOrder) -> None:
    """Pages 3 GiB apart in one sparse mapping: nothing but the touched ones is ever committed."""
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=4, dtype=DType.INT8)
    apart, inner = 3 << 30, (4, 2, 4) if order is TokenOrder.NHD else (2, 4, 4)
    storage = torch.empty(2 * apart + 4096, dtype=torch.int8)
    strides = (apart, inner[1] * inner[2], inner[2], 1)
    k, v = (storage.as_strided((3, *inner), strides, start) for start in (0, 1024))
    pool = PagedKVPool(layout=layout, shard=Shard(page_size=4, order=order), num_pages=3, buffers=[LayerBuffers(k=k, v=v)])
    for page in (0, 2):
        k[page] = torch.randint(-99, 99, inner, dtype=torch.int8)
    wire, expected = torch.zeros(8 * 8, dtype=torch.uint8), torch.zeros(8 * 8, dtype=torch.uint8)
    buffer = WireBuffer(layer=0, is_v=False, tokens=Range(begin=0, end=8), row_bytes=8, offset_bytes=0)
    for copier, out in ((head_slice_copier, wire), (TorchCopier, expected)):
        copier(pool, heads=Range(begin=0, end=2), wire_dtype=DType.INT8).plan([buffer]).gather(torch.tensor([2, 0]), out)
    assert torch.equal(wire, expected)
    head_slice_copier(pool, heads=Range(begin=0, end=2), wire_dtype=DType.INT8).plan([buffer]).scatter(torch.tensor([0, 2]), wire)
    gathered = torch.zeros_like(wire)
    TorchCopier(pool, heads=Range(begin=0, end=2), wire_dtype=DType.INT8).plan([buffer]).gather(torch.tensor([0, 2]), gathered)
    assert torch.equal(gathered, wire)


def test_a_cpu_pool_needs_no_triton() -> None:
    code = (
        "import sys, transfer.copy as kernels\n"
        "from transfer.pool.kv_pool import PagedKVPool\n"
        "from transfer.layout import *\n"
        "layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=DType.FLOAT32)\n"
        "pool = PagedKVPool(layout=layout, shard=Shard(), num_pages=1)\n"
        "copier = kernels.head_slice_copier(pool, heads=Range(begin=0, end=1), wire_dtype=DType.FLOAT32)\n"
        "print(type(copier).__name__, 'triton' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["CompiledCopier" if IS_BUILT else "HostCopier", "False"]


@pytest.mark.parametrize("kernels", [pytest.param(Kernels.COMPILED, marks=needs_compiled), Kernels.NUMPY, Kernels.TORCH])
def test_pages_have_the_bytes_of_the_digest_although_a_peer_changes_the_wire(kernels: Kernels) -> None:
    """A hostile peer can map the ring, and write while a piece is scattered. Before, 1 to 5 % of these copies were wrong."""
    num_bytes, page_bytes = 1 << 20, 1 << 16
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=page_bytes // 16, dtype=DType.INT8)
    pool = PagedKVPool(layout=layout, shard=Shard(page_size=16), num_pages=num_bytes // page_bytes)
    tokens = Range(begin=0, end=num_bytes // page_bytes * 16)
    buffer = WireBuffer(layer=0, is_v=False, tokens=tokens, row_bytes=page_bytes // 16, offset_bytes=0)
    copier = head_slice_copier(pool, heads=Range(begin=0, end=1), wire_dtype=DType.INT8, kernels=kernels)
    pages = torch.arange(pool.num_pages)
    copy = replace(PieceCopy.of({0: copier.plan([buffer])}, pool.device, kernels), tables=[pages], first_pages=[0])
    honest = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    announced, wire = digest(honest.numpy()), honest.clone()
    ring, place, is_over = wire.numpy(), slice(num_bytes // 2, num_bytes // 2 + 64), False
    other = 255 - ring[place]

    def change() -> None:
        mine = ring[place].copy()
        while not is_over:
            ring[place] = other
            ring[place] = mine

    peer = threading.Thread(target=change)
    peer.start()
    accepted = wrong = 0
    for _ in range(100):
        found = HostDigest(DIGEST_XXH3)
        copy.scatter(wire, found)
        if found.value() == announced:
            accepted += 1
            wrong += not torch.equal(pool.buffer(0, is_v=False).view(torch.uint8).flatten(), honest)
    is_over = True
    peer.join()
    assert accepted and not wrong


@needs_compiled
def test_compiled_code_of_another_version_is_not_used(tmp_path: Path) -> None:
    """In a checkout after an update, its arguments could lie in other places."""
    source = tmp_path / "_host_copy.c"
    assert compiled_copy.is_current(SimpleNamespace(), source), "an installed wheel has no source"
    source.write_text("another version")
    built = SimpleNamespace(source_hash=lambda: hashlib.sha256(b"this version").hexdigest())
    assert not compiled_copy.is_current(built, source) and not compiled_copy.is_current(SimpleNamespace(), source)
    source.write_text("this version")
    assert compiled_copy.is_current(built, source)
