"""HTTP server of a node with a synthetic status, in a thread, for tests of the status page."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from node_runtime.cluster_view import Seen
from node_runtime.health import HealthServer, Readiness
from node_runtime.status_page import Picture, StatusPage
from transfer.pb import kvferry_pb2 as pb

PREFILL_INCARNATION, DECODE_INCARNATION = 0x1111, 0x2222


def decode_status(*, reason: str = "", watermark: int = 0, live: int = 0) -> pb.NodeStatus:
    pools = [pb.PoolStatus(group="full", pages=200, reserved=20, bound=50)]
    return pb.NodeStatus(
        role="decode",
        state="ready",
        ready=not reason,
        not_ready_reason=reason,
        version="0.2.0",
        uptime_s=3700,
        running_requests=2,
        instance=pb.InstanceInfo(incarnation=DECODE_INCARNATION, transport="ucx", shard=pb.ShardInfo(tp_size=2, page_size=32)),
        ranks=[
            pb.RankStatus(
                rank=rank, pools=pools, ring_capacity=1 << 20, ring_live_bytes=live, watermark_position=watermark + (7 << 20)
            )
            for rank in range(2)
        ],
        peers=[
            pb.PeerStatus(address="127.0.0.1:7001", incarnation=PREFILL_INCARNATION, state="joined", breaker="closed"),
            pb.PeerStatus(address="127.0.0.1:7002", state="lost", reason=reason or "gone", breaker="open", breaker_reason="gone"),
        ],
        links=[
            pb.LinkStatus(
                prefill_rank=0, decode_rank=rank, lane="ucx/shm", latency_s=1e-4, bandwidth_bytes_per_s=(2 - rank) * 3e9,
                peer_incarnation=PREFILL_INCARNATION,
            )
            for rank in range(2)
        ],
    )  # fmt: skip


def prefill_status() -> pb.NodeStatus:
    return pb.NodeStatus(
        role="prefill",
        state="draining",
        version="0.2.0",
        instance=pb.InstanceInfo(incarnation=PREFILL_INCARNATION, transport="ucx", shard=pb.ShardInfo(tp_size=1, page_size=16)),
        ranks=[pb.RankStatus(rank=0, staging_slots=8, staging_slots_used=2)],
    )


REQUESTS: Final = [
    pb.RequestStatus(request_id="tenant-7/alice", transfer_id="tenant-7/alice.0f", stage="receiving", prompt_tokens=900,
                     ranks_done=1),
    pb.RequestStatus(request_id="b", stage="generating", prompt_tokens=80, generated_tokens=16, max_new_tokens=64, age_s=3.25),
    pb.RequestStatus(request_id="c", stage="queued", prompt_tokens=8),
]  # fmt: skip


class Served:
    """HTTP server of a node, in a thread. It serves the status in `picture`."""

    def __init__(self) -> None:
        self.picture = Picture(address="127.0.0.1:7003", status=pb.NodeStatus(), requests=pb.ListRequestsResponse())
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._servers: list[HealthServer] = []

    def start(self) -> None:
        self._thread.start()

    def serve(
        self,
        *,
        shows_request_ids: bool = False,
        has_page: bool = True,
        host_names: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> str:
        """Start another server of the same node; return its URL."""
        page = StatusPage(self._picture, shows_request_ids=shows_request_ids, clock=clock) if has_page else None
        server = HealthServer(lambda: Readiness(is_ready=True), lambda: (), page=page, host_names=host_names)
        self._servers.append(server)
        port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0), self._loop).result(10)
        return f"http://127.0.0.1:{port}/"

    def stop_serving(self) -> None:
        for server in self._servers:
            asyncio.run_coroutine_threadsafe(server.stop(), self._loop).result(10)
        self._servers = []

    def end(self) -> None:
        self.stop_serving()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _picture(self) -> Picture:
        return self.picture

    def set_status(self, status: pb.NodeStatus, requests: list[pb.RequestStatus], *others: Seen) -> None:
        self.picture = Picture(
            address="127.0.0.1:7003",
            status=status,
            requests=pb.ListRequestsResponse(requests=requests, total=len(requests)),
            others={other.address: other for other in others},
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    one = Served()
    one.start()
    yield one
    one.end()


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    yield server
    server.stop_serving()


def read(url: str) -> tuple[int, bytes, dict[str, str]]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)
