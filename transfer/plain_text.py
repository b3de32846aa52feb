"""Checks of plain text instead of TLS: --insecure allows it within this machine, --insecure-anywhere everywhere."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

from transfer.config import DecodeNodeConfig, DiscoveryConfig, NodeConfig, ProcessConfig, TlsConfig
from transfer.errors import ConfigError

ON_LOOPBACK: Final = 1
"""`tls.insecure`: plain text between processes of this machine."""

ANYWHERE: Final = 2
"""`tls.insecure`: plain text to and from anywhere."""

NODE_WARNING: Final = (
    "without TLS (--insecure): every process that reaches a port of this node can use it, and read and change its traffic"
)
CLIENT_WARNING: Final = "without TLS (--insecure): every process between here and the node can read and change the traffic"


def is_loopback(address: str) -> bool:
    """Return whether a host, or the host of host:port, is on this machine. `localhost` is the only accepted name."""
    host = host_of(address)
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return found.is_loopback


def host_of(address: str) -> str:
    """Return the host of host or host:port, without brackets."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address


def check_plain_text(config: ProcessConfig) -> str | None:
    """Check a node or a command without TLS. Return the warning to print, or None if it has TLS.

    Raise ConfigError if it may not go without TLS; one line for each address.
    """
    is_node = isinstance(config, NodeConfig)
    named: list[tuple[str, str | None]] = []
    if isinstance(config, NodeConfig):
        named += [("server.host", config.server.host), ("server.advertise_host", config.server.advertise_host)]
    if isinstance(config, DecodeNodeConfig):
        named += [("peers.prefill_nodes", address) for address in config.peers.prefill_nodes]
    is_plain = is_plain_text_right(config.tls, named)
    if isinstance(config, NodeConfig):
        check_etcd(config.discovery, config.tls)
    return (NODE_WARNING if is_node else CLIENT_WARNING) if is_plain else None


def check_etcd(discovery: DiscoveryConfig, tls: TlsConfig) -> None:
    """Raise ConfigError if etcd is reached in plain text without permission.

    Anyone between a node and etcd can change the list of nodes and read the password.
    """
    for endpoint in discovery.etcd_endpoints:
        scheme, _, address = endpoint.partition("://")
        if scheme == "http" and not is_loopback(address) and tls.insecure < ANYWHERE:
            raise ConfigError(
                f"discovery.etcd_endpoints is {endpoint}, which is not a loopback address; use https://{address}, or allow "
                f"plain text with --insecure-anywhere (tls.insecure: {ANYWHERE})"
            )


def is_plain_text_right(tls: TlsConfig, named: Iterable[tuple[str, str | None]]) -> bool:
    """Return whether a process goes without TLS. Raise ConfigError if it may not; one line for each address.

    Args:
        named: Addresses that it listens on and connects to: a name, for example of its setting, and host or host:port.
    """
    if tls.is_set_up:
        return False
    if not tls.insecure:
        raise ConfigError(
            "TLS is not set up; give tls.cert_file, tls.key_file and tls.ca_file (--tls-cert, --tls-key, --tls-ca), or use "
            "plain text on this machine with --insecure"
        )
    found = [why_not_plain_text(what, address, tls.insecure) for what, address in named if address is not None]
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise ConfigError("\n".join(problems))
    return True


def why_not_plain_text(what: str, address: str, insecure: int) -> str | None:
    """Return one line on why an address may not be used in plain text, or None if it may.

    Args:
        what: Names the address, for example by its setting.
        address: Host, or host:port.
        insecure: As `tls.insecure`.
    """
    if insecure >= ANYWHERE or (insecure and is_loopback(address)):
        return None
    needs = f"without TLS it needs --insecure-anywhere (tls.insecure: {ANYWHERE})"
    return f"{what} is {address}, which is not a loopback address; {needs}"
