"""Prefill nodes that have registered themselves in etcd: one key for each, which lives as long as its lease."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

import structlog

import transfer
from transfer.config import DiscoveryConfig
from transfer.errors import TransportError
from transfer.registry.discovery.etcd_client import MAX_KEYS, Change, EtcdClient
from transfer.registry.discovery.watcher import AGAIN_S, DiscoveryView, Looks

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 5.0
MAX_VALUE_BYTES: Final = 1024

RENEWALS_OF_A_LEASE: Final = 3
REVOKE_TIMEOUT_S: Final = 2.0
"""Time to revoke a lease at the end. If etcd does not answer, the entry ends with its lease."""

log = structlog.get_logger(__name__)


class EtcdMembers:
    """The members of a cluster, used one at a time: after a failure the next one.

    Args:
        config: Section `discovery`.
        connect: Makes a connection to a member.
    """

    def __init__(self, config: DiscoveryConfig, connect: Callable[[str, DiscoveryConfig], EtcdClient] = EtcdClient) -> None:
        self.where = f"etcd {', '.join(config.etcd_endpoints)} under {config.etcd_prefix} (discovery.etcd_endpoints)"
        self._config = config
        self._connect = connect
        self._turn = 0
        self._failures_in_row = 0
        self._backoff_s = FIRST_BACKOFF_S

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[EtcdClient]:
        """Return a connection, logged in.

        Raises:
            TransportError: The member does not answer, or refuses the login.
        """
        endpoints = self._config.etcd_endpoints
        client = self._connect(endpoints[self._turn % len(endpoints)], self._config)
        try:
            await client.log_in()
            yield client
        finally:
            await client.close()

    def worked(self) -> None:
        """Record that the member answered."""
        self._failures_in_row, self._backoff_s = 0, FIRST_BACKOFF_S

    def failed(self) -> bool:
        """Use the next member from now on; return whether all of them failed in a row."""
        self._turn += 1
        self._failures_in_row += 1
        return self._failures_in_row % len(self._config.etcd_endpoints) == 0

    async def pause(self, *, at_most_s: float = MAX_BACKOFF_S) -> None:
        """Wait before all members are tried again; longer each time."""
        await asyncio.sleep(min(self._backoff_s, at_most_s))
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)


class EtcdNodes:
    """A source that reads all keys of a prefix, and then watches it.

    Args:
        config: Section `discovery`.
        members: Members that it asks.
    """

    def __init__(self, config: DiscoveryConfig, members: EtcdMembers) -> None:
        self.where = members.where
        self._prefix = config.etcd_prefix
        self._interval_s = config.interval_s
        self._members = members

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
        """Watch until the connection ends. The next connection reads all keys again, so that no change is lost."""
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
                else:  # a watch is also silent if the member is gone
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
    """Return the address in each key; if there is none, the key and its value, which is rejected later."""
    return [_address(value) or f"{key} = {value[:MAX_VALUE_BYTES].decode(errors='replace')}" for key, value in named.items()]


def node_value(address: str, version: str) -> bytes:
    """Return the value of a prefill node's key."""
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


class Registration:
    """Keep a node's address under the prefix while that is wanted, also through failures of etcd. Owned by one loop.

    The key belongs to this life of the process. The entry of an earlier life at the same address ends with its own lease, and
    does not take this one along.

    Args:
        config: Section `discovery`.
        members: Members that it asks.
        clock: Seconds.
    """

    def __init__(self, config: DiscoveryConfig, members: EtcdMembers, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._members = members
        self._clock = clock
        self.key = f"{config.etcd_prefix}{secrets.token_hex(8)}"
        """Key of the entry, under the prefix."""
        self._address = ""
        self._wanted = asyncio.Event()
        self._unwanted = asyncio.Event()
        self._unwanted.set()
        self.lease: int | None = None
        """The lease that keeps the entry; None while the node is not registered."""
        self._heartbeat_s = config.lease_s / RENEWALS_OF_A_LEASE
        self._heard_s: float | None = None
        self._problem = ""
        self._failures = 0
        self._keeping: asyncio.Task[None] | None = None

    @property
    def interval_s(self) -> float:
        """Seconds between two renewals of the lease; 0 while nothing is wanted or registered."""
        return 0.0 if self._is_at_rest else self._heartbeat_s

    @property
    def _is_at_rest(self) -> bool:
        return self.lease is None and not self._wanted.is_set()

    @property
    def view(self) -> DiscoveryView:
        """State of the registration: `addresses` has the node's own while it is registered, as far as it knows.

        The age is 0 while nothing is wanted: there is no entry that could be out of date.
        """
        age_s = None if self._heard_s is None else self._clock() - self._heard_s
        return DiscoveryView(
            where=self._members.where,
            addresses=(self._address,) if self.lease is not None else (),
            waiting={},
            problem=self._problem,
            age_s=0.0 if self._is_at_rest else age_s,
            failures=self._failures,
            refused={},
            interval_s=self.interval_s,
        )

    def start(self, address: str) -> None:
        """Start; nothing is registered before it is wanted.

        Args:
            address: host:port under which decode nodes reach the node.
        """
        self._address = address
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    def want(self, is_wanted: bool) -> None:
        """Set whether decode nodes should find the node."""
        now, other = (self._wanted, self._unwanted) if is_wanted else (self._unwanted, self._wanted)
        other.clear()
        now.set()

    async def close(self) -> None:
        """Take the entry back, if etcd answers at once."""
        if self._keeping is None:
            return
        self.want(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REVOKE_TIMEOUT_S):
                while self.lease is not None:
                    await asyncio.sleep(0.01)
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            try:
                await self._keep_until_it_fails()
            except Exception as error:
                log.critical("registration_crashed", error=f"{type(error).__name__}: {error}", exc_info=error)
                self._fail(f"unexpected {type(error).__name__}; see the log of this node")
            await asyncio.sleep(AGAIN_S)

    async def _keep_until_it_fails(self) -> None:
        while True:
            if self.lease is None:
                if not self._wanted.is_set():
                    # The last problem does not matter any more, and the next registration is a new one.
                    self._problem, self._heard_s = "", None
                await self._wanted.wait()
            try:
                async with self._members.connected() as client:
                    while self.lease is not None or self._wanted.is_set():
                        await self._step(client)
            except TransportError as error:
                if self._members.failed():
                    self._fail(str(error))
                    # A longer pause could outlive the lease: a short outage would take all nodes away.
                    await self._members.pause(at_most_s=self._heartbeat_s)

    async def _step(self, client: EtcdClient) -> None:
        """Register, renew or revoke, as is due now; then wait until the next step is due."""
        if self._unwanted.is_set():
            if self.lease is not None:
                await client.revoke(self.lease, timeout_s=REVOKE_TIMEOUT_S)
                self.lease = None
                log.info("deregistered", where=self._members.where, address=self._address)
            return
        if self.lease is not None and not await client.renew(self.lease):
            self.lease = None
            log.warning("registration_lost", where=self._members.where, address=self._address)
        if self.lease is None:
            lease, lives_s = await client.grant(self._config.lease_s)
            await self._put(client, lease)
            self.lease, self._heartbeat_s = lease, lives_s / RENEWALS_OF_A_LEASE
            log.info("registered", where=self._members.where, address=self._address, key=self.key, lease_s=lives_s)
        else:
            if not await client.has(self.key):  # another client deleted it, and the lease is still alive
                await self._put(client, self.lease)
                log.warning("registration_deleted", where=self._members.where, address=self._address, key=self.key)
            if self._problem:
                log.info("registration_recovered", where=self._members.where, address=self._address)
        self._members.worked()
        self._problem, self._heard_s = "", self._clock()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._unwanted.wait(), self._heartbeat_s)

    async def _put(self, client: EtcdClient, lease: int) -> None:
        await client.put(self.key, node_value(self._address, transfer.__version__), lease=lease)

    def _fail(self, reason: str) -> None:
        self._failures += 1
        if not self._problem:  # once: until it works again there is no other news
            log.warning("registration_failed", where=self._members.where, address=self._address, reason=reason)
        self._problem = reason
