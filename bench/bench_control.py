"""The control plane: chunks a second, and the round trip grant -> ready -> ack, with a data plane that takes no time.

    python -m bench.bench_control [--json FILE] [--quick]

"one process" is the protocol alone: both state machines and every message encoded and decoded, no sockets. "two processes" is
what ranks have between them: control messages over ZeroMQ, watermark acks over the gRPC stream, one event loop each.

Throughput: requests of `CHUNKS` chunks, a few at a time; in one process also many at a time, which must cost no more a chunk.
Round trip: one request of one chunk at a time, from its GrantRequest to the ack that shows its grant released, so a request, a
grant, a ready and an ack, with nothing else in the way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

from bench.timing import Report, argument_parser
from decode_node import receiver_events as rx
from decode_node.receiver import Receiver
from node_runtime.event_pump import EventPump
from prefill_node import sender_events as tx
from prefill_node.sender import Sender
from transfer.chunk import ChunkPlan
from transfer.control.zmq_channel import ZmqControlClient, ZmqControlServer
from transfer.instance import AttachRequest, AttachResponse, Instance
from transfer.layout import DType, KVLayout, Shard, routes
from transfer.messages import PROTOCOL_VERSIONS, decode, encode
from transfer.registry.client import TransferControlClient
from transfer.registry.server import TransferControlServicer, serve
from transfer.ring import StagingAllocator

LAYOUT = KVLayout.uniform(num_layers=8, num_kv_heads=12, head_dim=32, dtype=DType.FLOAT16)
PLAN = ChunkPlan(chunk_tokens=64)
(ROUTE,) = routes(LAYOUT, Shard(), Shard())
CHUNK_BYTES = 64 * 12 * 32 * 2 * 2 * 8
RING_BYTES = 64 * CHUNK_BYTES
CHUNKS = 32
ROUNDS = tuple(f"round{number}" for number in range(5))
IN_FLIGHT = 8
MANY_IN_FLIGHT = 256  # with grants for 2,048 chunks, of which the ring holds 64
SESSION = 7
DECODE_LIFE = 22
PREFILL_LIFE = 11
TARGET_CHUNKS_PER_S = 1_500
TARGET_ROUND_TRIP_S = 0.002
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Seconds per chunk at full load, one sample per round; seconds of each round trip."""

    chunk_s: list[float]
    round_trip_s: list[float]


def outgoing(request_id: str, num_chunks: int) -> tx.OutgoingRequest:
    return tx.OutgoingRequest(
        request_id=request_id,
        layout=LAYOUT,
        plan=PLAN,
        wire_dtype=LAYOUT.dtype,
        num_tokens=num_chunks * PLAN.chunk_tokens,
        start_token=0,
        routes=(tx.OutgoingRoute(route=ROUTE, session=SESSION),),
    )


def incoming(request_id: str, num_chunks: int) -> rx.IncomingRequest:
    return rx.IncomingRequest(
        request_id=request_id,
        layout=LAYOUT,
        plan=PLAN,
        wire_dtype=LAYOUT.dtype,
        num_tokens=num_chunks * PLAN.chunk_tokens,
        start_token=0,
        routes=(rx.IncomingRoute(route=ROUTE, session=SESSION),),
    )


def request_names(kind: str, number: int) -> list[str]:
    return [f"{kind}-{index}" for index in range(number)]


class Writer:
    """A sender whose gathers and writes take no time, and the requests that it is given."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[bytes], object]) -> None:
        self._loop = loop
        self._send = send
        self._machine = Sender(tx.SenderSettings(num_slots=8, grants_ahead=8), incarnation=PREFILL_LIFE)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self.pump: EventPump[tx.Event, tx.Action] = EventPump(
            loop, handle=self._machine.handle, carry_out=self._carry_out, is_idle=lambda: self._machine.is_idle, tick=tx.Tick()
        )
        self.pump.feed(tx.SessionOpened(session=SESSION, incarnation=DECODE_LIFE, ring_capacity_bytes=RING_BYTES))

    async def move(self, request_id: str, num_chunks: int) -> None:
        """Send a request; returns when every grant came back released."""
        self._waiting[request_id] = self._loop.create_future()
        self.pump.feed(tx.RequestStarted(request=outgoing(request_id, num_chunks)))
        for chunk in range(num_chunks):
            self.pump.feed(tx.ChunkComputed(request_id=request_id, chunk=chunk))
        await self._waiting[request_id]

    def on_payload(self, payload: bytes) -> None:
        self.pump.feed(tx.MessageArrived(session=SESSION, message=decode(payload)))

    def _carry_out(self, action: tx.Action) -> None:
        match action:
            case tx.Send():
                self._send(encode(action.message))
            case tx.StartGather():
                self.pump.feed(tx.GatherFinished(slot=action.slot, digest=1))
            case tx.StartWrite():
                self.pump.feed(tx.WriteFinished(slot=action.slot))
            case tx.RequestSent():
                self._waiting.pop(action.request_id).set_result(None)
            case tx.RequestFailed() | tx.CloseSession() | tx.MessageDropped():
                raise RuntimeError(f"the benchmark's writer failed: {action}")
            case _:
                pass


class Target:
    """A receiver whose scatters take no time, and which expects whatever it is told to."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, send: Callable[[bytes], object], publish: Callable[[StagingAllocator], object]
    ) -> None:
        self._send = send
        self._publish = publish
        self.ring = StagingAllocator(RING_BYTES, incarnation=DECODE_LIFE)
        self._machine = Receiver(rx.ReceiverSettings(is_one_sided=True), self.ring)
        self.pump: EventPump[rx.Event, rx.Action] = EventPump(
            loop, handle=self._machine.handle, carry_out=self._carry_out, is_idle=lambda: True, tick=rx.Tick()
        )
        self.pump.feed(rx.SessionOpened(session=SESSION, incarnation=PREFILL_LIFE))

    def expect(self, request_ids: list[str], num_chunks: int) -> None:
        for request_id in request_ids:
            self.pump.feed(rx.RequestExpected(request=incoming(request_id, num_chunks)))

    def on_payload(self, payload: bytes) -> None:
        self.pump.feed(rx.MessageArrived(session=SESSION, message=decode(payload)))

    def _carry_out(self, action: rx.Action) -> None:
        match action:
            case rx.Send():
                self._send(encode(action.message))
            case rx.StartScatter():
                self.pump.feed(rx.ScatterFinished(grant=action.grant, is_intact=True))
            case rx.PublishWatermark():
                self._publish(self.ring)
            case rx.RequestFailed() | rx.CloseSession() | rx.MessageDropped():
                raise RuntimeError(f"the benchmark's target failed: {action}")
            case _:
                pass


async def sample_writer(writer: Writer, *, num_requests: int, num_round_trips: int, num_in_flight: int = IN_FLIGHT) -> Samples:
    """Warm up, then move `num_requests` in each round, then `num_round_trips` one by one."""
    await move_all(writer, request_names("warm", num_in_flight), num_in_flight)
    chunk_s: list[float] = []
    for round_name in ROUNDS:
        started = time.perf_counter()
        await move_all(writer, request_names(round_name, num_requests), num_in_flight)
        chunk_s.append((time.perf_counter() - started) / (num_requests * CHUNKS))
    round_trip_s: list[float] = []
    for request_id in request_names("one", num_round_trips):
        started = time.perf_counter()
        await writer.move(request_id, 1)
        round_trip_s.append(time.perf_counter() - started)
        await asyncio.sleep(0.001)
    return Samples(chunk_s=chunk_s, round_trip_s=round_trip_s)


async def move_all(writer: Writer, request_ids: list[str], num_in_flight: int) -> None:
    """Move the requests, `num_in_flight` at a time."""
    left = deque(request_ids)

    async def one_after_another() -> None:
        while left:
            await writer.move(left.popleft(), CHUNKS)

    await asyncio.gather(*(one_after_another() for _ in range(num_in_flight)))


def expect_all(target: Target, *, num_requests: int, num_round_trips: int, num_in_flight: int = IN_FLIGHT) -> None:
    target.expect(request_names("warm", num_in_flight), CHUNKS)
    for round_name in ROUNDS:
        target.expect(request_names(round_name, num_requests), CHUNKS)
    target.expect(request_names("one", num_round_trips), 1)


async def run_one_process(*, num_requests: int, num_round_trips: int, num_in_flight: int = IN_FLIGHT) -> Samples:
    """Both machines on one loop; what one sends is handled by the other in a later turn of the loop."""
    loop = asyncio.get_running_loop()
    writer = Writer(loop, lambda payload: loop.call_soon(target.on_payload, payload))

    def publish(ring: StagingAllocator) -> None:
        loop.call_soon(writer.pump.feed, tx.WatermarkArrived(session=SESSION, watermark=ring.watermark()))

    target = Target(loop, lambda payload: loop.call_soon(writer.on_payload, payload), publish)
    expect_all(target, num_requests=num_requests, num_round_trips=num_round_trips, num_in_flight=num_in_flight)
    return await sample_writer(writer, num_requests=num_requests, num_round_trips=num_round_trips, num_in_flight=num_in_flight)


def instance(incarnation: int) -> Instance:
    return Instance(
        incarnation=incarnation,
        layout=LAYOUT,
        shard=Shard(),
        transport="inproc",
        digests=("xxh3-64",),
        protocol_versions=PROTOCOL_VERSIONS,
    )


async def run_two_processes(*, num_requests: int, num_round_trips: int) -> Samples:
    """This process is the decode rank; the prefill rank is a child, which measures and prints its result."""
    loop = asyncio.get_running_loop()
    control = ZmqControlServer("tcp://127.0.0.1:0")
    target = Target(loop, lambda payload: control.send(SESSION, payload), lambda ring: servicer.publish(ring.watermark()))

    async def attach(request: AttachRequest) -> AttachResponse:
        control.allow(SESSION)
        return AttachResponse(
            session_id=SESSION,
            decode=instance(DECODE_LIFE),
            decode_rank=0,
            answer=b"none",
            ring_capacity_bytes=RING_BYTES,
            control_address=control.address,
            heartbeat_s=servicer.heartbeat_s,
            protocol_version=PROTOCOL_VERSIONS[-1],
            probe_bytes=1,
        )

    lost: list[str] = []
    servicer = TransferControlServicer(
        watermark=target.ring.watermark(),
        ring_capacity_bytes=RING_BYTES,
        on_attach=attach,
        on_session_lost=lambda _, reason: lost.append(reason),
    )
    control.watch(loop, lambda received: target.on_payload(received.payload))
    server = await serve("127.0.0.1", 0, transfer_control=servicer)
    expect_all(target, num_requests=num_requests, num_round_trips=num_round_trips)
    command = [sys.executable, "-m", "bench.bench_control", "--writer", server.address]
    command += ["--requests", str(num_requests), "--round-trips", str(num_round_trips)]
    child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        output, _ = await asyncio.wait_for(child.communicate(), DEADLINE_S)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        servicer.close("the benchmark is over")
        control.close()
        await server.close()
    if child.returncode != 0:
        raise RuntimeError(f"the writer process exited with {child.returncode}; session lost: {lost}")
    return Samples(**json.loads(output))


async def run_writer(address: str, *, num_requests: int, num_round_trips: int) -> Samples:
    """The child: attach, then measure."""
    loop = asyncio.get_running_loop()
    client = TransferControlClient(address)
    request = AttachRequest(prefill=instance(PREFILL_LIFE), prefill_rank=0, offer=b"none", chunk_plan=PLAN, probe_bytes=1)
    attached = await client.attach(request, timeout_s=10.0)
    control = ZmqControlClient(attached.control_address, session_id=attached.session_id)
    writer = Writer(loop, control.send)
    control.watch(loop, writer.on_payload)
    watch = client.watch(
        attached.session_id,
        ring_capacity_bytes=attached.ring_capacity_bytes,
        heartbeat_s=attached.heartbeat_s,
        on_watermark=lambda watermark: writer.pump.feed(tx.WatermarkArrived(session=SESSION, watermark=watermark)),
        on_lost=lambda reason: sys.exit(f"the session was lost: {reason}"),
    )
    try:
        return await sample_writer(writer, num_requests=num_requests, num_round_trips=num_round_trips)
    finally:
        watch.close()
        await watch.wait_closed()
        control.close()
        await client.close()


def measure(*, is_quick: bool) -> Report:
    """All rows; a chunk's median is one over the chunks a second."""
    report = Report(
        title=f"Control plane (two processes: at least {TARGET_CHUNKS_PER_S:,} chunks a second, "
        f"round trip p50 below {TARGET_ROUND_TRIP_S * 1e3:g} ms)"
    )
    num_requests, num_round_trips = (8, 50) if is_quick else (64, 1000)
    for where, play in (("one process", run_one_process), ("two processes", run_two_processes)):
        samples = asyncio.run(play(num_requests=num_requests, num_round_trips=num_round_trips))
        chunk = report.add(where, f"chunk, {IN_FLIGHT} requests in flight", samples.chunk_s)
        report.add(where, "grant, ready, ack of one chunk", samples.round_trip_s)
        if play is run_one_process:
            num_many = MANY_IN_FLIGHT // 8 if is_quick else MANY_IN_FLIGHT
            many = asyncio.run(run_one_process(num_requests=num_many, num_round_trips=1, num_in_flight=num_many))
            report.add(where, f"chunk, {num_many} requests in flight", many.chunk_s, against=chunk)
    return report


def main() -> None:
    parser = argument_parser("chunks a second and round trip of the control plane")
    parser.add_argument("--writer", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--round-trips", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.writer:
        sizes = {"num_requests": arguments.requests, "num_round_trips": arguments.round_trips}
        print(json.dumps(asdict(asyncio.run(run_writer(arguments.writer, **sizes)))))
    else:
        measure(is_quick=arguments.quick).finish(arguments.json)


if __name__ == "__main__":
    main()
