"""The two ends of the control-plane benchmark: both protocol machines and all their messages, with a data plane of no time.

A `Writer` is a session's sending end, a `Target` the receiving end of them all. In one process what one sends is handled by the
other in a later turn of the loop; between two processes control messages travel over ZeroMQ and watermark acks over gRPC, as
between ranks. The process of the writers measures, and reads what the target's process used from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from node_runtime.process_setup import raise_open_files
from transfer.chunk import ChunkPlan
from transfer.config import TlsConfig
from transfer.control.session_channel import SessionControlServer, open_session_client
from transfer.control.zmq_authenticator import new_key_pair
from transfer.copy.digest import DIGEST_XXH3
from transfer.event_pump import EventPump
from transfer.instance import AttachRequest, AttachResponse, Instance
from transfer.layout import DType, KVLayout, Shard, routes
from transfer.messages import MAX_MESSAGE_BYTES, PROTOCOL_VERSIONS, GrantRequest, GrantsIssued, decode, encode
from transfer.piece import RankRequest, SessionRoute
from transfer.receive import events as rx
from transfer.receive.receiver import Receiver
from transfer.registry.certificates import CertificateFiles
from transfer.registry.client import TransferControlClient
from transfer.registry.heartbeat_timer import HeartbeatTimer
from transfer.registry.security import MutualTls, PlainText, Security
from transfer.registry.server import TransferControlServicer, serve
from transfer.ring import StagingAllocator, Watermark
from transfer.send import events as tx
from transfer.send.sender import Sender
from transfer.send.staging_arena import aligned

LAYOUT = KVLayout.uniform(num_layers=8, num_kv_heads=12, head_dim=32, dtype=DType.FLOAT16)
PLAN = ChunkPlan(chunk_tokens=64)
(ROUTE,) = routes(LAYOUT, Shard(), Shard())
CHUNK_BYTES = 64 * 12 * 32 * 2 * 2 * 8
GRANTS_AHEAD = 8
DECODE_LIFE = 22
PREFILL_LIFE = 1000
DEADLINE_S = 120.0
_NEVER_S = 1e6  # nothing is lost here, and a question that is repeated on a busy machine would only be counted twice


_TLS_NAME = "rank.example"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is moved between two processes.

    Args:
        num_peers: Sessions, which take turns.
        num_held: Grants that are live during the whole run: granted, and never computed. They are adjacent in the ring.
        num_gaps: Further such grants, each followed by a released grant, so that the ring has this number of released ranges.
        num_in_flight: Requests at a time.
        request_chunks: Chunks of a request.
        round_requests: Requests of each round.
        num_rounds: Rounds that are timed, after one that is not.
        num_round_trips: Requests of one chunk, one after another.
        idle_s: Seconds without any request before the first round, over which CPU time is measured.
        is_local: Whether control messages use a Unix socket. Otherwise they use TCP, as between machines.
        tls_folder: Where `make_certificates()` has written; empty: gRPC in plain text.
    """

    num_peers: int = 1
    num_held: int = 0
    num_gaps: int = 0
    num_in_flight: int = 8
    request_chunks: int = 32
    round_requests: int
    num_rounds: int
    num_round_trips: int = 0
    idle_s: float = 0.0
    is_local: bool = True
    tls_folder: str = ""

    @property
    def ring_chunks(self) -> int:
        """Few, so that the ring goes round; with held grants, which never make way, so many that it never does."""
        return 1 << 30 if self.num_held or self.num_gaps else 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Seconds of a chunk and CPU seconds of both ends for it, by round; seconds by round trip; resident bytes after each round.

    Attributes:
        resident_bytes: Of (writers' process, target's process), first before the first round.
        idle_cpu_s: CPU seconds in a second without requests of (writers' process, target's process).
        num_lost: Sessions that were lost.
    """

    chunk_s: list[float]
    cpu_s: list[float]
    round_trip_s: list[float]
    resident_bytes: list[tuple[int, int]]
    idle_cpu_s: tuple[float, float]
    num_lost: int


class Writer:
    """A sender whose gathers and writes take no time, and the requests that it is given."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, session: int, send: Callable[[bytes], object], *, ring_bytes: int, name: str
    ) -> None:
        self._loop = loop
        self.session = session
        self._send = send
        self._name = name
        self._numbers = itertools.count()
        self._machine = Sender(
            tx.SenderSettings(num_slots=8, slot_bytes=aligned(CHUNK_BYTES), grants_ahead=GRANTS_AHEAD, repeat_after_s=_NEVER_S),
            incarnation=life_of(session),
        )
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self.num_granted = 0
        self.asked_at_s = 0.0  # when a grant was last asked for
        self._pump: EventPump[tx.Event] = EventPump(
            loop,
            handle=self._machine.handle,
            carry_out=dict.fromkeys(get_args(tx.Action), self._carry_out),
            is_idle=lambda: self._machine.is_idle,
            tick=tx.Tick(),
        )
        self._pump.feed(tx.SenderSessionOpened(session=session, incarnation=DECODE_LIFE, ring_capacity_bytes=ring_bytes))

    async def move(self, num_chunks: int) -> None:
        """Send a request; returns when every grant came back released."""
        request_id = self._start(num_chunks)
        done = self._waiting[request_id] = self._loop.create_future()
        for chunk in range(num_chunks):
            self._pump.feed(tx.ChunkComputed(request_id=request_id, chunk=chunk))
        await done

    async def hold(self, num_grants: int) -> None:
        """Ask for grants of chunks that will not be computed; returns when they were given."""
        wanted = self.num_granted + num_grants
        for first in range(0, num_grants, GRANTS_AHEAD):
            self._start(min(GRANTS_AHEAD, num_grants - first))
        while self.num_granted < wanted:
            await asyncio.sleep(0.01)

    def _start(self, num_chunks: int) -> str:
        request_id = f"{self._name}-{next(self._numbers)}:{num_chunks}"
        routed = (SessionRoute(route=ROUTE, session=self.session),)
        self._pump.feed(tx.OutgoingStarted(request=RankRequest(**_request(request_id), routes=routed)))
        return request_id

    def on_payload(self, payload: bytes) -> None:
        message = decode(payload)
        if isinstance(message, GrantsIssued):
            self.num_granted += len(message.grants)
        self._pump.feed(tx.MessageArrived(session=self.session, message=message))

    @property
    def is_in_use(self) -> bool:
        return not self._machine.is_idle

    def on_watermark(self, watermark: Watermark) -> None:
        self._pump.feed(tx.WatermarkArrived(session=self.session, watermark=watermark))

    def close(self) -> None:
        self._pump.close()

    def _carry_out(self, action: tx.Action) -> None:
        match action:
            case tx.Send():
                if isinstance(action.message, GrantRequest):
                    self.asked_at_s = time.perf_counter()
                self._send(encode(action.message))
            case tx.StartGather():
                self._pump.feed(tx.GatherFinished(place=action.place, digest=1))
            case tx.StartWrite():
                self._pump.feed(tx.WriteFinished(place=action.place))
            case tx.OutgoingSent():
                done = self._waiting.pop(action.request_id)
                if not done.done():  # it is when nobody waits any more, because the measuring is over
                    done.set_result(None)
            case tx.OutgoingFailed() | tx.CloseSession() | tx.MessageDropped():
                raise RuntimeError(f"the benchmark's writer failed: {action}")
            case _:
                pass


class Target:
    """A receiver whose scatters take no time, and which expects every request that somebody asks grants for.

    Args:
        send: (session, payload) to a writer.
        publish: Tells the writers.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[int, bytes], object],
        publish: Callable[[Watermark, frozenset[int] | None], object],
        *,
        ring_bytes: int,
    ) -> None:
        self._loop = loop
        self._send = send
        self._publish = publish
        self._ahead: set[str] = set()  # requests that are expected, and that nobody has asked for
        self.ring = StagingAllocator(ring_bytes, incarnation=DECODE_LIFE)
        self._machine = Receiver(rx.ReceiverSettings(), self.ring)
        self._pump: EventPump[rx.Event] = EventPump(
            loop,
            handle=self._machine.handle,
            carry_out=dict.fromkeys(get_args(rx.Action), self._carry_out),
            is_idle=lambda: self._machine.is_idle,
            tick=rx.Tick(),
        )

    def sessions_in_use(self) -> set[int]:
        return self._machine.sessions_in_use

    def open(self, session: int) -> None:
        self._pump.feed(rx.ReceiverSessionOpened(session=session, incarnation=life_of(session), is_one_sided=False))

    def on_payload(self, session: int, payload: bytes) -> None:
        message = decode(payload)
        if isinstance(message, GrantRequest) and message.request_id not in self._ahead:
            if not self._machine.is_known(message.request_id):
                self._expect(session, message.request_id)
                self._loop.call_soon(self._expect_next, session, message.request_id)
        elif isinstance(message, GrantRequest):
            self._ahead.remove(message.request_id)
            self._loop.call_soon(self._expect_next, session, message.request_id)
        self._pump.feed(rx.MessageArrived(session=session, message=message))

    def _expect_next(self, session: int, request_id: str) -> None:
        """As a rule a request is expected before its writer asks, and what that takes is no part of the round trip."""
        name, number, size = re.split("[-:]", request_id)
        following = f"{name}-{int(number) + 1}:{size}"
        if not self._machine.is_known(following):
            self._expect(session, following)
            self._ahead.add(following)

    def _expect(self, session: int, request_id: str) -> None:
        routed = (SessionRoute(route=ROUTE, session=session),)
        self._pump.feed(rx.IncomingExpected(request=RankRequest(**_request(request_id), routes=routed)))

    def close(self) -> None:
        self._pump.close()

    def _carry_out(self, action: rx.Action) -> None:
        match action:
            case rx.Send():
                self._send(action.session, encode(action.message))
            case rx.PostReceive():
                self._pump.feed(rx.ReceiveSettled(grant=action.piece.grant, num_bytes=action.piece.num_bytes))
            case rx.StartScatter():
                self._pump.feed(rx.ScatterFinished(grant=action.piece.grant, is_intact=True))
            case rx.PublishWatermark():
                self._publish(self.ring.watermark(), action.sessions)
            case rx.IncomingFailed() | rx.CloseSession() | rx.MessageDropped():
                raise RuntimeError(f"the benchmark's target failed: {action}")
            case _:
                pass


def life_of(session: int) -> int:
    """The incarnation of the writer behind a session."""
    return PREFILL_LIFE + session


def _request(request_id: str) -> dict[str, Any]:
    """What both ends know of a request; its name ends in its number of chunks."""
    num_tokens = int(request_id.rpartition(":")[2]) * PLAN.chunk_tokens
    return {
        "request_id": request_id,
        "layout": LAYOUT,
        "plan": PLAN,
        "wire_dtype": LAYOUT.dtype,
        "digest": DIGEST_XXH3,
        "num_tokens": num_tokens,
        "start_token": 0,
    }


async def move_all(writers: Sequence[Writer], *, num_requests: int, num_chunks: int, num_in_flight: int) -> None:
    """Move requests, `num_in_flight` at a time, the writers taking turns."""
    left = deque(range(num_requests))

    async def one_after_another() -> None:
        while left:
            await writers[left.popleft() % len(writers)].move(num_chunks)

    await asyncio.gather(*(one_after_another() for _ in range(num_in_flight)))


async def cpu_of_a_chunk(*, num_waiting: int, num_chunks: int, num_rounds: int) -> list[float]:
    """CPU seconds of both machines and their messages in one process, by round, while `num_waiting` grants are live.

    The ring holds 10 of them; the others wait, computed, for their bytes, and each that is released is followed by a new one.
    """
    loop = asyncio.get_running_loop()
    ring_bytes = 10 * CHUNK_BYTES
    writer = Writer(loop, 1, lambda payload: loop.call_soon(target.on_payload, 1, payload), ring_bytes=ring_bytes, name="w")
    target = Target(
        loop,
        lambda _, payload: loop.call_soon(writer.on_payload, payload),
        lambda watermark, _: loop.call_soon(writer.on_watermark, watermark),
        ring_bytes=ring_bytes,
    )
    target.open(1)
    moved = 0

    async def one_after_another(size: int) -> None:
        nonlocal moved
        while True:
            await writer.move(size)
            moved += size

    sizes = [min(GRANTS_AHEAD, num_waiting - first) for first in range(0, num_waiting, GRANTS_AHEAD)]
    tasks = [asyncio.ensure_future(one_after_another(size)) for size in sizes]
    samples: list[float] = []
    try:
        await _until(lambda: moved >= num_waiting, tasks)  # the first of each, which all began at once
        for _ in range(num_rounds):
            begun, cpu_s = moved, time.process_time()
            await _until(lambda begun=begun: moved >= begun + num_chunks, tasks)  # type: ignore[misc]
            samples.append((time.process_time() - cpu_s) / (moved - begun))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()
        target.close()
    return samples


async def _until(is_so: Callable[[], bool], tasks: Iterable[asyncio.Task[None]]) -> None:
    """Let the tasks, which never end, run until it is so."""
    while not is_so():
        await asyncio.sleep(0.001)
        for task in itertools.islice(tasks, 1):
            if task.done():
                task.result()


def instance(incarnation: int) -> Instance:
    return Instance(
        incarnation=incarnation,
        layout=LAYOUT,
        shard=Shard(),
        transport="inproc",
        digests=(DIGEST_XXH3,),
        protocol_versions=PROTOCOL_VERSIONS,
    )


async def between_two_processes(load: Load) -> Samples:
    """This process is the decode rank; the prefill ranks are a child, which measures and prints its result."""
    raise_open_files()
    loop = asyncio.get_running_loop()
    ring_bytes = load.ring_chunks * CHUNK_BYTES
    control = SessionControlServer("tcp://127.0.0.1:0", keys=new_key_pair(), max_payload_bytes=MAX_MESSAGE_BYTES)
    target = Target(loop, control.send, lambda watermark, sessions: servicer.publish(watermark, sessions), ring_bytes=ring_bytes)

    async def attach(request: AttachRequest) -> AttachResponse:
        session = request.prefill.incarnation - PREFILL_LIFE
        control.allow(session, request.control_key)
        target.open(session)
        return AttachResponse(
            session_id=session,
            decode=instance(DECODE_LIFE),
            decode_rank=0,
            answer=b"none",
            ring_capacity_bytes=ring_bytes,
            control_address=control.address,
            control_key=control.public_key,
            local_control_address=control.local_address if load.is_local else "",
            heartbeat_s=servicer.heartbeat_s,
            protocol_version=PROTOCOL_VERSIONS[-1],
            probe_bytes=1,
        )

    lost: list[str] = []
    servicer = TransferControlServicer(
        watermark=target.ring.watermark(),
        ring_capacity_bytes=ring_bytes,
        on_attach=attach,
        on_session_lost=lambda _, reason: lost.append(reason),
        sessions_in_use=target.sessions_in_use,
        max_sessions=load.num_peers,
    )
    control.watch(loop, lambda received: target.on_payload(received.peer, received.payload))
    server = await serve("127.0.0.1", 0, transfer_control=servicer, security=_security(load))
    command = [sys.executable, "-m", "bench.control_ends", server.address, json.dumps(asdict(load))]
    child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        output, _ = await asyncio.wait_for(child.communicate(), DEADLINE_S)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        servicer.close("the benchmark is over")
        control.close()
        target.close()
        await server.close()
    if child.returncode != 0:
        raise RuntimeError(f"the writers' process exited with {child.returncode}; sessions lost: {lost}")
    return Samples(**json.loads(output))


async def run_writers(address: str, load: Load) -> Samples:
    """The child: attach as many as there are to be, then measure."""
    raise_open_files()
    writers: list[Writer] = []
    lost: list[str] = []
    timer = HeartbeatTimer(lambda: [writer.session for writer in writers if writer.is_in_use])
    async with AsyncExitStack() as stack:
        for session in range(1, load.num_peers + 1):
            writers.append(await _attached(address, session, stack, _security(load), timer, lost))
        if load.num_held:
            await writers[0].hold(load.num_held)
        for number in range(load.num_gaps):
            writer = writers[number % len(writers)]
            await writer.hold(1)
            await writer.move(1)
        samples = await _measure(writers, load)
        if lost and not load.idle_s:
            sys.exit(f"a session was lost: {lost[0]}")
        return replace(samples, num_lost=len(lost))


def make_certificates(folder: Path) -> None:
    """One certificate for both ends, and its authority."""
    import trustme  # of the extra dev, as the benchmarks are

    authority = trustme.CA()
    made = authority.issue_cert(_TLS_NAME)
    (folder / "tls.key").touch(mode=0o600)
    made.private_key_pem.write_to_path(str(folder / "tls.key"))
    made.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))


def _security(load: Load) -> Security:
    if not load.tls_folder:
        return PlainText()
    folder = Path(load.tls_folder)
    tls = TlsConfig(cert_file=folder / "tls.crt", key_file=folder / "tls.key", ca_file=folder / "ca.crt")
    return MutualTls(files=CertificateFiles(tls, is_server=True), peer_names=(_TLS_NAME,))


async def _attached(
    address: str, session: int, stack: AsyncExitStack, security: Security, timer: HeartbeatTimer, lost: list[str]
) -> Writer:
    client = TransferControlClient(address, security=security)
    stack.push_async_callback(client.close)
    keys = new_key_pair()
    request = AttachRequest(
        prefill=instance(life_of(session)),
        prefill_rank=0,
        offer=b"none",
        chunk_plan=PLAN,
        probe_bytes=1,
        control_key=keys.public,
    )
    attached = await client.attach(request, timeout_s=10.0)
    control = open_session_client(
        attached.control_address,
        attached.local_control_address,
        session_id=session,
        keys=keys,
        server_key=attached.control_key,
        max_payload_bytes=MAX_MESSAGE_BYTES,
    )
    stack.callback(control.close)
    ring_bytes = attached.ring_capacity_bytes
    loop = asyncio.get_running_loop()
    writer = Writer(loop, session, control.send, ring_bytes=ring_bytes, name=f"w{session}")
    stack.callback(writer.close)
    control.watch(loop, writer.on_payload)
    watch = client.watch(
        session,
        ring_capacity_bytes=ring_bytes,
        heartbeat_s=attached.heartbeat_s,
        on_watermark=writer.on_watermark,
        on_lost=lost.append,
        timer=timer,
    )
    stack.push_async_callback(watch.wait_closed)
    stack.callback(watch.close)
    return writer


async def _measure(writers: Sequence[Writer], load: Load) -> Samples:
    both = (os.getpid(), os.getppid())
    idle_cpu_s = await _idle_cpu_s(both, load.idle_s) if load.idle_s else (0.0, 0.0)
    chunk_s: list[float] = []
    cpu_s: list[float] = []
    resident: list[tuple[int, int]] = []
    for number in range(load.num_rounds + 1):
        begun, cpu_begun = time.perf_counter(), sum(map(_cpu_s, both))
        await move_all(
            writers,
            num_requests=load.round_requests,
            num_chunks=load.request_chunks,
            num_in_flight=load.num_in_flight,
        )
        if number:
            num_chunks = load.round_requests * load.request_chunks
            chunk_s.append((time.perf_counter() - begun) / num_chunks)
            cpu_s.append((sum(map(_cpu_s, both)) - cpu_begun) / num_chunks)
        resident.append((_resident_bytes(both[0]), _resident_bytes(both[1])))
    round_trip_s: list[float] = []
    for number in range(load.num_round_trips):
        writer = writers[number % len(writers)]
        await writer.move(1)
        round_trip_s.append(time.perf_counter() - writer.asked_at_s)
        await asyncio.sleep(0.001)
    return Samples(
        chunk_s=chunk_s, cpu_s=cpu_s, round_trip_s=round_trip_s, resident_bytes=resident, idle_cpu_s=idle_cpu_s, num_lost=0
    )


async def _idle_cpu_s(both: tuple[int, int], seconds: float) -> tuple[float, float]:
    await asyncio.sleep(seconds / 2)  # heartbeats grow rare
    begun_s, before = time.monotonic(), [_cpu_s(pid) for pid in both]
    await asyncio.sleep(seconds)
    elapsed_s = time.monotonic() - begun_s
    first, second = ((_cpu_s(pid) - cpu_s) / elapsed_s for pid, cpu_s in zip(both, before, strict=True))
    return first, second


def _cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, in the kernel's ticks (10 ms as a rule)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description="the writers' process of bench.control")
    parser.add_argument("address", help="of the target's registry plane")
    parser.add_argument("load", type=json.loads, help="a Load as JSON")
    arguments = parser.parse_args()
    print(json.dumps(asdict(asyncio.run(run_writers(arguments.address, Load(**arguments.load))))))


if __name__ == "__main__":
    main()
