"""What the demo says about the cost without staging is what the senders count."""

from __future__ import annotations

from pathlib import Path

from kvferry.demo_print import cost_line
from kvferry.demo_report import RequestOutcome, make_report
from prefill_node.sender_events import OutgoingRequest, OutgoingRoute
from prefill_node.sender_state import Request
from transfer.chunk import ChunkPlan
from transfer.layout import DType, KVLayout, Shard, routes
from transfer.pb import kvferry_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
NUM_LAYERS, NUM_TOKENS = 3, 50


def test_the_sentence_names_what_is_counted() -> None:
    layout = KVLayout.uniform(num_layers=NUM_LAYERS, num_kv_heads=4, head_dim=8, dtype=DType.FLOAT32)
    found = routes(layout, Shard(tp_size=4), Shard(tp_size=2))
    request = Request.of(
        OutgoingRequest(
            request_id="r",
            layout=layout,
            plan=ChunkPlan(chunk_tokens=16),
            wire_dtype=DType.FLOAT32,
            digest="xxh3-64",
            num_tokens=NUM_TOKENS,
            start_token=0,
            routes=tuple(OutgoingRoute(route=route, session=1) for route in found),
        )
    )
    pieces = [piece for route in request.routes.values() for piece in request.next_pieces(route, NUM_TOKENS)]
    stats = pb.TransferStats(
        bytes=sum(piece.num_bytes for piece in pieces),
        writes=len(pieces),
        writes_without_staging=sum(piece.num_slices for piece in pieces),
    )
    report = make_report(
        [RequestOutcome(prompt_tokens=NUM_TOKENS, done=pb.GenerateDone(stats=stats))],
        [None],
        decode=pb.NodeStatus(),
        leaked=(),
        seconds=1.0,
        generate_seconds=1.0,
        dtype="float32",
        environment={},
    )
    each_route = NUM_TOKENS * NUM_LAYERS * 2  # K and V
    assert cost_line(report) == (
        "Without staging, each route takes one write for each token, layer and K or V: "
        f"{len(found) * each_route:,} writes of 32 bytes. Here: 16 writes of 2.3 KiB, 75 times fewer."
    )


def test_the_readme_shows_that_sentence() -> None:
    sentence = "Without staging, each route takes one write for each token, layer and K or V: "
    assert sentence in (ROOT / "README.md").read_text(encoding="utf-8")
