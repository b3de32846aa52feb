"""Mutual TLS over real sockets: who is let in, who is not and what they hear, and what a change of the files does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from tests.authority import Authority, Files
from transfer.config import TlsConfig
from transfer.errors import ConfigError, PeerUnreachable
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry import renewal
from transfer.registry.certificates import CertificateFiles
from transfer.registry.client import open_channel
from transfer.registry.greeting import greet
from transfer.registry.guard import Refusal
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.renewal import SETTLE_S
from transfer.registry.roles import METHOD_ROLES, CallerRole
from transfer.registry.security import MutualTls, PlainText
from transfer.registry.server import RegistryServer, serve

DENIED, UNAVAILABLE, OK = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK
NODE, PEER, CLIENT = "node.example", "peer.example", "client.example"
SPIFFE = "spiffe://cluster.example/node"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def stranger() -> Authority:
    return Authority()


def tls_of(files: Files, *, peers: tuple[str, ...], clients: tuple[str, ...] = ()) -> MutualTls:
    return MutualTls(files=CertificateFiles(files.tls(), is_server=True), peer_names=peers, client_names=clients)


class Everything(
    pb_grpc.NodeControlServicer,
    pb_grpc.PrefillControlServicer,
    pb_grpc.DecodeControlServicer,
    pb_grpc.TransferControlServicer,
):
    """Every method of every service of ours, each of which writes down that it was reached; streams go on until they are left."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def Join(self, request: Any, context: Any) -> AsyncIterator[pb.JoinEvent]:
        self.reached.append("Join")
        while True:
            yield pb.JoinEvent(beat=pb.Beat())
            await asyncio.sleep(0.02)

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[pb.PrefillEvent]:
        self.reached.append("Prefill")
        yield pb.PrefillEvent()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        self.reached.append("Generate")
        yield pb.GenerateEvent()

    async def Reserve(self, request: Any, context: Any) -> pb.ReserveResponse:
        self.reached.append("Reserve")
        return pb.ReserveResponse()

    async def Abort(self, request: Any, context: Any) -> pb.AbortResponse:
        self.reached.append("Abort")
        return pb.AbortResponse()

    async def Status(self, request: Any, context: Any) -> pb.NodeStatus:
        self.reached.append("Status")
        return pb.NodeStatus()

    async def Drain(self, request: Any, context: Any) -> pb.DrainResponse:
        self.reached.append("Drain")
        return pb.DrainResponse()

    async def Undrain(self, request: Any, context: Any) -> pb.UndrainResponse:
        self.reached.append("Undrain")
        return pb.UndrainResponse()

    async def SetLogLevel(self, request: Any, context: Any) -> pb.SetLogLevelResponse:
        self.reached.append("SetLogLevel")
        return pb.SetLogLevelResponse()

    async def SwitchRole(self, request: Any, context: Any) -> pb.SwitchRoleResponse:
        self.reached.append("SwitchRole")
        return pb.SwitchRoleResponse()

    async def ListRequests(self, request: Any, context: Any) -> pb.ListRequestsResponse:
        self.reached.append("ListRequests")
        return pb.ListRequestsResponse()

    async def Attach(self, request: Any, context: Any) -> pb.AttachResponse:
        self.reached.append("Attach")
        return pb.AttachResponse()

    async def Watermarks(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.reached.append("Watermarks")
        await context.write(pb.WatermarkAck())


class Node:
    """A server with everything."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.services = Everything()
        self.refused: list[Refusal] = []
        self.server: RegistryServer

    @property
    def address(self) -> str:
        return self.server.address

    async def open(self, *, peers: tuple[str, ...] = (PEER,), clients: tuple[str, ...] = (CLIENT,)) -> None:
        self.server = await serve(
            "127.0.0.1",
            0,
            prefill_control=self.services,
            decode_control=self.services,
            node_control=self.services,
            transfer_control=self.services,
            security=tls_of(self.files, peers=peers, clients=clients),
            on_refused=self.refused.append,
        )


@pytest.fixture
async def node(authority: Authority, tmp_path: Path) -> AsyncIterator[Node]:
    one = Node(authority.files(tmp_path / "node", NODE, SPIFFE))
    await one.open()
    yield one
    await one.server.close()


@contextlib.asynccontextmanager
async def calling(node: Node, files: Files, *, names: tuple[str, ...] = (NODE,)) -> AsyncIterator[PeerChannel]:
    channel = PeerChannel(node.address, tls_of(files, peers=names))
    try:
        yield channel
    finally:
        await channel.close()


async def call(channel: grpc.aio.Channel, method: str) -> tuple[grpc.StatusCode, str]:
    """One call of any method, with an empty message; its status and text. A stream that answers is good."""
    service, name = method.removeprefix("/").split("/")
    stub: Any = {
        "kvferry.v1.NodeControl": pb_grpc.NodeControlStub,
        "kvferry.v1.PrefillControl": pb_grpc.PrefillControlStub,
        "kvferry.v1.DecodeControl": pb_grpc.DecodeControlStub,
        "kvferry.v1.TransferControl": pb_grpc.TransferControlStub,
        "grpc.health.v1.Health": health_pb2_grpc.HealthStub,
        "grpc.reflection.v1alpha.ServerReflection": reflection_pb2_grpc.ServerReflectionStub,
    }[service](channel)
    questions: dict[str, Any] = {
        **{one: getattr(pb, f"{one}Request") for one in ("Join", "Prefill", "Generate", "Reserve", "Abort", "Status", "Drain")},
        **{one: getattr(pb, f"{one}Request") for one in ("ListRequests", "Undrain", "SetLogLevel", "SwitchRole")},
        **{"Attach": pb.AttachRequest, "Watermarks": pb.WriterBeat, "Check": health_pb2.HealthCheckRequest},
        **{"Watch": health_pb2.HealthCheckRequest, "List": health_pb2.HealthListRequest},
        "ServerReflectionInfo": lambda: reflection_pb2.ServerReflectionRequest(list_services=""),
    }
    question = questions[name]()
    begun = getattr(stub, name)
    try:
        if name in ("Watermarks", "ServerReflectionInfo"):
            stream = begun(iter([question]), timeout=20)
            await stream.read()
            stream.cancel()
        elif name in ("Join", "Prefill", "Generate", "Watch"):
            stream = begun(question, timeout=20)
            await stream.read()
            stream.cancel()
        else:
            await begun(question, timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return OK, ""


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


@pytest.mark.parametrize("name", ["other.example", "peer.example.org", "spiffe://cluster.example/peer", "127.0.0.1"])
async def test_who_is_in_no_list_calls_nothing(node: Node, authority: Authority, tmp_path: Path, name: str) -> None:
    async with calling(node, authority.files(tmp_path / "caller", name, "extra.example")) as peer:
        channel = await peer.ready()
        for method in METHOD_ROLES:
            code, text = await call(channel, method)
            assert code is DENIED and "extra.example may not call" in text, text
    assert not node.services.reached and len(node.refused) == len(METHOD_ROLES)


async def test_a_method_that_nobody_has_is_unknown_and_not_refused(node: Node, authority: Authority, tmp_path: Path) -> None:
    async with calling(node, authority.files(tmp_path / "caller", "other.example")) as peer:
        begun = (await peer.ready()).unary_unary("/kvferry.v1.PrefillControl/NoSuch")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await begun(b"", timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED and not node.refused


async def test_a_method_without_roles_is_for_nobody(
    node: Node, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(METHOD_ROLES, "/kvferry.v1.DecodeControl/Status")
    async with calling(node, authority.files(tmp_path / "caller", PEER, CLIENT)) as peer:
        code, text = await call(await peer.ready(), "/kvferry.v1.DecodeControl/Status")
    assert code is DENIED and text.endswith("may not call DecodeControl/Status: it is not in any list of this node")


async def test_one_name_in_both_lists_is_both(authority: Authority, tmp_path: Path) -> None:
    one = Node(authority.files(tmp_path / "node", NODE))
    await one.open(peers=("*.ops.example",), clients=("a.ops.example",))
    try:
        async with calling(one, authority.files(tmp_path / "caller", "a.ops.example")) as peer:
            channel = await peer.ready()
            assert (await call(channel, "/kvferry.v1.DecodeControl/Status"))[0] is OK
            assert (await call(channel, "/kvferry.v1.TransferControl/Attach"))[0] is OK
    finally:
        await one.server.close()


# Strangers


async def test_without_a_certificate_nothing_is_let_in(node: Node, authority: Authority, stranger: Authority) -> None:
    cert, key = stranger.issue(PEER)
    for pair in ((None, None), (key, cert)):
        credentials = grpc.ssl_channel_credentials(authority.pem, *pair)
        options = (("grpc.ssl_target_name_override", NODE),)
        async with grpc.aio.secure_channel(node.address, credentials, options=options) as channel:
            assert (await call(channel, "/grpc.health.v1.Health/Check"))[0] is UNAVAILABLE
    async with open_channel(node.address) as channel:
        assert (await call(channel, "/grpc.health.v1.Health/Check"))[0] is UNAVAILABLE
    assert not node.services.reached


async def refusal(node: Node, files: Files, *, names: tuple[str, ...] = (NODE,)) -> str:
    async with calling(node, files, names=names) as peer:
        with pytest.raises(PeerUnreachable) as caught:
            await peer.ready()
    text = str(caught.value)
    assert text.startswith(f"{node.address}: ") and "\n" not in text
    return text.removeprefix(f"{node.address}: ")


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
async def test_a_node_that_is_somebody_else(node: Node, authority: Authority, tmp_path: Path, names: tuple[str, ...]) -> None:
    text = await refusal(node, authority.files(tmp_path / "caller", PEER), names=names)
    assert text == f"{SPIFFE}, {NODE} answers there, which is not in tls.peer_names (--peer-name) of this side"


SOON_DAYS = 5 / 86_400
"""So long that a busy machine loads the files meanwhile."""


async def expired(tls: MutualTls) -> None:
    while tls.files.current().not_after_s > time.time() - 1:
        await asyncio.sleep(0.1)


async def test_a_caller_whose_certificate_has_expired_meanwhile(node: Node, authority: Authority, tmp_path: Path) -> None:
    files = authority.files(tmp_path / "caller", PEER, days=SOON_DAYS)
    tls = tls_of(files, peers=(NODE,))
    await expired(tls)
    channel = PeerChannel(node.address, tls)
    with pytest.raises(PeerUnreachable, match=r"does not accept this side's certificate .* expired"):
        await channel.ready()
    await channel.close()


async def test_a_node_whose_certificate_has_expired_meanwhile(authority: Authority, tmp_path: Path) -> None:
    one = Node(authority.files(tmp_path / "node", NODE, days=SOON_DAYS))
    await one.open()
    await expired(tls_of(one.files, peers=(PEER,)))
    text = await refusal(one, authority.files(tmp_path / "caller", PEER))
    await one.server.close()
    assert text == "its certificate is refused: certificate has expired (tls.ca_file)"


async def test_a_node_that_speaks_plain_text(authority: Authority, tmp_path: Path) -> None:
    services = Everything()
    one = Node(authority.files(tmp_path / "node", NODE))
    one.server = await serve("127.0.0.1", 0, decode_control=services)
    text = await refusal(one, authority.files(tmp_path / "caller", PEER))
    await one.server.close()
    assert text == "what answers there does not speak TLS (a node with --insecure?)"


async def test_nobody_there(node: Node, authority: Authority, tmp_path: Path) -> None:
    await node.server.close()
    assert await refusal(node, authority.files(tmp_path / "caller", PEER)) == "Connection refused"


@pytest.mark.parametrize("host", ["a..b", f"{'x' * 70}.example", ".a"])
async def test_a_host_that_is_no_name(authority: Authority, tmp_path: Path, host: str) -> None:
    own = tls_of(authority.files(tmp_path / "own", NODE), peers=(NODE,)).files.current()
    with pytest.raises(PeerUnreachable, match="its host is no name"):
        await greet(f"{host}:7100", own, allowed=(NODE,), timeout_s=5)


async def test_somebody_who_says_nothing(authority: Authority, tmp_path: Path) -> None:
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(30), "127.0.0.1", 0)
    address = "{}:{}".format(*silent.sockets[0].getsockname())
    channel = PeerChannel(address, tls_of(authority.files(tmp_path / "caller", PEER), peers=(NODE,)))
    with pytest.raises(PeerUnreachable, match=rf"{address}: no answer within 0.3 s"):
        await channel.ready(timeout_s=0.3)
    await channel.close()
    silent.close()


def resumer(node: Node, files: Files, version: str) -> Callable[[ssl.SSLSession | None], tuple[bool, ssl.SSLSession]]:
    """Connects, with the ticket of an earlier connection if there is one: whether that was good, and the next ticket."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    host, port = node.address.split(":")

    def connect(session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession]:
        with context.wrap_socket(socket.create_connection((host, int(port)), timeout=20), session=session) as connection:
            assert connection.recv(1)  # a ticket comes with it
            ticket = connection.session
            assert ticket is not None and ticket.has_ticket
            return bool(connection.session_reused), ticket

    return connect


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
async def test_no_session_is_resumed(node: Node, authority: Authority, tmp_path: Path, version: str) -> None:
    """Or a caller could come back without being asked for a certificate, when the one that it had has expired."""
    connect = resumer(node, authority.files(tmp_path / "caller", CLIENT), version)
    _, ticket = await asyncio.to_thread(connect, None)
    await asyncio.sleep(SETTLE_S)
    is_resumed, _ = await asyncio.to_thread(connect, ticket)
    assert not is_resumed


async def test_handshakes_without_a_pause_keep_a_ticket_good_for_seconds_at_most(
    node: Node, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "MAX_AGE_S", 1.0)
    connect = resumer(node, authority.files(tmp_path / "caller", CLIENT), "TLSv1_3")
    _, ticket = await asyncio.to_thread(connect, None)
    began_s, is_resumed = time.monotonic(), True
    while is_resumed and time.monotonic() - began_s < 20:
        await asyncio.to_thread(connect, None)
        is_resumed, _ = await asyncio.to_thread(connect, ticket)
    assert not is_resumed


async def test_strangers_who_connect_and_leave_at_once_do_not_end_the_process(authority: Authority, tmp_path: Path) -> None:
    """Hundreds of connections without a certificate, opened and closed together: gRPC freed TLS contexts that it still used."""
    files = authority.files(tmp_path / "node", NODE)
    command = [sys.executable, "-m", "tests.cluster.links.tls_node", str(files.cert), str(files.key), str(files.ca)]
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
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
            assert code is OK
            child.stdin.close()
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.mark.parametrize(("version", "is_spoken"), [("TLSv1", False), ("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_versions_of_tls(node: Node, authority: Authority, tmp_path: Path, version: str, is_spoken: bool) -> None:
    files = authority.files(tmp_path / "caller", PEER)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.cert, files.key)
    context.set_ciphers("DEFAULT@SECLEVEL=0")  # else this side would not speak the old ones itself
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    host, port = node.address.split(":")
    try:
        async with asyncio.timeout(20):
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
        assert (await call(await peer.ready(), "/kvferry.v1.DecodeControl/Status"))[0] is OK


async def test_what_answers_gRPC_must_be_what_was_greeted(node: Node, authority: Authority, tmp_path: Path) -> None:
    """A URI is not among what gRPC checks, so it is to accept the very certificate: another one with the same DNS name is not."""
    tls = tls_of(authority.files(tmp_path / "caller", CLIENT), peers=(SPIFFE,))
    other = authority.files(tmp_path / "other", NODE, "spiffe://cluster.example/other")
    greeted = await greet(node.address, tls.files.current(), allowed=(SPIFFE,), timeout_s=20)
    assert greeted.authorities.strip() == node.files.cert.read_bytes().strip() and greeted.name == NODE
    node.files.put(cert=other.cert.read_bytes(), key=other.key.read_bytes())
    credentials = grpc.ssl_channel_credentials(greeted.authorities, tls.files.current().key, tls.files.current().chain)
    options = (("grpc.ssl_target_name_override", NODE),)
    async with grpc.aio.secure_channel(greeted.target, credentials, options=options) as channel:
        code, text = await call(channel, "/kvferry.v1.DecodeControl/Status")
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
            assert (await call(await channel.ready(), "/kvferry.v1.DecodeControl/Status"))[0] is OK
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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(caller.ca)
    context.load_cert_chain(caller.cert, caller.key)
    host, port = node.address.split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
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


async def test_half_of_a_rotation_changes_nothing(node: Node, authority: Authority, tmp_path: Path) -> None:
    caller = authority.files(tmp_path / "caller", CLIENT)
    before = node.files.cert.read_bytes()
    cert, key = authority.issue(NODE)
    for half in ({"key": key}, {"key": key[:50]}, {"cert": cert[:100]}, {"cert": b""}):
        node.files.put(**half)
        assert await served_certificate(node, caller) == before
        async with calling(node, caller) as peer:
            assert (await call(await peer.ready(), "/kvferry.v1.DecodeControl/Status"))[0] is OK
    node.files.put(cert=cert, key=key)
    assert await served_certificate(node, caller) == cert


async def test_a_caller_connects_again_with_its_new_certificate(node: Node, authority: Authority, tmp_path: Path) -> None:
    caller = authority.files(tmp_path / "caller", "before.example")
    async with calling(node, caller) as peer:
        assert (await call(await peer.ready(), "/kvferry.v1.DecodeControl/Status"))[0] is DENIED
        renew(caller, authority, CLIENT)
        assert (await call(await peer.ready(), "/kvferry.v1.DecodeControl/Status"))[0] is DENIED, "the connection stands"
        port = node.server.port
        await node.server.close()
        async with asyncio.timeout(20):
            while peer.current.get_state() is grpc.ChannelConnectivity.READY:  # gRPC hears of the end in its own time
                await asyncio.sleep(0.01)
        with pytest.raises(PeerUnreachable):
            await peer.ready()
        node.server = await serve(
            "127.0.0.1", port, decode_control=node.services, security=tls_of(node.files, peers=(PEER,), clients=(CLIENT,))
        )
        assert (await call(await peer.ready(), "/kvferry.v1.DecodeControl/Status"))[0] is OK


async def test_a_new_authority_in_three_steps(node: Node, authority: Authority, tmp_path: Path) -> None:
    """As the operations page tells it: trust both, renew every certificate, trust the new one alone."""
    caller, new = authority.files(tmp_path / "caller", CLIENT), Authority()

    async def is_served() -> bool:
        async with calling(node, caller) as peer:
            return (await call(await peer.ready(), "/kvferry.v1.DecodeControl/Status"))[0] is OK

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


async def test_many_calls_at_once_share_one_connection(node: Node, authority: Authority, tmp_path: Path) -> None:
    async with calling(node, authority.files(tmp_path / "caller", CLIENT)) as peer:
        channels = await asyncio.gather(*(peer.ready() for _ in range(20)))
        assert len({id(channel) for channel in channels}) == 1


async def test_a_channel_that_is_closed_while_it_connects(
    node: Node, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[grpc.aio.Channel] = []
    secure_channel = grpc.aio.secure_channel

    def make(*args: Any, **kwargs: Any) -> grpc.aio.Channel:
        made.append(secure_channel(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(grpc.aio, "secure_channel", make)
    peer = PeerChannel(node.address, tls_of(authority.files(tmp_path / "caller", CLIENT), peers=(NODE,)))
    connecting = asyncio.ensure_future(peer.ready())
    while not made:
        await asyncio.sleep(0)
    await peer.close()
    with pytest.raises(PeerUnreachable, match="this side has closed the channel"):
        await connecting
    assert made[0].get_state() is grpc.ChannelConnectivity.SHUTDOWN


# Without


async def test_plain_text_goes_to_loopback_addresses_alone() -> None:
    for address in ("10.0.0.1:1", "node.example:1"):
        with pytest.raises(ConfigError, match=f"address is {address}, which is no loopback address"):
            PeerChannel(address, PlainText())
        await PeerChannel(address, PlainText(insecure=2)).close()
    with pytest.raises(ConfigError, match=r"server address is 0\.0\.0\.0:0, which is no loopback address"):
        await serve("0.0.0.0", 0)


def test_half_of_the_settings_is_refused() -> None:
    with pytest.raises(ValueError, match="key_file is k and cert_file is missing; TLS needs cert_file, key_file and ca_file"):
        TlsConfig(key_file=Path("k"))
    with pytest.raises(ValueError, match="insecure is 1 and cert_file is c; set one of them"):
        TlsConfig(cert_file=Path("c"), key_file=Path("k"), ca_file=Path("a"), insecure=cast(Any, 1))
