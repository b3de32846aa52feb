"""A prefill node's own entry in etcd, for as long as it serves."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Final

import structlog

import transfer
from transfer.config import DiscoveryConfig
from transfer.errors import TransportError
from transfer.registry.discovery.etcd import EtcdMembers, node_value
from transfer.registry.discovery.etcd_client import EtcdClient
from transfer.registry.discovery.watcher import AGAIN_S, DiscoveryView

RENEWALS_OF_A_LEASE: Final = 3
REVOKE_TIMEOUT_S: Final = 2.0
"""At the end; whom etcd does not hear by then, it forgets by itself when the lease is over."""

log = structlog.get_logger(__name__)


class Registration:
    """Keeps a node's address under the prefix while that is wanted, whatever becomes of etcd. Owned by one loop.

    The key is of this life of the process: the entry of an earlier one at the same address goes with its own lease, and cannot
    take this one along.

    Args:
        config: Section `discovery`.
        members: Who is asked.
        clock: Seconds.
    """

    def __init__(self, config: DiscoveryConfig, members: EtcdMembers, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._members = members
        self._clock = clock
        self._key = f"{config.etcd_prefix}{secrets.token_hex(8)}"
        self._address = ""
        self._wanted = asyncio.Event()
        self._unwanted = asyncio.Event()
        self._unwanted.set()
        self._lease: int | None = None
        self._heartbeat_s = config.lease_s / RENEWALS_OF_A_LEASE
        self._heard_s: float | None = None
        self._problem = ""
        self._failures = 0
        self._keeping: asyncio.Task[None] | None = None

    @property
    def key(self) -> str:
        """Key of the entry, under the prefix."""
        return self._key

    @property
    def lease(self) -> int | None:
        """The lease that keeps the entry; None while the node is not registered."""
        return self._lease

    @property
    def interval_s(self) -> float:
        """Seconds between two renewals of the lease; 0 where there is nothing to renew: not wanted, and nothing registered."""
        return 0.0 if self._is_at_rest else self._heartbeat_s

    @property
    def _is_at_rest(self) -> bool:
        return self._lease is None and not self._wanted.is_set()

    @property
    def view(self) -> DiscoveryView:
        """`addresses` has the node's own while it is registered, as far as it knows.

        Its age is 0 while nothing is wanted: what is not registered cannot be out of date.
        """
        age_s = None if self._heard_s is None else self._clock() - self._heard_s
        return DiscoveryView(
            where=self._members.where,
            addresses=(self._address,) if self._lease is not None else (),
            waiting={},
            problem=self._problem,
            age_s=0.0 if self._is_at_rest else age_s,
            failures=self._failures,
            refused={},
            interval_s=self.interval_s,
        )

    def start(self, address: str) -> None:
        """Begin; nothing is registered before it is wanted.

        Args:
            address: host:port that decode nodes are to reach.
        """
        self._address = address
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    def want(self, is_wanted: bool) -> None:
        """Whether the node is to be found."""
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
                while self._lease is not None:
                    await asyncio.sleep(0.01)
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            try:
                await self._keep_until_it_fails()
            except Exception as error:
                log.critical("registration_broke", error=f"{type(error).__name__}: {error}", exc_info=error)
                self._fail(f"unexpected {type(error).__name__}; see the log of this node")
            await asyncio.sleep(AGAIN_S)

    async def _keep_until_it_fails(self) -> None:
        while True:
            if self._lease is None:
                if not self._wanted.is_set():
                    # What was wrong keeps nobody from being found any more; and the next registration is a new one.
                    self._problem, self._heard_s = "", None
                await self._wanted.wait()
            try:
                async with self._members.connected() as client:
                    while self._lease is not None or self._wanted.is_set():
                        await self._step(client)
            except TransportError as error:
                if self._members.failed():
                    self._fail(str(error))
                    # A longer pause could outlive the lease: a short outage would take all nodes away.
                    await self._members.pause(at_most_s=self._heartbeat_s)

    async def _step(self, client: EtcdClient) -> None:
        """Register, renew, or take the entry back: what is to be done now; then wait until there is something."""
        if self._unwanted.is_set():
            if self._lease is not None:
                await client.revoke(self._lease, timeout_s=REVOKE_TIMEOUT_S)
                self._lease = None
                log.info("deregistered", where=self._members.where, address=self._address)
            return
        if self._lease is not None and not await client.renew(self._lease):
            self._lease = None
            log.warning("registration_lost", where=self._members.where, address=self._address)
        if self._lease is None:
            lease, lives_s = await client.grant(self._config.lease_s)
            await self._put(client, lease)
            self._lease, self._heartbeat_s = lease, lives_s / RENEWALS_OF_A_LEASE
            log.info("registered", where=self._members.where, address=self._address, key=self._key, lease_s=lives_s)
        else:
            if not await client.has(self._key):  # whoever deleted it has left the lease alive
                await self._put(client, self._lease)
                log.warning("registration_was_deleted", where=self._members.where, address=self._address, key=self._key)
            if self._problem:
                log.info("registration_works_again", where=self._members.where, address=self._address)
        self._members.worked()
        self._problem, self._heard_s = "", self._clock()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._unwanted.wait(), self._heartbeat_s)

    async def _put(self, client: EtcdClient, lease: int) -> None:
        await client.put(self._key, node_value(self._address, transfer.__version__), lease=lease)

    def _fail(self, reason: str) -> None:
        self._failures += 1
        if not self._problem:  # once: until it works again there is no other news
            log.warning("registration_failed", where=self._members.where, address=self._address, reason=reason)
        self._problem = reason
