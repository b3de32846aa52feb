"""Prefill nodes that have registered themselves in etcd: one key for each, which lives as long as its lease."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

from transfer.config import DiscoveryConfig
from transfer.errors import TransportError
from transfer.registry.discovery.etcd_client import MAX_KEYS, Change, EtcdClient
from transfer.registry.discovery.source import Looks

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 5.0
MAX_VALUE_BYTES: Final = 1024


class EtcdMembers:
    """The members of a cluster, of which one is spoken to at a time: the next one when it fails.

    Args:
        config: Section `discovery`.
        connect: Makes a connection to a member.
    """

    def __init__(self, config: DiscoveryConfig, connect: Callable[[str, DiscoveryConfig], EtcdClient] = EtcdClient) -> None:
        self._config = config
        self._connect = connect
        self._turn = 0
        self._failures_in_row = 0
        self._backoff_s = FIRST_BACKOFF_S

    @property
    def where(self) -> str:
        return f"etcd {', '.join(self._config.etcd_endpoints)} under {self._config.etcd_prefix} (discovery.etcd_endpoints)"

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[EtcdClient]:
        """A connection, logged in.

        Raises:
            TransportError: There is none.
        """
        endpoints = self._config.etcd_endpoints
        client = self._connect(endpoints[self._turn % len(endpoints)], self._config)
        try:
            await client.log_in()
            yield client
        finally:
            await client.close()

    def worked(self) -> None:
        """The member has done what it was asked for."""
        self._failures_in_row, self._backoff_s = 0, FIRST_BACKOFF_S

    def failed(self) -> bool:
        """Have the next member tried; whether all of them have failed in a row by now."""
        self._turn += 1
        self._failures_in_row += 1
        return self._failures_in_row % len(self._config.etcd_endpoints) == 0

    async def pause(self, *, at_most_s: float = MAX_BACKOFF_S) -> None:
        """Before all of them are tried again; longer each time."""
        await asyncio.sleep(min(self._backoff_s, at_most_s))
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)


class EtcdNodes:
    """A source that reads all keys of a prefix, and then watches it.

    Args:
        config: Section `discovery`.
        members: Who is asked.
    """

    def __init__(self, config: DiscoveryConfig, members: EtcdMembers) -> None:
        self._prefix = config.etcd_prefix
        self._interval_s = config.interval_s
        self._members = members

    @property
    def where(self) -> str:
        return self._members.where

    async def follow(self, looks: Looks) -> None:
        while True:
            try:
                async with self._members.connected() as client:
                    await self._watch(client, looks)
            except TransportError as error:
                if self._members.failed():
                    looks.failed(str(error))
                    await self._members.pause()

    async def _watch(self, client: EtcdClient, looks: Looks) -> None:
        """Until the connection ends: whatever was missed by then, the next one reads anew."""
        named, revision = await client.named(self._prefix)
        looks.saw(_entries(named))
        changes = client.changes(self._prefix, after=revision)
        reading = asyncio.ensure_future(anext(changes))
        try:
            while True:
                await asyncio.wait({reading}, timeout=self._interval_s)
                if reading.done():
                    changed = reading.result()
                    is_standing = bool(changed)  # the first answer says that the watch has begun, and it may end with that
                    _apply(changed, named)
                    reading = asyncio.ensure_future(anext(changes))
                else:  # a watch is silent also where nobody is there any more
                    named, _ = await client.named(self._prefix)
                    is_standing = True
                if is_standing:  # not before: where reading works and watching does not, members would be tried without a pause
                    self._members.worked()
                looks.saw(_entries(named))
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await changes.aclose()


def _apply(changed: Iterable[Change], named: dict[str, bytes]) -> None:
    for change in changed:
        if change.value is None:
            named.pop(change.key, None)
        elif change.key in named or len(named) < MAX_KEYS:
            named[change.key] = change.value


def _entries(named: dict[str, bytes]) -> list[str]:
    """What each key says; where that is no address, the key and what it holds, which is none either."""
    return [_address(value) or f"{key} = {value[:MAX_VALUE_BYTES].decode(errors='replace')}" for key, value in named.items()]


def node_value(address: str, version: str) -> bytes:
    """What a prefill node's key holds."""
    return json.dumps({"address": address, "version": version}, sort_keys=True).encode()


def _address(value: bytes) -> str | None:
    if len(value) > MAX_VALUE_BYTES:
        return None
    try:
        content = json.loads(value)
    except (ValueError, RecursionError):
        return None
    address = content.get("address") if isinstance(content, dict) else None
    return address if isinstance(address, str) else None
