"""What `kvferry status` shows of a node."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvferry.status_view import status_tables, status_to_json
from transfer.pb import kvferry_pb2 as pb

IDLE = pb.NodeStatus(role="decode", state="ready", not_ready_reason="no prefill node is joined: [b]:1 is lost: no such host")


def shown(status: pb.NodeStatus, width: int = 80) -> str:
    console = Console(width=width, height=100)
    with console.capture() as capture:
        console.print(status_tables(status, "h:1"))
    return capture.get()


def test_a_node_whose_ranks_live_but_that_can_serve_nobody_is_not_called_ready() -> None:
    text = shown(IDLE)
    assert "decode node h:1 not ready " in text
    assert "no prefill node is joined: [b]:1 is lost: no such host" in text
    content = status_to_json(IDLE)
    assert (content["state"], content["ready"], content["not_ready_reason"]) == ("ready", False, IDLE.not_ready_reason)


@pytest.mark.parametrize(("state", "is_ready"), [("ready", True), ("starting", False), ("draining", False)])
def test_every_other_state_is_shown_as_it_is(state: str, is_ready: bool) -> None:
    status = pb.NodeStatus(role="decode", state=state, ready=is_ready)
    assert f"decode node h:1 {state} " in shown(status)
    assert status_to_json(status)["ready"] is is_ready


def test_on_80_columns_nothing_is_cut_off() -> None:
    address = "prefill-node-0.prefill-nodes.inference.svc.cluster.local:7001"
    large = 1_234_567_890_123
    status = pb.NodeStatus(
        role="decode",
        state="ready",
        ready=True,
        ranks=[
            pb.RankStatus(
                rank=7, pid=4194304, sessions=256, pools=[
                    pb.PoolStatus(group="full", pages=1048575, reserved=1048574, bound=1048573),
                    pb.PoolStatus(group="window_131072", pages=1048575, reserved=1048574, bound=1048572),
                ],
                ring_capacity=1023 << 20, ring_live_bytes=1022 << 20, ring_peak_bytes=1021 << 20, watermark_position=large,
                staging_slots=4096, staging_slots_used=4095, requests=10000, watermark_acks=12345678, dropped_messages=1234567,
                refused_connections=7654321, open_files=65536, threads=4321, resident_bytes=123456 << 20, pending_transfers=7531,
                ending_sessions=255, idle_checks=98765432,
            )
        ],
        peers=[
            pb.PeerStatus(
                address=address, incarnation=2**64 - 1, state="draining", reason="it drains", breaker="half-open",
                chunk_plan=pb.ChunkPlanInfo(chunk_tokens=131072, layers_per_group=4096), largest_piece_bytes=1020 << 20,
            )
        ],
        links=[pb.LinkStatus(prefill_rank=10, decode_rank=11, lane="ucx/shm", latency_s=0.1, bandwidth_bytes_per_s=4.5e11)],
    )  # fmt: skip
    text = shown(status)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    for whole in (
        "4194304", "1,048,575", "1,048,574", "1,048,573", "window_131072", "1,048,572", "4,095 of 4,096",
        "10,000", "256", "12,345,678", "1,234,567", "7,654,321", "65,536", "4,321", "123,456 MiB", "7,531", "255", "98,765,432",
        "1,022.0 MiB", "1,021.0 MiB", "1,023.0 MiB", "1,234,567,890,123", "0xffffffffffffffff", "draining", "half-open",
        "450.00 GB/s",
        "131,072", "4,096", "1,020.00 MiB",
        "sessions", "dropped", "refused", "incarnation", "watermark",
    ):  # fmt: skip
        assert whole in text, whole
    rows = text[text.index("peers") : text.index("links")].splitlines()[2:]
    assert "".join(row.split(" ")[0] for row in rows) == address, "folded, and whole"


def test_breakers_are_shown_where_there_are_any_with_what_is_left_of_their_pause() -> None:
    reason = "a:1 ended the join"
    peers = [
        pb.PeerStatus(address="a:1", state="joined", breaker="open", breaker_reason=reason, breaker_pause_s=1.25),
        pb.PeerStatus(address="b:1", state="lost", reason="no such host", breaker="half-open", breaker_reason=reason),
        pb.PeerStatus(address="c:1", state="joined", breaker="closed"),
    ]
    status = pb.NodeStatus(role="decode", state="ready", ready=True, peers=peers)
    text = shown(status)
    rows = [" ".join(line.split()) for line in text[text.index("address") :].splitlines()]
    assert rows == [
        "address state breaker incarnation reason",
        "a:1 joined open 1.2 s - a:1 ended the join",
        "b:1 lost half-open - no such host",
        "c:1 joined closed -",
    ]
    first, _, third = status_to_json(status)["peers"]
    assert (first["breaker"], first["breaker_reason"], first["breaker_pause_s"]) == ("open", reason, 1.25)
    assert (third["breaker"], third["breaker_reason"], third["breaker_pause_s"]) == ("closed", "", 0.0)
    assert "breaker" not in shown(pb.NodeStatus(role="prefill", state="ready", peers=[pb.PeerStatus(address="d:1")]))


def test_how_requests_are_cut_is_shown_for_every_peer_that_has_joined() -> None:
    whole = pb.PeerStatus(address="a:1", chunk_plan=pb.ChunkPlanInfo(chunk_tokens=128), largest_piece_bytes=3 << 20)
    lost = pb.PeerStatus(address="b:1", state="lost")
    status = pb.NodeStatus(role="prefill", state="ready", ready=True, peers=[whole, lost])
    text = shown(status)
    (row,) = [line for line in text[text.index("chunks") :].splitlines() if ":1" in line]
    assert row.split() == ["a:1", "128", "all", "3.00", "MiB"]
    first, second = status_to_json(status)["peers"]
    assert first["chunk_plan"] == {"chunk_tokens": 128, "layers_per_group": 0} and first["largest_piece_bytes"] == 3 << 20
    assert second["chunk_plan"] is None and second["largest_piece_bytes"] == 0


def test_how_prefill_nodes_are_found_is_shown_with_what_is_wrong() -> None:
    found = pb.DiscoveryStatus(
        where="DNS name p:7100 (discovery.dns_name)",
        addresses=["a:1", "b:1"],
        waiting=["c:1: it does not serve: it is starting, or draining"],
        problem="p: Name or service not known",
        age_s=12.3,
        failures=2,
    )
    peers = [
        pb.PeerStatus(address="a:1", state="joined", incarnation=1, is_unnamed=True),
        pb.PeerStatus(address="b:1", state="alias", reason="the node is joined as a:1"),
    ]
    text = shown(pb.NodeStatus(role="decode", state="ready", ready=True, discovery=found, peers=peers), width=160)
    for line in (
        "discovery: DNS name p:7100 (discovery.dns_name): 2 named, seen 12 s ago",
        "looking failed: p: Name or service not known",
        "not used yet: c:1: it does not serve: it is starting, or draining",
        "named no longer",
        "the node is joined as a:1",
    ):
        assert line in text
    found.ClearField("age_s")
    assert "nothing was heard from there yet" in shown(pb.NodeStatus(role="decode", discovery=found), width=160)
    assert "discovery" not in shown(pb.NodeStatus(role="prefill"))
