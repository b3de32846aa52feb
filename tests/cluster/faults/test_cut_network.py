"""A network between the tiers that goes silent, slow, or resets its connections; without any privilege, on every machine.

Registry and control plane go through relays; the data plane does not, see `proxy.py`. `test_two_hosts.py` cuts all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.local_cluster.cluster import ClusterNode
from tests.cluster.calls import Reference
from tests.cluster.faults.conftest import reached_at, warm_up
from tests.cluster.faults.proxy import HOST, PROXY_HOST, ProxyNetwork
from tests.cluster.faults.scenario import OK, UNAVAILABLE, Scenario, Tiers
from tests.cluster.open_nodes import open_nodes

pytestmark = pytest.mark.timeout(180)

REJOIN_S = 30.0


class BehindProxy(ClusterNode):
    """A node that the test reaches directly, whatever address it advertises."""

    @property
    def address(self) -> str:
        return super().address.replace(PROXY_HOST, HOST)


@dataclass(slots=True, kw_only=True)
class Proxied(Tiers):
    """A prefill node and a decode node that reach each other through relays."""

    network: ProxyNetwork


@pytest.fixture(scope="module")
def relayed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    folder = tmp_path_factory.mktemp("relayed")
    with open_nodes(folder) as nodes:
        ports = nodes.hold_ports(2)
        launched: list[ClusterNode] = []

        def pids() -> list[int]:
            return [pid for node in launched if (ready := node.ready_file) for pid in (ready.pid, *ready.rank_pids)]

        with ProxyNetwork(pids) as network:
            for role, port in zip(("prefill", "decode"), ports, strict=True):
                others = (f"{PROXY_HOST}:{ports[0]}",) if role == "decode" else ()
                own = folder / f"runtime-{role}"  # as another user's, so that control messages go over TCP
                own.mkdir()
                launched.append(
                    nodes.launch(
                        role,
                        reached_at(model, PROXY_HOST, port),
                        *others,
                        kind=BehindProxy,
                        environment={"XDG_RUNTIME_DIR": str(own)},
                    )
                )
            prefill, decode = launched
            tiers = Proxied(prefill=prefill, decode=decode, network=network)
            asyncio.run(nodes.until_started(prefill, decode))
            asyncio.run(warm_up(tiers))
            yield tiers


@pytest.fixture
def proxied(relayed: Proxied) -> Iterator[Proxied]:
    """Joined by a whole network, before and after."""
    yield relayed
    relayed.network.heal()


async def test_a_network_that_goes_silent(proxied: Proxied, reference: Reference) -> None:
    """Whom it hits hears in time, what has arrived goes on, and the tiers join again once it heals, as the same lives."""
    lives = proxied.lives()
    async with Scenario(proxied, reference, join_s=REJOIN_S) as scene:
        await scene.generating(150)
        moving = await scene.arriving(2)
        with scene.fault():
            proxied.network.silence()
        scene.ends(moving, UNAVAILABLE)
        await scene.over(moving)
        proxied.network.heal()
        await scene.serves_again(within_s=REJOIN_S)
    assert proxied.lives() == lives, "the same lives go on"


async def test_connections_that_are_reset(proxied: Proxied, reference: Reference) -> None:
    """Heard at once, by both; and they join again at once."""
    async with Scenario(proxied, reference, join_s=REJOIN_S) as scene:
        await scene.generating(150)
        moving = await scene.arriving(2)
        with scene.fault():
            proxied.network.reset()
        scene.ends(moving, UNAVAILABLE)
        await scene.over(moving)
        await scene.serves_again(within_s=REJOIN_S)


async def test_a_network_that_is_slow(proxied: Proxied, reference: Reference) -> None:
    """A tenth of a second each way: everything takes longer, nothing is taken for dead."""
    async with Scenario(proxied, reference) as scene:
        proxied.network.delay_s = 0.1
        await scene.over([await scene.generating(60), *(scene.begin(num_tokens, 8) for num_tokens in (40, 300, 500))])
        proxied.network.delay_s = 0.0


async def test_a_silence_shorter_than_three_heartbeats(proxied: Proxied, reference: Reference) -> None:
    """It is sat out: nothing fails, no session ends."""
    async with Scenario(proxied, reference) as scene:
        await scene.generating()
        moving = await scene.arriving(1, num_tokens=1200)
        proxied.network.silence()
        await asyncio.sleep(0.7)
        proxied.network.heal()
        scene.ends(moving, OK)
        await scene.over(moving)


async def test_resets_again_and_again(proxied: Proxied, reference: Reference) -> None:
    """Requests end one way or the other, and nothing is left of them."""
    async with Scenario(proxied, reference, join_s=REJOIN_S) as scene:
        for pause_s in (0.05, 0.3, 0.6, 0.1, 1.0, 0.2):
            flights = [scene.begin(900, 8) for _ in range(2)]
            with scene.fault():
                pass
            scene.ends(flights, OK, UNAVAILABLE, within_s=60)
            await asyncio.sleep(pause_s)
            proxied.network.reset()
            await scene.over(flights)
        await scene.serves_again(within_s=REJOIN_S)
