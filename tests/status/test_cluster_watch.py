"""Asking nodes how they are, when one of them hangs: the others are shown all the same."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvferry import cluster_watch
from kvferry.cluster_view import Alerts, Seen
from kvferry.cluster_watch import ClusterWatch
from kvferry.top_view import node_cells, summary
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc

SPEED = 1000.0
"""Bytes a second of the link of a node that has one, by its answers."""


class FakeNode(pb_grpc.NodeControlServicer):
    """Says how often it was asked, as its number of requests, and with an incarnation as bytes of a link.

    Or nothing, for as long as `speaks` is not set.
    """

    def __init__(self, *peers: str, incarnation: int = 0) -> None:
        self.peers = peers
        self.incarnation = incarnation
        self.num_asked = 0
        self.speaks = asyncio.Event()
        self.speaks.set()

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.NodeStatus:
        self.num_asked += 1
        number = self.num_asked
        await self.speaks.wait()
        peers = [pb.PeerStatus(address=address, state="joined") for address in self.peers]
        use = pb.LinkUse(peer_incarnation=9, written_bytes=number * 1000, busy_s=number, probe_s=number)
        return pb.NodeStatus(
            role="prefill" if self.incarnation else "decode",
            state="ready",
            ready=True,
            queued_requests=number,
            peers=peers,
            instance=pb.InstanceInfo(incarnation=self.incarnation),
            ranks=[pb.RankStatus(link_uses=[use])] if self.incarnation else [],
            links=[pb.LinkStatus(peer_incarnation=9)] if self.incarnation else [],
        )

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        await self.speaks.wait()
        return pb.ListRequestsResponse()


@asynccontextmanager
async def served(node: FakeNode) -> AsyncIterator[str]:
    server = grpc.aio.server()
    pb_grpc.add_NodeControlServicer_to_server(node, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        node.speaks.set()
        await server.stop(None)


@asynccontextmanager
async def deaf() -> AsyncIterator[str]:
    """Takes connections, and says nothing on them: a process that is stopped, as the kernel answers for it."""
    writers: list[asyncio.StreamWriter] = []

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for writer in writers:
            writer.close()
        server.close()


async def test_a_node_that_hangs_makes_no_other_row_old() -> None:
    lively, hanging = FakeNode(), FakeNode()
    async with served(lively) as first, served(hanging) as second, ClusterWatch([first, second], answer_s=30.0) as watch:
        before = {node.address: node for node in (await watch.look()).nodes}
        assert before[second].status is not None and before[second].late_s == 0
        hanging.speaks.clear()
        began_s = time.monotonic()
        for look in range(1, 6):
            view = await watch.look()
            nodes = {node.address: node for node in view.nodes}
            assert nodes[first].status is not None and nodes[first].status.queued_requests == 1 + look, "asked anew each time"
            late = nodes[second]
            assert late.status == before[second].status and late.at_s == before[second].at_s and late.late_s > 0
        assert time.monotonic() - began_s < 10.0, "a look that waited would have taken 30 s"
        assert hanging.num_asked == 2, "it is asked once, and not again before it has answered"
        cells = [cell.plain for cell in node_cells(late)]
        assert cells[2] == "silent" and cells[-1].startswith("no answer for ") and cells[-1].endswith("it was ready before")
        assert ", 1 silent;" in summary(view) and Alerts().update(view) == ([], [])
        hanging.speaks.set()
        async with asyncio.timeout(20):
            while nodes[second].late_s:
                nodes = {node.address: node for node in (await watch.look()).nodes}
        assert nodes[second].status is not None and nodes[second].status.queued_requests == 2


async def test_a_node_that_is_slow_keeps_its_state_and_the_speeds_of_its_links() -> None:
    slow = FakeNode(incarnation=7)
    async with served(slow) as address, ClusterWatch([address], answer_s=30.0, patience_s=0.2) as watch:

        async def look() -> tuple[Seen, list[float | None]]:
            view = await watch.look()
            return view.nodes[0], [link.now_bytes_per_s for link in view.links]

        assert (await look())[1] == [None], "one answer tells no speed"
        assert (await look())[1] == [SPEED]
        for _ in range(3):
            slow.speaks.clear()
            node, speeds = await look()
            assert node.late_s > 0 and (node.shown_state, speeds) == ("ready", [SPEED]), "as it was in its last two answers"
            assert node_cells(node)[-1].plain.startswith("no answer for ")
            slow.speaks.set()
            await asyncio.wait([task for task, _ in watch._asking.values()], timeout=20)
            node, speeds = await look()
            assert (node.late_s, node.late_looks, node.shown_state, speeds) == (0, 0, "ready", [SPEED])
        slow.speaks.clear()
        assert [(await look())[0].shown_state for _ in range(3)] == ["ready", "silent", "silent"]


async def test_a_node_that_never_speaks_is_unreachable_in_the_end_and_holds_nobody_up() -> None:
    lively = FakeNode()
    async with deaf() as silent, served(lively) as first, ClusterWatch([silent, first], answer_s=1.5) as watch:
        view = await watch.look()
        (late,) = [node for node in view.nodes if node.address == silent]
        assert late.status is None and late.late_s > 0 and node_cells(late)[2].plain == "silent"
        assert Alerts().update(view) == ([], []), "it was asked a moment ago"
        async with asyncio.timeout(30):
            while late.late_s:
                await asyncio.sleep(0.05)
                (late,) = [node for node in (await watch.look()).nodes if node.address == silent]
        assert late.state == "unreachable" and late.error
        for _ in range(5):  # it stays so, while it is asked again
            view = await watch.look()
            assert [node.state for node in view.nodes if node.address == silent] == ["unreachable"]
        assert lively.num_asked > 6


async def test_who_looks_once_waits_for_everybody() -> None:
    async with contextlib.AsyncExitStack() as stack:
        silent, first = await stack.enter_async_context(deaf()), await stack.enter_async_context(served(FakeNode()))
        watch = await stack.enter_async_context(ClusterWatch([silent, first], answer_s=1.0, patience_s=None))
        nodes = {node.address: node for node in (await watch.look()).nodes}
    assert nodes[silent].state == "unreachable" and nodes[silent].late_s == 0 and nodes[first].state == "ready"


async def test_more_nodes_than_are_asked_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are asked, and none of those that they name."""
    monkeypatch.setattr(cluster_watch, "MAX_NODES", 2)
    async with contextlib.AsyncExitStack() as stack:
        others = [await stack.enter_async_context(served(FakeNode())) for _ in range(3)]
        named = [await stack.enter_async_context(served(FakeNode(*others))) for _ in range(3)]
        watch = await stack.enter_async_context(ClusterWatch(named, patience_s=None))
        assert {node.address for node in (await watch.look()).nodes} == set(named)
        few = await stack.enter_async_context(ClusterWatch(named[:1], patience_s=None))
        assert {node.address for node in (await few.look()).nodes} == {named[0], others[0]}


class HalfNode(FakeNode):
    """Refuses to say how it is, and never says which requests it has."""

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.NodeStatus:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        raise AssertionError

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        await asyncio.sleep(60)
        return pb.ListRequestsResponse()


async def test_a_look_that_failed_leaves_no_call_behind() -> None:
    node = HalfNode()
    async with served(node) as address:
        before = asyncio.all_tasks()
        async with ClusterWatch([address]) as watch:
            (seen,) = (await watch.look()).nodes
            assert seen.status is None and "not now" in seen.error
            left = [task for task in asyncio.all_tasks() - before if "_requests" in repr(task.get_coro())]
            assert not left
