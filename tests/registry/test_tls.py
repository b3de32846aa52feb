"""Mutual TLS over real sockets: which callers are accepted, which are refused and why, and the effect of changed files."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from tests.authority import Authority, Files
from tests.registry.secure_node import (
    CLIENT,
    NODE,
    PEER,
    SPIFFE,
    STATUS,
    Node,
    call,
    calling,
    client_context,
    opened,
    refusal,
    resumer,
    tls_of,
)
from transfer.config import TlsConfig
from transfer.errors import ConfigError, PeerUnreachable
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.certificates import CertificateFiles
from transfer.registry.guard import METHOD_ROLES, CallerRole, Refusal
from transfer.registry.options import CHANNEL_OPTIONS
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import SETTLE_S, MutualTls, PlainText
from transfer.registry.server import serve
from transfer.registry.tls_identity import greet

DENIED, UNAVAILABLE, OK = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK
HEALTH = "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def stranger() -> Authority:
    return Authority()


@pytest.fixture
async def node(authority: Authority, tmp_path: Path) -> AsyncIterator[Node]:
    async with opened(authority, tmp_path / "node", NODE, SPIFFE) as one:
        yield one


@pytest.mark.parametrize("role", CallerRole)
async def test_each_role_calls_what_the_table_says_and_nothing_else(
    node: Node, authority: Authority, tmp_path: Path, role: CallerRole
) -> None:
    name = PEER if role is CallerRole.PEER else CLIENT
    async with calling(node, authority.files(tmp_path / "caller", name)) as peer:
        channel = await peer.ready()
        for method, roles in METHOD_ROLES.items():
            del node.services.reached[:], node.refused[:]
            code, text = await call(channel, method)
            if role in roles:
                assert code is not DENIED, f"{method}: {text}"
                assert not node.refused
                continue
            short = method.removeprefix("/").removeprefix("kvferry.v1.")
            setting = " or ".join(one.setting for one in CallerRole if one in roles)
            line = f"{name} may not call {short}: it is not in {setting} of this node"
            assert (code, text) == (DENIED, line)
            assert node.refused == [Refusal(method=short, caller=name, reason=line)]
            assert not node.services.reached, "a refused call is acted upon"


@pytest.mark.parametrize("name", ["peer.example.org", "spiffe://cluster.example/peer"])
async def test_a_name_in_no_list_may_call_no_method(node: Node, authority: Authority, tmp_path: Path, name: str) -> None:
    async with calling(node, authority.files(tmp_path / "caller", name, "extra.example")) as peer:
        channel = await peer.ready()
        for method in METHOD_ROLES:
            code, text = await call(channel, method)
            assert code is DENIED and "extra.example may not call" in text, text
    assert not node.services.reached and len(node.refused) == len(METHOD_ROLES)


async def test_a_method_without_roles_rejects_every_caller(
    node: Node, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(METHOD_ROLES, STATUS)
    async with calling(node, authority.files(tmp_path / "caller", PEER, CLIENT)) as peer:
        code, text = await call(await peer.ready(), STATUS)
    assert code is DENIED and text.endswith("may not call DecodeControl/Status: it is not in any list of this node")


# Strangers


async def test_without_a_certificate_nothing_is_let_in(node: Node, authority: Authority, stranger: Authority) -> None:
    cert, key = stranger.issue(PEER)
    for pair in ((None, None), (key, cert)):
        credentials = grpc.ssl_channel_credentials(authority.pem, *pair)
        options = (("grpc.ssl_target_name_override", NODE),)
        async with grpc.aio.secure_channel(node.address, credentials, options=options) as channel:
            assert (await call(channel, HEALTH))[0] is UNAVAILABLE
    async with grpc.aio.insecure_channel(node.address, options=CHANNEL_OPTIONS) as channel:
        assert (await call(channel, HEALTH))[0] is UNAVAILABLE
    assert not node.services.reached


async def test_an_authority_that_the_node_does_not_know(
    node: Node, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    files = stranger.files(tmp_path / "caller", PEER)
    files.put(ca=stranger.pem + authority.pem)
    text = await refusal(node, files)
    assert text.startswith(
        "it ended the connection in the TLS handshake; a node does so that does not accept this side's certificate"
    )


async def test_an_authority_that_the_caller_does_not_know(node: Node, stranger: Authority, tmp_path: Path) -> None:
    text = await refusal(node, stranger.files(tmp_path / "caller", PEER))
    assert text == "its certificate is refused: unable to get local issuer certificate (tls.ca_file)"


@pytest.mark.parametrize("names", [("other.example",), ("*.example.org", "spiffe://cluster.example/other")])
async def test_a_node_with_another_name_is_not_called(
    node: Node, authority: Authority, tmp_path: Path, names: tuple[str, ...]
) -> None:
    text = await refusal(node, authority.files(tmp_path / "caller", PEER), names=names)
    assert text == f"{SPIFFE}, {NODE} answers there, which is not in tls.peer_names (--peer-name) of this side"


async def test_a_node_that_speaks_plain_text(authority: Authority, tmp_path: Path) -> None:
    one = Node(authority.files(tmp_path / "node", NODE))
    one.server = await serve("127.0.0.1", 0, decode_control=one.services)
    text = await refusal(one, authority.files(tmp_path / "caller", PEER))
    await one.server.close()
    assert text == "what answers there does not speak TLS (a node with --insecure?)"


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
async def test_no_session_is_resumed(node: Node, authority: Authority, tmp_path: Path, version: str) -> None:
    """Or a caller could come back without being asked for a certificate, when the one that it had has expired."""
    connect = resumer(node, authority.files(tmp_path / "caller", CLIENT), version)
    _, ticket = await asyncio.to_thread(connect, None)
    await asyncio.sleep(SETTLE_S)
    is_resumed, _ = await asyncio.to_thread(connect, ticket)
    assert not is_resumed


@pytest.mark.parametrize(("version", "is_spoken"), [("TLSv1", False), ("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_versions_of_tls(node: Node, authority: Authority, tmp_path: Path, version: str, is_spoken: bool) -> None:
    context = client_context(authority.files(tmp_path / "caller", PEER))
    context.set_ciphers("DEFAULT@SECLEVEL=0")  # else this side would not speak the old ones itself
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    host, port = node.address.split(":")
    try:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            spoke = await reader.read(1)
            writer.transport.abort()
    except (ssl.SSLError, ConnectionError):
        spoke = b""
    assert bool(spoke) is is_spoken


# Names


@pytest.mark.parametrize("names", [(NODE,), ("*.example",), (SPIFFE,), ("x.example", SPIFFE), ("NODE.Example",)])
async def test_a_node_is_known_by_any_of_its_names(
    node: Node, authority: Authority, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Whatever its address is: here an IP address, which its certificate does not have."""
    async with calling(node, authority.files(tmp_path / "caller", CLIENT), names=names) as peer:
        assert (await call(await peer.ready(), STATUS))[0] is OK


async def test_grpc_accepts_only_the_greeted_certificate(node: Node, authority: Authority, tmp_path: Path) -> None:
    """A URI is not among what gRPC checks, so it is to accept the very certificate: another one with the same DNS name is not."""
    tls = tls_of(authority.files(tmp_path / "caller", CLIENT), peers=(SPIFFE,))
    other = authority.files(tmp_path / "other", NODE, "spiffe://cluster.example/other")
    greeted = await greet(node.address, tls.files.current(), allowed=(SPIFFE,), timeout_s=20)
    assert greeted.authorities.strip() == node.files.cert.read_bytes().strip() and greeted.name == NODE
    node.files.put(cert=other.cert.read_bytes(), key=other.key.read_bytes())
    credentials = grpc.ssl_channel_credentials(greeted.authorities, tls.files.current().key, tls.files.current().chain)
    options = (("grpc.ssl_target_name_override", NODE),)
    async with grpc.aio.secure_channel(greeted.target, credentials, options=options) as channel:
        code, text = await call(channel, STATUS)
    assert code is UNAVAILABLE and "CERTIFICATE_VERIFY_FAILED" in text


async def test_a_command_without_names_checks_the_host(authority: Authority, tmp_path: Path) -> None:
    caller = authority.files(tmp_path / "caller", CLIENT)
    for names, host, is_good in (
        (("localhost",), "localhost", True),
        (("127.0.0.1", "x.example"), "127.0.0.1", True),
        ((NODE,), "127.0.0.1", False),
        ((NODE,), "localhost", False),
    ):
        one = Node(authority.files(tmp_path / f"node-{names[0]}-{host}", *names, *(() if is_good else ("z.example",))))
        await one.open()
        tls = MutualTls(files=CertificateFiles(caller.tls(), is_server=False), peer_names=())
        channel = PeerChannel(f"{host}:{one.server.port}", tls)
        if is_good:
            assert (await call(await channel.ready(), STATUS))[0] is OK
        else:
            with pytest.raises(PeerUnreachable, match=r"refused: (Hostname|IP address) mismatch.*'; give .* \(--peer-name\)$"):
                await channel.ready()
        await channel.close()
        await one.server.close()


# Rotation


def renew(files: Files, authority: Authority, *names: str) -> bytes:
    cert, key = authority.issue(*names)
    files.put(cert=cert)
    files.put(key=key)
    return cert


async def served_certificate(node: Node, caller: Files) -> bytes:
    """What a new connection is shown."""
    host, port = node.address.split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=client_context(caller))
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return ssl.DER_cert_to_PEM_cert(found).encode()


async def test_rotation_under_an_open_stream(node: Node, authority: Authority, tmp_path: Path) -> None:
    caller = authority.files(tmp_path / "caller", PEER)
    async with calling(node, caller) as peer:
        stub: Any = pb_grpc.PrefillControlStub(await peer.ready())
        stream = stub.Join(pb.JoinRequest())
        await stream.read()
        cert = renew(node.files, authority, NODE)
        assert await served_certificate(node, caller) == cert, "a new connection has the new certificate"
        for _ in range(5):
            assert isinstance(await stream.read(), pb.JoinEvent), "the connection that stands goes on"
        assert await peer.ready() is peer.current and node.services.reached == ["Join"]
        stream.cancel()


async def test_a_caller_connects_again_with_its_new_certificate(node: Node, authority: Authority, tmp_path: Path) -> None:
    caller = authority.files(tmp_path / "caller", "before.example")
    async with calling(node, caller) as peer:
        assert (await call(await peer.ready(), STATUS))[0] is DENIED
        renew(caller, authority, CLIENT)
        assert (await call(await peer.ready(), STATUS))[0] is DENIED, "the connection stands"
        port = node.server.port
        await node.server.close()
        async with asyncio.timeout(60):
            while peer.current.get_state() is grpc.ChannelConnectivity.READY:  # gRPC hears of the end in its own time
                await asyncio.sleep(0.01)
        with pytest.raises(PeerUnreachable):
            await peer.ready()
        await node.open(port=port)
        assert (await call(await peer.ready(), STATUS))[0] is OK


async def test_a_new_authority_in_three_steps(node: Node, authority: Authority, tmp_path: Path) -> None:
    """As the operations page tells it: trust both, renew every certificate, trust the new one alone."""
    caller, new = authority.files(tmp_path / "caller", CLIENT), Authority()

    async def is_served() -> bool:
        async with calling(node, caller) as peer:
            return (await call(await peer.ready(), STATUS))[0] is OK

    for files in (node.files, caller):
        files.put(ca=authority.pem + new.pem)
        assert await is_served()
    for files, name in ((node.files, NODE), (caller, CLIENT)):
        renew(files, new, name)
        assert await is_served()
    for files in (node.files, caller):
        files.put(ca=new.pem)
        assert await is_served()
    old = authority.files(tmp_path / "old", CLIENT)
    old.put(ca=authority.pem + new.pem)
    assert "does not accept this side's certificate" in await refusal(node, old)


# Without


async def test_plain_text_goes_to_loopback_addresses_alone() -> None:
    for address in ("10.0.0.1:1", "node.example:1"):
        with pytest.raises(ConfigError, match=f"address is {address}, which is not a loopback address"):
            PeerChannel(address, PlainText())
        await PeerChannel(address, PlainText(insecure=2)).close()
    with pytest.raises(ConfigError, match=r"server address is 0\.0\.0\.0:0, which is not a loopback address"):
        await serve("0.0.0.0", 0)


def test_half_of_the_settings_is_refused() -> None:
    with pytest.raises(ValueError, match="key_file is k and cert_file is missing; TLS needs cert_file, key_file and ca_file"):
        TlsConfig(key_file=Path("k"))
    with pytest.raises(ValueError, match="insecure is 1 and cert_file is c; set one of them"):
        TlsConfig(cert_file=Path("c"), key_file=Path("k"), ca_file=Path("a"), insecure=cast(Any, 1))
