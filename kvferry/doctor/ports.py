"""`kvferry doctor`: whether ports can be had, any on loopback and those of a node's settings."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvferry.doctor.finding import Finding, fail, ok, read_line, warn
from transfer.config import DecodeNodeConfig, NodeConfig, PrefillNodeConfig, ServerConfig
from transfer.errors import ConfigError
from transfer.load_config import load_config

NAME = "loopback ports"


def server_of(file: Path, environment: Mapping[str, str] = os.environ) -> ServerConfig:
    """Where the node of that configuration listens, of whichever tier it is.

    Raises:
        ConfigError: It is none of a prefill node, and none of a decode node; with the message of the tier that it is
            nearer to.
    """
    problems: list[str] = []
    kinds: tuple[type[NodeConfig], ...] = (PrefillNodeConfig, DecodeNodeConfig)
    for kind in kinds:
        try:
            return load_config(kind, file=file, environment=environment).server
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError(min(problems, key=lambda text: text.count("\n")))


def check_ports(span: str | None = None) -> Finding:
    """Whether free ports can be had on loopback, and a connection made.

    Args:
        span: What the kernel says of which; None: it is asked.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2.0):
                pass
    except OSError as error:
        return fail(NAME, str(error), "ip link set lo up")
    if span is None:
        span = read_line(Path("/proc/sys/net/ipv4/ip_local_port_range")) or ""
    text = f"a free one can be had and reached (of {' to '.join(span.split())})"
    return ok(NAME, f"{text}; whether those of a node can be had, --node-config FILE tells")


def check_configured_ports(server: ServerConfig) -> Iterator[Finding]:
    """Whether a node with these settings could bind its two ports now; that others reach them it cannot tell."""
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
