"""How a decode instance's requests are cut: by the settings, or by its links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.instances import instance, prefill_config
from transfer.chunk import ChunkPlan
from transfer.errors import ConfigError
from transfer.instance import Instance, Link
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec
from transfer.sizes import Cut, choose_cut

LAYOUT = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype=DType.FLOAT16)
LAYER_BYTES = 128 * 8 * 128 * 2 * 2  # 512 KiB a chunk of 128 tokens
LINK = Link(prefill_rank=0, decode_rank=0, lane="x", latency_s=50e-6, bandwidth_bytes_per_s=0.3e9)
RING_BYTES = 64 << 20


def chosen(folder: Path, ring_bytes: int = RING_BYTES, slot_bytes: int = 0, decode: Instance | None = None, **chunk: Any) -> Cut:
    """Return the cut for a decode instance, by default one of the release before."""
    decode = decode or instance(1, layout=LAYOUT)
    config = prefill_config(folder, chunk={"chunk_tokens": 128, **chunk})
    own = instance(2, layout=decode.layout)
    return choose_cut(config.chunk, own, decode, [LINK], ring_bytes=ring_bytes, slot_bytes=slot_bytes, device=config.device)


@pytest.mark.parametrize(
    ("chunk", "ring_bytes", "layers", "largest"),
    [
        ({}, RING_BYTES, 4, 4 * LAYER_BYTES),  # 2.3 MB (9 * 850 us * 0.3 GB/s) are four layers
        ({}, 4 << 20, 2, 2 * LAYER_BYTES),  # of which the ring holds several
        ({"layers_per_group": 5}, RING_BYTES, 5, 5 * LAYER_BYTES),
        ({"piece_bytes": "8MiB"}, RING_BYTES, 16, 16 * LAYER_BYTES),
    ],
)
def test_a_setting_is_stronger_than_the_links(
    tmp_path: Path, chunk: dict[str, Any], ring_bytes: int, layers: int, largest: int
) -> None:
    cut = chosen(tmp_path, ring_bytes, **chunk)
    assert cut == Cut(plan=ChunkPlan(chunk_tokens=128, layers_per_group=layers), largest_piece_bytes=largest)


def test_a_piece_fits_a_staging_slot_if_it_goes_through_one(tmp_path: Path) -> None:
    assert chosen(tmp_path, slot_bytes=3 * LAYER_BYTES, piece_bytes="8MiB").largest_piece_bytes == 3 * LAYER_BYTES
    assert chosen(tmp_path, slot_bytes=0, piece_bytes="8MiB").largest_piece_bytes == 16 * LAYER_BYTES


@pytest.mark.parametrize(
    ("num_tokens", "chunk_tokens", "layers"),
    [(1, 128, 4), (128, 128, 4), (129, 256, 2), (513, 1024, 1), (5000, 1024, 1)],  # 2.3 MB
)
def test_a_prompt_shorter_than_a_chunk_has_more_layers_in_a_piece(
    tmp_path: Path, num_tokens: int, chunk_tokens: int, layers: int
) -> None:
    plan = chosen(tmp_path, chunk_tokens=1024).plan_of(num_tokens)
    assert plan == ChunkPlan(chunk_tokens=chunk_tokens, layers_per_group=layers)
    given = {"chunk_tokens": 1024, "layers_per_group": 5}
    assert chosen(tmp_path, **given).plan_of(num_tokens) == ChunkPlan(**given), "the user has set the groups"


@pytest.mark.parametrize(
    ("start_token", "num_tokens", "chunk_tokens"),
    [(5000, 5100, 128), (5000, 5121, 1024), (5120, 5248, 128), (4096, 4600, 512), (1023, 1025, 1024)],
)
def test_what_is_sent_of_a_long_prompt_may_fit_a_short_plan(
    tmp_path: Path, start_token: int, num_tokens: int, chunk_tokens: int
) -> None:
    """The tokens to send lie within one chunk of the short plan."""
    cut = chosen(tmp_path, chunk_tokens=1024)
    assert cut.plan_of(num_tokens, start_token).chunk_tokens == chunk_tokens


NEW = frozenset({"token_layers"})


def test_a_decode_side_that_knows_token_layers_gets_one_plan(tmp_path: Path) -> None:
    decode = instance(1, layout=LAYOUT, capabilities=NEW)
    cut = chosen(tmp_path, decode=decode, chunk_tokens=1024)
    wanted_bytes = int(9 * 850e-6 * 0.3e9)
    plan = ChunkPlan(chunk_tokens=1024, layers_per_group=1, token_layers=wanted_bytes * 128 // LAYER_BYTES)
    assert cut == Cut(plan=plan, largest_piece_bytes=8 * LAYER_BYTES), "one layer of 1,024 tokens"
    assert cut.plan_of(1) == cut.plan_of(5000) == plan
    assert [plan.layers_of(tokens, 32) for tokens in (1024, 513, 256, 128, 64, 1)] == [1, 1, 2, 4, 8, 32]
    whole = chosen(tmp_path, decode=decode, piece_bytes="64MiB")
    assert whole.plan == ChunkPlan(chunk_tokens=128), "every chunk has all layers"
    given = {"chunk_tokens": 1024, "layers_per_group": 5}
    assert chosen(tmp_path, decode=decode, **given).plan == ChunkPlan(**given), "the user has set the groups"


@pytest.mark.parametrize("kind", [LayerKind.SLIDING_WINDOW, LayerKind.RECURRENT_STATE])
def test_no_piece_of_a_short_chunk_is_larger_than_wanted(tmp_path: Path, kind: LayerKind) -> None:
    """A window of 128 tokens, or a state, has as many bytes in a chunk of 128 tokens as in one of 1,024."""
    whole = LayerSpec(num_kv_heads=8, k_head_dim=128, v_head_dim=128)
    other = (
        replace(whole, kind=kind, window_tokens=128)
        if kind is LayerKind.SLIDING_WINDOW
        else replace(whole, kind=kind, k_head_dim=65_536, v_head_dim=0)
    )
    layout = KVLayout(layers=(whole, other) * 16, dtype=DType.FLOAT16)
    cut = chosen(tmp_path, decode=instance(1, layout=layout, capabilities=NEW), chunk_tokens=1024, piece_bytes="5MiB")
    assert cut.largest_piece_bytes <= 5 << 20
    assert bool(cut.plan.token_layers) != bool(cut.short_plans) == (kind is LayerKind.RECURRENT_STATE)


def test_the_largest_piece_is_that_of_all_plans(tmp_path: Path) -> None:
    cut = chosen(tmp_path, chunk_tokens=512)
    assert [(plan.chunk_tokens, plan.layers_per_group) for plan in (*cut.short_plans, cut.plan)] == [(128, 4), (256, 2), (512, 1)]
    assert cut.largest_piece_bytes == 4 * LAYER_BYTES
    uneven = chosen(tmp_path, slot_bytes=7 * LAYER_BYTES, chunk_tokens=512, piece_bytes="8MiB")
    assert uneven.plan.layers_per_group == 1 and uneven.largest_piece_bytes == 7 * LAYER_BYTES, "6 of 256 tokens, 7 of 128"


def test_a_chunk_of_a_step_has_some_groups_however_fast_the_links_are(tmp_path: Path) -> None:
    one = instance(1, layout=LAYOUT)
    link = replace(LINK, bandwidth_bytes_per_s=100e9)
    config = prefill_config(tmp_path, chunk={"chunk_tokens": 1024})
    found = [
        choose_cut(
            config.chunk, one, one, [link], ring_bytes=2 << 30, slot_bytes=0, device="cuda", min_layer_groups=groups
        ).plan.layers_per_group
        for groups in (1, 4)
    ]
    assert found == [0, 8]


def test_two_ways_to_cut_are_refused(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match="piece_bytes is 4096 and layers_per_group is 2; set one of them"):
        prefill_config(tmp_path, chunk={"layers_per_group": 2, "piece_bytes": 4096})
