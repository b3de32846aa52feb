"""The Triton kernels under their interpreter; run by test_under_interpreter.py with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.kernel_cases import Case, address_only, assert_agrees, cases
from tests.kernels.page_cases import PageCase, Side, assert_moves, page_cases
from tests.runtime.pieces import piece_of
from tests.runtime.scattered_tiers import HYBRID
from tests.runtime.test_piece_copier import carry_over, pages_of
from transfer.chunk import ChunkPlan, Pieces, split_into_chunks
from transfer.copy import CopyPlan, Kernels, WireMemory, add_digest, copier, device_page_mover, head_slice
from transfer.copy.digest import DIGEST_WORDS, STEP, digest
from transfer.copy.head_slice import TritonCopier, Tuning
from transfer.copy.launch import Launcher
from transfer.copy.page_segments import IoBackend
from transfer.copy.piece_copier import PieceCopier
from transfer.copy.torch_copy import TorchCopier, words_sum
from transfer.layout import DType, KVLayout, Range, Shard, TokenOrder, WireBuffer, routes, wire_dtype
from transfer.pool.kv_pool import TORCH_DTYPES, LayerBuffers, PagedKVPool, as_words

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


@settings(max_examples=120)
@given(case=cases(max_page_size=20, max_pages=5, max_dim=12))
def test_agrees_with_the_reference(case: Case) -> None:
    assert_agrees(case, TritonCopier, has_kernels=True)


@settings(max_examples=6)
@given(case=cases(max_page_size=256, max_pages=2, max_dim=3))
def test_agrees_on_large_pages(case: Case) -> None:
    assert_agrees(case, TritonCopier, has_kernels=True)


class PeersWire(head_slice._TritonPlan):  # noqa: SLF001
    """Gathers store into a peer's memory."""

    def _check_address_only(self, wire: WireMemory, name: str) -> None:
        pass

    def gather(self, pages: Tensor, out: WireMemory, **more: Any) -> None:
        super().gather(pages, address_only(out) if isinstance(out, Tensor) else out, **more)


class OtherwiseTuned(TritonCopier):
    """With small tiles, other warps, and few programs for gathers."""

    def plan(self, buffers: Sequence[WireBuffer]) -> CopyPlan:
        return PeersWire(self, buffers)

    def __init__(self, *arguments: Any, **more: Any) -> None:
        tuning = Tuning(
            copy_words=32,
            copy_warps=1,
            digest_words=16,
            digest_warps=8,
            conversion_elements=64,
            conversion_warps=2,
            max_columns=8,
            peer_programs=5,
            peer_words=16,
            peer_warps=1,
        )
        super().__init__(*arguments, **more, tuning=tuning)


@settings(max_examples=30)
@given(case=cases(max_page_size=20, max_pages=5, max_dim=12))
def test_tuning_changes_no_byte(case: Case) -> None:
    assert_agrees(case, OtherwiseTuned, has_kernels=True)


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("head_dim", [513, 1100 * 8])
def test_rows_wider_than_a_tile(order: TokenOrder, head_dim: int) -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=head_dim, dtype=DType.INT8)
    assert_agrees(
        Case(
            layout=layout,
            shard=Shard(page_size=2, order=order),
            num_pages=2,
            heads=Range(begin=0, end=2),
            wire_dtype=DType.INT8,
            pages=(1, 0),
            tokens=Range(begin=1, end=4),
            num_tokens=4,
        ),
        TritonCopier,
        has_kernels=True,
    )


FLOATS = [dtype for dtype in DType if dtype is not DType.INT8]


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_conversions_are_exact_for_every_pattern(source: DType, target: DType) -> None:
    """All bit patterns of the 8- and 16-bit types, 65,536 random ones of float32; NaN must stay NaN."""
    bits = torch.randint(-(2**31), 2**31, (65536,), generator=torch.Generator().manual_seed(6)).to(torch.int32)
    values = {
        1: torch.arange(65536).to(torch.uint8).view(TORCH_DTYPES[source]) if source.num_bytes == 1 else None,
        2: torch.arange(-32768, 32768).to(torch.int16).view(TORCH_DTYPES[source]) if source.num_bytes == 2 else None,
        4: bits.view(torch.float32) if source.num_bytes == 4 else None,
    }[source.num_bytes]
    assert values is not None
    if source is DType.FLOAT32:  # random bits are mostly huge or tiny: add numbers around the limits of the narrow types
        near = torch.randn(32768, generator=torch.Generator().manual_seed(7)) * 2.0 ** torch.arange(-14, 18).repeat(1024)
        values = torch.cat([values[:32768], near])
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1024, v_head_dim=0, dtype=source)
    pool = PagedKVPool(layout=layout, shard=Shard(page_size=64), num_pages=1)
    as_words(pool.buffer(0, is_v=False)).view(-1).copy_(as_words(values))
    tokens = Range(begin=0, end=64)
    buffer = WireBuffer(layer=0, is_v=False, tokens=tokens, row_bytes=1024 * target.num_bytes, offset_bytes=0)
    wire, expected = (torch.zeros(65536 * target.num_bytes, dtype=torch.uint8) for _ in range(2))
    for implementation, out in ((TritonCopier, wire), (TorchCopier, expected)):
        implementation(pool, heads=Range(begin=0, end=1), wire_dtype=target).plan([buffer]).gather(torch.tensor([0]), out)
    found, right = wire.view(TORCH_DTYPES[target]), expected.view(TORCH_DTYPES[target])
    is_nan = right.float().isnan()
    assert torch.equal(found.float().isnan(), is_nan)
    assert torch.equal(as_words(found)[~is_nan], as_words(right)[~is_nan])


def test_pages_outside_the_pool_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table on a GPU is not checked on the host: the kernel must not follow it out of the pool."""
    monkeypatch.setattr(copier, "check_pages", lambda pages, num_pages: None)
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=8, v_head_dim=0, dtype=DType.INT8)
    storage = torch.full((6, 2, 1, 8), 7, dtype=torch.int8)
    pool = PagedKVPool(layout=layout, shard=Shard(page_size=2), num_pages=2, buffers=[LayerBuffers(k=storage[2:4], v=None)])
    buffer = WireBuffer(layer=0, is_v=False, tokens=Range(begin=0, end=6), row_bytes=8, offset_bytes=0)
    plan = TritonCopier(pool, heads=Range(begin=0, end=1), wire_dtype=DType.INT8).plan([buffer])
    wire, pages = torch.full((48,), 9, dtype=torch.uint8), torch.tensor([2, 1, -1])
    plan.scatter(pages, wire)
    assert storage[:3].eq(7).all() and storage[4:].eq(7).all() and storage[3].eq(9).all()
    wire.fill_(1)
    plan.gather(pages, wire)
    assert wire.view(3, 16).tolist() == [[1] * 16, [9] * 16, [1] * 16]


WORDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from((0, 1, 2**63, 2**64 - 1, STEP)))


@settings(max_examples=60)
@given(words=st.lists(WORDS, max_size=60), rest=st.binary(max_size=7), shift=st.sampled_from((0, 0, 1, 2, 4)))
def test_a_pass_over_a_wire_is_the_words_digest(words: list[int], rest: bytes, shift: int) -> None:
    payload = b"".join(word.to_bytes(8, "little") for word in words) + rest
    memory = torch.zeros(len(payload) + 16, dtype=torch.uint8)
    wire = memory[-memory.data_ptr() % 8 + shift :][: len(payload)]
    wire.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else wire)
    total = torch.full((1,), 3, dtype=torch.int64)
    add_digest(total, wire, len(payload))
    assert (int(total) - 3) % 2**64 == digest(payload, DIGEST_WORDS) == int(words_sum(wire)) % 2**64


@pytest.mark.parametrize("dtype", [None, DType.FLOAT8_E4M3])
def test_a_prompt_of_all_kinds_of_layers_is_carried_over(dtype: DType | None) -> None:
    """Full attention, windows, a latent and states, each from and into its own pages; the states stay as they are."""
    decode = Shard(tp_size=2, page_size=4, order=TokenOrder.HND, dtype=dtype)
    plan = ChunkPlan(chunk_tokens=8, layers_per_group=3)
    carry_over(Shard(tp_size=4, page_size=3), decode, plan, 25, algorithm=DIGEST_WORDS, kernels=Kernels.TRITON)


@pytest.mark.parametrize(
    ("is_gather", "dtype", "page_size"),
    [(True, None, 5), (False, None, 6), (True, DType.FLOAT8_E4M3, 7), (False, DType.FLOAT8_E4M3, 9)],
)
def test_prompts_compile_no_kernel_after_the_warm_up(
    is_gather: bool, dtype: DType | None, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of a size of its own in each case: no other test has made these launchers."""
    made: list[Launcher] = []
    honest = Launcher.__init__

    def counted(self: Launcher, *arguments: Any, **more: Any) -> None:
        made.append(self)
        honest(self, *arguments, **more)

    monkeypatch.setattr(Launcher, "__init__", counted)
    shard, peer = Shard(page_size=page_size), Shard(page_size=page_size, dtype=dtype)
    plan = ChunkPlan(chunk_tokens=24, layers_per_group=3)
    on_wire = wire_dtype(HYBRID, shard, peer)
    pages = pages_of(shard, 90, seed=1, in_flight=90)
    pages.cover("a", 90)
    copier = PieceCopier(pages.pool, is_source=is_gather, kernels=Kernels.TRITON)
    for route in routes(HYBRID, shard, peer):
        copier.compile(route, plan, layout=HYBRID, dtype=on_wire, is_direct=is_gather)
        num_warmed = len(made)
        for num_tokens in range(1, 90, 4):
            chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=HYBRID.num_layers, start_token=num_tokens // 3)
            for chunk, num_bytes in Pieces(chunks, HYBRID, route, num_tokens=num_tokens, dtype=on_wire):
                piece = piece_of(HYBRID, route, chunk, num_tokens=num_tokens, dtype=on_wire)
                copy = copier.prepare(piece, pages.allocator.tables("a"))
                address = torch.zeros(num_bytes, dtype=torch.uint8).data_ptr()
                copy.compile(address, is_gather=is_gather, is_direct=is_gather)
                assert copy.is_compiled(address, is_gather=is_gather, is_direct=is_gather)
        assert len(made) == num_warmed
    assert made


@pytest.mark.parametrize("side", ["save", "load", "copy"])
@pytest.mark.parametrize("io_backend", ["auto", "copies"])
@settings(max_examples=40)
@given(case=page_cases())
def test_pages_are_moved_as_by_the_reference(side: Side, io_backend: IoBackend, case: PageCase) -> None:
    """By packing them, and by the kernel's own way to host memory."""
    assert_moves(
        case,
        side,
        lambda pool, host, size: device_page_mover.DevicePageMovement(pool, host, buffer_bytes=size, io_backend=io_backend),
    )


def test_a_launch_of_few_programs_moves_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_page_mover, "LINK_PROGRAMS", 2)
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=3, head_dim=100, dtype=DType.FLOAT32)
    case = PageCase(layout=layout, shard=Shard(page_size=16), num_pages=7, num_host_pages=7, buffer_pages=3,
                    is_consecutive=False, is_view=False, seed=3)  # fmt: skip
    for side in ("save", "load"):
        assert_moves(
            case,
            side,
            lambda pool, host, size: device_page_mover.DevicePageMovement(pool, host, buffer_bytes=size, io_backend="kernel"),
        )
