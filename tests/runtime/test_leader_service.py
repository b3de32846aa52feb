"""What both roles' leaders do alike: whom an abort means, how long a drain is waited for, what is refused meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from node_runtime import leader_service
from node_runtime.daemon import Daemon, NodeState
from node_runtime.health import Readiness
from node_runtime.leader_service import Leader
from node_runtime.rank_report import RankMemory
from tests.authority import Authority
from tests.runtime import rank_entries
from tests.runtime.instances import instance, prefill_config, until
from transfer.config import PrefillNodeConfig
from transfer.errors import TransferError
from transfer.instance import Instance
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.security import MutualTls


@dataclass
class Requests:
    request_ids: tuple[str, ...] = ("a.0123", "a.4567", "ab.0123")
    num_queued: int = 1
    num_running: int = 2
    aborted: list[tuple[str, str]] = field(default_factory=list)

    def abort(self, request_id: str, error: TransferError) -> bool:
        self.aborted.append((request_id, str(error)))
        return request_id != "a.0123"  # that one is over for its caller


@dataclass
class Life:
    instance: Instance = field(default_factory=lambda: instance(3))
    requests: Requests = field(default_factory=Requests)
    memory: tuple[RankMemory, ...] = (RankMemory(),)


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


def leader_of(daemon: SimpleNamespace, config: PrefillNodeConfig) -> Leader[PrefillNodeConfig, Life]:
    return Leader(
        cast(Daemon, daemon),
        config,
        entry=rank_entries.obedient,
        codec=rank_entries.CODEC,
        on_rank_message=lambda rank, message: None,
    )


@pytest.fixture
def leader(tmp_path: Path) -> Leader[PrefillNodeConfig, Life]:
    asked = SimpleNamespace(state=NodeState.STARTING, started_s=0.0, num_restarts=4, ready=Readiness(is_ready=True))
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
    leader._draining.set()
    assert await leader._life_or_end(a_call(), is_new_work=False) is leader._life
    with pytest.raises(ConnectionAbortedError, match="UNAVAILABLE: the prefill node is draining"):
        await leader._life_or_end(a_call(), is_new_work=True)
    leader._life = None
    with pytest.raises(ConnectionAbortedError, match="UNAVAILABLE: the prefill node is starting"):
        await leader._life_or_end(a_call(), is_new_work=False)


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


async def test_new_certificates_are_looked_at_while_nobody_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_service, "CERTIFICATE_LOOK_S", 0.05)
    authority = Authority()
    files = authority.files(tmp_path / "tls", "node.example")
    tls = files.tls(peer_names=("peer.example",))
    one = leader_of(SimpleNamespace(state=NodeState.STARTING, num_restarts=0), prefill_config(tmp_path, tls=tls.model_dump()))
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
    one = leader_of(SimpleNamespace(state=NodeState.STARTING, num_restarts=0), prefill_config(tmp_path, tls=tls.model_dump()))
    with capture_logs() as lines:
        await one._listen()
        try:
            await until(lambda: lines)
            await asyncio.sleep(0.3)
        finally:
            await one.close()
    assert [(line["event"], line["names"]) for line in lines] == [("certificate_expired", "node.example")], "once a minute"
