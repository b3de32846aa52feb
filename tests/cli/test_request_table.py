"""What others wrote reaches a terminal as text, and nothing else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from kvferry.cli.request_table import request_table, requests_to_json
from kvferry.cli.status_view import status_tables
from transfer.pb import kvferry_pb2 as pb

HOSTILE = "a\x1b]0;owned\x07\x1b[2Jb\x1b[31m [bold]c[/bold]"


def shown(what: RenderableType) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    console.print(what)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


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


@pytest.mark.parametrize("command", ["requests", "status"])
def test_no_order_of_a_stranger_reaches_the_terminal(command: str) -> None:
    found = shown(request_table(hostile_requests(), "h:1") if command == "requests" else status_tables(hostile_status(), "h:1"))
    for order in ("\x1b]0;", "\x1b[2J", "\x07"):
        assert order not in found
    assert "[bold]c[/bold]" in found, "it is no markup"


def test_the_requests_that_are_not_shown_are_counted() -> None:
    assert "3 in flight, 2 of them not shown" in shown(request_table(hostile_requests(), "h:1"))
    (one,) = requests_to_json(hostile_requests())["requests"]
    assert one["request_id"] == HOSTILE and one["generated_tokens"] == 0
