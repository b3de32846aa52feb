"""The common part of both roles' leaders: aborts, drains, refused calls, and changes of role."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from node_runtime import node_service
from node_runtime.daemon import Daemon, NodeState
from node_runtime.exit_codes import DOES_NOT_FIT
from node_runtime.health import Readiness
from node_runtime.leader_service import ConfigT, Leader
from node_runtime.rank_link import RankCodec
from node_runtime.supervisor import RankStartError, RankSupervisor
from tests.authority import Authority
from tests.runtime.instances import decode_config, instance, prefill_config, until
from transfer.config import NodeConfig, PrefillNodeConfig
from transfer.connector.rank_report import RankMemory
from transfer.connector.side_service import RequestView
from transfer.errors import PeerUnreachable, TransferError
from transfer.instance import Instance
from transfer.logs import log_level, set_log_level
from transfer.metrics import MetricsPage
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.security import MutualTls


@dataclass
class Requests:
    request_ids: tuple[str, ...] = ("a.0123", "a.4567", "ab.0123")
    num_queued: int = 1
    num_running: int = 2
    aborted: list[tuple[str, str]] = field(default_factory=list)

    def views(self) -> list[RequestView]:
        ages = {"a.0123": 1.0, "a.4567": 3.0, "ab.0123": 2.0}
        return [
            RequestView(request_id=name[:-5], transfer_id=name, stage="queued", age_s=age, prompt_tokens=9)
            for name, age in ages.items()
        ]

    def abort(self, request_id: str, error: TransferError) -> bool:
        self.aborted.append((request_id, str(error)))
        return request_id != "a.0123"  # that one is over for its caller


@dataclass
class Life:
    instance: Instance = field(default_factory=lambda: instance(3))
    requests: Requests = field(default_factory=Requests)
    memory: tuple[RankMemory, ...] = (RankMemory(),)


class Context:
    """A call with a deadline. `abort` raises the status that ends it."""

    def __init__(self, remaining_s: float | None = None) -> None:
        self.remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self.remaining_s

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object = ()) -> None:
        raise ConnectionAbortedError(f"{code.name}: {details}")


def a_call(remaining_s: float | None = None) -> Any:
    return cast(Any, Context(remaining_s))


def refused(details: str) -> Any:
    return pytest.raises(ConnectionAbortedError, match=details)


class AskedDaemon:
    """A substitute for the daemon of a leader."""

    def __init__(self, other: NodeConfig | None = None) -> None:
        self.state = NodeState.READY
        self.num_restarts, self.http_port, self.incarnation = 4, 7, 9
        self.is_stopping, self.can_switch = False, True
        self.other_config = other
        self.ready = Readiness(is_ready=True)
        self.num_switches = 0
        self.error: TransferError | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    def readiness(self) -> Readiness:
        return self.ready

    def readiness_changed(self) -> None:
        """Log nothing."""

    async def switch_role(self) -> None:
        self.num_switches += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error


class DecodeInstance:
    def status(self) -> pb.PeerStatus:
        return pb.PeerStatus(address="decode:1")

    def link_statuses(self) -> list[pb.LinkStatus]:
        return []


class PlainLeader(Leader[ConfigT, Life]):
    """A role without methods of its own, whose lives the test begins and ends."""

    def __init__(self, daemon: AskedDaemon, config: ConfigT) -> None:
        super().__init__(cast(Daemon, daemon), config, codec=RankCodec(), on_rank_message=lambda rank, message: None)
        self.asked = daemon

    @property
    def requests(self) -> Requests:
        assert self._life is not None
        return self._life.requests

    async def open(self) -> str:
        return await self._listen()

    def begin_life(self, life: Life) -> None:
        self._life = life

    def end_life(self) -> None:
        self._life = None

    def use_ranks(self, supervisor: Any) -> None:
        self._supervisor = supervisor

    @property
    def peers(self) -> list[DecodeInstance]:
        return [DecodeInstance()]

    def show(self) -> dict[str, int]:
        return {}

    def page(self) -> str:
        return MetricsPage().render(self.collect_metrics())[0].decode()

    async def take_work(self) -> bool:
        """Whether there is a life for a call of a peer that brings new work."""
        return await self._life_or_end(a_call(), is_new_work=True) is self._life

    async def go_on(self) -> bool:
        """Whether there is one for a call about work that the node has."""
        return await self._life_or_end(a_call(), is_new_work=False) is self._life

    async def take_request(self) -> bool:
        return await self._life_for_request(a_call()) is self._life

    async def drain_for(self, seconds: float | None) -> int:
        """As an operator asks."""
        return (await self.Drain(pb.DrainRequest(), a_call(seconds))).remaining

    async def undrain(self) -> bool:
        return (await self.Undrain(pb.UndrainRequest(), a_call())).was_draining

    async def switch(self, role: str = "decode", remaining_s: float | None = None, drain_budget_s: float = 0.0) -> Any:
        return await self.SwitchRole(pb.SwitchRoleRequest(role=role, drain_budget_s=drain_budget_s), a_call(remaining_s))

    @property
    def is_draining(self) -> bool:
        return self.status().draining


Node = PlainLeader[PrefillNodeConfig]


@pytest.fixture
async def leader(tmp_path: Path) -> Node:
    daemon = AskedDaemon()
    daemon.state = NodeState.STARTING
    one = PlainLeader(daemon, prefill_config(tmp_path))
    one.begin_life(Life())
    return one


async def test_an_abort_means_every_try_of_the_clients_request(leader: Node) -> None:
    aborted = leader.requests.aborted
    assert (await leader.Abort(pb.AbortRequest(request_id="a"), a_call())).found
    assert aborted == [("a.0123", "aborted by an operator"), ("a.4567", "aborted by an operator")]
    aborted.clear()
    assert not (await leader.Abort(pb.AbortRequest(request_id="a.0123", reason="too slow"), a_call())).found
    assert aborted == [("a.0123", "too slow")]
    leader.end_life()
    assert not (await leader.Abort(pb.AbortRequest(request_id="a"), a_call())).found


async def test_a_drain_says_what_is_left_when_its_caller_must_go(leader: Node) -> None:
    assert await leader.drain_for(0.2) == 3
    draining = asyncio.ensure_future(leader.drain_for(None))
    await asyncio.sleep(0.05)
    assert not draining.done()
    leader.requests.num_queued = leader.requests.num_running = 0
    assert await draining == 0


async def test_a_draining_leader_takes_no_new_work_and_goes_on_with_what_it_has(leader: Node) -> None:
    assert await leader.take_work()
    await leader.drain_for(0.0)
    assert await leader.go_on()
    with refused("UNAVAILABLE: the prefill node is draining"):
        await leader.take_work()
    leader.end_life()
    with refused("UNAVAILABLE: the prefill node is starting"):
        await leader.go_on()


async def test_a_drain_is_undone(leader: Node) -> None:
    assert not await leader.undrain()
    await leader.drain_for(0.0)
    leader.asked.state = NodeState.READY
    assert (leader.status().state, leader.is_draining) == ("draining", True)
    assert await leader.undrain() and await leader.take_work()
    assert (leader.status().state, leader.is_draining) == ("ready", False)


async def test_an_undrain_ends_a_drain_that_waits(leader: Node) -> None:
    draining = asyncio.ensure_future(leader.drain_for(None))
    await until(lambda: leader.is_draining)
    assert await leader.undrain()
    with refused("FAILED_PRECONDITION: the drain was undone with 3 requests in flight"):
        await draining
    assert not leader.is_draining


async def test_requests_are_listed_the_oldest_first(leader: Node) -> None:
    all_of_them = await leader.ListRequests(pb.ListRequestsRequest(), a_call())
    assert [one.transfer_id for one in all_of_them.requests] == ["a.4567", "ab.0123", "a.0123"] and all_of_them.total == 3
    assert all_of_them.requests[1] == pb.RequestStatus(
        request_id="ab", transfer_id="ab.0123", stage="queued", age_s=2.0, prompt_tokens=9, role="prefill"
    )
    oldest = await leader.ListRequests(pb.ListRequestsRequest(limit=1), a_call())
    assert [one.transfer_id for one in oldest.requests] == ["a.4567"] and oldest.total == 3
    with refused("INVALID_ARGUMENT: limit is 1001; it must be at most 1000"):
        await leader.ListRequests(pb.ListRequestsRequest(limit=1001), a_call())
    leader.end_life()
    assert (await leader.ListRequests(pb.ListRequestsRequest(), a_call())).total == 0


class Ranks:
    reports: dict[int, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.levels: list[str] = []

    def set_log_level(self, level: str) -> None:
        self.levels.append(level)


async def test_the_log_level_of_leader_and_ranks_is_set(leader: Node) -> None:
    ranks = Ranks()
    leader.use_ranks(cast(RankSupervisor, ranks))
    before = logging.getLogger().level
    try:
        set_log_level("error")
        answer = await leader.SetLogLevel(pb.SetLogLevelRequest(level="debug"), a_call())
        assert (answer.level_before, ranks.levels, log_level()) == ("error", ["debug"], "debug")
        assert leader.status().log_level == "debug"
        with refused("level is 'loud'; it must be one of debug, info, warning, error"):
            await leader.SetLogLevel(pb.SetLogLevelRequest(level="loud"), a_call())
        assert (ranks.levels, log_level()) == (["debug"], "debug")
    finally:
        logging.getLogger().setLevel(before)


async def test_new_certificates_are_looked_at_while_nobody_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_service, "CERTIFICATE_LOOK_S", 0.05)
    authority = Authority()
    files = authority.files(tmp_path / "tls", "node.example")
    tls = files.tls(peer_names=("peer.example",))
    one = PlainLeader(AskedDaemon(), prefill_config(tmp_path, tls=tls.model_dump(), server={"port": 0}))
    await one.open()
    assert isinstance(one.security, MutualTls)
    certificates, expiry = one.security.files, "kvferry_certificate_expiry_timestamp_seconds"

    def shown(name: str) -> float:
        return next(float(line.split()[-1]) for line in one.page().splitlines() if line.startswith(name))

    before = shown(expiry)
    try:
        cert, key = authority.issue("node.example", days=5)
        files.put(key=key)
        await until(lambda: certificates.problem)
        assert shown("kvferry_certificate_stale") == 1 and shown(expiry) == before
        files.put(cert=cert)
        await until(lambda: not certificates.problem)
        assert shown("kvferry_certificate_stale") == 0 and shown(expiry) > before + 86_400
    finally:
        await one.close()


@pytest.fixture
async def changing(tmp_path: Path) -> Node:
    """A node of two roles, without a request."""
    one = PlainLeader(AskedDaemon(decode_config(tmp_path)), prefill_config(tmp_path, drain_timeout_s=60))
    one.begin_life(Life(requests=Requests(num_queued=0, num_running=0)))
    return one


async def test_a_change_of_role_comes_after_a_drain(changing: Node) -> None:
    changing.requests.num_running = 1
    asked = asyncio.ensure_future(changing.switch())
    await until(lambda: changing.is_draining)
    await asyncio.sleep(0.05)
    assert not changing.asked.num_switches
    with refused("UNAVAILABLE: a change of role is under way"):
        await changing.switch()
    changing.requests.num_running = 0
    assert await asked == pb.SwitchRoleResponse(role="decode", role_before="prefill", incarnation=9)
    assert changing.asked.num_switches == 1
    assert (await changing.switch("prefill")).role_before == "prefill" and changing.asked.num_switches == 1, "it has that one"


@pytest.mark.parametrize("was_draining", [False, True])
async def test_with_requests_left_the_node_is_as_it_was(changing: Node, was_draining: bool) -> None:
    changing.requests.num_running = 2
    if was_draining:
        await changing.drain_for(0.0)
    with refused(r"DEADLINE_EXCEEDED: 2 requests are still in flight after 0\.1 s; the node"):
        await changing.switch(remaining_s=0.2)
    assert changing.is_draining is was_draining and not changing.asked.num_switches
    changing.requests.num_running = 0
    await changing.switch()


async def test_requests_get_no_more_time_than_was_asked_for_and_the_change_has_the_rest(changing: Node) -> None:
    changing.requests.num_running = 2
    for remaining_s in (60.0, None):
        with refused(r"DEADLINE_EXCEEDED: 2 requests are still in flight after 0\.1 s; the node"):
            await changing.switch(remaining_s=remaining_s, drain_budget_s=0.1)
    for wrong in (-1.0, math.nan, math.inf):
        with refused(r"INVALID_ARGUMENT: drain_budget_s is .*; it must be a number"):
            await changing.switch(drain_budget_s=wrong)


async def test_an_undrain_ends_a_change_that_waits(changing: Node) -> None:
    changing.requests.num_running = 1
    asked = asyncio.ensure_future(changing.switch())
    await until(lambda: changing.is_draining)
    await changing.undrain()
    changing.requests.num_running = 0
    with refused("FAILED_PRECONDITION: the drain was undone meanwhile"):
        await asked
    assert not changing.is_draining and not changing.asked.num_switches


@pytest.mark.parametrize("is_drained", [False, True])
async def test_a_caller_that_goes_away_while_requests_are_in_flight_changes_nothing(changing: Node, is_drained: bool) -> None:
    """A drain that an operator requested meanwhile continues."""
    changing.requests.num_running = 1
    asked = asyncio.ensure_future(changing.switch())
    await until(lambda: changing.is_draining)
    if is_drained:
        assert await changing.drain_for(0.0) == 1
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    changing.requests.num_running = 0
    assert changing.is_draining is is_drained and not changing.asked.num_switches
    assert await changing.undrain() is is_drained and not changing.is_draining


class Takeover(AskedDaemon):
    """Has the leader of the other role take over, as a daemon does, and the first one again where the ranks cannot."""

    def __init__(self, folder: Path) -> None:
        super().__init__(decode_config(folder))
        self.gate.clear()
        self.before = PlainLeader(self, prefill_config(folder, server={"port": 0}))
        self.after = PlainLeader(self, decode_config(folder))
        self.now: PlainLeader[Any] = self.before
        life = Life(requests=Requests(num_queued=0, num_running=1))
        self.before.begin_life(life)
        self.after.begin_life(life)

    async def switch_role(self) -> None:
        self._hand_over(self.before, self.after)
        try:
            await super().switch_role()
        except TransferError:
            self._hand_over(self.after, self.before)
            raise

    def _hand_over(self, former: PlainLeader[Any], now: PlainLeader[Any]) -> None:
        now.take_over(former)
        self.now = now


@asynccontextmanager
async def takeover(folder: Path) -> AsyncIterator[Takeover]:
    """At the end the port is served by the leader of the role that the node has then."""
    daemon = Takeover(folder)
    address = await daemon.before.open()
    try:
        yield daemon
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = pb_grpc.NodeControlStub(channel)
            assert (await stub.Status(pb.StatusRequest(), timeout=30)).role == daemon.now.config.role
    finally:
        await daemon.now.close()


@pytest.mark.parametrize("when", ["before", "while it waits", "while ranks change"])
@pytest.mark.parametrize("is_possible", [True, False])
async def test_a_drain_of_an_operator_goes_on_whatever_the_node_is(tmp_path: Path, when: str, is_possible: bool) -> None:
    async with takeover(tmp_path) as daemon:
        if when == "before":
            await daemon.now.drain_for(0.0)
        asked = asyncio.ensure_future(daemon.before.switch())
        await until(lambda: daemon.before.is_draining)
        if when == "while it waits":
            await daemon.now.drain_for(0.0)
        daemon.before.requests.num_running = 0
        await until(lambda: daemon.num_switches)
        if when == "while ranks change":
            await daemon.now.drain_for(0.0)
        daemon.error = None if is_possible else RankStartError("a bug", exit_code=4)
        daemon.gate.set()
        await asyncio.gather(asked, return_exceptions=True)
        now, former = (daemon.after, daemon.before) if is_possible else (daemon.before, daemon.after)
        assert daemon.now is now
        with refused(f"UNAVAILABLE: the {now.config.role} node is draining"):
            await now.take_work()
        assert not former.is_draining
        assert await now.undrain() and await now.take_work()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RankStartError("no room", exit_code=DOES_NOT_FIT),
            "RESOURCE_EXHAUSTED: the node could not change its role, .*: no room",
        ),
        (PeerUnreachable("the node has shut down"), "UNAVAILABLE: the node has shut down"),
    ],
)
async def test_a_change_that_fails_is_said_and_the_node_takes_requests_again(
    changing: Node, error: TransferError, said: str
) -> None:
    changing.asked.error = error
    for _ in range(2):  # it can be asked for again
        with refused(said):
            await changing.switch()
    assert not changing.is_draining and await changing.take_request()


async def test_what_cannot_be_changed_is_refused_before_the_drain(changing: Node) -> None:
    daemon = changing.asked
    with refused("INVALID_ARGUMENT: role is 'both'; it must be one of prefill, decode"):
        await changing.switch("both")
    daemon.can_switch = False
    with refused(r"FAILED_PRECONDITION: engine is .*load_engine, which cannot .*switch_role"):
        await changing.switch()
    changing.end_life()
    with refused("UNAVAILABLE: the node is ready"):
        await changing.switch()
    daemon.is_stopping = True
    with refused("FAILED_PRECONDITION: the node is being stopped"):
        await changing.switch()
    daemon.other_config = None
    with refused("FAILED_PRECONDITION: the prefill node has no settings for the other role"):
        await changing.switch()
    assert not changing.is_draining and not daemon.num_switches
