"""`kvferry doctor --node`: how this machine and a node that runs get along, as far as a client of the node can tell."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import transfer
from kvferry.cli.node_client import NodeClient, is_refusal_of_caller
from kvferry.doctor.finding import Finding, fail, ok, warn
from transfer.errors import TransferError
from transfer.messages import PROTOCOL_VERSIONS
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.security import Security

MAX_OFFSET_S: Final = 0.5
"""Logs of two machines whose clocks are further apart cannot be laid side by side."""
_TRIES: Final = 5  # the quickest of them says most about the clock
_ANSWER_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLook:
    """What came of calling a node.

    Args:
        address: host:port of its gRPC API.
        status: As it answered; None: it did not.
        error: Why not.
        is_refused: It answers, and does not let this caller in.
        round_trip_s: Of the quickest answer.
        offset_s: Its clock less that of this machine, good to half of the round trip.
        http_error: Why its HTTP port does not answer; empty: it does.
    """

    address: str
    status: pb.NodeStatus | None = None
    error: str = ""
    is_refused: bool = False
    round_trip_s: float = 0.0
    offset_s: float = 0.0
    http_error: str = ""


async def look_at_node(address: str, security: Security | None, *, timeout_s: float = _ANSWER_S) -> NodeLook:
    """Call it, a few times.

    Args:
        timeout_s: Bound of each call.

    Raises:
        ConfigError: The address is none, or must not be called like this.
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
    """Why /healthz does not answer at the same host; empty: it does."""
    url = f"http://{address.rpartition(':')[0]}:{port}/healthz"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # nobody in between
    try:
        with opener.open(url, timeout=_ANSWER_S) as answer:
            answer.read()
    except (OSError, urllib.error.URLError, ValueError) as error:
        return f"{url}: {getattr(error, 'reason', error)}"
    return ""


def check_node(look: NodeLook, *, transports: Collection[str]) -> Iterator[Finding]:
    """Every finding about one node.

    Args:
        look: What came of calling it.
        transports: That this machine has.
    """
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
        fix = f"let port {status.http_port} of it through to probes, Prometheus and browsers (docs/operations.md, Ports)"
        yield warn(f"{name} http", f"{look.http_error}; its gRPC port answers", fix)
    else:
        yield ok(f"{name} http", f"port {status.http_port} answers")


def _fix_unreached(address: str) -> str:
    return f"start the node, and let {address} through; docs/operations.md, TLS, where it answers without a certificate"


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
    theirs = status.instance.transport
    if not theirs or theirs in transports:
        return ok(name, f"{theirs}, which this machine has, too" if theirs else "it does not tell yet: it has no ranks")
    text = f"{theirs}, which this machine does not have ({', '.join(transports)}): a node here could not join it"
    return warn(
        name, text, f"pip install 'kvferry[{'nixl' if theirs == 'nixl' else 'cuda-ipc'}]', or another transport.name there"
    )
