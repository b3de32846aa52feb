"""A decode rank's worker between a leader and a receiver that are both the test's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from decode_node.worker import DecodeWorker
from node_runtime.rank_worker import RankSpec
from tests.runtime.instances import decode_config
from transfer.layout import Range
from transfer.piece import RankRequest, TransferTerms
from transfer.pool.page_allocator import GroupAllocator
from transfer.receive.attach import Unattached


class Receiver:
    """A `ReceiverLoop` that receives nothing by itself: requests are expected, and after a cancel they drain."""

    num_requests = 0
    is_idle = True

    def __init__(self, *, knows_all: bool = False) -> None:
        self.expected: list[RankRequest] = []
        self.receiving: set[str] = set()
        self.draining: list[str] = []
        self.held: dict[str, Range | None] = {}
        self._knows_all = knows_all

    def is_known(self, request_id: str) -> bool:
        return self._knows_all

    def expect_request(self, request: RankRequest) -> None:
        self.expected.append(request)
        self.receiving.add(request.request_id)

    def hold(self, request_id: str, tokens: Range | None) -> None:
        self.held[request_id] = tokens

    def cancel_request(self, request_id: str, reason: str) -> bool:
        self.receiving.discard(request_id)
        self.draining.append(request_id)
        return True

    def check_idle(self) -> None:
        pass


def new_worker(
    *,
    rank: int = 0,
    thread: object,
    send: Callable[[object], None],
) -> DecodeWorker:
    loop: Any = SimpleNamespace()
    spec = SimpleNamespace(rank=rank, config=decode_config(Path("model")))
    return DecodeWorker(
        cast(RankSpec, spec), cast(Any, SimpleNamespace(send=send)), loop, cast(Any, SimpleNamespace(thread=thread))
    )


def use(
    worker: DecodeWorker,
    *,
    engine: object,
    allocator: GroupAllocator,
    receiver: Receiver,
    writers: TransferTerms | Unattached,
    offload: object = None,
    reader: object = None,
) -> None:
    """Give the worker its parts; `writers` send every request."""
    worker.use(
        engine=cast(Any, engine),
        allocator=allocator,
        receiver=cast(Any, receiver),
        sessions=cast(Any, SimpleNamespace(writers_of=lambda incarnation: writers, on_message=lambda message: False)),
        offload=cast(Any, offload),
        reader=cast(Any, reader),
    )
