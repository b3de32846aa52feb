"""`ClusterWatch`: a node that hangs or is slow leaves the rows of the others fresh. Nodes are made up, and so is the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvferry.cli.text_bars import cell_text
from kvferry.top import cluster_watch
from kvferry.top.alerts import Alerts
from kvferry.top.cluster_watch import ClusterWatch
from kvferry.top.view import summary, tables
from node_runtime.cluster_view import ClusterView, Seen
from tests.runtime.virtual_time import run_in_virtual_time
from transfer.errors import PeerUnreachable, TransportTimeout
from transfer.pb import kvferry_pb2 as pb

InVirtualTime = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


class FakeNode:
    """Returns how often it was asked, as its number of requests.

    It does not answer while `speaks` is clear. With `refusal` it refuses its status and never lists its requests.
    """

    def __init__(self, *peers: str, refusal: str = "") -> None:
        self.peers, self.refusal = peers, refusal
        self.num_asked = 0
        self.speaks = asyncio.Event()
        self.speaks.set()

    async def status(self) -> pb.NodeStatus:
        if self.refusal:
            raise PeerUnreachable(self.refusal)
        self.num_asked += 1
        number = self.num_asked
        await asyncio.sleep(0.001)
        await self.speaks.wait()
        return pb.NodeStatus(
            role="decode",
            state="ready",
            ready=True,
            queued_requests=number,
            peers=[pb.PeerStatus(address=address, state="joined") for address in self.peers],
        )

    async def list_requests(self) -> pb.ListRequestsResponse:
        await (asyncio.Event() if self.refusal else self.speaks).wait()
        return pb.ListRequestsResponse()


def shown(view: ClusterView, address: str) -> list[str]:
    """Return the text of a node's row."""
    (row,) = [row for row in tables(view)["nodes"].rows if row.cells[1] == address]
    return [cell_text(cell).plain for cell in row.cells]


NODES: dict[str, FakeNode] = {}
"""The nodes of a test, by address."""


class FakeClient:
    def __init__(self, address: str, *, security: object = None) -> None:
        self._address = address

    async def status(self, *, timeout_s: float) -> pb.NodeStatus:
        return await self._within(timeout_s, NODES[self._address].status())

    async def list_requests(self, *, timeout_s: float) -> pb.ListRequestsResponse:
        return await self._within(timeout_s, NODES[self._address].list_requests())

    async def _within(self, timeout_s: float, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise TransportTimeout(f"{self._address} has not answered within {timeout_s:g} s") from None

    async def close(self) -> None:
        pass


@pytest.fixture
def in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> InVirtualTime:
    NODES.clear()
    monkeypatch.setattr(cluster_watch, "NodeClient", FakeClient)
    return lambda main: run_in_virtual_time(lambda _: main(), monkeypatch, cluster_watch)


def serve(**nodes: FakeNode) -> None:
    NODES.update(nodes)


async def rows(watch: ClusterWatch) -> dict[str, Seen]:
    return {node.address: node for node in (await watch.look()).nodes}


def test_a_node_that_hangs_makes_no_other_row_old(in_virtual_time: InVirtualTime) -> None:
    async def main() -> None:
        serve(lively=FakeNode(), hanging=(hanging := FakeNode()))
        async with ClusterWatch(["lively", "hanging"], answer_s=30.0) as watch:
            before = await rows(watch)
            assert before["hanging"].status is not None and before["hanging"].late_s == 0
            hanging.speaks.clear()
            for look in range(1, 6):
                view = await watch.look()
                found = {node.address: node for node in view.nodes}
                assert found["lively"].status is not None and found["lively"].status.queued_requests == 1 + look, (
                    "asked each time"
                )
                late = found["hanging"]
                assert late.status == before["hanging"].status and late.at_s == before["hanging"].at_s and late.late_s > 0
            assert asyncio.get_running_loop().time() < 1.0, "only the first look waits, for half a second"
            assert hanging.num_asked == 2, "it is asked once, and not again before it has answered"
            cells = shown(view, "hanging")
            assert cells[2] == "silent" and cells[-1].startswith("no answer for ") and cells[-1].endswith("it was ready before")
            assert ", 1 silent;" in summary(view) and Alerts().update(view) == ([], [])
            hanging.speaks.set()
            await asyncio.sleep(0.1)
            again = (await rows(watch))["hanging"]
            assert again.late_s == 0 and again.status is not None and again.status.queued_requests == 2

    in_virtual_time(main)


def test_a_node_that_never_speaks_is_unreachable_in_the_end_and_delays_no_other(in_virtual_time: InVirtualTime) -> None:
    async def main() -> None:
        serve(lively=(lively := FakeNode()), mute=(mute := FakeNode()))
        mute.speaks.clear()
        async with ClusterWatch(["mute", "lively"], answer_s=1.5) as watch:
            view = await watch.look()
            (late,) = [node for node in view.nodes if node.address == "mute"]
            assert late.status is None and late.late_s > 0 and shown(view, "mute")[2] == "silent"
            assert Alerts().update(view) == ([], []), "it was asked a moment ago"
            await asyncio.sleep(1.5)
            for _ in range(6):  # it stays so, while it is asked again
                found = (await rows(watch))["mute"]
                assert found.state == "unreachable" and found.late_s == 0 and found.error
            assert lively.num_asked == 7

    in_virtual_time(main)


def test_all_named_nodes_are_asked_and_their_peers_only_up_to_the_limit(
    in_virtual_time: InVirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_watch, "MAX_NODES", 2)

    async def main() -> None:
        others = ("d", "e", "f")
        serve(**{name: FakeNode(*others) for name in ("a", "b", "c")}, **{name: FakeNode() for name in others})
        async with ClusterWatch(["a", "b", "c"]) as watch:
            assert set(await rows(watch)) == {"a", "b", "c"}
        async with ClusterWatch(["a"]) as few:
            assert set(await rows(few)) == {"a", "d"}

    in_virtual_time(main)


def test_a_look_that_failed_leaves_no_call_behind(in_virtual_time: InVirtualTime) -> None:
    async def main() -> None:
        serve(half=FakeNode(refusal="not now"))
        before = asyncio.all_tasks()
        async with ClusterWatch(["half"]) as watch:
            seen = (await rows(watch))["half"]
            assert seen.status is None and "not now" in seen.error
            assert asyncio.all_tasks() == before

    in_virtual_time(main)
