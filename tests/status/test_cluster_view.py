"""Links, requests, alerts and bars of a cluster, from synthetic statuses of nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvferry.cli.text_bars import bar
from kvferry.top.alerts import SLOW_LOOKS, STALLED_S, Alerts
from kvferry.top.view import view_to_json
from node_runtime.cluster_view import Seen, view_of
from node_runtime.view_cells import ring_meter
from transfer.pb import kvferry_pb2 as pb

P, D = 0x11, 0x22


def prefill(
    *,
    written: int = 0,
    busy_s: float = 0.0,
    probe_s: float = 0.0,
    incarnation: int = P,
    requests: tuple[pb.RequestStatus, ...] = (),
) -> Seen:
    use = pb.LinkUse(peer_incarnation=D, decode_rank=0, written_bytes=written, busy_s=busy_s, probe_s=probe_s)
    status = pb.NodeStatus(
        role="prefill",
        state="ready",
        ready=True,
        instance=pb.InstanceInfo(incarnation=incarnation),
        ranks=[pb.RankStatus(rank=0, link_uses=[use])],
        peers=[pb.PeerStatus(address="d:1", incarnation=D, state="joined")],
        links=[pb.LinkStatus(prefill_rank=0, decode_rank=0, lane="ucx/shm", bandwidth_bytes_per_s=4e9, peer_incarnation=D)],
    )
    return Seen(address="p:1", status=status, requests=requests)


def decode(*, at_s: float = 0.0, requests: tuple[pb.RequestStatus, ...] = (), **ring: int) -> Seen:
    status = pb.NodeStatus(
        role="decode",
        state="ready",
        ready=True,
        version="0.2.0",
        instance=pb.InstanceInfo(incarnation=D),
        ranks=[pb.RankStatus(rank=0, ring_capacity=1000, pool_pages=100, **ring)],
        peers=[pb.PeerStatus(address="p:1", incarnation=P, state="joined", breaker="closed")],
        links=[pb.LinkStatus(prefill_rank=0, decode_rank=0, lane="ucx/shm", bandwidth_bytes_per_s=4e9, peer_incarnation=P)],
    )
    return Seen(address="d:1", status=status, requests=requests, at_s=at_s)


def test_the_current_rate_of_a_link_is_its_bytes_per_busy_second() -> None:
    before = [prefill(written=10**9, busy_s=1.0, probe_s=0.25)]
    (link,) = view_of([prefill(written=2 * 10**9, busy_s=1.5, probe_s=0.5), decode()], before).links
    assert link.now_bytes_per_s == 2e9 and link.share == 0.5
    (link,) = view_of([prefill(written=10**9, busy_s=1.0), decode()], before).links
    assert link.now_bytes_per_s == 0.0 and link.share is None, "idle"
    (link,) = view_of([replace(prefill(written=5), address="p:1"), decode()], [prefill(incarnation=0x99)]).links
    assert link.now_bytes_per_s is None, "another incarnation of the node counts from 0"


def request(stage: str, **fields: int | str) -> pb.RequestStatus:
    return pb.RequestStatus(request_id="r", transfer_id="r.0", stage=stage, prompt_tokens=900, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("at_decode", "at_prefill", "stage", "computed", "moved", "generated"),
    [
        (request("queued", max_new_tokens=64), None, "queued", (0, 900), (0, 1), (0, 64)),
        (request("queued", max_new_tokens=64), request("computing", ready_tokens=300), "computing", (300, 900), (0, 1), (0, 64)),
        (request("receiving", max_new_tokens=64), request("sending", ready_tokens=900), "receiving", (900, 900), (0, 1), (0, 64)),
        (request("generating", max_new_tokens=64, generated_tokens=8), None, "generating", (900, 900), (1, 1), (8, 64)),
        (None, request("computing", ready_tokens=450), "computing", (450, 900), (0, 1), (0, 0)),
    ],
)
def test_a_request_that_both_nodes_report_is_shown_once(
    at_decode: pb.RequestStatus | None,
    at_prefill: pb.RequestStatus | None,
    stage: str,
    computed: tuple[int, int],
    moved: tuple[int, int],
    generated: tuple[int, int],
) -> None:
    nodes = [prefill(requests=(at_prefill,) if at_prefill else ()), decode(requests=(at_decode,) if at_decode else ())]
    (found,) = view_of(nodes).requests
    assert (found.stage, found.computed, found.moved, found.generated) == (stage, computed, moved, generated)


def begun(alerts: Alerts, *nodes: Seen, before: Sequence[Seen] = ()) -> list[str]:
    return [alert.what for alert in alerts.update(view_of(nodes, before))[0]]


def test_alerts_begin_once_and_end() -> None:
    alerts = Alerts()
    assert begun(alerts, prefill(), decode()) == []
    gone = Seen(address="p:1", error="p:1: connection refused")
    assert begun(alerts, gone, decode()) == ["unreachable p:1"]
    assert begun(alerts, gone, decode()) == []
    new, ended = alerts.update(view_of([prefill(), decode()]))
    assert new == [] and [alert.what for alert in ended] == ["unreachable p:1"]


def test_each_fault_of_a_node_is_an_alert() -> None:
    node = decode(ring_quarantined_bytes=10)
    assert node.status is not None
    node.status.ready, node.status.not_ready_reason = False, "no prefill node is joined"
    node.status.peers[0].state, node.status.peers[0].breaker = "lost", "open"
    found = begun(Alerts(), node)
    assert found == ["state d:1", "peer d:1 p:1", "breaker d:1 p:1", "quarantine d:1 #0"]


def test_only_a_stalled_watermark_with_live_grants_is_an_alert() -> None:
    alerts = Alerts()
    assert begun(alerts, decode(at_s=0.0, ring_live_grants=2, watermark_position=500)) == []
    assert begun(alerts, decode(at_s=STALLED_S - 0.1, ring_live_grants=2, watermark_position=500)) == []
    assert begun(alerts, decode(at_s=STALLED_S, ring_live_grants=2, watermark_position=500)) == ["stalled d:1 #0"]
    assert begun(alerts, decode(at_s=STALLED_S + 1, ring_live_grants=2, watermark_position=501)) == [] and not alerts.now
    assert begun(alerts, decode(at_s=100.0, watermark_position=501)) == [], "an empty ring does not stall"
    assert begun(alerts, decode(at_s=101.0, ring_live_grants=1, watermark_position=501)) == [], "the stall time starts again"


def test_a_link_far_below_its_probe_is_an_alert_after_several_polls() -> None:
    before = [prefill()]
    slow, quick = (prefill(written=10**9, busy_s=1.0, probe_s=share) for share in (0.25, 0.75))
    alerts = Alerts()
    found = [begun(alerts, one, decode(), before=before) for one in (slow, slow, quick, slow, slow, slow)]
    assert found == [[], [], [], [], [], ["slow p:1 #0 -> d:1 #0"]] and SLOW_LOOKS == 3
    assert begun(alerts, quick, decode(), before=before) == [] and not alerts.now


@pytest.mark.parametrize(
    ("live", "watermark", "cells"),
    [
        (0, 0, "┃░░░░░░░░░"),
        (300, 2_500, "░░░░░┃██░░"),
        (400, 1_800, "██░░░░░░┃█"),
    ],
)
def test_live_bytes_of_a_ring_begin_at_the_watermark_and_go_around_its_end(live: int, watermark: int, cells: str) -> None:
    rank = pb.RankStatus(ring_live_bytes=live, ring_capacity=1_000, watermark_position=watermark)
    assert bar(ring_meter(rank), 10).plain == cells


def test_the_json_view_contains_nodes_requests_and_links() -> None:
    nodes = [prefill(), decode(requests=(request("queued"),)), Seen(address="p:2", error="refused")]
    content = json.loads(json.dumps(view_to_json(view_of(nodes), []), allow_nan=False))
    assert [(node["address"], node["error"]) for node in content["nodes"]] == [("p:1", ""), ("d:1", ""), ("p:2", "refused")]
    assert content["nodes"][1]["requests"][0]["stage"] == "queued" and content["nodes"][2]["status"] is None
    assert content["links"][0]["prefill"] == "p:1" and content["links"][0]["lane"] == "ucx/shm"
