"""Mutual TLS where time passes or processes can end: certificates that expire, tickets that grow old, crowds of strangers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from pathlib import Path

import grpc
import pytest

from tests.authority import Authority
from tests.registry.secure_node import CLIENT, NODE, PEER, call, opened, refusal, resumer, tls_of
from transfer.errors import PeerUnreachable
from transfer.registry import security
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import MutualTls

SOON_DAYS = 5 / 86_400
"""So long that a busy machine loads the files meanwhile."""


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def expired(tls: MutualTls) -> None:
    while tls.files.current().not_after_s > time.time() - 1:
        await asyncio.sleep(0.1)


async def test_a_caller_whose_certificate_has_expired_meanwhile(authority: Authority, tmp_path: Path) -> None:
    tls = tls_of(authority.files(tmp_path / "caller", PEER, days=SOON_DAYS), peers=(NODE,))
    async with opened(authority, tmp_path / "node", NODE) as node:
        await expired(tls)
        channel = PeerChannel(node.address, tls)
        with pytest.raises(PeerUnreachable, match=r"does not accept this side's certificate .* expired"):
            await channel.ready()
        await channel.close()


async def test_a_node_whose_certificate_has_expired_meanwhile(authority: Authority, tmp_path: Path) -> None:
    async with opened(authority, tmp_path / "node", NODE, days=SOON_DAYS) as node:
        await expired(tls_of(node.files, peers=(PEER,)))
        text = await refusal(node, authority.files(tmp_path / "caller", PEER))
    assert text == "its certificate is refused: certificate has expired (tls.ca_file)"


async def test_handshakes_without_a_pause_keep_a_ticket_good_for_seconds_at_most(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "MAX_AGE_S", 1.0)
    async with opened(authority, tmp_path / "node", NODE) as node:
        connect = resumer(node, authority.files(tmp_path / "caller", CLIENT), "TLSv1_3")
        _, ticket = await asyncio.to_thread(connect, None)
        is_resumed = True
        async with asyncio.timeout(60):
            while is_resumed:
                await asyncio.to_thread(connect, None)
                is_resumed, _ = await asyncio.to_thread(connect, ticket)


async def test_strangers_who_connect_and_leave_at_once_do_not_end_the_process(authority: Authority, tmp_path: Path) -> None:
    """Hundreds of connections without a certificate, opened and closed together: gRPC freed TLS contexts that it still used."""
    files = authority.files(tmp_path / "node", NODE)
    command = [sys.executable, "-m", "tests.cluster.links.tls_node", str(files.cert), str(files.key), str(files.ca)]
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        address = (await asyncio.wait_for(child.stdout.readline(), 60)).decode().strip()
        host, port = address.split(":")
        for _ in range(5):
            crowd = [socket.socket() for _ in range(600)]
            for one in crowd:
                one.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    one.connect((host, int(port)))
            await asyncio.sleep(0.5)
            for one in crowd:
                one.close()
        async with asyncio.timeout(60):
            channel = PeerChannel(address, tls_of(authority.files(tmp_path / "caller", PEER), peers=(NODE,)))
            code, _ = await call(await channel.ready(), "/grpc.health.v1.Health/Check")
            await channel.close()
            assert code is grpc.StatusCode.OK
            child.stdin.close()
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
