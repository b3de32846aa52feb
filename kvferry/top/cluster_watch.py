"""Polls the status of every node of a cluster: named nodes, and the peers that they report."""

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
"""Longest wait of a look for a node; a node that lives answers in milliseconds."""
REMEMBERED_S: Final = 30.0
"""How long a silent node that no other node reports is shown."""


class ClusterWatch:
    """Polls from one loop. Use it as an async context manager.

    Args:
        addresses: host:port of nodes of either role; at least one.
        security: None means plain text on loopback addresses.
        answer_s: Deadline of a node's answer. It may arrive during a later look.
        patience_s: Longest wait of a look for an answer; None means until `answer_s`.
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
        self._asking: dict[str, tuple[asyncio.Task[Seen], float]] = {}  # with the time of their start
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
        """Check the addresses.

        Raises:
            ConfigError: One is not host:port, or must not be called in plain text.
        """
        for address in self._named:
            self.client_of(address)

    async def look(self) -> ClusterView:
        """Return the current view of all nodes, within `patience_s` for each step away from the named nodes.

        A node that does not answer in time is shown as it was before, with the delay (`Seen.late_s`). No look waits for it again
        until it has answered, so a hanging node does not delay the others.
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
            next_ones = next_ones[: max(0, MAX_NODES - len(asked))]  # all named nodes are asked, however many
        await self._forget_old(found)
        self._seen = found
        for address, seen in found.items():
            last = before.get(address)
            if last is not None and last.status is not None and last.at_s != seen.at_s:
                self._earlier[address] = last
        self._earlier = {address: seen for address, seen in self._earlier.items() if address in found}
        return view_of(_distinct(found.values()), self._earlier.values())

    def client_of(self, address: str) -> NodeClient:
        """Return a client of a node.

        Raises:
            ConfigError: The address is invalid, or must not be called in plain text.
        """
        if address not in self._clients:
            self._clients[address] = NodeClient(address, security=self._security)
        return self._clients[address]

    async def _ask_all(self, addresses: Sequence[str]) -> list[Seen]:
        """Return the new or the last answer of each node."""
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
        """Return the answer to the last question, or the earlier one if there is none yet."""
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
    """Return each node once, also if it has several addresses, sorted by role."""
    lives: set[int] = set()
    kept: list[Seen] = []
    for node in nodes:
        if node.incarnation and node.incarnation in lives:
            continue
        lives.add(node.incarnation)
        kept.append(node)
    return sorted(kept, key=lambda node: (node.role != "prefill", node.role != "decode", node.address))
