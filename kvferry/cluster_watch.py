"""Asks every node of a cluster how it is: those that were named, and those that these name as their peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Self

from kvferry.cluster_view import ClusterView, Seen, view_of
from kvferry.node_client import NodeClient
from transfer.errors import RemoteProtocolError, TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.security import Security

MAX_NODES: Final = 256
ANSWER_S: Final = 3.0
REMEMBERED_S: Final = 30.0
"""A node that nobody names any more, and that does not answer, is shown for so long."""


class ClusterWatch:
    """Owned by one loop. Use it as an async context manager.

    Args:
        addresses: host:port of nodes of either role; at least one.
        security: How they, and whom they name, are called; None: in plain text on loopback addresses.
        answer_s: Longest wait for a node.
    """

    def __init__(self, addresses: Sequence[str], *, security: Security | None = None, answer_s: float = ANSWER_S) -> None:
        self._named = tuple(dict.fromkeys(addresses))
        self._security = security
        self._answer_s = answer_s
        self._clients: dict[str, NodeClient] = {}
        self._seen: dict[str, Seen] = {}  # the newest of each address
        self._answered_s: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    def check_named(self) -> None:
        """Whether the addresses that were given can be called at all.

        Raises:
            ConfigError: One is no host:port, or must not be called in plain text.
        """
        for address in self._named:
            self.client_of(address)

    async def look(self) -> ClusterView:
        """All nodes now; takes `answer_s` a step away from the named ones at most, and answers of milliseconds as a rule."""
        before = self._seen
        found: dict[str, Seen] = {}
        asked: set[str] = set()
        next_ones = [*self._named, *(address for address in before if address not in self._named)]
        while next_ones:
            asked.update(next_ones)
            for seen in await asyncio.gather(*(self._ask(address) for address in next_ones)):
                found[seen.address] = seen
            named = (peer.address for seen in found.values() if seen.status is not None for peer in seen.status.peers)
            next_ones = [address for address in dict.fromkeys(named) if address not in asked][: MAX_NODES - len(asked)]
        await self._forget_old(found)
        self._seen = found
        return view_of(_distinct(found.values()), before)

    def client_of(self, address: str) -> NodeClient:
        """To call a node that was seen.

        Raises:
            ConfigError: The address is none, or must not be called in plain text.
        """
        if address not in self._clients:
            self._clients[address] = NodeClient(address, security=self._security)
        return self._clients[address]

    async def _ask(self, address: str) -> Seen:
        try:
            client = self.client_of(address)
            status, requests = await asyncio.gather(client.status(timeout_s=self._answer_s), self._requests(client))
        except TransferError as error:
            return Seen(address=address, error=" ".join(str(error).split()), at_s=time.monotonic())
        self._answered_s[address] = time.monotonic()
        return Seen(address=address, status=status, requests=requests, at_s=time.monotonic())

    async def _requests(self, client: NodeClient) -> tuple[pb.RequestStatus, ...]:
        """In flight; none of a node that cannot tell: of version 0.1, or hosted by an engine."""
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
