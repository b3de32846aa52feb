from __future__ import annotations

import pytest
import torch

from transfer.errors import ConfigError, LayoutError
from transfer.kv_pool import BUFFER_ALIGNMENT_BYTES, LayerBuffers, PagedKVPool, convert
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, TokenOrder

LAYOUT = KVLayout(
    layers=(
        LayerSpec(num_kv_heads=4, k_head_dim=6, v_head_dim=5),
        LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=4, k_head_dim=6, v_head_dim=5, window_tokens=8),
        LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=7, v_head_dim=0),
    ),
    dtype=DType.FLOAT32,
)


def pool(order: TokenOrder = TokenOrder.NHD, dtype: DType | None = None, **cut: int) -> PagedKVPool:
    return PagedKVPool(
        layout=LAYOUT, shard=Shard(tp_size=2, tp_rank=1, page_size=3, order=order, dtype=dtype, **cut), num_pages=5
    )


def test_shapes_and_sizes() -> None:
    nhd, hnd = pool(), pool(TokenOrder.HND, dtype=DType.BFLOAT16)
    assert nhd.buffer(0, is_v=False).shape == (5, 3, 2, 6) and nhd.buffer(0, is_v=True).shape == (5, 3, 2, 5)
    assert hnd.buffer(1, is_v=False).shape == (5, 2, 3, 6) and hnd.buffer(2, is_v=False).shape == (5, 1, 3, 7)
    assert (nhd.dtype, hnd.dtype) == (torch.float32, torch.bfloat16)
    assert nhd.num_bytes == 15 * (2 * 2 * 11 + 7) * 4 == 2 * hnd.num_bytes
    assert (nhd.num_slots, nhd.num_heads(0), nhd.num_heads(2)) == (15, 2, 1)
    assert (nhd.head_dim(0, is_v=True), nhd.head_dim(2, is_v=True)) == (5, 0)
    assert nhd.device == torch.device("cpu") and nhd.page_size == 3 and nhd.order is TokenOrder.NHD


def test_starts_as_zeros_and_buffers_do_not_overlap() -> None:
    fresh = pool()
    buffers = [(layer, is_v) for layer in range(3) for is_v in (False, True) if (layer, is_v) != (2, True)]
    for index, (layer, is_v) in enumerate(buffers):
        buffer = fresh.buffer(layer, is_v=is_v)
        assert buffer.data_ptr() % BUFFER_ALIGNMENT_BYTES == 0
        assert not buffer.any()  # also: not reached by the fills before
        buffer.fill_(index + 1)
    for index, (layer, is_v) in enumerate(buffers):
        assert bool((fresh.buffer(layer, is_v=is_v) == index + 1).all())


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("dtype", list(DType))
def test_read_gives_what_write_stored(dtype: DType, order: TokenOrder) -> None:
    under_test = pool(order, dtype=dtype)
    slots = torch.tensor([14, 0, 7, 3, 4])
    k, v = torch.randn(5, 2, 6) * 100, torch.randn(5, 2, 5) * 100
    if dtype is DType.INT8:
        k, v = k.to(torch.int8), v.to(torch.int8)
    under_test.write(1, slots, k, v)
    found_k, found_v = under_test.read(1, slots)
    assert found_k.dtype is under_test.dtype
    assert torch.equal(found_k.float(), convert(k, dtype).float()) and torch.equal(found_v.float(), convert(v, dtype).float())
    assert not any(part.float().any() for part in under_test.read(0, slots))  # another layer
    others = torch.tensor([slot for slot in range(15) if slot not in slots])
    assert not any(part.float().any() for part in under_test.read(1, others))


@pytest.mark.parametrize("order", list(TokenOrder))
def test_a_slot_is_page_times_page_size_plus_offset(order: TokenOrder) -> None:
    under_test = pool(order)
    under_test.write(0, torch.tensor([7]), torch.full((1, 2, 6), 2.0), torch.full((1, 2, 5), 3.0))
    for is_v, value in ((False, 2.0), (True, 3.0)):
        buffer = under_test.buffer(0, is_v=is_v)
        at = buffer[2, 1] if order is TokenOrder.NHD else buffer[2, :, 1]
        assert bool((at == value).all()) and float(buffer.sum()) == float(at.sum())


@pytest.mark.parametrize("order", list(TokenOrder))
def test_reads_of_any_shape_and_a_layer_without_v(order: TokenOrder) -> None:
    under_test = pool(order)
    under_test.write(2, torch.arange(15), torch.arange(15.0)[:, None, None].expand(15, 1, 7), torch.empty(15, 1, 0))
    k, v = under_test.read(2, torch.tensor([[1, 14, 3], [0, 0, 9]]))
    assert k.shape == (2, 3, 1, 7) and v.shape == (2, 3, 1, 0)
    assert k[..., 0, 0].tolist() == [[1.0, 14.0, 3.0], [0.0, 0.0, 9.0]]
    assert under_test.read(0, torch.empty(0, dtype=torch.int64))[1].shape == (0, 2, 5)


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("slot", [-1, 15])
def test_slots_outside_are_refused(slot: int, order: TokenOrder) -> None:
    under_test = pool(order)
    with pytest.raises(IndexError):
        under_test.write(0, torch.tensor([slot]), torch.ones(1, 2, 6), torch.ones(1, 2, 5))
    with pytest.raises(IndexError):
        under_test.read(0, torch.tensor([slot]))
    assert not under_test.buffer(0, is_v=False).any()


def test_layers_are_global() -> None:
    second_stage = pool(pp_size=2, pp_rank=1)
    assert second_stage.layers == (2,)
    assert second_stage.buffer(2, is_v=False).shape[-1] == 7
    with pytest.raises(LayoutError, match=r"layer 0 is not in this pool; it has \[2, 3\)"):
        second_stage.buffer(0, is_v=False)
    with pytest.raises(LayoutError, match="layer 2 has no V buffer"):
        second_stage.buffer(2, is_v=True)


def test_shapes_of_writes_are_checked() -> None:
    slots = torch.tensor([0, 1])
    with pytest.raises(LayoutError, match=r"k of layer 0 has shape \(2, 4, 6\); must be \(2, 2, 6\)"):
        pool().write(0, slots, torch.ones(2, 4, 6), torch.ones(2, 2, 5))
    with pytest.raises(LayoutError, match=r"v of layer 0 has shape \(2, 2, 6\)"):
        pool().write(0, slots, torch.ones(2, 2, 6), torch.ones(2, 2, 6))
    with pytest.raises(LayoutError, match="int8"):
        pool(dtype=DType.INT8).write(0, slots, torch.ones(2, 2, 6), torch.ones(2, 2, 5))


def test_what_cannot_be_a_pool() -> None:
    with pytest.raises(ConfigError, match="num_pages is 0"):
        PagedKVPool(layout=LAYOUT, shard=Shard(), num_pages=0)
    with pytest.raises(LayoutError, match="stage 1 of 2 has no layers"):
        PagedKVPool(layout=LAYOUT, shard=Shard(pp_size=2, pp_rank=1, stage_layers=(3, 0)), num_pages=1)
    state = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=1, k_head_dim=4, v_head_dim=0)
    with pytest.raises(
        LayoutError, match="layers 0 and 3 are attention and recurrent_state in float32 and float32; they cannot share"
    ):
        PagedKVPool(layout=KVLayout(layers=(*LAYOUT.layers, state), dtype=DType.FLOAT32), shard=Shard(), num_pages=1)


@pytest.mark.parametrize("order", list(TokenOrder))
def test_an_engines_own_strided_tensors(order: TokenOrder) -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=6, dtype=DType.BFLOAT16)
    inner = (3, 2, 6) if order is TokenOrder.NHD else (2, 3, 6)
    both = torch.zeros(5, 2, *inner, dtype=torch.bfloat16)
    adopted = PagedKVPool(
        layout=layout,
        shard=Shard(page_size=3, order=order),
        num_pages=5,
        buffers=[LayerBuffers(k=both[:, 0], v=both[:, 1])],
    )
    slots, k, v = torch.tensor([13, 2, 6]), torch.randn(3, 2, 6).bfloat16(), torch.randn(3, 2, 6).bfloat16()
    adopted.write(0, slots, k, v)
    assert adopted.buffer(0, is_v=True).data_ptr() == both[:, 1].data_ptr()
    found = adopted.read(0, slots)
    assert torch.equal(found[0], k) and torch.equal(found[1], v)
    assert int(both.count_nonzero()) == int(k.count_nonzero() + v.count_nonzero())


def test_given_tensors_are_checked() -> None:
    def adopt(*pairs: LayerBuffers) -> PagedKVPool:
        layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=6, dtype=DType.BFLOAT16)
        return PagedKVPool(layout=layout, shard=Shard(page_size=3), num_pages=5, buffers=pairs)

    good = torch.zeros(5, 3, 2, 6, dtype=torch.bfloat16)
    adopt(LayerBuffers(k=good, v=good.clone()))
    with pytest.raises(LayoutError, match="buffers has 2 layers; this pool has 1"):
        adopt(LayerBuffers(k=good, v=good), LayerBuffers(k=good, v=good))
    with pytest.raises(LayoutError, match="v is absent"):
        adopt(LayerBuffers(k=good, v=None))
    with pytest.raises(
        LayoutError, match=r"k of layer 0 is torch.bfloat16 \(5, 2, 3, 6\); must be torch.bfloat16 \(5, 3, 2, 6\)"
    ):
        adopt(LayerBuffers(k=good.view(5, 2, 3, 6), v=good))
    with pytest.raises(LayoutError, match=r"v of layer 0 is torch\.float32"):
        adopt(LayerBuffers(k=good, v=good.float()))
    with pytest.raises(LayoutError, match="elements of a head adjacent"):
        adopt(LayerBuffers(k=good, v=torch.zeros(5, 3, 6, 2, dtype=torch.bfloat16).transpose(2, 3)))
    with pytest.raises(LayoutError, match="device meta"):
        adopt(LayerBuffers(k=good, v=good.to("meta")))


@pytest.mark.parametrize("order", TokenOrder)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_what_float16_cannot_hold_is_stored_as_its_largest(source: torch.dtype, order: TokenOrder) -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=6, v_head_dim=0, dtype=DType.FLOAT16)
    stored = PagedKVPool(layout=layout, shard=Shard(page_size=2, order=order), num_pages=1)
    values = torch.tensor([1e5, -1e5, float("inf"), float("-inf"), float("nan"), 0.5], dtype=source).view(1, 1, 6)
    stored.write(0, torch.tensor([1]), values, values[..., :0])
    k, _ = stored.read(0, torch.tensor([1]))
    assert k.view(-1)[:4].tolist() == [65504.0, -65504.0, 65504.0, -65504.0]
    assert k.view(-1)[4].isnan() and k.view(-1)[5] == 0.5
