"""Checks of nodes: of one that runs (`--node`), and of the ports that a configuration needs here (`--node-config`)."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import transfer
from kvferry.cli.node_client import NodeClient, is_refusal_of_caller
from kvferry.doctor.finding import Finding, fail, ok, warn
from transfer.config import DecodeNodeConfig, NodeConfig, PrefillNodeConfig, ServerConfig
from transfer.errors import ConfigError, TransferError
from transfer.load_config import load_config
from transfer.messages import PROTOCOL_VERSIONS
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import transport_names
from transfer.registry.security import Security

MAX_OFFSET_S: Final = 0.5
"""With a larger offset, the logs of two machines cannot be compared."""
_TRIES: Final = 5  # the fastest call gives the best estimate of the clock
_ANSWER_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLook:
    """Outcome of calls of a node.

    Args:
        status: None means that it did not answer; `error` is the reason.
        is_refused: It answered, and rejected this caller.
        round_trip_s: Time of the fastest answer.
        offset_s: Its clock minus the clock of this machine, with an error of up to half of the round trip.
        http_error: Why its HTTP port does not answer; empty if it does.
    """

    address: str
    status: pb.NodeStatus | None = None
    error: str = ""
    is_refused: bool = False
    round_trip_s: float = 0.0
    offset_s: float = 0.0
    http_error: str = ""


async def look_at_node(address: str, security: Security | None, *, timeout_s: float = _ANSWER_S) -> NodeLook:
    """Call a node a few times, each for at most `timeout_s`.

    Raises:
        ConfigError: The address is invalid, or must not be called like this.
    """
    best: tuple[float, float, pb.NodeStatus] | None = None
    async with NodeClient(address, security=security) as client:
        for _ in range(_TRIES):
            begun_s, begun_clock_s = time.monotonic(), time.time()
            try:
                status = await client.status(timeout_s=timeout_s)
            except TransferError as error:
                return NodeLook(address=address, error=str(error), is_refused=is_refusal_of_caller(error))
            round_trip_s = time.monotonic() - begun_s
            if best is None or round_trip_s < best[0]:
                best = (round_trip_s, status.time_s - (begun_clock_s + round_trip_s / 2), status)
    assert best is not None
    round_trip_s, offset_s, status = best
    http_error = await asyncio.to_thread(_http_error, address, status.http_port) if status.http_port else ""
    return NodeLook(address=address, status=status, round_trip_s=round_trip_s, offset_s=offset_s, http_error=http_error)


def _http_error(address: str, port: int) -> str:
    """Return why /healthz does not answer at the same host; empty if it does."""
    url = f"http://{address.rpartition(':')[0]}:{port}/healthz"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # nobody in between
    try:
        with opener.open(url, timeout=_ANSWER_S) as answer:
            answer.read()
    except (OSError, urllib.error.URLError, ValueError) as error:
        return f"{url}: {getattr(error, 'reason', error)}"
    return ""


def check_node(look: NodeLook, *, transports: Collection[str]) -> Iterator[Finding]:
    """Yield the findings about a node; `transports` are those of this machine."""
    name = f"node {look.address}"
    status = look.status
    if status is None:
        fix = "give a certificate that is in its tls.client_names" if look.is_refused else _fix_unreached(look.address)
        yield fail(name, look.error, fix)
        return
    text = f"{status.role} node, {status.state}, version {_version(status)}, answers within {look.round_trip_s * 1e3:,.1f} ms"
    if status.ready:
        yield ok(name, text)
    else:
        yield warn(name, f"{text}; not ready: {status.not_ready_reason}", f"kvferry status --target {look.address}")
    yield _check_clock(name, look, status)
    yield _check_protocol(name, status)
    yield _check_transport(name, status, transports)
    if not status.http_port:
        return
    if look.http_error:
        fix = f"let port {status.http_port} of it through to probes, Prometheus and browsers (docs/network.md, Ports)"
        yield warn(f"{name} http", f"{look.http_error}; its gRPC port answers", fix)
    else:
        yield ok(f"{name} http", f"port {status.http_port} answers")


def _fix_unreached(address: str) -> str:
    return f"start the node, and let {address} through; docs/tls.md, where it answers without a certificate"


def _version(status: pb.NodeStatus) -> str:
    return status.version or status.instance.version or "0.1"


def _check_clock(name: str, look: NodeLook, status: pb.NodeStatus) -> Finding:
    name = f"{name} clock"
    if not status.time_s:
        return ok(name, f"it does not tell its time (version {_version(status)})")
    error_s = look.round_trip_s / 2
    text = f"{look.offset_s * 1e3:+,.1f} ms from this machine's, give or take {error_s * 1e3:,.1f} ms"
    if abs(look.offset_s) - error_s <= MAX_OFFSET_S:
        return ok(name, text)
    return warn(name, text, "timedatectl timesync-status (or chronyc tracking) on both machines: one of them has no time server")


def _check_protocol(name: str, status: pb.NodeStatus) -> Finding:
    name = f"{name} protocol"
    theirs = set(status.instance.protocol_versions)
    if not theirs:
        return ok(name, "it does not tell yet: it has no ranks")
    common = theirs & set(PROTOCOL_VERSIONS)
    versions = f"kvferry {_version(status)} there, {transfer.__version__} here"
    if common:
        return ok(name, f"version {max(common)} in common; {versions}")
    fix = f"install a kvferry that speaks version {max(theirs)} of the protocol (docs/protocol.md)"
    return fail(name, f"no version in common: {sorted(theirs)} there, {sorted(PROTOCOL_VERSIONS)} here; {versions}", fix)


def _check_transport(name: str, status: pb.NodeStatus, transports: Collection[str]) -> Finding:
    name = f"{name} transport"
    theirs = transport_names(status.instance)
    common = [one for one in theirs if one in transports]
    if not theirs or common:
        return ok(name, f"{', '.join(common)} in common" if common else "not reported yet: the node has no ranks")
    text = f"the node has {', '.join(theirs)}, this machine has {', '.join(transports)}: a node here could not join it"
    return warn(
        name, text, f"pip install 'kvferry[{'nixl' if 'nixl' in theirs else 'cuda-ipc'}]', or another transport.name there"
    )


def server_of(file: Path, environment: Mapping[str, str] = os.environ) -> ServerConfig:
    """Return the addresses of a node's configuration, of either tier.

    Raises:
        ConfigError: It is invalid for both tiers. The message is that of the tier with fewer problems.
    """
    problems: list[str] = []
    kinds: tuple[type[NodeConfig], ...] = (PrefillNodeConfig, DecodeNodeConfig)
    for kind in kinds:
        try:
            return load_config(kind, file=file, environment=environment).server
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError(min(problems, key=lambda text: text.count("\n")))


def check_configured_ports(server: ServerConfig) -> Iterator[Finding]:
    """Check that a node with these settings could bind its two ports now."""
    for setting, what, port in (
        ("server.port", "gRPC", server.port),
        ("server.http_port", "health, metrics, status page", server.http_port),
    ):
        yield _check_port(setting, what, server.host, port)


def _check_port(setting: str, what: str, host: str, port: int) -> Finding:
    where = f"{host} port {port}" if port else f"{host}, a free port"
    text = f"{where} ({what})"
    bound = "" if host == "*" else host.strip("[]")
    try:
        family, *_, address = socket.getaddrinfo(bound or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            one.bind(address)
            one.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fix = f"ss -ltnp 'sport = :{port}' says by whom; stop it, or choose another {setting}"
            return warn(setting, f"{text} is taken: by the node itself, where it runs already, or by something else", fix)
        if error.errno == errno.EACCES:
            return fail(setting, f"{text}: {error.strerror}", f"choose a {setting} from 1024")
        fix = "set server.host to an address of this machine (ip addr), or to 0.0.0.0 with server.advertise_host"
        return fail(setting, f"{text} cannot be bound: {error.strerror or error}", fix)
    return ok(setting, f"{text} can be bound; whether others reach it, `kvferry doctor --node` tells from where they are")
