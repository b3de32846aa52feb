"""Prefill nodes in a real etcd: registered, seen, gone with their lease; etcd restarted, away, or with authentication and TLS."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.authority import Authority
from tests.cluster.links.etcd_server import EtcdServer, etcd_server
from tests.runtime.instances import until
from transfer.config import DiscoveryConfig
from transfer.registry.discovery import Discovery
from transfer.registry.discovery.etcd import EtcdMembers, EtcdNodes, Registration
from transfer.registry.discovery.etcd_client import EtcdClient
from transfer.registry.security import PlainText

LEASE_S = 2  # the least that etcd grants with the election time-out of these servers


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One that most tests use, each under a prefix of its own."""
    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        asyncio.run(server.start())
        yield server


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"tests/{request.node.name}/"


def settings(*servers: EtcdServer, prefix: str, **others: Any) -> DiscoveryConfig:
    return DiscoveryConfig(
        kind="etcd",
        etcd_endpoints=tuple(server.endpoint for server in servers),
        etcd_prefix=prefix,
        lease_s=others.pop("lease_s", LEASE_S),
        **others,
    )


@asynccontextmanager
async def found(config: DiscoveryConfig) -> AsyncIterator[Discovery]:
    discovery = Discovery(EtcdNodes(config, EtcdMembers(config)), security=PlainText())
    discovery.start()
    try:
        yield discovery
    finally:
        await discovery.close()


class Frozen(EtcdClient):
    """As of a node that is killed once it has registered: it neither renews nor revokes its lease."""

    async def renew(self, lease: int) -> bool:
        return await asyncio.Event().wait()

    async def revoke(self, lease: int, *, timeout_s: float) -> None:
        await asyncio.Event().wait()


@asynccontextmanager
async def registered(
    config: DiscoveryConfig, *addresses: str, client: type[EtcdClient] = EtcdClient
) -> AsyncIterator[list[Registration]]:
    nodes = [Registration(config, EtcdMembers(config, client)) for _ in addresses]
    for node, address in zip(nodes, addresses, strict=True):
        node.start(address)
        node.want(True)
    try:
        yield nodes
    finally:
        for node in nodes:
            await node.close()


async def test_nodes_are_seen_as_they_come_and_go(shared: EtcdServer, prefix: str) -> None:
    config = settings(shared, prefix=prefix)
    async with found(config) as discovery:
        await until(lambda: discovery.view.age_s is not None)
        assert discovery.addresses == () and "no prefill node is named there" in str(discovery.view)
        told: list[tuple[str, ...]] = []
        discovery.listen(told.append)
        async with registered(config, "127.0.0.1:7001", "127.0.0.1:7002") as (first, _):
            await until(lambda: len(discovery.addresses) == 2)
            assert discovery.addresses == ("127.0.0.1:7001", "127.0.0.1:7002") and not discovery.view.problem
            assert first.view.addresses == ("127.0.0.1:7001",) and not first.view.problem
            assert first.interval_s == pytest.approx(LEASE_S / 3) and (first.view.age_s or 0) > 0
            first.want(False)
            await until(lambda: discovery.addresses == ("127.0.0.1:7002",))
            await until(lambda: first.interval_s == 0 and first.view.age_s == 0)  # nothing that could grow old
            first.want(True)
            await until(lambda: len(discovery.addresses) == 2)
            await asyncio.sleep(1.5 * LEASE_S)
            assert len(discovery.addresses) == 2, "renewals keep the leases"
        await until(lambda: discovery.addresses == (), within_s=1)  # revoked, not run out
        assert told[0] == told[-1] == ()


async def test_a_node_that_is_killed_is_gone_with_its_lease(shared: EtcdServer, prefix: str) -> None:
    config = settings(shared, prefix=prefix)
    async with (
        found(config) as discovery,
        registered(config, "127.0.0.1:7001", client=Frozen),
        registered(config, "127.0.0.1:7002"),
    ):
        await until(lambda: len(discovery.addresses) == 2)
        await until(lambda: discovery.addresses == ("127.0.0.1:7002",), within_s=30)


async def test_a_lost_lease_is_replaced(shared: EtcdServer, prefix: str) -> None:
    config = settings(shared, prefix=prefix)
    async with found(config) as discovery, registered(config, "127.0.0.1:7001") as (node,):
        await until(lambda: discovery.addresses)
        await until(lambda: node.lease is not None)  # others can hear of its key before it does itself
        lease = node.lease
        assert lease is not None
        client = EtcdClient(shared.endpoint, config)
        with capture_logs() as lines:
            told: list[tuple[str, ...]] = []
            discovery.listen(told.append)
            await client.revoke(lease, timeout_s=5)
            await until(lambda: told[-1:] == [("127.0.0.1:7001",)] and () in told, within_s=2 * LEASE_S)
            await until(lambda: node.lease not in (None, lease))
            await until(lambda: any(line["event"] == "registered" for line in lines))
        await client.close()
        assert [line["event"] for line in lines if line["event"].startswith(("registration", "registered"))] == [
            "registration_lost",
            "registered",
        ]


async def test_a_deleted_entry_is_put_again_with_its_lease(shared: EtcdServer, prefix: str) -> None:
    config = settings(shared, prefix=prefix)
    client = EtcdClient(shared.endpoint, config)
    async with found(config) as discovery:
        with capture_logs() as lines:
            async with registered(config, "127.0.0.1:7001") as (node,):
                await until(lambda: discovery.addresses)
                await until(lambda: node.lease is not None)  # others can hear of its key before it does itself
                lease = node.lease
                other, _ = await client.grant(60)
                await client.put(node.key, b"another one's", lease=other)
                told: list[tuple[str, ...]] = []
                discovery.listen(told.append)
                await client.revoke(other, timeout_s=5)  # which takes the key along
                await until(lambda: told[-1:] == [("127.0.0.1:7001",)] and () in told, within_s=2 * LEASE_S)
                assert node.lease == lease and node.view.addresses == ("127.0.0.1:7001",)
            await until(lambda: not discovery.addresses, within_s=1)  # it went with the lease again
    await client.close()
    told = [line["event"] for line in lines if line["event"].startswith(("registered", "registration"))]
    assert told == ["registered", "registration_deleted"]


async def test_invalid_entries_are_refused_counted_and_named_once(shared: EtcdServer, prefix: str) -> None:
    config = settings(shared, prefix=prefix)
    client = EtcdClient(shared.endpoint, config)
    lease, _ = await client.grant(60)
    with capture_logs() as lines:
        async with found(config) as discovery:
            for key, value in (
                ("a", b'{"address": "127.0.0.1:7001"}'),
                ("b", b"\xff\x00 not JSON"),
                ("c", b'{"address": "no port"}'),
                ("d", b'{"address": "10.1.2.3:7001"}'),
                ("e", b'{"address": "127.0.0.1:7001", "version": "9"}'),
                ("f", b"[" * 1000),
                ("g", b'{"address": 7}'),
            ):
                await client.put(prefix + key, value, lease=lease)
            await until(lambda: discovery.view.refused["malformed"] == 4)
            assert discovery.addresses == ("127.0.0.1:7001",)
            assert discovery.view.refused == {"malformed": 4, "too_many": 0, "plain_text": 1}
            await client.put(prefix + "h", b'{"address": "127.0.0.1:7002"}', lease=lease)
            await until(lambda: len(discovery.addresses) == 2)
            assert discovery.view.refused["malformed"] == 4, "each once"
    await client.revoke(lease, timeout_s=5)
    await client.close()
    said = [line["reason"] for line in lines if line["event"] == "discovered_entry_refused"]
    assert len(said) == 5 and any(f"{prefix}b = " in reason for reason in said)
    assert any("10.1.2.3:7001, which is not a loopback address" in reason for reason in said)


async def test_etcd_away_at_the_start_and_later_and_restarted(tmp_path: Path, prefix: str) -> None:
    with etcd_server(tmp_path) as server, capture_logs() as lines:
        config = settings(server, prefix=prefix, lease_s=9)  # as long as etcd is away, and a pause until the next try
        async with found(config) as discovery, registered(config, "127.0.0.1:7001", "127.0.0.1:7002") as nodes:
            await until(lambda: discovery.view.problem and nodes[0].view.problem, within_s=10)
            assert f"etcd {server.endpoint}" in str(discovery.view) and discovery.view.age_s is None
            await server.start()
            await until(lambda: len(discovery.addresses) == 2, within_s=15)
            assert not discovery.view.problem and discovery.view.failures >= 1
            await until(lambda: None not in [node.lease for node in nodes])
            leases = [node.lease for node in nodes]

            server.kill()
            await until(lambda: discovery.view.problem and nodes[0].view.problem, within_s=10)
            assert len(discovery.addresses) == 2, "what it had stays"
            assert (discovery.view.age_s or 0) > 0
            await server.start()
            await until(lambda: not discovery.view.problem and not nodes[0].view.problem, within_s=15)
            assert len(discovery.addresses) == 2 and [node.lease for node in nodes] == leases, "the same leases go on"

            server.kill(forgets=True)
            await server.start()
            await until(lambda: [node.lease for node in nodes] != leases and None not in [node.lease for node in nodes], 15)
            await until(lambda: len(discovery.addresses) == 2 and not discovery.view.problem, within_s=15)
    events = [line["event"] for line in lines]
    assert events.count("discovery_failed") == events.count("discovery_recovered") <= 3, "once for each time that it is away"


async def test_the_next_member_is_asked_when_one_is_away(shared: EtcdServer, tmp_path: Path, prefix: str) -> None:
    with etcd_server(tmp_path) as away, capture_logs() as lines:
        config = settings(away, shared, prefix=prefix)
        async with found(config) as discovery, registered(config, "127.0.0.1:7001"):
            await until(lambda: discovery.addresses, within_s=10)
            assert not discovery.view.problem and not discovery.view.failures
    assert not [line for line in lines if "failed" in line["event"]]


async def test_authentication_and_tls(tmp_path: Path, prefix: str) -> None:
    authority = Authority()
    files = authority.files(tmp_path / "etcd", "127.0.0.1")
    password = tmp_path / "password"
    password.write_text("right\n")
    flags = ("--cert-file", str(files.cert), "--key-file", str(files.key))
    with etcd_server(tmp_path / "server", scheme="https", flags=flags) as server:
        await server.start()
        for command in ("user add root:root", "user add kvferry:right", "role add nodes",
                        f"role grant-permission nodes readwrite {prefix} --prefix", "user grant-role kvferry nodes",
                        "auth enable"):  # fmt: skip
            etcdctl(server, files.ca, *command.split())
        tls = {"etcd_ca_file": files.ca}
        async with found(settings(server, prefix=prefix)) as stranger:  # does not know the authority
            await until(lambda: stranger.view.problem, within_s=10)
            assert "UNAVAILABLE" in stranger.view.problem
        async with found(settings(server, prefix=prefix, **tls)) as nobody:
            await until(lambda: nobody.view.problem, within_s=10)
            assert "user name is empty" in nobody.view.problem
        config = settings(server, prefix=prefix, etcd_user="kvferry", etcd_password_file=password, **tls)
        password.write_text("wrong\n")
        async with found(config) as refused, registered(config, "127.0.0.1:7001") as (node,):
            await until(lambda: refused.view.problem and node.view.problem, within_s=10)
            assert "invalid user ID or password" in refused.view.problem
            password.write_text("right\n")
            await until(lambda: refused.addresses == ("127.0.0.1:7001",), within_s=15)
        elsewhere = settings(server, prefix="others/", etcd_user="kvferry", etcd_password_file=password, **tls)
        async with found(elsewhere) as forbidden, registered(elsewhere, "127.0.0.1:7001") as (node,):
            await until(lambda: forbidden.view.problem and node.view.problem, within_s=10)
            assert "permission denied" in forbidden.view.problem and "permission denied" in node.view.problem


def etcdctl(server: EtcdServer, ca: Path, *arguments: str) -> None:
    """Steer the server as its operator does."""
    tool = shutil.which("etcdctl")
    if tool is None:
        pytest.skip("no etcdctl on the PATH; Debian and Ubuntu have it in the package etcd-client")
    subprocess.run(
        [tool, "--endpoints", server.endpoint, "--cacert", str(ca), *arguments],
        env={"ETCDCTL_API": "3", "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
        timeout=30,
    )


async def test_an_etcd_that_is_frozen_is_noticed(tmp_path: Path, prefix: str) -> None:
    with etcd_server(tmp_path) as server:
        await server.start()
        config = settings(server, prefix=prefix, interval_s=0.5)
        async with found(config) as discovery, registered(config, "127.0.0.1:7001"):
            await until(lambda: discovery.addresses, within_s=10)
            server.signal(signal.SIGSTOP)
            await until(lambda: discovery.view.problem, within_s=40)
            assert discovery.addresses
            server.signal(signal.SIGCONT)
            await until(lambda: not discovery.view.problem and discovery.addresses, within_s=40)
