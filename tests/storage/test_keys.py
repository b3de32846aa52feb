"""Keys of stored pages: equal for equal KV, and never equal for any other."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.errors import ConfigError
from transfer.instance import Instance
from transfer.layer_groups import GroupKind, LayerGroup, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, TokenOrder
from transfer.storage import hashing
from transfer.storage.hashing import SLICE_TOKENS, HashingTurns
from transfer.storage.keys import (
    FINGERPRINT_CHARS,
    MAX_KEY_CHARS,
    PageHashes,
    chain_seed,
    fingerprint_of,
    is_shared,
    rounding,
    running_key,
    store_fingerprint,
    store_key,
    storing_rank,
)
from transfer.storage.pages import can_be_stored, page_parts

LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=4, head_dim=8, dtype=DType.BFLOAT16)
MLA = LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=16, v_head_dim=0)
ATTENTION = LayerSpec(num_kv_heads=4, k_head_dim=8, v_head_dim=8)
WINDOW = LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=2, k_head_dim=8, v_head_dim=8, window_tokens=32)
SHARD = Shard(page_size=4)
FIELDS = {"architecture": "LlamaForCausalLM", "weights": "0123"}
SEED = chain_seed("f" * FINGERPRINT_CHARS, "", "")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def instance(**changed: Any) -> Instance:
    arguments = {"layout": LAYOUT, "shard": SHARD, "model_fields": FIELDS} | changed
    return Instance(incarnation=1, transport="ucx", digests=("xxh3-64",), protocol_versions=(1,), **arguments)


def page_hashes(token_ids: Iterable[int], *, page_size: int, seed: bytes) -> list[bytes]:
    chain = PageHashes(page_size=page_size, seed=seed)
    chain.extend(token_ids)
    return chain.hashes


def fingerprint(**changed: Any) -> str:
    return store_fingerprint(instance(**changed))


def full_group(layout: KVLayout) -> LayerGroup:
    return layer_groups(layout)[0]


def test_the_fingerprint_is_stable_across_versions() -> None:
    """A new version would otherwise read nothing of what an older one has stored."""
    assert fingerprint() == "bb327cb4adfb951d775f4b956fd895b4"
    assert fingerprint(model_fields=dict(reversed(FIELDS.items()))) == fingerprint()


@pytest.mark.parametrize(
    "changed",
    [
        {"layout": KVLayout.uniform(num_layers=5, num_kv_heads=4, head_dim=8, dtype=DType.BFLOAT16)},
        {"layout": KVLayout.uniform(num_layers=4, num_kv_heads=4, head_dim=8, dtype=DType.FLOAT16)},
        {"shard": replace(SHARD, page_size=8)},
        {"shard": replace(SHARD, order=TokenOrder.HND)},
        {"shard": replace(SHARD, dtype=DType.FLOAT8_E4M3)},
        {"model_fields": FIELDS | {"weights": "0124"}},
        {"model_fields": {}},
    ],
)
def test_what_kv_depends_on_is_in_the_fingerprint(changed: dict[str, Any]) -> None:
    assert fingerprint(**changed) != fingerprint()


def test_scales_are_in_the_fingerprint_to_the_last_bit() -> None:
    shard = replace(SHARD, dtype=DType.FLOAT8_E4M3)
    scaled = fingerprint(shard=shard, kv_scales=((1.0, 2.0),) * 4)
    assert scaled != fingerprint(shard=shard)
    assert scaled != fingerprint(shard=shard, kv_scales=((1.0, 2.0000000000000004),) * 4)
    assert scaled == fingerprint(shard=shard, kv_scales=((1, 2),) * 4)


def test_ranks_are_not_in_the_fingerprint() -> None:
    assert fingerprint(shard=replace(SHARD, tp_size=4, tp_rank=3)) == fingerprint()
    assert fingerprint(shard=replace(SHARD, pp_size=2, pp_rank=1)) == fingerprint()
    assert fingerprint(shard=replace(SHARD, dtype=DType.BFLOAT16)) == fingerprint()  # what None means


@given(st.tuples(st.text(), st.text(), st.text()), st.tuples(st.text(), st.text(), st.text()))
def test_seeds_are_equal_only_for_equal_texts(ours: tuple[str, str, str], theirs: tuple[str, str, str]) -> None:
    assert (chain_seed(*ours) == chain_seed(*theirs)) is (ours == theirs)


def test_seeds_are_stable_across_versions() -> None:
    """Pages that were stored before seeds knew of rounding are still found."""
    assert SEED.hex() == "09547c62d130339bc455094b98083d717ca9e77ed8e860c189e1dcdc6b67736b"
    first = hashlib.sha256(SEED + struct.pack("<2I", 7, 2**32 - 1)).digest()
    assert page_hashes([7, 2**32 - 1, 0], page_size=2, seed=SEED) == [first]
    assert page_hashes([7, 2**32 - 1, 0, 9], page_size=2, seed=SEED)[-1].hex().startswith("0481545bac444f2e03a1")


@pytest.mark.parametrize(
    ("prefill", "decode", "wire"),
    [
        (DType.BFLOAT16, DType.BFLOAT16, None),
        (DType.BFLOAT16, DType.FLOAT8_E4M3, None),
        (DType.INT8, DType.INT8, None),
        (DType.FLOAT8_E4M3, DType.BFLOAT16, DType.FLOAT8_E4M3),
        (DType.BFLOAT16, DType.FLOAT32, DType.BFLOAT16),
    ],
)
def test_rounding_names_a_wire_that_is_not_of_the_decode_pools_type(prefill: DType, decode: DType, wire: DType | None) -> None:
    """The fingerprint contains the precision of the decode pool itself."""
    found = rounding(instance(shard=replace(SHARD, dtype=prefill)), instance(shard=replace(SHARD, dtype=decode)))
    assert found == ("" if wire is None else f'{{"dtype":"{wire}","kv_scales":[]}}')


def test_kv_that_was_rounded_by_other_scales_has_another_chain() -> None:
    narrow, decode = replace(SHARD, dtype=DType.FLOAT8_E4M3), instance()
    scales = [(), ((1.0, 2.0),) * 4, ((1.0, 2.0000000000000004),) * 4]
    found = [rounding(instance(shard=narrow, kv_scales=one), decode) for one in scales]
    assert len({"", *found}) == 4
    assert len({chain_seed("f", "", "", one) for one in ("", *found)}) == 4


def test_kv_of_approximate_attention_has_another_chain() -> None:
    """Whatever its precision: a prompt never begins with pages that another approximation computed."""
    narrow = replace(SHARD, dtype=DType.FLOAT8_E4M3)
    names = ("", "xattention threshold=0.9", "xattention threshold=0.8")
    found = [rounding(instance(shard=shard, attention=name), instance()) for shard in (SHARD, narrow) for name in names]
    assert len(set(found)) == len(found) and found[0] == ""


def test_texts_do_not_run_into_each_other() -> None:
    texts = (("a", "b", "c"), ("a", "bc"), ("ab", "c"), ("a", "c"), ("a", "b"), ("ab", ""), ("", "ab"))
    assert len({chain_seed("f", *one) for one in texts}) == len(texts)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_pages_share_a_hash_exactly_as_far_as_the_tokens_are_equal(ours: list[int], theirs: list[int], page_size: int) -> None:
    common = 0
    while common < min(len(ours), len(theirs)) and ours[common] == theirs[common]:
        common += 1
    a, b = (page_hashes(tokens, page_size=page_size, seed=SEED) for tokens in (ours, theirs))
    assert [x == y for x, y in zip(a, b, strict=False)] == [index < common // page_size for index in range(min(len(a), len(b)))]
    assert len(set(a)) == len(a) == len(ours) // page_size


@given(TOKENS, st.lists(st.integers(0, 9), max_size=12), st.integers(1, 5))
def test_a_chain_that_grows_is_the_chain_of_all_its_tokens(tokens: list[int], cuts: list[int], page_size: int) -> None:
    chain = PageHashes(page_size=page_size, seed=SEED)
    added: list[bytes] = []
    position = 0
    for cut in [*cuts, len(tokens)]:
        added += chain.extend(tokens[position : position + cut])
        position = min(len(tokens), position + cut)
        assert chain.num_tokens == position
    assert added == chain.hashes == page_hashes(tokens, page_size=page_size, seed=SEED)


def test_a_page_has_tokens() -> None:
    with pytest.raises(ConfigError, match="page_size is 0; it must be at least 1"):
        PageHashes(page_size=0, seed=SEED)


def keys_of_ranks(layout: KVLayout, group: LayerGroup, tp_size: int) -> list[str]:
    shards = [Shard(tp_size=tp_size, tp_rank=rank, page_size=4) for rank in range(tp_size)]
    return [store_key("a" * 32, bytes(32), group=group, layout=layout, shard=shard) for shard in shards]


def test_a_key_names_its_part() -> None:
    assert keys_of_ranks(LAYOUT, full_group(LAYOUT), 2) == [f"{'a' * 32}/{'00' * 32}-full-{rank}of2" for rank in range(2)]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_ranks_share_a_key_exactly_when_they_hold_the_same_heads(tp_size: int, heads: int, other_heads: int) -> None:
    specs = tuple(LayerSpec(num_kv_heads=number, k_head_dim=8, v_head_dim=8) for number in (heads, other_heads))
    layout = KVLayout(layers=specs, dtype=DType.BFLOAT16)
    shards = [Shard(tp_size=tp_size, tp_rank=rank) for rank in range(tp_size)]
    keys = keys_of_ranks(layout, full_group(layout), tp_size)
    for shard, key in zip(shards, keys, strict=True):
        held = [shard.heads(spec.num_kv_heads) for spec in specs]
        same = [other.tp_rank for other in shards if [other.heads(spec.num_kv_heads) for spec in specs] == held]
        assert storing_rank(full_group(layout), layout=layout, shard=shard) == same[0]
        assert [rank for rank, other in enumerate(keys) if other == key] == same


def test_a_latent_is_stored_once_for_every_degree() -> None:
    layout = KVLayout(layers=(MLA, MLA), dtype=DType.BFLOAT16)
    assert is_shared(full_group(layout), layout=layout)
    assert {*keys_of_ranks(layout, full_group(layout), 2), *keys_of_ranks(layout, full_group(layout), 3)} == {
        f"{'a' * 32}/{'00' * 32}-full-all"
    }
    assert storing_rank(full_group(layout), layout=layout, shard=Shard(tp_size=2, tp_rank=1)) == 0


def test_a_latent_beside_heads_is_stored_with_them() -> None:
    layout = KVLayout(layers=(MLA, ATTENTION), dtype=DType.BFLOAT16)
    assert not is_shared(full_group(layout), layout=layout)
    assert len(set(keys_of_ranks(layout, full_group(layout), 4))) == 4


def test_groups_and_stages_have_keys_of_their_own() -> None:
    layout = KVLayout(layers=(ATTENTION, WINDOW, ATTENTION, WINDOW), dtype=DType.BFLOAT16)
    full, window = layer_groups(layout)
    names = [
        store_key("a" * 32, bytes(32), group=group, layout=layout, shard=Shard(pp_size=2, pp_rank=rank, tp_size=2))
        for group in (full, window)
        for rank in range(2)
    ]
    assert [name.partition("00-")[2] for name in names] == [
        "full-0_2-0of2", "full-2_4-0of2", "window_32-0_2-0of2", "window_32-2_4-0of2",
    ]  # fmt: skip


def test_every_key_is_a_path_that_a_store_takes() -> None:
    layout = KVLayout(layers=(replace(WINDOW, window_tokens=2**31),) * 4096, dtype=DType.BFLOAT16)
    shard = Shard(tp_size=2, tp_rank=1, pp_size=512, pp_rank=511)
    key = store_key(fingerprint(), bytes(range(32)), group=full_group(layout), layout=layout, shard=shard)
    assert fingerprint_of(key) == fingerprint()
    assert len(key) <= MAX_KEY_CHARS


def test_blocks_of_running_requests_have_a_key_for_each_layer() -> None:
    layout = KVLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=8, dtype=DType.FLOAT16)
    group = full_group(layout)

    def key(name: bytes, layer: int, rank: int) -> str:
        shard = Shard(tp_size=2, tp_rank=rank)
        return running_key("0" * 32, name, layer=layer, group=group, layout=layout, shard=shard)

    keys = [key(name, layer, rank) for name in (b"a", b"b") for layer in (0, 1) for rank in (0, 1)]
    assert len(set(keys)) == 8 and all(fingerprint_of(one) == "0" * 32 and one.endswith("of2-running") for one in keys)


@pytest.mark.parametrize(
    "key",
    ["", "a" * 32, f"{'a' * 31}/x", f"{'A' * 32}/x", f"{'a' * 32}/../x", f"{'a' * 32}/.x", f"{'a' * 32}/x/y", f"{'a' * 32}/x\n",
     f"/{'a' * 32}/x", f"{'a' * 32}/", f"{'a' * 32}/{'b' * 300}"],
)  # fmt: skip
def test_an_invalid_key_has_no_fingerprint(key: str) -> None:
    with pytest.raises(ConfigError, match="store key is"):
        fingerprint_of(key)


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("tp_size", [1, 2, 8])
@pytest.mark.parametrize("pp_size", [1, 2])
def test_parts_of_a_page_follow_each_other_without_a_gap(order: TokenOrder, tp_size: int, pp_size: int) -> None:
    layout = KVLayout(layers=(ATTENTION, WINDOW, MLA, ATTENTION), dtype=DType.FLOAT16)
    for rank in range(tp_size * pp_size):
        shard = Shard(tp_size=tp_size, pp_size=pp_size, page_size=4, order=order).at(rank)
        for group in layer_groups(layout):
            position = 0
            for part in page_parts(group, layout=layout, shard=shard):
                spec = layout.layers[part.layer]
                heads, dim = len(shard.heads(spec.num_kv_heads)), spec.v_head_dim if part.is_v else spec.k_head_dim
                assert part.shape == ((4, heads, dim) if order is TokenOrder.NHD else (heads, 4, dim))
                assert part.offset_bytes == position
                position += part.num_bytes
            assert position == group.page_bytes(layout, shard)


def test_a_latent_has_one_part_and_a_state_none() -> None:
    layout = KVLayout(layers=(MLA,), dtype=DType.FLOAT16)
    assert [part.is_v for part in page_parts(full_group(layout), layout=layout, shard=SHARD)] == [False]
    assert not can_be_stored(LayerGroup(kind=GroupKind.STATE, layers=(0,)))
    assert can_be_stored(full_group(layout))


# Hashing beside a loop


@pytest.mark.parametrize("page_size", [1, 3, 4, 50])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 47])
async def test_the_chain_is_that_of_all_tokens(monkeypatch: pytest.MonkeyPatch, page_size: int, num_tokens: int) -> None:
    monkeypatch.setattr(hashing, "SLICE_TOKENS", 4)
    found = PageHashes(page_size=page_size, seed=SEED)
    await HashingTurns().extend(found, range(num_tokens))
    assert found.hashes == page_hashes(range(num_tokens), page_size=page_size, seed=SEED)
    assert found.num_tokens == num_tokens


async def test_however_many_prompts_there_are_a_turn_of_the_loop_has_one_slice() -> None:
    turns, chains = HashingTurns(), [PageHashes(page_size=1, seed=SEED) for _ in range(4)]
    prompt = tuple(range(4 * SLICE_TOKENS))
    tasks = [asyncio.create_task(turns.extend(one, prompt)) for one in chains]
    most, hashed = 0, 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        now = sum(one.num_tokens for one in chains)
        most, hashed = max(most, now - hashed), now
        assert max(one.num_tokens for one in chains) - min(one.num_tokens for one in chains) <= SLICE_TOKENS, "in turns"
    assert (most, hashed) == (SLICE_TOKENS, 4 * len(prompt))


async def test_a_prompt_that_is_given_up_does_not_keep_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "SLICE_TOKENS", 4)
    turns, found = HashingTurns(), PageHashes(page_size=1, seed=SEED)
    given_up = asyncio.create_task(turns.extend(PageHashes(page_size=1, seed=SEED), range(400)))
    await asyncio.sleep(0)
    given_up.cancel()
    async with asyncio.timeout(5):
        await turns.extend(found, range(40))
    assert given_up.cancelled() and found.num_tokens == 40
