"""What the report says of each group of layers: pages, tokens that did not have to travel, bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import pytest
from rich.console import Console

from kvferry.demo_groups import Lengths, group_reports
from kvferry.demo_print import GROUP_LEGEND, cost_line, print_report
from kvferry.demo_report import DemoReport, RequestOutcome, make_report
from kvferry.reference_generate import ReferenceResult
from transfer.instance import Instance
from transfer.layer_groups import layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, Span, routes, wire_bytes
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import instance_to_proto

FULL = LayerSpec(num_kv_heads=4, k_head_dim=8, v_head_dim=8)
WINDOW = LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=4, k_head_dim=8, v_head_dim=8, window_tokens=10)
STATE = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=4, k_head_dim=30, v_head_dim=0, dtype=DType.FLOAT32)
LATENT = LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=24, v_head_dim=0)

PREFILL, DECODE = Shard(tp_size=4, page_size=4), Shard(tp_size=2, page_size=8)
LENGTHS = (Lengths(prompt_tokens=25, generated_tokens=9), Lengths(prompt_tokens=3, generated_tokens=1))


def status(layout: KVLayout, shard: Shard, role: str, pages: Sequence[int]) -> pb.NodeStatus:
    instance = Instance(
        incarnation=7,
        layout=layout,
        shard=shard,
        model_fields={"weights": "w"},
        transport="ucx",
        digests=("crc32",),
        protocol_versions=(1,),
        capabilities=frozenset(),
        version="0",
    )
    pools = [pb.PoolStatus(group=group.name, pages=count) for group, count in zip(layer_groups(layout), pages, strict=True)]
    return pb.NodeStatus(role=role, instance=instance_to_proto(instance), ranks=[pb.RankStatus(rank=0, pools=pools)])


def layout_of(*layers: LayerSpec) -> KVLayout:
    return KVLayout(layers=layers, dtype=DType.BFLOAT16)


def report_of(layout: KVLayout, kind: str, pages: Sequence[int]) -> DemoReport:
    whole = Span(begin=0, end=25)
    layers = Span(begin=0, end=layout.num_layers)
    moved = sum(
        wire_bytes(layout, route, tokens=whole, layers=layers, num_tokens=25, dtype=DType.BFLOAT16)
        for route in routes(layout, PREFILL, DECODE)
    )
    stats = pb.TransferStats(bytes=moved, writes=8, writes_without_staging=100)
    return make_report(
        [RequestOutcome(prompt_tokens=25, token_ids=(1,) * 9, done=pb.GenerateDone(stats=stats))],
        [ReferenceResult(prompt_tokens=25, token_ids=(1,) * 9)],
        prefill=status(layout, PREFILL, "prefill", pages),
        decode=status(layout, DECODE, "decode", pages),
        leaked=(),
        seconds=1.0,
        generate_seconds=1.0,
        dtype="float32",
        model_kind=kind,
        environment={},
    )


def test_windows_and_states() -> None:
    layout = layout_of(FULL, WINDOW, WINDOW, STATE)
    full, window, state = group_reports(
        status(layout, PREFILL, "prefill", (50, 9, 2)), status(layout, DECODE, "decode", (40, 5, 3)), LENGTHS
    )
    # Prompts of 25 and 3 tokens are 7 + 1 pages of 4. What is computed of 9 new tokens and of 1 makes them 33 and 3: 5 + 1 of 8.
    assert (full.name, full.keeps, full.layers, full.prefill_pages, full.decode_pages) == ("full", "K or V", 1, 50, 40)
    assert (full.prefill_pages_used, full.decode_pages_used) == (8, 6)
    assert (full.tokens_sent, full.tokens_left_out) == (28, 0)
    assert full.bytes_sent == 28 * 4 * (8 + 8) * 2
    # Decode gets the last 10 of 25 tokens: no page for the first 8.
    assert (window.name, window.keeps, window.layers, window.prefill_pages, window.decode_pages) == (
        "window_10",
        "K or V",
        2,
        9,
        5,
    )
    assert (window.prefill_pages_used, window.decode_pages_used) == (8, 5)
    assert (window.tokens_sent, window.tokens_left_out) == (13, 15)
    assert window.bytes_sent == 2 * 13 * 4 * (8 + 8) * 2
    assert (state.name, state.keeps, state.layers, state.prefill_pages, state.decode_pages) == ("state", "state", 1, 2, 3)
    assert (state.prefill_pages_used, state.decode_pages_used) == (2, 2)
    assert (state.tokens_sent, state.tokens_left_out) == (2, 28)
    assert state.bytes_sent == 2 * 4 * 30 * 4


def test_a_latent_goes_to_every_decode_rank() -> None:
    layout = layout_of(LATENT, LATENT)
    (group,) = group_reports(status(layout, PREFILL, "prefill", (5,)), status(layout, DECODE, "decode", (5,)), LENGTHS)
    assert (group.name, group.keeps) == ("full", "latent")
    assert group.bytes_sent == 2 * 28 * 24 * 2 * DECODE.tp_size


@pytest.mark.parametrize("left_out", ["instance", "ranks"])
def test_a_node_that_does_not_say_what_it_is(left_out: str) -> None:
    layout = layout_of(FULL)
    whole, less = status(layout, PREFILL, "prefill", (5,)), status(layout, DECODE, "decode", (5,))
    less.ClearField(left_out)
    assert group_reports(whole, less, LENGTHS) == group_reports(less, whole, LENGTHS) == ()


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ((FULL, WINDOW), "each token, layer and K or V: 100 writes of 45 bytes on average."),
        ((LATENT,), "each token, layer and latent: 100 writes of 24 bytes."),
        ((FULL, STATE), "each token, layer and K or V, and one for each layer's state: 100 writes of 37 bytes on average."),
        ((FULL,), "each token, layer and K or V: 100 writes of 32 bytes."),
    ],
)
def test_the_sentence_on_writes_names_what_the_layers_keep(layers: tuple[LayerSpec, ...], sentence: str) -> None:
    layout = layout_of(*layers)
    assert sentence in cost_line(report_of(layout, "x", [5] * len(layer_groups(layout))))


def test_the_table_fits_a_narrow_terminal_and_a_llama_has_none() -> None:
    output = io.StringIO()
    console = Console(file=output, width=80)
    print_report(console, report_of(layout_of(FULL, WINDOW, STATE), "mixed", (1234, 56, 7)))
    shown = output.getvalue()
    table = shown[shown.index("what each group") : shown.index(GROUP_LEGEND)]
    assert "(mixed)" in table and max(map(len, table.splitlines())) <= 80 and "..." not in table and "…" not in table
    assert re.search(r"pages of a prefill rank +│ 1,234; 7 used │ +56; 7 used │ +7; 1 used │", table)
    console.file = output = io.StringIO()
    print_report(console, report_of(layout_of(FULL), "llama", (5,)))
    assert "group of layers" not in output.getvalue()
