"""A node asks its peers how they are, over real gRPC: at a bounded rate, for a bounded time, and whatever they answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from node_runtime import peer_look_client
from node_runtime.peer_look_client import MAX_STATUS_BYTES, MAX_STATUS_PARTS, PeerLook
from tests.authority import Authority
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.certificates import CertificateFiles
from transfer.registry.security import MutualTls, PlainText, Security
from transfer.registry.server import serve


class Peer(pb_grpc.NodeControlServicer):
    def __init__(self, status: pb.NodeStatus | None = None, *, is_frozen: bool = False) -> None:
        self.status = status or pb.NodeStatus(role="prefill", state="ready")
        self.is_frozen = is_frozen
        self.num_asked = 0

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.NodeStatus:
        self.num_asked += 1
        if self.is_frozen:
            await asyncio.sleep(3600)
        return self.status


@asynccontextmanager
async def serving(peer: Peer | None, security: Security | None = None) -> AsyncIterator[str]:
    server = await serve("127.0.0.1", 0, node_control=peer, security=security)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.close(grace_s=0)


@pytest.fixture
async def look() -> AsyncIterator[PeerLook]:
    one = PeerLook(PlainText())
    yield one
    await one.close()


async def test_peers_are_asked_once_in_a_while_however_many_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_look_client, "LOOK_S", 3600.0)
    look, peer = PeerLook(PlainText()), Peer()
    async with serving(peer) as address:
        for _ in range(200):
            found = await look.look([address])
            assert found[address].status == peer.status and found[address].error == ""
        assert peer.num_asked == 1
    await look.close()


@pytest.mark.parametrize("answer_s", [3600.0, 0.2])
async def test_a_frozen_peer_is_waited_for_a_second_and_then_known_for_frozen(
    look: PeerLook, monkeypatch: pytest.MonkeyPatch, answer_s: float
) -> None:
    monkeypatch.setattr(peer_look_client, "ANSWER_S", answer_s)
    monkeypatch.setattr(peer_look_client, "IDLE_S", 3600.0)  # which ends a look, too
    async with serving(Peer(is_frozen=True)) as slow, serving(well := Peer()) as quick, asyncio.timeout(40):
        found = await look.look([slow, quick])
        if answer_s > 60.0:
            assert found == {}
        else:
            while slow not in found:
                found = await look.look([slow, quick])
            assert found[slow].status is None and "Deadline" in found[slow].error
            assert quick not in found or found[quick].error or found[quick].status == well.status


async def test_a_peer_without_a_valid_status_is_shown_with_the_reason(look: PeerLook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_look_client, "FIRST_WAIT_S", 10.0)
    endless = Peer(pb.NodeStatus(role="prefill", not_ready_reason="x" * (MAX_STATUS_BYTES + 1)))
    many = Peer(pb.NodeStatus(role="prefill", ranks=[pb.RankStatus()] * (MAX_STATUS_PARTS + 1)))
    async with serving(None) as old, serving(endless) as hostile, serving(many) as swelling:
        found = await look.look([old, hostile, swelling, "127.0.0.1:1"])
    assert found[swelling].status is None and "8,193 parts" in found[swelling].error
    assert found[old].status is None and "it does not serve NodeControl" in found[old].error
    assert found[hostile].status is None and "262,144" in found[hostile].error
    assert found["127.0.0.1:1"].status is None and found["127.0.0.1:1"].error


async def test_with_TLS_a_peer_may_ask_and_a_stranger_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_look_client, "FIRST_WAIT_S", 10.0)
    authority = Authority()
    names = ("prefill.example", "decode.example", "other.example")
    files = {name: authority.files(tmp_path / name, name, "localhost") for name in names}

    def security(name: str, *, is_server: bool) -> MutualTls:
        return MutualTls(
            files=CertificateFiles(files[name].tls(), is_server=is_server),
            peer_names=("decode.example",) if is_server else ("prefill.example",),
        )

    peer = Peer()
    async with serving(peer, security("prefill.example", is_server=True)) as address:
        for name, is_let_in in (("decode.example", True), ("other.example", False)):
            look = PeerLook(security(name, is_server=False))
            seen = (await look.look([address]))[address]
            await look.close()
            assert (seen.status is not None) is is_let_in, seen
            assert is_let_in or "may not call" in seen.error
