"""What both roles' leaders do alike: whom an abort means, how long a drain is waited for, what is refused meanwhile."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from node_runtime import leader_service
from node_runtime.daemon import Daemon, NodeState
from node_runtime.draining import DrainReason
from node_runtime.exit_codes import NO_MEMORY
from node_runtime.health import Readiness
from node_runtime.leader_service import ConfigT, Leader
from node_runtime.rank_report import RankMemory
from node_runtime.request_view import RequestView
from node_runtime.role_service import RoleServices
from node_runtime.supervisor import RankStartError
from tests.authority import Authority
from tests.runtime import rank_entries
from tests.runtime.instances import decode_config, instance, prefill_config, until
from transfer.config import DecodeNodeConfig, PrefillNodeConfig
from transfer.errors import PeerUnreachable, TransferError
from transfer.instance import Instance
from transfer.logs import log_level, set_log_level
from transfer.pb import kvferry_pb2 as pb
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


STARTING = SimpleNamespace(state=NodeState.STARTING, num_restarts=0, other_config=None)


class Context:
    """A call with a deadline, or what ended it."""

    def __init__(self, remaining_s: float | None = None) -> None:
        self.remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self.remaining_s

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object = ()) -> None:
        raise ConnectionAbortedError(f"{code.name}: {details}")


def a_call(remaining_s: float | None = None) -> Any:
    return cast(Any, Context(remaining_s))


def leader_of(daemon: SimpleNamespace, config: ConfigT) -> Leader[ConfigT, Life]:
    return Leader(
        cast(Daemon, daemon),
        config,
        entry=rank_entries.obedient,
        codec=rank_entries.CODEC,
        on_rank_message=lambda rank, message: None,
    )


@pytest.fixture
def leader(tmp_path: Path) -> Leader[PrefillNodeConfig, Life]:
    asked = SimpleNamespace(
        state=NodeState.STARTING, started_s=0.0, num_restarts=4, ready=Readiness(is_ready=True), http_port=7, is_stopping=False
    )
    asked.readiness = lambda: asked.ready
    one = leader_of(asked, prefill_config(tmp_path))
    one._life = Life()
    return one


async def test_an_abort_means_every_try_of_the_clients_request(leader: Leader[PrefillNodeConfig, Life]) -> None:
    assert leader._life is not None
    aborted = leader._life.requests.aborted
    assert (await leader.Abort(pb.AbortRequest(request_id="a"), a_call())).found
    assert aborted == [("a.0123", "aborted by an operator"), ("a.4567", "aborted by an operator")]
    aborted.clear()
    assert not (await leader.Abort(pb.AbortRequest(request_id="a.0123", reason="too slow"), a_call())).found
    assert aborted == [("a.0123", "too slow")]
    leader._life = None
    assert not (await leader.Abort(pb.AbortRequest(request_id="a"), a_call())).found


async def test_a_drain_says_what_is_left_when_its_caller_must_go(leader: Leader[PrefillNodeConfig, Life]) -> None:
    async with asyncio.timeout(5):
        assert (await leader.Drain(pb.DrainRequest(), a_call(remaining_s=0.2))).remaining == 3
        draining = asyncio.ensure_future(leader.Drain(pb.DrainRequest(), a_call()))
        await asyncio.sleep(0.05)
        assert not draining.done()
        assert leader._life is not None
        leader._life.requests.num_queued = leader._life.requests.num_running = 0
        assert (await draining).remaining == 0


async def test_a_draining_leader_takes_no_new_work_and_goes_on_with_what_it_has(leader: Leader[PrefillNodeConfig, Life]) -> None:
    assert await leader._life_or_end(a_call(), is_new_work=True) is leader._life
    leader._draining.begin()
    assert await leader._life_or_end(a_call(), is_new_work=False) is leader._life
    with pytest.raises(ConnectionAbortedError, match="UNAVAILABLE: the prefill node is draining"):
        await leader._life_or_end(a_call(), is_new_work=True)
    leader._life = None
    with pytest.raises(ConnectionAbortedError, match="UNAVAILABLE: the prefill node is starting"):
        await leader._life_or_end(a_call(), is_new_work=False)


async def test_requests_without_a_life_or_to_a_draining_node_count_as_refused_and_are_logged_once(
    leader: Leader[PrefillNodeConfig, Life],
) -> None:
    assert await leader._life_for_request(a_call()) is leader._life
    leader._draining.begin()
    with capture_logs() as lines:
        for _ in range(3):
            with pytest.raises(ConnectionAbortedError, match="UNAVAILABLE: the prefill node is draining"):
                await leader._life_for_request(a_call())
    assert [(line["event"], line["kind"], line["reason"]) for line in lines] == [
        ("request_refused", "lost", "the prefill node is draining")
    ]
    leader._draining.end()
    leader._life = None
    with pytest.raises(ConnectionAbortedError, match="UNAVAILABLE: the prefill node is starting"):
        await leader._life_for_request(a_call())
    with pytest.raises(ConnectionAbortedError, match="UNAVAILABLE: the prefill node is starting"):
        await leader._life_or_end(a_call(), is_new_work=True)  # of a join, which is no request
    page = leader.metrics.render([]).decode()
    assert 'kvferry_requests_total{outcome="refused",role="prefill"} 4' in page.replace(".0\n", "\n")


def test_a_status_says_what_is_there(leader: Leader[PrefillNodeConfig, Life]) -> None:
    said = leader._status(peers=[pb.PeerStatus(address="decode:1")], links=[])
    assert (said.role, said.state, said.restarts) == ("prefill", "starting", 4)
    assert (said.queued_requests, said.running_requests, said.instance.incarnation) == (1, 2, 3)
    assert [peer.address for peer in said.peers] == ["decode:1"]
    leader._life = None
    without = leader._status(peers=[], links=[])
    assert not without.HasField("instance") and without.running_requests == 0


def test_a_status_says_whether_the_node_is_ready_as_readyz_does(leader: Leader[PrefillNodeConfig, Life]) -> None:
    ready = leader._status(peers=[], links=[])
    assert (ready.ready, ready.not_ready_reason) == (True, "")
    cast(Any, leader._daemon).ready = Readiness(is_ready=False, reason="no prefill node is joined")
    idle = leader._status(peers=[], links=[])
    assert (idle.ready, idle.not_ready_reason) == (False, "no prefill node is joined")
    cast(Any, leader._daemon).ready = Readiness(is_ready=True, reason="the node is draining")
    assert leader._status(peers=[], links=[]).not_ready_reason == ""


async def test_a_drain_is_undone(leader: Leader[PrefillNodeConfig, Life]) -> None:
    assert not (await leader.Undrain(pb.UndrainRequest(), a_call())).was_draining
    await leader.Drain(pb.DrainRequest(), a_call(remaining_s=0.15))
    cast(Any, leader._daemon).state = NodeState.READY
    drained = leader._status(peers=[], links=[])
    assert (drained.state, drained.draining) == ("draining", True)
    assert (await leader.Undrain(pb.UndrainRequest(), a_call())).was_draining
    assert await leader._life_or_end(a_call(), is_new_work=True) is leader._life
    again = leader._status(peers=[], links=[])
    assert (again.state, again.draining) == ("ready", False)


async def test_an_undrain_ends_a_drain_that_waits(leader: Leader[PrefillNodeConfig, Life]) -> None:
    async with asyncio.timeout(5):
        draining = asyncio.ensure_future(leader.Drain(pb.DrainRequest(), a_call()))
        await until(lambda: leader._draining.is_on)
        assert (await leader.Undrain(pb.UndrainRequest(), a_call())).was_draining
        with pytest.raises(ConnectionAbortedError, match="FAILED_PRECONDITION: the drain was undone with 3 requests in flight"):
            await draining
    assert not leader._draining.is_on


async def test_a_node_that_is_being_stopped_is_not_undrained(leader: Leader[PrefillNodeConfig, Life]) -> None:
    leader._draining.begin()
    cast(Any, leader._daemon).is_stopping = True
    with pytest.raises(ConnectionAbortedError, match="FAILED_PRECONDITION: the node is being stopped"):
        await leader.Undrain(pb.UndrainRequest(), a_call())
    assert leader._draining.is_on


async def test_requests_are_listed_the_oldest_first(leader: Leader[PrefillNodeConfig, Life]) -> None:
    all_of_them = await leader.ListRequests(pb.ListRequestsRequest(), a_call())
    assert [one.transfer_id for one in all_of_them.requests] == ["a.4567", "ab.0123", "a.0123"] and all_of_them.total == 3
    assert all_of_them.requests[1] == pb.RequestStatus(
        request_id="ab", transfer_id="ab.0123", stage="queued", age_s=2.0, prompt_tokens=9
    )
    oldest = await leader.ListRequests(pb.ListRequestsRequest(limit=1), a_call())
    assert [one.transfer_id for one in oldest.requests] == ["a.4567"] and oldest.total == 3
    with pytest.raises(ConnectionAbortedError, match="INVALID_ARGUMENT: limit is 1001; it must be at most 1000"):
        await leader.ListRequests(pb.ListRequestsRequest(limit=1001), a_call())
    leader._life = None
    assert (await leader.ListRequests(pb.ListRequestsRequest(), a_call())).total == 0


async def test_the_log_level_of_leader_and_ranks_is_set(leader: Leader[PrefillNodeConfig, Life]) -> None:
    told: list[str] = []
    leader._supervisor = cast(Any, SimpleNamespace(set_log_level=told.append, reports={}))
    before = logging.getLogger().level
    try:
        set_log_level("error")
        answer = await leader.SetLogLevel(pb.SetLogLevelRequest(level="debug"), a_call())
        assert (answer.level_before, told, log_level()) == ("error", ["debug"], "debug")
        assert leader._status(peers=[], links=[]).log_level == "debug"
        with pytest.raises(ConnectionAbortedError, match="level is 'loud'; it must be one of debug, info, warning, error"):
            await leader.SetLogLevel(pb.SetLogLevelRequest(level="loud"), a_call())
        assert (told, log_level()) == (["debug"], "debug")
    finally:
        logging.getLogger().setLevel(before)


async def test_new_certificates_are_looked_at_while_nobody_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_service, "CERTIFICATE_LOOK_S", 0.05)
    authority = Authority()
    files = authority.files(tmp_path / "tls", "node.example")
    tls = files.tls(peer_names=("peer.example",))
    one = leader_of(
        STARTING,
        prefill_config(tmp_path, tls=tls.model_dump()),
    )
    await one._listen()
    assert isinstance(one.security, MutualTls)
    expiry = "kvferry_certificate_expiry_timestamp_seconds"

    def shown(name: str) -> float:
        page = one._render_metrics({}).decode()
        return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    before, old = shown(expiry), one.security.files._current
    try:
        cert, key = authority.issue("node.example", days=5)
        files.put(key=key)
        await until(lambda: one.security.files.problem)  # type: ignore[union-attr]
        assert shown("kvferry_certificate_stale") == 1 and shown(expiry) == before
        files.put(cert=cert)
        await until(lambda: one.security.files._current is not old)  # type: ignore[union-attr]
        assert shown("kvferry_certificate_stale") == 0 and shown(expiry) > before + 86_400
    finally:
        await one.close()


async def test_a_leader_says_that_its_certificate_has_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_service, "CERTIFICATE_LOOK_S", 0.05)
    tls = Authority().files(tmp_path / "tls", "node.example", days=5 / 86_400).tls(peer_names=("peer.example",))
    one = leader_of(
        STARTING,
        prefill_config(tmp_path, tls=tls.model_dump()),
    )
    with capture_logs() as lines:
        await one._listen()
        try:
            await until(lambda: lines)
            await asyncio.sleep(0.3)
        finally:
            await one.close()
    assert [(line["event"], line["names"]) for line in lines] == [("certificate_expired", "node.example")], "once a minute"


class Switching:
    """What a leader asks of its daemon about a change of role."""

    def __init__(self, other: DecodeNodeConfig | None) -> None:
        self.state = NodeState.READY
        self.is_stopping = False
        self.can_switch = True
        self.other_config = other
        self.incarnation = 9
        self.num_switches = 0
        self.error: TransferError | None = None

    async def switch_role(self) -> None:
        self.num_switches += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def changing(tmp_path: Path) -> Leader[PrefillNodeConfig, Life]:
    one = leader_of(cast(Any, Switching(decode_config(tmp_path))), prefill_config(tmp_path, drain_timeout_s=5))
    one._life = Life(requests=Requests(num_queued=0, num_running=0))
    return one


async def switch(
    leader: Leader[PrefillNodeConfig, Life], role: str = "decode", remaining_s: float | None = None, drain_budget_s: float = 0.0
) -> Any:
    async with asyncio.timeout(10):
        return await leader.SwitchRole(pb.SwitchRoleRequest(role=role, drain_budget_s=drain_budget_s), a_call(remaining_s))


async def test_a_change_of_role_comes_after_a_drain(changing: Leader[PrefillNodeConfig, Life]) -> None:
    daemon = cast(Any, changing._daemon)
    assert changing._life is not None
    changing._life.requests.num_running = 1
    asked = asyncio.ensure_future(switch(changing))
    await until(lambda: changing._draining.is_on)
    await asyncio.sleep(0.05)
    assert not daemon.num_switches
    with pytest.raises(ConnectionAbortedError, match="UNAVAILABLE: a change of role is under way"):
        await switch(changing)
    changing._life.requests.num_running = 0
    assert await asked == pb.SwitchRoleResponse(role="decode", role_before="prefill", incarnation=9)
    assert daemon.num_switches == 1
    assert (await switch(changing, "prefill")).role_before == "prefill" and daemon.num_switches == 1, "it has that one"


@pytest.mark.parametrize("was_draining", [False, True])
async def test_with_requests_left_the_node_is_as_it_was(changing: Leader[PrefillNodeConfig, Life], was_draining: bool) -> None:
    assert changing._life is not None
    changing._life.requests.num_running = 2
    if was_draining:
        changing._draining.begin()
    with pytest.raises(ConnectionAbortedError, match=r"DEADLINE_EXCEEDED: 2 requests are still in flight after 0\.1 s; the node"):
        await switch(changing, remaining_s=0.2)
    assert changing._draining.is_on is was_draining and not cast(Any, changing._daemon).num_switches
    changing._life.requests.num_running = 0
    await switch(changing)


async def test_requests_get_no_more_time_than_was_asked_for_and_the_change_has_the_rest(
    changing: Leader[PrefillNodeConfig, Life],
) -> None:
    assert changing._life is not None
    changing._life.requests.num_running = 2
    for remaining_s in (60.0, None):
        with pytest.raises(
            ConnectionAbortedError, match=r"DEADLINE_EXCEEDED: 2 requests are still in flight after 0\.1 s; the node"
        ):
            await switch(changing, remaining_s=remaining_s, drain_budget_s=0.1)
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ConnectionAbortedError, match=r"INVALID_ARGUMENT: drain_budget_s is .*; it must be a number"):
            await switch(changing, drain_budget_s=wrong)


async def test_an_undrain_ends_a_change_that_waits(changing: Leader[PrefillNodeConfig, Life]) -> None:
    assert changing._life is not None
    changing._life.requests.num_running = 1
    asked = asyncio.ensure_future(switch(changing))
    await until(lambda: changing._draining.is_on)
    await changing.Undrain(pb.UndrainRequest(), a_call())
    changing._life.requests.num_running = 0
    with pytest.raises(ConnectionAbortedError, match="FAILED_PRECONDITION: the drain was undone meanwhile"):
        await asked
    assert not changing._draining.is_on and not cast(Any, changing._daemon).num_switches


async def test_a_drain_that_an_operator_asks_for_while_a_change_waits_outlives_it(
    changing: Leader[PrefillNodeConfig, Life],
) -> None:
    assert changing._life is not None
    changing._life.requests.num_running = 1
    asked = asyncio.ensure_future(switch(changing, remaining_s=0.5))
    await until(lambda: changing._draining.is_on)
    assert (await changing.Drain(pb.DrainRequest(), a_call(remaining_s=0.15))).remaining == 1
    with pytest.raises(ConnectionAbortedError, match="DEADLINE_EXCEEDED: 1 requests are still in flight"):
        await asked
    assert changing._draining.is_for(DrainReason.OPERATOR) and not changing._draining.is_for(DrainReason.SWITCH)
    assert (await changing.Undrain(pb.UndrainRequest(), a_call())).was_draining and not changing._draining.is_on


@pytest.mark.parametrize("is_undrained", [False, True])
async def test_what_an_operator_asks_for_while_ranks_change_is_kept_when_they_cannot(
    changing: Leader[PrefillNodeConfig, Life], monkeypatch: pytest.MonkeyPatch, is_undrained: bool
) -> None:
    daemon, gate = cast(Any, changing._daemon), asyncio.Event()

    async def fail() -> None:
        daemon.num_switches += 1
        await gate.wait()
        raise RankStartError("a bug", exit_code=4)

    monkeypatch.setattr(daemon, "switch_role", fail)
    if is_undrained:
        changing._draining.begin()
    asked = asyncio.ensure_future(switch(changing))
    await until(lambda: daemon.num_switches)
    if is_undrained:
        assert (await changing.Undrain(pb.UndrainRequest(), a_call())).was_draining
        assert changing._draining.is_on, "its ranks are leaving: it can serve nothing yet"
    else:
        assert (await changing.Drain(pb.DrainRequest(), a_call(remaining_s=0.15))).remaining == 0
    gate.set()
    with pytest.raises(ConnectionAbortedError, match="INTERNAL: the node could not change its role"):
        await asked
    assert changing._draining.is_on is not is_undrained


class Takeover(Switching):
    """Has the leader of the other role take over, as a daemon does, and the first one again where the ranks cannot."""

    def __init__(self, folder: Path) -> None:
        super().__init__(decode_config(folder))
        self.gate = asyncio.Event()
        self.before, self.after = (
            leader_of(cast(Any, self), prefill_config(folder)),
            leader_of(cast(Any, self), decode_config(folder)),
        )
        self.before._services = RoleServices(self.before)
        self.before._life = self.after._life = Life(requests=Requests(num_queued=0, num_running=1))

    async def switch_role(self) -> None:
        self.num_switches += 1
        self.after.take_over(self.before)
        await self.gate.wait()
        if self.error is not None:
            self.before.take_over(self.after)
            raise self.error


@pytest.mark.parametrize("when", ["before", "while it waits", "while ranks change"])
@pytest.mark.parametrize("is_possible", [True, False])
async def test_a_drain_of_an_operator_goes_on_whatever_the_node_is(tmp_path: Path, when: str, is_possible: bool) -> None:
    daemon = Takeover(tmp_path)
    services = daemon.before._services
    assert services is not None and daemon.before._life is not None

    async def drain() -> None:
        """At whoever leads the node then."""
        await cast(Any, services.leader).Drain(pb.DrainRequest(), a_call(remaining_s=0.15))

    if when == "before":
        await drain()
    asked = asyncio.ensure_future(switch(daemon.before))
    await until(lambda: daemon.before._draining.is_for(DrainReason.SWITCH))
    if when == "while it waits":
        await drain()
    daemon.before._life.requests.num_running = 0
    await until(lambda: daemon.num_switches)
    if when == "while ranks change":
        await drain()
    daemon.error = None if is_possible else RankStartError("a bug", exit_code=4)
    daemon.gate.set()
    await asyncio.gather(asked, return_exceptions=True)
    now, former = (daemon.after, daemon.before) if is_possible else (daemon.before, daemon.after)
    assert services.leader is now
    with pytest.raises(ConnectionAbortedError, match=f"UNAVAILABLE: the {now.config.role} node is draining"):
        await now._life_or_end(a_call(), is_new_work=True)
    assert not now._draining.is_for(DrainReason.SWITCH) and not former._draining.is_on
    assert (await now.Undrain(pb.UndrainRequest(), a_call())).was_draining
    assert await now._life_or_end(a_call(), is_new_work=True) is now._life


async def test_an_undrain_while_ranks_change_is_of_the_node_too(tmp_path: Path) -> None:
    daemon = Takeover(tmp_path)
    assert daemon.before._life is not None
    daemon.before._draining.begin()
    daemon.before._life.requests.num_running = 0
    asked = asyncio.ensure_future(switch(daemon.before))
    await until(lambda: daemon.num_switches)
    assert (await daemon.after.Undrain(pb.UndrainRequest(), a_call())).was_draining
    daemon.gate.set()
    assert (await asked).role == "decode" and not daemon.after._draining.is_on and not daemon.before._draining.is_on


async def test_a_caller_that_goes_away_while_requests_are_in_flight_changes_nothing(
    changing: Leader[PrefillNodeConfig, Life],
) -> None:
    assert changing._life is not None
    changing._life.requests.num_running = 1
    asked = asyncio.ensure_future(switch(changing))
    await until(lambda: changing._draining.is_on)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    changing._life.requests.num_running = 0
    assert not changing._draining.is_on and not cast(Any, changing._daemon).num_switches


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RankStartError("no room", exit_code=NO_MEMORY), "RESOURCE_EXHAUSTED: the node could not change its role, .*: no room"),
        (RankStartError("a bug", exit_code=4), "INTERNAL: the node could not change its role, and keeps the one .*: a bug"),
        (PeerUnreachable("the node has shut down"), "UNAVAILABLE: the node has shut down"),
    ],
)
async def test_a_change_that_fails_is_said_and_the_node_takes_requests_again(
    changing: Leader[PrefillNodeConfig, Life], error: TransferError, said: str
) -> None:
    cast(Any, changing._daemon).error = error
    with pytest.raises(ConnectionAbortedError, match=said):
        await switch(changing)
    assert not changing._draining.is_on and not changing._is_switching


async def test_what_cannot_be_changed_is_refused_before_the_drain(changing: Leader[PrefillNodeConfig, Life]) -> None:
    daemon = cast(Any, changing._daemon)
    with pytest.raises(ConnectionAbortedError, match="INVALID_ARGUMENT: role is 'both'; it must be one of prefill, decode"):
        await switch(changing, "both")
    daemon.can_switch = False
    with pytest.raises(ConnectionAbortedError, match=r"FAILED_PRECONDITION: engine is .*load_engine, which cannot .*switch_role"):
        await switch(changing)
    changing._life = None
    with pytest.raises(ConnectionAbortedError, match="UNAVAILABLE: the node is ready"):
        await switch(changing)
    daemon.is_stopping = True
    with pytest.raises(ConnectionAbortedError, match="FAILED_PRECONDITION: the node is being stopped"):
        await switch(changing)
    daemon.other_config = None
    with pytest.raises(ConnectionAbortedError, match="FAILED_PRECONDITION: the prefill node has no settings for the other role"):
        await switch(changing)
    assert not changing._draining.is_on and not daemon.num_switches
