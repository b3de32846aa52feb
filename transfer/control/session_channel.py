"""The control channel of sessions: over TCP with keys, and over a Unix socket between processes of one user on one machine.

A message over the Unix socket passes fewer threads, and is not encrypted. Only processes of the same user can connect to it. A
writer uses it if the target's TCP address belongs to the writer's own network namespace, and the socket is in the private folder
of the writer's user. Otherwise it uses TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import structlog

from transfer.control.base import MAX_PAYLOAD_BYTES, ControlClient, KeyPair, Received
from transfer.control.unix_channel import (
    SCHEME,
    UnixControlClient,
    UnixControlServer,
    private_folder,
    remove_dead_sockets,
)
from transfer.control.zmq_channel import ZmqControlClient, ZmqControlServer
from transfer.errors import ConfigError, PeerUnreachable, TransportError

_NAME_BYTES: Final = 16

log = structlog.get_logger(__name__)


class SessionControlServer:
    """A `ControlServer` that listens on TCP and, if there is a folder for it, on a Unix socket.

    Args:
        bind, keys, advertise_host, max_payload_bytes: As of `ZmqControlServer`.

    Raises:
        ConfigError: The address cannot be bound.
        TransportError: This process has no descriptors left.
    """

    def __init__(
        self,
        bind: str,
        *,
        keys: KeyPair,
        advertise_host: str | None = None,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self._tcp = ZmqControlServer(bind, keys=keys, advertise_host=advertise_host, max_payload_bytes=max_payload_bytes)
        self._local: UnixControlServer | None = None
        try:
            folder = private_folder()
            remove_dead_sockets(folder)
            path = folder / secrets.token_hex(_NAME_BYTES)
            self._local = UnixControlServer(f"{SCHEME}{path}", max_payload_bytes=max_payload_bytes)
        except (ConfigError, TransportError) as error:
            log.warning("no_local_control_channel", reason=str(error), used="TCP")
        self.address = self._tcp.address
        self.public_key = self._tcp.public_key

    @property
    def local_address(self) -> str:
        """Address of the Unix socket; empty if there is none."""
        return "" if self._local is None else self._local.address

    @property
    def num_dropped(self) -> int:
        return self._tcp.num_dropped + (0 if self._local is None else self._local.num_dropped)

    @property
    def num_refused(self) -> int:
        return self._tcp.num_refused

    def allow(self, peer: int, key: bytes = b"") -> None:
        self._tcp.allow(peer, key)
        if self._local is not None:
            self._local.allow(peer)

    def forget(self, peer: int) -> None:
        self._tcp.forget(peer)
        if self._local is not None:
            self._local.forget(peer)

    def send(self, peer: int, payload: bytes) -> bool:
        if self._local is not None and self._local.is_connected(peer):
            return self._local.send(peer, payload)
        return self._tcp.send(peer, payload)

    def watch(self, loop: asyncio.AbstractEventLoop, on_received: Callable[[Received], None]) -> None:
        self._tcp.watch(loop, on_received)
        if self._local is not None:
            self._local.watch(loop, on_received)

    def close(self) -> None:
        self._tcp.close()
        if self._local is not None:
            self._local.close()


def open_session_client(
    address: str,
    local_address: str,
    *,
    session_id: int,
    keys: KeyPair,
    server_key: bytes,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
) -> ControlClient:
    """Connect to a `SessionControlServer`, over its Unix socket if that can be reached.

    Args:
        address, local_address: Of the server. `local_address` is empty if it has none, or is of an earlier version.
        session_id, keys, server_key, max_payload_bytes: As of `ZmqControlClient`.

    Raises:
        PeerUnreachable: `address` cannot be connected to.
        TransportError: This process has no descriptors left.
    """
    if is_own_address(address) and _is_in_private_folder(local_address):
        with contextlib.suppress(PeerUnreachable):
            client = UnixControlClient(local_address, session_id=session_id, max_payload_bytes=max_payload_bytes)
            if client.is_connected:
                return client
            client.close()
    return ZmqControlClient(address, session_id=session_id, keys=keys, server_key=server_key, max_payload_bytes=max_payload_bytes)


def _is_in_private_folder(address: str) -> bool:
    """Return whether the socket is in this user's private folder. The peer chose the address, so others are rejected."""
    try:
        return address.startswith(SCHEME) and Path(address.removeprefix(SCHEME)).parent == private_folder()
    except ConfigError:
        return False


def is_own_address(address: str) -> bool:
    """Return whether the IP address in ``tcp://HOST:PORT`` belongs to this network namespace. False for names of hosts."""
    try:
        ip = ipaddress.ip_address(urlsplit(address).hostname or "")
    except ValueError:
        return False
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(ip), 0))  # the system binds its own addresses only
    except OSError:
        return False
    return True
