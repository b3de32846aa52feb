from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from transfer.errors import ConfigError, LayoutError
from transfer.layer_groups import PageNeeds, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, TokenOrder
from transfer.pool.kv_pool import BUFFER_ALIGNMENT_BYTES, KVPool, LayerBuffers, PagedKVPool, PoolView, convert
from transfer.pool.page_allocator import GroupAllocator

LAYOUT = KVLayout(
    layers=(
        LayerSpec(num_kv_heads=4, k_head_dim=6, v_head_dim=5),
        LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=4, k_head_dim=6, v_head_dim=5, window_tokens=8),
        LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=7, v_head_dim=0),
    ),
    dtype=DType.FLOAT32,
)


def pool(order: TokenOrder = TokenOrder.NHD, dtype: DType | None = None, **cut: Any) -> PagedKVPool:
    return PagedKVPool(
        layout=LAYOUT, shard=Shard(tp_size=2, tp_rank=1, page_size=3, order=order, dtype=dtype, **cut), num_pages=5
    )


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
def test_slots_outside_are_refused(order: TokenOrder) -> None:
    under_test = pool(order)
    for slot in (torch.tensor([-1]), torch.tensor([15])):
        with pytest.raises(IndexError):
            under_test.write(0, slot, torch.ones(1, 2, 6), torch.ones(1, 2, 5))
        with pytest.raises(IndexError):
            under_test.read(0, slot)
    assert not under_test.buffer(0, is_v=False).any()


def test_given_tensors_are_checked() -> None:
    def adopt(*pairs: LayerBuffers) -> PagedKVPool:
        layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=6, dtype=DType.BFLOAT16)
        return PagedKVPool(layout=layout, shard=Shard(page_size=3), num_pages=5, buffers=pairs)

    good = torch.zeros(5, 3, 2, 6, dtype=torch.bfloat16)
    adopt(LayerBuffers(k=good, v=good.clone()))
    apart = torch.zeros(5, 3, 6, 2, dtype=torch.bfloat16).transpose(2, 3)
    assert not adopt(LayerBuffers(k=good, v=apart)).has_adjacent_elements
    with pytest.raises(LayoutError, match=r"v of layer 0 has stride \(36, 12, 1, 2\) on meta: the elements of a head must"):
        adopt(LayerBuffers(k=good.to("meta"), v=apart.to("meta")))


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


STATE = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=4, k_head_dim=10, v_head_dim=0, dtype=DType.FLOAT32)
HYBRID = KVLayout(layers=(STATE, *LAYOUT.layers, STATE), dtype=DType.BFLOAT16)  # attention 1, window 2, latent 3, states 0 and 4
PAGES = (5, 3, 2)  # full, window_8, state


def hybrid(order: TokenOrder = TokenOrder.NHD, dtype: DType | None = None, **cut: Any) -> KVPool:
    shard = Shard(tp_size=2, tp_rank=1, page_size=3, order=order, dtype=dtype, **cut)
    return KVPool(layout=HYBRID, shard=shard, num_pages=PAGES)


@pytest.mark.parametrize("dtype", [None, DType.FLOAT8_E4M3])
@pytest.mark.parametrize("order", list(TokenOrder))
def test_every_group_has_pages_of_its_own(order: TokenOrder, dtype: DType | None) -> None:
    found = hybrid(order, dtype)
    is_nhd = order is TokenOrder.NHD
    assert [group.name for group in found.groups] == ["full", "window_8", "state"]
    assert [part.layers for part in found.parts] == [(1, 3), (2,), (0, 4)]
    assert [found.group_of(layer) for layer in range(5)] == [2, 0, 1, 0, 2]
    assert found.num_pages == PAGES == tuple(part.num_pages for part in found.parts)
    assert found.buffer(1, is_v=True).shape == ((5, 3, 2, 5) if is_nhd else (5, 2, 3, 5))
    assert found.buffer(2, is_v=False).shape == ((3, 3, 2, 6) if is_nhd else (3, 2, 3, 6))
    assert found.buffer(3, is_v=False).shape == ((5, 3, 1, 7) if is_nhd else (5, 1, 3, 7))
    element = 2 if dtype is None else 1
    kv_bytes = (15 * (2 * 11 + 7) + 9 * 2 * 11) * element
    assert found.num_bytes == kv_bytes + 2 * 2 * 2 * 10 * 4
    assert (found.page_size, found.order, found.device) == (3, order, torch.device("cpu"))
    assert [found.num_heads(layer) for layer in range(5)] == [2, 2, 2, 1, 2]
    for layer in (0, 4):  # a row for each request, whatever the pool's order and dtype are
        states = found.buffer(layer, is_v=False)
        assert states.shape == (2, 1, 2, 10) and states.dtype is torch.float32
        assert (found.part_of(layer).page_size, found.part_of(layer).num_slots) == (1, 2)
    needs = PageNeeds(groups=found.groups, page_size=3, tokens_in_flight=1)
    per_page = [group.page_bytes(HYBRID, found.shard) for group in needs.groups]
    assert found.num_bytes == sum(count * size for count, size in zip(PAGES, per_page, strict=True))


@pytest.mark.parametrize("order", list(TokenOrder))
def test_slots_are_those_of_the_layers_own_group(order: TokenOrder) -> None:
    found = hybrid(order)
    k, v = torch.randn(1, 2, 6), torch.randn(1, 2, 5)
    found.write(1, torch.tensor([14]), k, v)  # the last of five pages of three
    found.write(2, torch.tensor([8]), k, v)  # the last of three
    for layer, slot in ((1, 14), (2, 8)):
        found_k, found_v = found.read(layer, torch.tensor([slot]))
        assert torch.equal(found_k, k.bfloat16()) and torch.equal(found_v, v.bfloat16())
        assert int(found.buffer(layer, is_v=True).count_nonzero()) == 10
    with pytest.raises(IndexError):
        found.read(2, torch.tensor([9]))
    state, nothing = torch.randn(2, 2, 10), torch.empty(2, 2, 0)
    found.write(4, torch.tensor([1, 0]), state, nothing)
    assert torch.equal(found.read(4, torch.tensor([1, 0]))[0], state), "not rounded to the pool's bfloat16"
    assert torch.equal(found.buffer(4, is_v=False)[1, 0], state[0])
    assert not found.buffer(0, is_v=False).any() and not found.buffer(3, is_v=False).any()


def test_a_stage_without_a_kind_of_layers_counts_its_pages_all_the_same() -> None:
    """All ranks of an instance bind alike: a request's tables are the same on each of them."""
    stage = hybrid(pp_size=2, pp_rank=1)  # layers 3 and 4
    assert [part.layers for part in stage.parts] == [(3,), (4,)]
    assert stage.num_pages == PAGES and len(stage.groups) == 3
    assert (stage.group_of(3), stage.group_of(4)) == (0, 2)
    assert stage.num_bytes == 15 * 7 * 2 + 2 * 2 * 10 * 4
    with pytest.raises(LayoutError, match=r"layer 2 is not of this rank; it has \[3, 5\)"):
        stage.buffer(2, is_v=False)
    with pytest.raises(LayoutError, match="stage 1 of 2 has no layers"):
        shard = Shard(pp_size=2, pp_rank=1, stage_layers=(5, 0))
        KVPool(layout=HYBRID, shard=shard, num_pages=PAGES)


def own_tensors(order: TokenOrder) -> tuple[list[LayerBuffers], list[torch.Tensor]]:
    """As engines have them; also what was allocated.

    K and V of a layer in one tensor, its pages first or not; the latent without a dimension of heads; the states of all layers in
    one tensor, side by side in a request's row.
    """
    inner = (3, 2) if order is TokenOrder.NHD else (2, 3)
    attention = torch.zeros(2, 5, *inner, 8, dtype=torch.bfloat16)  # rows padded to 8 elements
    windows = torch.zeros(3, 2, *inner, 8, dtype=torch.bfloat16)
    latent = torch.zeros(5, 3, 7, dtype=torch.bfloat16)
    states = torch.zeros(2, 2, 2, 10)  # [requests, layers, heads, elements]
    buffers = [
        LayerBuffers(k=states[:, :1], v=None),
        LayerBuffers(k=attention[0, ..., :6], v=attention[1, ..., :5]),
        LayerBuffers(k=windows[:, 0, ..., :6], v=windows[:, 1, ..., :5]),
        LayerBuffers(k=latent.unsqueeze(2 if order is TokenOrder.NHD else 1), v=None),
        LayerBuffers(k=states[:, 1:], v=None),
    ]
    return buffers, [attention, windows, latent, states]


def view_of(buffers: list[LayerBuffers], order: TokenOrder = TokenOrder.NHD) -> PoolView:
    return PoolView(layout=HYBRID, shard=Shard(tp_size=2, tp_rank=1, page_size=3, order=order), buffers=buffers)


@pytest.mark.parametrize("order", list(TokenOrder))
def test_a_view_of_an_engines_tensors_is_a_pool_without_a_copy(order: TokenOrder) -> None:
    buffers, memory = own_tensors(order)
    view, pool_of_the_same = view_of(buffers, order), hybrid(order)
    assert view.num_pages == PAGES and [part.layers for part in view.parts] == [(1, 3), (2,), (0, 4)]
    for layer, pair in enumerate(buffers):
        for is_v, tensor in ((False, pair.k), (True, pair.v)):
            if tensor is not None:
                found = view.buffer(layer, is_v=is_v)
                assert (found.data_ptr(), found.stride()) == (tensor.data_ptr(), tensor.stride())
        slots = torch.randperm(view.part_of(layer).num_slots)[:2]
        dims = (HYBRID.layers[layer].k_head_dim, HYBRID.layers[layer].v_head_dim)
        values = [torch.randn(2, view.num_heads(layer), dim) for dim in dims]
        for one in (view, pool_of_the_same):
            one.write(layer, slots, *values)
        for part, expected in zip(view.read(layer, slots), pool_of_the_same.read(layer, slots), strict=True):
            assert torch.equal(part, expected)
    stored = sum(
        int(pool_of_the_same.buffer(layer, is_v=is_v).count_nonzero())
        for layer, pair in enumerate(buffers)
        for is_v in (False, True)[: 1 if pair.v is None else 2]
    )
    assert sum(int(tensor.count_nonzero()) for tensor in memory) == stored, (
        "every value lies in the engine's memory, and no other"
    )


def test_a_view_has_the_page_tables_of_its_engine() -> None:
    """Two layers of full attention have one table each, with different numbers of pages."""
    buffers, _ = own_tensors(TokenOrder.NHD)
    shard = Shard(tp_size=2, tp_rank=1, page_size=3)
    full, *others = layer_groups(HYBRID)
    own = (*(replace(full, layers=(layer,)) for layer in full.layers), *others)
    view = PoolView(layout=HYBRID, shard=shard, buffers=buffers, groups=own)
    assert view.groups == own and view.num_pages == (PAGES[0], *PAGES)
    assert [view.group_of(layer) for layer in range(5)] == [3, 0, 2, 1, 3]
    pages = list(buffers)
    pages[1] = LayerBuffers(k=buffers[1].k.reshape(-1, 1, 2, 6), v=buffers[1].v.reshape(-1, 1, 2, 5))
    view = PoolView(layout=HYBRID, shard=shard, buffers=pages, groups=own, page_sizes=(1, 3, 3, 3))
    assert [view.part_of(layer).page_size for layer in range(5)] == [1, 1, 3, 3, 1]
    assert view.num_pages == (3 * PAGES[0], *PAGES)
    with pytest.raises(LayoutError, match="the model has 4 groups of layers"):
        PoolView(layout=HYBRID, shard=shard, buffers=buffers, groups=own, num_pages=PAGES)


def test_tensors_of_an_engine_are_checked() -> None:
    def refused(match: str, **changed: LayerBuffers) -> None:
        buffers, _ = own_tensors(TokenOrder.NHD)
        for name, pair in changed.items():
            buffers[int(name[1:])] = pair
        with pytest.raises(LayoutError, match=match):
            view_of(buffers)

    buffers, _ = own_tensors(TokenOrder.NHD)
    view_of(buffers)
    with pytest.raises(LayoutError, match="buffers has 4 layers; this rank has 5"):
        view_of(buffers[:4])
    state, latent = buffers[4].k, buffers[3].k
    refused(
        r"k of layer 4 is torch\.bfloat16 \(2, 1, 2, 10\); must be torch\.float32", l4=LayerBuffers(k=state.bfloat16(), v=None)
    )
    refused(r"k of layer 3 is .* \(4, 3, 1, 7\); must be torch\.bfloat16 \(5, 3, 1, 7\)", l3=LayerBuffers(k=latent[:4], v=None))
    refused(r"buffers of layer 3: v is given", l3=LayerBuffers(k=latent, v=latent))
    refused(r"k of layer 0 is \(\); must have 4 dimensions", l0=LayerBuffers(k=torch.tensor(0.0), v=None))
    k, v = (torch.zeros(3, 3, 2, dim, dtype=torch.bfloat16, device="meta") for dim in (6, 5))
    refused("buffers lie on cpu, meta; must all lie on one device", l2=LayerBuffers(k=k, v=v))


def test_a_view_of_a_stage_is_told_the_pages_of_what_it_lacks() -> None:
    """Its tensors cannot say how many pages the other stages have of a group, and the ranks of an instance count alike."""
    shard = Shard(tp_size=2, tp_rank=1, pp_size=2, pp_rank=1, page_size=3)
    buffers = own_tensors(TokenOrder.NHD)[0][3:]
    view = PoolView(layout=HYBRID, shard=shard, buffers=buffers)
    assert view.num_pages == (5, 0, 2)
    needs = PageNeeds(groups=layer_groups(HYBRID), page_size=3, tokens_in_flight=1)
    with pytest.raises(ConfigError, match="num_pages is 0"):
        GroupAllocator(needs, view.num_pages)
    told = PoolView(layout=HYBRID, shard=shard, buffers=buffers, num_pages=PAGES)
    assert told.num_pages == hybrid(pp_size=2, pp_rank=1).num_pages == PAGES
    assert GroupAllocator(needs, told.num_pages).reserve("a", 9)
    with pytest.raises(LayoutError, match="num_pages of group state is 3; k of layer 4 has 2 pages"):
        PoolView(layout=HYBRID, shard=shard, buffers=buffers, num_pages=(5, 3, 3))
