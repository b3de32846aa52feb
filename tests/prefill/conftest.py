from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node_runtime.daemon import Daemon, NodeState
from prefill_node.node import PrefillNode
from prefill_node.requests import PrefillRequests
from tests.decode.leader_world import turns
from tests.decode.local_nodes import LocalContext
from tests.runtime.instances import hello, instance, prefill_config
from transfer.connector.decode_instances import DecodeInstances, Join
from transfer.connector.messages import DecodeAttached
from transfer.errors import PeerUnreachable
from transfer.pb import kvferry_pb2 as pb

DAEMON = cast(Daemon, SimpleNamespace(state=NodeState.READY, other_config=None, readiness_changed=lambda: None))


class Leader:
    """A prefill leader with one rank, which is the test.

    Args:
        folder: For its files.
        decode_address: Of the decode leaders that join. Nobody answers there. If it refused connections, a request for
            them would end at some moment.
    """

    def __init__(self, folder: Path, decode_address: str) -> None:
        self.node = PrefillNode(DAEMON, prefill_config(folder))
        self._decode_address = decode_address

    @property
    def requests(self) -> PrefillRequests:
        assert self.node.life is not None
        return self.node.life.requests

    @property
    def joins(self) -> DecodeInstances:
        assert self.node.life is not None
        return self.node.life.joins

    async def joined(self, number: int, address: str | None = None) -> Join:
        opening = asyncio.ensure_future(self.joins.open(instance(100 + number), address or self._decode_address, ("rank:1",)))
        await turns()
        self.node.ranks.on_message(0, DecodeAttached(join=number, incarnation=100 + number, links=()))
        return await opening

    def prefill(self, context: object = None, **fields: Any) -> asyncio.Task[pb.PrefillEvent]:
        """Call the node with the prompt "a" of two tokens, for the decode instance that joined first."""
        question = pb.PrefillRequest(**{"request_id": "a", "token_ids": (1, 2), "decode_incarnation": 101, **fields})
        question.sampling.temperature = 0.0
        call = self.node.Prefill(question, cast(Any, context or LocalContext()))
        return asyncio.ensure_future(anext(aiter(call)))


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[Leader]:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = Leader(tmp_path, f"127.0.0.1:{silent.getsockname()[1]}")
        await one.node.begin_life((hello(0),))
        yield one
        await one.node.end_life(PeerUnreachable("the test is over"))
