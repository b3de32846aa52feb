"""Prefill nodes behind one name: every address that DNS has for it is one, as with a headless Service of Kubernetes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from transfer.registry.connecting import addresses_of
from transfer.registry.discovery.source import Looks
from transfer.registry.server import host_port

Resolve = Callable[[str], Awaitable[Collection[str]]]
"""Every address of a name, IPv4 and IPv6. Raises OSError with why there is none."""


class DnsNodes:
    """A source that resolves a name now and again.

    A name that has no address, or no longer exists, counts as a failure: resolvers do not tell an empty Service from a mistyped
    one, and a cluster's DNS that has lost its data says the same. So a look never takes the last node away.

    Args:
        name: host:port.
        interval_s: Seconds from one look to the next.
        resolve: Asks; None: as the system does (its files and resolvers, and their time limits).
    """

    def __init__(self, name: str, *, interval_s: float, resolve: Resolve | None = None) -> None:
        host, _, port = name.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._name = name
        self._interval_s = interval_s
        self._resolve = resolve or addresses_of

    @property
    def where(self) -> str:
        return f"DNS name {self._name} (discovery.dns_name)"

    async def follow(self, looks: Looks) -> None:
        while True:
            try:
                found = await self._resolve(self._host)
            except OSError as error:
                looks.failed(f"{self._host}: {error.strerror or error}")
            else:
                looks.saw([host_port(address, self._port) for address in found])
            await asyncio.sleep(self._interval_s)
