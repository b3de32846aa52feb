"""Engines that span two hosts, with mutual TLS: tensor parallelism and pipeline stages over network namespaces.

Each engine has its leader on another host. All of kvferry is real; the engine's ranks only keep KV.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.engines.connector import DECODE, PREFILL, Sides
from kvferry.local_cluster.spec import Role
from tests.authority import Authority
from tests.cluster.engines.connector.host_process import HostProcess, host_process, side_name
from tests.cluster.faults.hosts import DATA, ROLES, Hosts, open_hosts, why_not
from tests.connector.instances import FROM, PROMPT, TO, wait_for
from tests.connector.test_tls import tls
from transfer.layout import Shard

WHY_NOT = why_not()
pytestmark = [pytest.mark.timeout(240), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can")]

PLACES: dict[Sides, tuple[Role, ...]] = {PREFILL: ROLES, DECODE: ROLES[::-1]}
"""Hosts of the parts of each engine. The first one has the leader."""

RANKS_PORT = 7300
CUT_S = 3.0  # longer than ZeroMQ keeps a silent connection, shorter than three heartbeats of 2 s, which end a session


class Engine:
    """All parts of one engine; the first one has the leader."""

    def __init__(self, sides: Sides, shard: Shard, parts: list[HostProcess], hosts: Hosts, settings: dict[str, Any]) -> None:
        self.parts = parts
        self.leader = parts[0]
        share = shard.num_ranks // len(parts)
        places = PLACES[sides]
        own = settings | {
            "leader.address": f"{hosts.address(places[0])}:{RANKS_PORT}",
            "leader.peer_names": (f"{side_name(sides)}.example",),
            "transport.name": "ucx",
            "transport.ucx.lane": "net",
        }
        for index, (part, place) in enumerate(zip(parts, places, strict=True)):
            part.begin(
                "begin",
                sides,
                name=f"engine-{side_name(sides)}",
                shard=shard,
                ranks=range(share * index, share * (index + 1)),
                has_leader=index == 0,
                settings=own | {"server.host": hosts.address(place)},
            )
        addresses = [part.end() for part in parts]
        self.address: str = addresses[0]

    def all(self, name: str, /, *args: Any, **named: Any) -> list[Any]:
        for part in self.parts:
            part.begin(name, *args, **named)
        return [part.end() for part in self.parts]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with open_hosts() as opened:
        yield opened


@pytest.fixture
def engines(hosts: Hosts, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """A prefill engine and a decode engine of these shards, joined."""
    authority = Authority()
    calls = tmp_path / "calls"
    calls.mkdir()
    shards: tuple[Shard, Shard] = request.param
    with ExitStack() as stack:

        def start(sides: Sides, shard: Shard, other: str, **settings: Any) -> Engine:
            environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DATA, "OMP_NUM_THREADS": "1"}
            places = ROLES if sides == PREFILL else ROLES[::-1]
            parts = [stack.enter_context(host_process(calls, hosts.prefix(place), environment)) for place in places]
            files = tls(authority.files(tmp_path / side_name(sides), f"{side_name(sides)}.example"), f"{other}.example")
            return Engine(sides, shard, parts, hosts, files | settings)

        prefill = start(PREFILL, shards[0], "decode")
        decode = start(DECODE, shards[1], "prefill", **{"peers.prefill_nodes": (prefill.address,)})
        wait_for(lambda: decode.leader.call("num_joined") == 1, "joined")
        yield prefill, decode


def begin(prefill: Engine, decode: Engine, name: str) -> None:
    decode.leader.call("fetches_from", name, name, prefill.address, TO)
    prefill.leader.call("leader.offer", name, name, PROMPT)
    prefill.leader.call("leader.begin", name)


def end(prefill: Engine, decode: Engine, name: str) -> None:
    """Compute the prompt. Every rank of decode gets exactly its heads and layers."""
    prefill.all("compute", name, FROM, PROMPT, 0, len(PROMPT))
    prefill.all("finish_ranks", name)
    prefill.leader.call("leader.finish", name)
    assert {settled.failure for settled in decode.all("settled", name)} == {""}
    decode.all("assert_has", TO, PROMPT)
    assert {freed.failure for freed in prefill.all("freed", name)} == {""}
    for engine in (prefill, decode):
        engine.leader.call("leader.check")


def hand_over(prefill: Engine, decode: Engine, name: str) -> None:
    begin(prefill, decode, name)
    end(prefill, decode, name)


TENSOR, STAGES = Shard(tp_size=16), Shard(pp_size=2)


@pytest.mark.parametrize("engines", [(TENSOR, STAGES), (STAGES, TENSOR)], ids=["TP 16 to PP 2", "PP 2 to TP 16"], indirect=True)
def test_engines_over_two_hosts(engines: tuple[Engine, Engine]) -> None:
    hand_over(*engines, "a")
    hand_over(*engines, "b")


@pytest.mark.parametrize("engines", [(Shard(tp_size=2), STAGES)], ids=["TP 2 to PP 2"], indirect=True)
def test_messages_to_ranks_survive_a_cut(engines: tuple[Engine, Engine], hosts: Hosts) -> None:
    """The prompt begins while the second rank of each engine cannot be reached. ZeroMQ alone loses its messages then."""
    prefill, decode = engines
    hand_over(prefill, decode, "before")
    hosts.cut("both ways")
    begin(prefill, decode, "a")
    time.sleep(CUT_S)
    hosts.heal()
    end(prefill, decode, "a")
    hand_over(prefill, decode, "after")
