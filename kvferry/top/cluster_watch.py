"""Asks every node of a cluster how it is: those that were named, and those that these name as their peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from kvferry.cli.node_client import NodeClient
from node_runtime.cluster_view import ClusterView, Seen, view_of
from transfer.errors import RemoteProtocolError, TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.security import Security

MAX_NODES: Final = 256
ANSWER_S: Final = 3.0
PATIENCE_S: Final = 0.5
"""A look waits no longer for a node; those that live answer in milliseconds."""
REMEMBERED_S: Final = 30.0
"""A node that nobody names any more, and that does not answer, is shown for so long."""


class ClusterWatch:
    """Owned by one loop. Use it as an async context manager.

    Args:
        addresses: host:port of nodes of either role; at least one.
        security: How they, and whom they name, are called; None: in plain text on loopback addresses.
        answer_s: Longest wait for a node's answer, which is waited for beside later looks.
        patience_s: How long a look waits for it; None: until it is there, or its time is over.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        security: Security | None = None,
        answer_s: float = ANSWER_S,
        patience_s: float | None = PATIENCE_S,
    ) -> None:
        self._named = tuple(dict.fromkeys(addresses))
        self._security = security
        self._answer_s = answer_s
        self._patience_s = patience_s
        self._asking: dict[str, tuple[asyncio.Task[Seen], float]] = {}  # and since when
        self._clients: dict[str, NodeClient] = {}
        self._seen: dict[str, Seen] = {}  # the newest of each address
        self._earlier: dict[str, Seen] = {}  # the answer before that
        self._answered_s: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        tasks = [task for task, _ in self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    def check_named(self) -> None:
        """Whether the addresses that were given can be called at all.

        Raises:
            ConfigError: One is no host:port, or must not be called in plain text.
        """
        for address in self._named:
            self.client_of(address)

    async def look(self) -> ClusterView:
        """All nodes now; takes `patience_s` a step away from the named ones at most, and answers of milliseconds as a rule.

        A node that does not answer in time is shown as it was before, and says for how long (`Seen.late_s`); no look waits for it
        again until it has answered. One hanging node thus makes no other node's row old.
        """
        before = self._seen
        found: dict[str, Seen] = {}
        asked: set[str] = set()
        next_ones = [*self._named, *(address for address in before if address not in self._named)]
        while next_ones:
            asked.update(next_ones)
            for seen in await self._ask_all(next_ones):
                found[seen.address] = seen
            named = (peer.address for seen in found.values() if seen.status is not None for peer in seen.status.peers)
            next_ones = [address for address in dict.fromkeys(named) if address not in asked]
            next_ones = next_ones[: max(0, MAX_NODES - len(asked))]  # all that were named are asked, however many
        await self._forget_old(found)
        self._seen = found
        for address, seen in found.items():
            last = before.get(address)
            if last is not None and last.status is not None and last.at_s != seen.at_s:
                self._earlier[address] = last
        self._earlier = {address: seen for address, seen in self._earlier.items() if address in found}
        return view_of(_distinct(found.values()), self._earlier.values())

    def client_of(self, address: str) -> NodeClient:
        """To call a node that was seen.

        Raises:
            ConfigError: The address is none, or must not be called in plain text.
        """
        if address not in self._clients:
            self._clients[address] = NodeClient(address, security=self._security)
        return self._clients[address]

    async def _ask_all(self, addresses: Sequence[str]) -> list[Seen]:
        """What each says, or said before."""
        waited_for: list[asyncio.Task[Seen]] = []
        for address in addresses:
            if address in self._asking:
                if self._patience_s is None:
                    waited_for.append(self._asking[address][0])
                continue
            task = asyncio.create_task(self._ask(address))
            self._asking[address] = (task, time.monotonic())
            before = self._seen.get(address)
            if self._patience_s is None or before is None or before.status is not None:
                waited_for.append(task)
        if waited_for:
            await asyncio.wait(waited_for, timeout=self._patience_s)
        return [self._seen_of(address) for address in addresses]

    def _seen_of(self, address: str) -> Seen:
        """The answer that was asked for last, where it is there, and else what is known from before."""
        task, since_s = self._asking[address]
        if task.done():
            del self._asking[address]
            return task.result()
        before, now_s = self._seen.get(address), time.monotonic()
        if before is None:
            return Seen(address=address, at_s=now_s, late_s=now_s - since_s, late_looks=1)
        is_away = before.status is None and not before.late_s
        return before if is_away else replace(before, late_s=now_s - since_s, late_looks=before.late_looks + 1)

    async def _ask(self, address: str) -> Seen:
        error: str | None = None
        try:
            client = self.client_of(address)
            async with asyncio.TaskGroup() as both:
                status = both.create_task(client.status(timeout_s=self._answer_s))
                requests = both.create_task(self._requests(client))
        except* TransferError as group:
            error = " ".join(str(group.exceptions[0]).split())
        now_s = time.monotonic()
        if error is not None:
            return Seen(address=address, error=error, at_s=now_s)
        self._answered_s[address] = now_s
        return Seen(address=address, status=status.result(), requests=requests.result(), at_s=now_s)

    async def _requests(self, client: NodeClient) -> tuple[pb.RequestStatus, ...]:
        """Return the requests in flight; none for version 0.1, which does not support the call."""
        try:
            return tuple((await client.list_requests(timeout_s=self._answer_s)).requests)
        except RemoteProtocolError:
            return ()

    async def _forget_old(self, found: dict[str, Seen]) -> None:
        named = {peer.address for seen in found.values() if seen.status is not None for peer in seen.status.peers}
        now_s = time.monotonic()
        for address, seen in list(found.items()):
            is_wanted = seen.status is not None or address in self._named or address in named
            if not is_wanted and now_s - self._answered_s.get(address, 0.0) > REMEMBERED_S:
                del found[address]
                if address in self._asking:
                    self._asking.pop(address)[0].cancel()
                if (client := self._clients.pop(address, None)) is not None:
                    await client.close()


def _distinct(nodes: Iterable[Seen]) -> list[Seen]:
    """Of one node that is known under several addresses the first."""
    lives: set[int] = set()
    kept: list[Seen] = []
    for node in nodes:
        if node.incarnation and node.incarnation in lives:
            continue
        lives.add(node.incarnation)
        kept.append(node)
    return sorted(kept, key=lambda node: (node.role != "prefill", node.role != "decode", node.address))
