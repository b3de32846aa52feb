from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvferry.engines.connector import PREFILL, Sides
from kvferry.engines.connector_rank import CODEC
from node_runtime.loop_thread import LoopThread
from node_runtime.rank_link import Inbox
from tests.connector.instances import Instance, target

Start = Callable[..., Instance]
Pair = Callable[..., tuple[Instance, Instance]]


@pytest.fixture(scope="module", autouse=True)
def loop_thread() -> Iterator[None]:
    """One loop for the tests of a file: gRPC has one poller in a process, which stumbles over calls of a closed loop."""
    thread = LoopThread.shared()
    yield
    thread.release()


@pytest.fixture(scope="module", autouse=True)
def messages_that_can_travel() -> Iterator[None]:
    """Leader and ranks share a process here and pass objects. Between processes, each message is encoded and checked."""
    put = Inbox.put

    def checked(self: Inbox, message: object, *sender: int) -> bool:
        CODEC.decode(CODEC.encode(message))
        return put(self, message, *sender)

    Inbox.put = checked  # type: ignore[method-assign]
    yield
    Inbox.put = put  # type: ignore[method-assign]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an instance, and closes it at the end of the test."""
    with ExitStack() as stack:

        def begin(sides: Sides, **said: Any) -> Instance:
            instance = Instance(sides, **said)
            stack.callback(instance.close)
            return instance

        yield begin


@pytest.fixture
def pair(start: Start) -> Iterator[Pair]:
    """Starts a prefill side and a decode side that has joined it."""
    with ExitStack() as stack:

        def begin(source: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> tuple[Instance, Instance]:
            first = start(PREFILL, **(source or {}))
            second = target(first, **(decode or {}))
            stack.callback(second.close)
            return first, second

        yield begin
