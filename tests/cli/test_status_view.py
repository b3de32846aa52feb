"""What `kvferry status` shows of a node."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvferry.cli.status_view import status_tables, status_to_json
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
