"""Ranks of an engine that spans hosts meet their leader over gRPC, and then exchange messages over TCP with keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import transfer
from node_runtime.rank_link import RankCodec, RankLink
from node_runtime.rank_port_service import RankPort, meet_leader, security_among_hosts
from tests.authority import Authority
from tests.runtime.instances import until
from transfer.config import ServerConfig
from transfer.control import session_channel
from transfer.errors import ConfigError, PeerUnreachable
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import PlainText, Security


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    number: int


CODEC = RankCodec(Note)
PLAIN = PlainText(insecure=1)


@dataclass(slots=True, kw_only=True)
class Leader:
    port: RankPort
    address: str
    heard: list[tuple[int, Any]]
    misfits: list[str]
    there: set[int]

    async def meet(self, rank: int, *, instance: str = "i", security: Security = PLAIN) -> RankLink:
        return await meet_leader(self.address, security=security, instance=instance, rank=rank, codec=CODEC)


@asynccontextmanager
async def leader(*, security: Security = PLAIN, num_ranks: int = 2) -> AsyncIterator[Leader]:
    misfits: list[str] = []
    there: set[int] = set()
    port = RankPort(
        instance="i",
        num_ranks=num_ranks,
        codec=CODEC,
        server=ServerConfig(),
        why_not=lambda rank: f"rank {rank} is there already" if rank in there else "",
        on_misfit=misfits.append,
    )
    heard: list[tuple[int, Any]] = []
    port.link.watch(asyncio.get_running_loop(), lambda rank, message: heard.append((rank, message)))
    bound = await port.open(0, security)
    try:
        yield Leader(port=port, address=f"127.0.0.1:{bound}", heard=heard, misfits=misfits, there=there)
    finally:
        await port.close()


@pytest.fixture(params=["the leader's host", "another host"])
def _place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "another host":
        monkeypatch.setattr(session_channel, "is_own_address", lambda address: False)


@pytest.mark.usefixtures("_place")
async def test_ranks_meet_their_leader_and_talk() -> None:
    async with leader() as here:
        ranks = [await here.meet(rank) for rank in range(2)]
        told: list[list[Any]] = [[], []]
        for rank, link in enumerate(ranks):
            link.watch(asyncio.get_running_loop(), told[rank].append)
            link.send(Note(number=rank))
        await until(lambda: len(here.heard) == 2)
        assert sorted((rank, note.number) for rank, note in here.heard) == [(0, 0), (1, 1)]
        for number in range(20):
            assert here.port.link.broadcast(Note(number=number))
        await until(lambda: all(len(messages) == 20 for messages in told))
        assert all([message.number for message in messages] == list(range(20)) for messages in told)
        here.port.link.bypass_socket(0)
        note = Note(number=99)
        assert here.port.link.send(0, note)
        await until(lambda: len(told[0]) == 21)
        assert told[0][-1] is note, "both ends are in one process"
        for link in ranks:
            link.close()


async def test_a_rank_that_comes_again_has_a_new_session_until_it_is_ready() -> None:
    async with leader() as here:
        lost = await here.meet(1)
        link = await here.meet(1)
        told: list[Any] = []
        link.watch(asyncio.get_running_loop(), told.append)
        lost.send(Note(number=1))
        link.send(Note(number=2))
        await until(lambda: bool(here.heard))
        assert here.port.link.send(1, Note(number=3))
        await until(lambda: bool(told))
        assert here.heard == [(1, Note(number=2))], "the earlier session is over"
        here.there.add(1)
        with pytest.raises(PeerUnreachable, match="rank 1 is there already"):
            await here.meet(1)
        lost.close()
        link.close()


async def test_another_engine_or_build_is_refused() -> None:
    async with leader() as here:
        with pytest.raises(PeerUnreachable, match="instance 'old' is not here"):
            await here.meet(0, instance="old")
        with pytest.raises(ConfigError, match="rank is 2; the engine has 2"):
            await here.meet(2)
        with pytest.raises(ConfigError, match="instance has 300 characters"):
            await here.meet(0, instance="x" * 300)
        assert not here.misfits
        version = transfer.__version__
        request = pb.MeetRequest(version="0.0.1", instance="i", rank=1, control_key=bytes(32))
        channel = PeerChannel(here.address, PLAIN)
        stub = pb_grpc.RankControlStub(await channel.ready())
        for key, change, problem in (
            ("version", "0.0.1", f"version of rank 1 is '0.0.1', and {version} of its leader"),
            ("control_key", bytes(5), "control_key has 5 bytes; it must have 32"),
        ):
            request.version = version
            setattr(request, key, change)
            with pytest.raises(Exception, match=problem):
                await stub.Meet(request)
        await channel.close()
        [misfit] = here.misfits
        assert misfit.endswith("of its leader: install one version of kvferry on all hosts of the engine")


@pytest.fixture
def security(tmp_path: Path) -> Callable[..., Security]:
    authority = Authority()

    def made(*names: str, hosts: tuple[str, ...] = ("prefill.example",)) -> Security:
        files = authority.files(tmp_path / names[0], *names)
        return security_among_hosts(files.security("decode.example"), hosts)

    return made


async def test_with_tls_only_hosts_of_the_engine_meet(security: Callable[..., Security]) -> None:
    """A decode node has a valid certificate, too, and its name is in `tls.peer_names`. It is no rank of the engine."""
    async with leader(security=security("prefill.example")) as here:
        with pytest.raises(ConfigError, match=r"decode\.example may not call RankControl/Meet"):
            await here.meet(0, security=security("decode.example"))
        with pytest.raises(PeerUnreachable, match=r"prefill\.example answers there, which is not in"):
            await here.meet(0, security=security("prefill.example", hosts=("other.example",)))
        link = await here.meet(0, security=security("prefill.example"))
        link.watch(asyncio.get_running_loop(), lambda message: None)
        link.send(Note(number=1))
        await until(lambda: here.heard == [(0, Note(number=1))])
        link.close()


async def test_a_missing_leader_is_reported_by_name() -> None:
    async with leader() as here:
        pass
    with pytest.raises(PeerUnreachable):
        await here.meet(0)
