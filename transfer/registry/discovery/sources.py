"""The sources of addresses without etcd, and the check whether a node serves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Final

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from transfer.errors import TransferError
from transfer.registry.connecting import addresses_of
from transfer.registry.discovery.watcher import Looks
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import Security
from transfer.registry.server import host_port
from transfer.registry.status import error_of

MAX_FILE_BYTES: Final = 1 << 16

ASK_TIMEOUT_S: Final = 3.0
SERVICE: Final = "kvferry.v1.PrefillControl"

Resolve = Callable[[str], Awaitable[Collection[str]]]
"""Returns every address of a name, IPv4 and IPv6. Raises OSError with the reason if there is none."""


class GivenNodes:
    """A source of addresses, each host:port, that never change."""

    where = "peers.prefill_nodes"

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses

    async def follow(self, looks: Looks) -> None:
        looks.saw(self._addresses)


class NodeFile:
    """A source that looks at a file again when it changes: a YAML list of host:port, which may be empty.

    Args:
        path: The file. It, or its folder, is replaced as a whole, as Kubernetes does with mounted files.
        interval_s: Seconds between looks.
    """

    def __init__(self, path: Path, *, interval_s: float) -> None:
        self.where = f"file {path} (discovery.file)"
        self._path = path
        self._interval_s = interval_s

    async def follow(self, looks: Looks) -> None:
        read: tuple[int, ...] | None = None
        while True:
            try:
                found = await asyncio.to_thread(self._changed, read)
            except ValueError as error:
                read = None
                looks.failed(str(error))
            else:
                if found is None:
                    looks.same()
                else:
                    read, entries = found
                    looks.saw(entries)
            await asyncio.sleep(self._interval_s)

    def _changed(self, read: tuple[int, ...] | None) -> tuple[tuple[int, ...], list[str]] | None:
        """Return the identity of the file and its entries; None if it is the file that was read last.

        Raises:
            ValueError: It cannot be read, or holds no list.
        """
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                found = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
                if found == read:
                    return None
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ValueError(f"it cannot be read: {error.strerror or error}") from error
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        try:
            entries = yaml.load(content, Loader=yaml.SafeLoader)
        except RecursionError:
            raise ValueError("it is nested too deeply; it must hold a list of host:port") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"it is not YAML: {' '.join(str(error).split())[:300]}") from error
        if not isinstance(entries, list):
            kind = "nothing" if entries is None else f"a {type(entries).__name__}"
            raise ValueError(f"it holds {kind}; it must hold a list of host:port, [] for none")
        return found, entries


class DnsNodes:
    """A source that resolves a name at intervals: every address is a node, as with a headless Service of Kubernetes.

    A name without an address, or that no longer exists, counts as a failure. Resolvers do not distinguish an empty Service from a
    mistyped one, and a cluster's DNS that lost its data answers the same. So a look never removes the last node.

    Args:
        name: host:port.
        interval_s: Seconds from one look to the next.
        resolve: Resolver; None means that of the system (its files and resolvers, and their time limits).
    """

    def __init__(self, name: str, *, interval_s: float, resolve: Resolve | None = None) -> None:
        host, _, port = name.rpartition(":")
        self.where = f"DNS name {name} (discovery.dns_name)"
        self._host, self._port = host.strip("[]"), int(port)
        self._interval_s = interval_s
        self._resolve = resolve or addresses_of

    async def follow(self, looks: Looks) -> None:
        while True:
            try:
                found = await self._resolve(self._host)
            except OSError as error:
                looks.failed(f"{self._host}: {error.strerror or error}")
            else:
                looks.saw([host_port(address, self._port) for address in found])
            await asyncio.sleep(self._interval_s)


async def why_not_serving(security: Security, address: str) -> str:
    """Ask a node by gRPC's health protocol whether it serves as a prefill node, before an address from DNS is used.

    Args:
        address: One that `security` allows.

    Returns:
        One line that says why the node may not be used; empty if it serves.
    """
    channel = PeerChannel(address, security)
    try:
        stub = health_pb2_grpc.HealthStub(await channel.ready(timeout_s=ASK_TIMEOUT_S))
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=ASK_TIMEOUT_S)
    except TransferError as error:
        return str(error)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return f"it is no prefill node: it does not know {SERVICE}"
        return str(error_of(error, peer=address))
    finally:
        await channel.close()
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "it does not serve: it is starting, or draining"
