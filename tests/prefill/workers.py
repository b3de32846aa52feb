"""A prefill rank's worker between a leader and a sender that are both the test's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from node_runtime.rank_worker import RankSpec
from prefill_node.prefix_loader import PrefixLoader
from prefill_node.rank_messages import StartRequest
from prefill_node.worker import PrefillWorker
from tests.runtime.instances import prefill_config
from transfer.chunk import ChunkPlan
from transfer.engine_types import SamplingParams
from transfer.instance import Instance
from transfer.piece import RankRequest
from transfer.pool.page_allocator import GroupAllocator
from transfer.send.attach import DecodePeer


class Sender:
    """A `SenderLoop` that sends nothing: it remembers its requests, and calls `on_chunk` for each computed chunk."""

    num_requests = 0

    def __init__(self, on_chunk: Callable[[str, int], None]) -> None:
        self.started: list[RankRequest] = []
        self.aborted: list[str] = []
        self._on_chunk = on_chunk

    def start_request(self, request: RankRequest) -> None:
        self.started.append(request)

    def chunk_computed(self, request_id: str, chunk: int, event: object) -> None:
        self._on_chunk(request_id, chunk)

    def abort_request(self, request_id: str, reason: str) -> None:
        self.aborted.append(request_id)

    def check_idle(self) -> None:
        pass


def decode_peer(decode: Instance, **fields: Any) -> DecodePeer:
    """The instance as a prefill rank is attached to it; without routes, unless `fields` has them."""
    agreed = {"layout": decode.layout, "wire_dtype": decode.layout.dtype, "digest": "xxh3-64", "scales": None, "routes": ()}
    return DecodePeer(join=1, instance=decode, **agreed | fields)


def new_worker(
    *,
    thread: object,
    send: Callable[[object], None],
    engine: object,
    allocator: GroupAllocator,
    sender: Sender,
    peer: Callable[[], DecodePeer | None],
    loader: PrefixLoader | None = None,
    loop: object = None,
    crash: Callable[[BaseException], None] | None = None,
) -> PrefillWorker:
    """A worker with its parts.

    Args:
        thread: The engine's thread.
        send: Called with each message to the leader.
        peer: Returns the decode instance that is attached.
        loop: Runs loads; a worker without a loader needs none.
        crash: Called with the error that would end the rank's process.
    """
    spec = SimpleNamespace(rank=0, config=prefill_config(Path("model")))
    link = SimpleNamespace(send=send)
    rank_engine = SimpleNamespace(thread=thread, crash=crash)
    worker = PrefillWorker(cast(RankSpec, spec), cast(Any, link), cast(Any, loop), cast(Any, rank_engine))
    worker.use(
        engine=cast(Any, engine),
        allocator=allocator,
        sender=cast(Any, sender),
        sessions=cast(Any, SimpleNamespace(of=lambda incarnation: peer())),
        loader=loader,
    )
    return worker


def start_request(
    transfer_id: str, plan: ChunkPlan, num_tokens: int, *, decode_incarnation: int, start_token: int = 0
) -> StartRequest:
    return StartRequest(
        transfer_id=transfer_id,
        decode_incarnation=decode_incarnation,
        num_tokens=num_tokens,
        start_token=start_token,
        plan=plan,
        sampling=SamplingParams(),
    )
