"""Status, requests, top and the status page show the same facts in the same words, and reported text only as text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from rich.console import Console, RenderableType

from kvferry.cli.status_view import request_table, status_tables
from kvferry.top.alerts import Alerts
from kvferry.top.view import picture, tables
from node_runtime.cluster_view import ClusterView, Seen, view_of
from node_runtime.status_page import Picture, StatusPage
from tests.status.served import decode_status
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.plain_values import plain

HOSTILE = "a\x1b]0;owned\x07\x1b[2Jb\x1b[31m [bold]c[/bold]\nalert: all is well"
IDLE = pb.NodeStatus(role="decode", state="ready", not_ready_reason="no prefill node is joined: [b]:1 is lost: no such host")


def drawn(what: RenderableType, *, is_terminal: bool = False) -> str:
    console = Console(width=200, force_terminal=is_terminal)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def status_shows(status: pb.NodeStatus) -> str:
    return drawn(status_tables(status, "h:1"))


def top_shows(status: pb.NodeStatus) -> str:
    view = view_of([Seen(address="h:1", status=status)])
    return drawn(picture(view, Alerts().update(view)[0]))


def page_shows(status: pb.NodeStatus) -> str:
    async def look() -> Picture:
        return Picture(address="h:1", status=status, requests=pb.ListRequestsResponse())

    return json.dumps(json.loads(asyncio.run(StatusPage(look, shows_request_ids=False).json()))["shown"], ensure_ascii=False)


EVERY_VIEW = pytest.mark.parametrize("shows", [status_shows, top_shows, page_shows])


@EVERY_VIEW
def test_every_view_shows_why_a_link_is_not_faster(shows: Callable[[pb.NodeStatus], str]) -> None:
    status = decode_status()
    status.links[0].obstacle = "cuda_ipc: no peer access"
    assert "cuda_ipc: no peer access" in shows(status)


def test_the_columns_of_top_are_those_of_an_empty_cluster() -> None:
    """`kvferry top` makes its columns before it has seen a node."""
    status = decode_status()
    status.links[0].obstacle = "cuda_ipc: no peer access"
    found, empty = (tables(view) for view in (view_of([Seen(address="h:1", status=status)]), ClusterView(nodes=())))
    assert {name: table.columns for name, table in found.items()} == {name: table.columns for name, table in empty.items()}
    assert all(len(row.cells) == len(table.columns) for table in found.values() for row in table.rows)


@EVERY_VIEW
def test_every_view_shows_a_fact_in_the_same_words(shows: Callable[[pb.NodeStatus], str]) -> None:
    text = shows(decode_status(live=128 << 10))
    for words in (
        "62 min",
        "0.2.0" if shows is not status_shows else "",
        "128.0 KiB",
        "1.0 MiB",
        "100 us",
        "6.00 GB/s",
        "ucx/shm",
    ):
        assert words in text
    assert "127.0.0.1:7001 #0" in text and "h:1 #1" in text


@EVERY_VIEW
def test_a_node_with_live_ranks_that_can_serve_nobody_is_not_shown_as_ready(shows: Callable[[pb.NodeStatus], str]) -> None:
    text = shows(IDLE)
    assert "not ready" in text and IDLE.not_ready_reason in text
    for state, is_ready in (("ready", True), ("starting", False), ("draining", False)):
        text = shows(pb.NodeStatus(role="decode", state=state, ready=is_ready))
        assert state in text and "not ready" not in text


def test_status_as_json_has_the_unchanged_state() -> None:
    content = plain(IDLE)
    assert (content["state"], content["ready"], content["not_ready_reason"]) == ("ready", False, IDLE.not_ready_reason)


def hostile_requests() -> pb.ListRequestsResponse:
    return pb.ListRequestsResponse(
        requests=[pb.RequestStatus(request_id=HOSTILE, stage=HOSTILE, peer=HOSTILE, prompt_tokens=7, max_new_tokens=9)], total=3
    )


def hostile_status() -> pb.NodeStatus:
    return pb.NodeStatus(
        role="decode",
        not_ready_reason=HOSTILE,
        instance=pb.InstanceInfo(incarnation=1),
        ranks=[pb.RankStatus(pools=[pb.PoolStatus(group=HOSTILE)])],
        peers=[pb.PeerStatus(address=HOSTILE, state=HOSTILE, breaker=HOSTILE, reason=HOSTILE)],
        links=[pb.LinkStatus(lane=HOSTILE)],
    )


@pytest.mark.parametrize("command", ["requests", "status", "top"])
def test_reported_text_reaches_a_terminal_as_text_only(command: str) -> None:
    view = view_of([Seen(address="p:2", error=HOSTILE), Seen(address="d:1", status=hostile_status())])
    shown = {
        "requests": request_table(hostile_requests(), "h:1"),
        "status": status_tables(hostile_status(), "h:1"),
        "top": picture(view, Alerts().update(view)[0]),
    }[command]
    found = drawn(shown, is_terminal=True)
    for order in ("\x1b]0;", "\x1b[2J", "\x07"):
        assert order not in found
    assert "[bold]c[/bold]" in found, "it is no markup"
    assert "\nalert: all is well" not in drawn(shown), "it begins no line"


def test_the_requests_that_are_not_shown_are_counted() -> None:
    assert "3 in flight, 2 of them not shown" in drawn(request_table(hostile_requests(), "h:1"))
    (one,) = plain(hostile_requests())["requests"]
    assert one["request_id"] == HOSTILE and one["generated_tokens"] == 0


def test_status_shows_the_source_of_prefill_nodes_and_its_problems() -> None:
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
    text = status_shows(pb.NodeStatus(role="decode", state="ready", ready=True, discovery=found, peers=peers))
    for line in (
        "discovery: DNS name p:7100 (discovery.dns_name): 2 named, seen 12 s ago",
        "looking failed: p: Name or service not known",
        "not used yet: c:1: it does not serve: it is starting, or draining",
        "named no longer",
        "the node is joined as a:1",
    ):
        assert line in text
    found.ClearField("age_s")
    assert "nothing was heard from there yet" in status_shows(pb.NodeStatus(role="decode", discovery=found))
    assert "discovery" not in status_shows(pb.NodeStatus(role="prefill"))
