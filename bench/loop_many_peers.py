"""The cases of `bench.loop` with 256 peers over real gRPC: a decode rank's writers, and a decode leader's prefill nodes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from bench.loop_models import CONTEXT_TOKENS
from bench.loop_peers import LAYOUT, instance
from bench.loop_turns import Watch
from bench.timing import ROOT
from decode_node.admission import Admission, page_needs
from decode_node.offload.tiers import Tiers
from decode_node.requests import DecodeRequests, GenerationObserver
from transfer.config import ConnectorConfig, DecodeLimitsConfig, SpeculativeConfig, TlsConfig
from transfer.connector.attempt import IncomingObserver
from transfer.connector.prefill_nodes import PrefillNodes
from transfer.connector.rank_report import RankReady
from transfer.engine_types import SamplingParams
from transfer.errors import PeerUnreachable
from transfer.instance import AttachRequest, AttachResponse
from transfer.layer_groups import PageCounts, layer_groups
from transfer.metrics import NodeMetrics
from transfer.registry.security import PlainText
from transfer.registry.server import TransferControlServicer, serve
from transfer.ring import Grant, Watermark

NUM_PEERS: Final = 256
NUM_PLACED: Final = 32
DEADLINE_S: Final = 60.0
RING_BYTES: Final = 2 << 30
DECODE_LIFE: Final = 5


@contextlib.asynccontextmanager
async def _others(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The other side's process, and the first line that it prints."""
    command = (sys.executable, "-m", "bench.loop_peers", *arguments)
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line, f"{' '.join(command)} has ended"
        yield process, line.strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.01)


def writers(watch: Watch, *, number: int = NUM_PEERS) -> None:
    """A decode rank's 256 sessions: heartbeats, acks to all of them again and again, one lost, all lost.

    Real: the rank's gRPC server and `TransferControlServicer`, 256 connections to another process. No machine, no data plane.
    """

    async def main() -> None:
        lost: list[int] = []
        ids = iter(range(1, 1 << 20))

        async def attach(request: AttachRequest) -> AttachResponse:
            return AttachResponse(
                session_id=next(ids),
                decode=instance(DECODE_LIFE, tp_size=1),
                decode_rank=0,
                answer=b"answer",
                ring_capacity_bytes=RING_BYTES,
                control_address="tcp://127.0.0.1:1",
                heartbeat_s=0.5,
                protocol_version=max(request.prefill.protocol_versions),
                probe_bytes=4096,
                control_key=bytes(32),
            )

        def watermark(sequence: int) -> Watermark:
            position = 4096 * sequence
            spans = tuple(Grant(position + 1024 * step + 256, position + 1024 * step + 512) for step in range(64))
            return Watermark(incarnation=DECODE_LIFE, sequence=sequence, position=position, released=spans)

        servicer = TransferControlServicer(
            watermark=watermark(1),
            ring_capacity_bytes=RING_BYTES,
            on_attach=attach,
            on_session_lost=lambda session, reason: lost.append(session),
            max_sessions=number,
        )
        server = await serve("127.0.0.1", 0, transfer_control=servicer)
        watch.start()
        async with _others("writers", server.address, str(number)) as (process, _):
            for sequence in range(2, 52):
                servicer.publish(watermark(sequence))
                await asyncio.sleep(0.02)
            servicer.close_session(servicer.session_ids[0], "its data plane broke")
            process.kill()
            await _until(lambda: len(lost) >= number)
        await server.close()

    watch.run(main)


def prefill_nodes(watch: Watch, *, number: int = NUM_PEERS) -> None:
    """A decode leader's 256 prefill nodes: all are joined at once, tell of themselves, get a prompt each, and are lost at once.

    Real: `PrefillNodes` and its gRPC calls to another process, which serves all of them.
    """

    async def main() -> None:
        async with _others("prefill-nodes", str(number)) as (process, ports):
            peers = _peers(ports.split())
            watch.start()
            peers.start()
            await _until(lambda: all(peer.state == "joined" for peer in peers.peers))
            await asyncio.sleep(1.0)  # two heartbeats of each
            for request in range(number):
                tokens = tuple(range(request, request + 1024))
                peer = peers.pick(token_ids=tokens)
                assert peer is not None
                peers.begin(peer, tokens)
                await asyncio.sleep(0)
            process.kill()
            await _until(lambda: not any(peer.state == "joined" for peer in peers.peers))
            peers.unavailable_reason()
            await asyncio.sleep(1.0)  # each is tried again
            await peers.close()

    watch.run(main)


def placed_together(watch: Watch, *, number: int = NUM_PLACED, num_tokens: int = CONTEXT_TOKENS) -> None:
    """Long prompts that waited for a prefill node are sent to the first that is joined.

    Real: `DecodeRequests`, `PrefillNodes` and their gRPC calls to another process, which refuses the prompts.
    """

    async def main() -> None:
        async with _others("prefill-nodes", "2") as (_, ports):
            peers = _peers(ports.split())
            groups = layer_groups(LAYOUT)
            pool = PageCounts((2 * number * num_tokens,))
            outcomes: list[str] = []
            requests = DecodeRequests(
                tiers=Tiers(Admission(pool_pages=pool, needs=page_needs(groups, 16), max_running=number)),
                peers=peers,
                text=_NoText(),  # type: ignore[arg-type]  # nothing is generated
                own=instance(DECODE_LIFE, tp_size=1),
                speculative=SpeculativeConfig(),
                limits=DecodeLimitsConfig(
                    max_queued_requests=number,
                    queue_timeout_s=DEADLINE_S,
                    join_timeout_s=DEADLINE_S,
                    step_timeout_s=DEADLINE_S,
                    prefill_retries=0,
                ),
                broadcast=lambda message: None,
                on_broken=lambda reason: None,
                observer=IncomingObserver(
                    on_outcome=outcomes.append, on_queue_seconds=lambda seconds: None, on_retry=lambda: None
                ),
                generation=GenerationObserver(on_first_token=lambda seconds: None, on_token=lambda seconds: None),
            )
            for request in range(number):
                tokens = tuple(range(request, request + num_tokens))
                requests.submit(f"request {request}", tokens, 1, SamplingParams(), frozenset())
            watch.start()
            peers.start()
            await _until(lambda: len(peers.peers) == sum(peer.state == "joined" for peer in peers.peers))
            requests.transfers.peers_changed()
            await _until(lambda: len(outcomes) == number)
            await requests.close(PeerUnreachable("the bench is over"))
            await peers.close()

    watch.run(main)


class _NoText:
    """Of a `TextCodec`."""

    def stream(self) -> _NoText:
        return self


def _peers(ports: Sequence[str]) -> PrefillNodes:
    return PrefillNodes(
        [f"127.0.0.1:{port}" for port in ports],
        config=ConnectorConfig(tls=TlsConfig(insecure=1)),
        hellos=[
            RankReady(
                rank=0,
                pid=0,
                instance=instance(DECODE_LIFE, tp_size=1),
                pool_pages=(1,),
                max_context_tokens=CONTEXT_TOKENS,
                vocab_size=1 << 32,
                address="127.0.0.1:2",
                ring_bytes=RING_BYTES,
            )
        ],
        security=PlainText(),
        decode_address="127.0.0.1:1",
        metrics=NodeMetrics(role="decode"),
        broadcast=lambda message: None,
        on_lost=lambda peer, reason: None,
        prefix_tokens=4096,
    )
