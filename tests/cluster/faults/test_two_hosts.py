"""The tiers on two hosts with a network between them that is cut and healed: control, registry and data plane alike.

The hosts are network namespaces, and UCX is held to TCP, for shared memory would not notice that the network is gone. Skipped,
with the reason, where there can be no namespaces; `test_cut_network.py` cuts the planes that have ports without them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.calls import Reference
from tests.cluster.faults.conftest import reached_at, warm_up
from tests.cluster.faults.hosts import DATA, Hosts, open_hosts, why_not
from tests.cluster.faults.scenario import OK, UNAVAILABLE, Scenario, Tiers
from tests.cluster.open_nodes import open_nodes

WHY_NOT = why_not()
pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can")]

REJOIN_S = 20.0  # the nodes' own back-off is 2 s at most; TCP's, of a connection that was cut for three seconds, about as much


@dataclass(slots=True, kw_only=True)
class TwoHosts(Tiers):
    """A prefill node on one host, a decode node on the other."""

    hosts: Hosts

    async def are_apart(self) -> bool:
        """Both have noticed: no node of the other tier, no session, and nothing of any request that needed one."""
        statuses = await self.statuses()
        if statuses is None or any(rank.sessions for status in statuses for rank in status.ranks):
            return False
        prefill, decode = statuses
        return not any(peer.state == "joined" for peer in (*prefill.peers, *decode.peers))


@pytest.fixture(scope="module")
def apart(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with open_hosts() as hosts, open_nodes(tmp_path_factory.mktemp("hosts")) as nodes:
        port = 7001
        launched = []
        for role in ("prefill", "decode"):
            settings = reached_at(model, hosts.address(role), port)
            settings |= {"server.host": "0.0.0.0", "transport.ucx.lane": "net"}
            settings |= {"limits.join_timeout_s": 2} if role == "decode" else {}  # what is refused is waited for here
            others = (f"{hosts.address('prefill')}:{port}",) if role == "decode" else ()
            environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DATA}
            launched.append(
                nodes.launch(role, settings, *others, prefix=hosts.prefix(role), environment=environment, is_on_loopback=False)
            )
        prefill, decode = launched
        tiers = TwoHosts(prefill=prefill, decode=decode, hosts=hosts)
        asyncio.run(nodes.until_started(prefill, decode))
        asyncio.run(warm_up(tiers))
        yield tiers


@pytest.fixture
def two_hosts(apart: TwoHosts) -> Iterator[TwoHosts]:
    """Joined by a whole link, before and after."""
    yield apart
    apart.hosts.heal()


async def is_cut_and_heals(tiers: TwoHosts, reference: Reference, how: str) -> None:
    """In mid-transfer: whom it hits hears in time, both ends let go, what has arrived goes on; then they join again."""
    lives = tiers.lives()
    async with Scenario(tiers, reference, join_s=REJOIN_S) as scene:
        await scene.generating(150)
        moving = await scene.arriving(2)
        with scene.fault():
            tiers.hosts.cut(how)
        scene.ends(moving, UNAVAILABLE)
        await scene.over(moving)
        await scene.until_noticed(tiers.are_apart, "both ends let go")
        refused = scene.begin(40, 4)
        scene.ends([refused], UNAVAILABLE, within_s=10)
        await scene.over([refused])
        tiers.hosts.heal()
        await scene.serves_again(within_s=REJOIN_S)
    assert tiers.lives() == lives, "the same lives go on"


@pytest.mark.parametrize("how", ["both ways", "towards prefill", "towards decode", "refused"])
async def test_a_cut_between_two_hosts(two_hosts: TwoHosts, reference: Reference, how: str) -> None:
    await is_cut_and_heals(two_hosts, reference, how)


async def test_a_network_that_comes_and_goes(two_hosts: TwoHosts, reference: Reference) -> None:
    """Cuts of all lengths around the time in which they are noticed, one after the other, with requests under way at each."""
    async with Scenario(two_hosts, reference, join_s=REJOIN_S) as scene:
        for cut_s in (0.2, 0.8, 1.4, 1.7, 2.5, 0.1):
            with scene.fault():
                flights = [scene.begin(900, 8) for _ in range(2)]
            await asyncio.sleep(0.3)
            two_hosts.hosts.cut("both ways")
            await asyncio.sleep(cut_s)
            two_hosts.hosts.heal()
            for flight in flights:
                flight.codes, flight.within_s = (OK, UNAVAILABLE), 60.0
            await scene.over(flights)
        await scene.serves_again(within_s=REJOIN_S)
