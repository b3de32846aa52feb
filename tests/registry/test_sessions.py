"""Attach and the Watermarks life line, over real connections on the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from tests.registry.attaches import LLAMA, attach_request, attach_response, instance, serving
from tests.registry.loop_errors import record_loop_errors
from transfer.errors import (
    ConfigError,
    LayoutError,
    PeerUnreachable,
    RemoteProtocolError,
    ResourceExhausted,
    TransportTimeout,
)
from transfer.instance import AttachRequest, AttachResponse, Instance, Link, check_compatible
from transfer.layout import DType, KVLayout
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.client import SessionWatch, TransferControlClient
from transfer.registry.convert import attach_request_to_proto
from transfer.registry.heartbeat_timer import HeartbeatTimer
from transfer.registry.options import CHANNEL_OPTIONS
from transfer.registry.probe_turns import MAX_PROBES
from transfer.registry.server import RegistryServer, TransferControlServicer, serve
from transfer.ring import Grant, RingView, Watermark

CAPACITY = 1 << 20
HEARTBEAT_S = 0.2
LINK = Link(prefill_rank=0, decode_rank=0, lane="ucx/shm", latency_s=1e-5, bandwidth_bytes_per_s=4e9)
DEADLINE_S = 60.0  # only ends a wait that would never end


def watermark(sequence: int, position: int | None = None, released: tuple[Grant, ...] = ()) -> Watermark:
    return Watermark(
        incarnation=9, sequence=sequence, position=256 * sequence if position is None else position, released=released
    )


async def until(holds: Callable[[], bool], what: str) -> None:
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < DEADLINE_S, f"{what} did not happen"
        await asyncio.sleep(0.002)


class NoticingServicer(TransferControlServicer):
    """Sets `given_up` once it has noticed that a caller of Attach went away."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.given_up = asyncio.Event()

    async def Attach(self, request: pb.AttachRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.AttachResponse:
        try:
            return await super().Attach(request, context)
        except asyncio.CancelledError:
            self.given_up.set()
            raise


@dataclass
class DecodeRank:
    """The owner of a servicer, as a decode rank will be one."""

    decode: Instance = field(default_factory=lambda: instance(9))
    lost: list[tuple[int, str]] = field(default_factory=list)
    links: list[tuple[int, Link]] = field(default_factory=list)
    attached: list[AttachRequest] = field(default_factory=list)
    before_answer: Callable[[], Awaitable[None]] | None = None
    next_session_id: int = 100
    probe_bytes: int = 4096
    protocol_version: int | None = None
    heartbeat_s: float = HEARTBEAT_S
    max_sessions: int | None = None
    in_use: set[int] = field(default_factory=set)
    turns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.servicer = NoticingServicer(
            watermark=watermark(1),
            ring_capacity_bytes=CAPACITY,
            heartbeat_s=self.heartbeat_s,
            on_attach=self.on_attach,
            on_session_lost=lambda session_id, reason: self.lost.append((session_id, reason)),
            on_link=lambda session_id, link: self.links.append((session_id, link)),
            sessions_in_use=lambda: self.in_use,
            on_probe_turn=self.turns.append,
            max_sessions=self.max_sessions,
        )

    def hold(self) -> tuple[asyncio.Event, asyncio.Event]:
        """Hold every attach from now on. Return the events "one is held" and "go on"."""
        is_held, goes_on = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            is_held.set()
            await goes_on.wait()

        self.before_answer = wait
        return is_held, goes_on

    async def on_attach(self, request: AttachRequest) -> AttachResponse:
        agreement = check_compatible(self.decode, request.prefill)
        if self.before_answer is not None:
            await self.before_answer()
        self.attached.append(request)
        self.next_session_id += 1
        return attach_response(
            self.decode,
            session_id=self.next_session_id,
            ring_capacity_bytes=CAPACITY,
            heartbeat_s=self.heartbeat_s,
            protocol_version=self.protocol_version or agreement.protocol_version,
            probe_bytes=self.probe_bytes,
        )


@dataclass
class Writer:
    """The owner of a watch, as a prefill rank will be one."""

    client: TransferControlClient
    seen: list[Watermark] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    watches: list[SessionWatch] = field(default_factory=list)

    def watch(self, response: AttachResponse, **changes: Any) -> SessionWatch:
        values: dict[str, Any] = {
            "ring_capacity_bytes": response.ring_capacity_bytes,
            "heartbeat_s": response.heartbeat_s,
            "on_watermark": self.seen.append,
            "on_lost": self.lost.append,
        }
        self.watches.append(self.client.watch(response.session_id, **values | changes))
        return self.watches[-1]


@pytest.fixture
def rank() -> DecodeRank:
    return DecodeRank()


@pytest.fixture
async def server(rank: DecodeRank) -> AsyncIterator[RegistryServer]:
    async with serving(transfer_control=rank.servicer) as server:
        yield server


@pytest.fixture
async def writer(server: RegistryServer) -> AsyncIterator[Writer]:
    writer = Writer(TransferControlClient(server.address))
    yield writer
    for watch in writer.watches:
        watch.close()
        await asyncio.wait_for(watch.wait_closed(), DEADLINE_S)
    await writer.client.close()


async def joined(rank: DecodeRank, writer: Writer) -> tuple[AttachResponse, SessionWatch]:
    response = await writer.client.attach(attach_request(), timeout_s=DEADLINE_S)
    watch = writer.watch(response)
    count = len(writer.seen)
    await until(lambda: len(writer.seen) > count, "the first ack")
    return response, watch


async def test_attach_of_another_model_is_refused_with_everything_named(rank: DecodeRank, writer: Writer) -> None:
    other = KVLayout.uniform(num_layers=8, num_kv_heads=6, head_dim=32, dtype=DType.FLOAT32)
    with pytest.raises(LayoutError) as caught:
        await writer.client.attach(attach_request(instance(layout=other)), timeout_s=DEADLINE_S)
    for part in (LLAMA.fingerprint(), other.fingerprint(), "kv_heads=12", "kv_heads=6", writer.client.address):
        assert part in str(caught.value)
    assert rank.servicer.session_ids == ()
    # Refused is not attached: the same writer may come again.
    await writer.client.attach(attach_request(), timeout_s=DEADLINE_S)


async def test_an_answer_that_does_not_fit_the_question_is_refused(rank: DecodeRank, writer: Writer) -> None:
    rank.probe_bytes = 4097
    with pytest.raises(RemoteProtocolError, match="probe_bytes is 4097; this writer can probe with 4096"):
        await writer.client.attach(attach_request(), timeout_s=DEADLINE_S)
    rank.decode = instance(9, protocol_versions=(1, 2))
    rank.probe_bytes, rank.protocol_version = 4096, 2
    with pytest.raises(RemoteProtocolError, match="protocol_version is 2; this writer speaks 1"):
        await writer.client.attach(attach_request(instance(6)), timeout_s=DEADLINE_S)


async def test_the_same_writer_attaches_once_and_again_after_its_session(rank: DecodeRank, writer: Writer) -> None:
    _, watch = await joined(rank, writer)
    with pytest.raises(PeerUnreachable, match="attached already"):
        await writer.client.attach(attach_request(), timeout_s=DEADLINE_S)
    await writer.client.attach(attach_request(prefill_rank=1), timeout_s=DEADLINE_S)
    await writer.client.attach(attach_request(instance(6)), timeout_s=DEADLINE_S)
    watch.close()
    await until(lambda: bool(rank.lost), "the loss")
    await writer.client.attach(attach_request(), timeout_s=DEADLINE_S)


async def test_a_writer_that_gives_up_in_mid_attach_leaves_nothing(rank: DecodeRank, writer: Writer) -> None:
    has_begun, rank.servicer.given_up = rank.hold()
    asked = asyncio.ensure_future(writer.client.attach(attach_request(), timeout_s=DEADLINE_S))
    await asyncio.wait_for(has_begun.wait(), DEADLINE_S)
    asked.cancel()
    await until(lambda: bool(rank.lost), "the loss")
    assert rank.lost == [(101, "the writer went away while it attached")]
    assert rank.servicer.session_ids == ()


async def test_the_sessions_of_a_rank_are_limited() -> None:
    """Attaches under way count; a session that ends makes room."""
    rank = DecodeRank(max_sessions=3)
    rank.before_answer = lambda: asyncio.sleep(0.02)
    async with serving(transfer_control=rank.servicer) as server:
        client = TransferControlClient(server.address)
        asked = (client.attach(attach_request(instance(50 + number)), timeout_s=DEADLINE_S) for number in range(8))
        results = await asyncio.gather(*asked, return_exceptions=True)
        refused = [str(result) for result in results if isinstance(result, ResourceExhausted)]
        assert len(refused) == 5 and len(rank.servicer.session_ids) == len(rank.attached) == 3
        assert all("this rank has 3 sessions, and takes 3 with" in text for text in refused)
        rank.servicer.close_session(rank.servicer.session_ids[0], "makes room")
        await client.attach(attach_request(instance(99)), timeout_s=DEADLINE_S)
        await client.close()


async def test_attaches_are_handled_one_at_a_time(rank: DecodeRank, writer: Writer) -> None:
    running, most = 0, 0

    async def open_slowly() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1

    rank.before_answer = open_slowly
    asked = (writer.client.attach(attach_request(instance(50 + number)), timeout_s=DEADLINE_S) for number in range(5))
    assert len({response.session_id for response in await asyncio.gather(*asked)}) == 5
    assert most == 1


async def test_a_writer_that_gives_up_before_its_turn_costs_nothing(rank: DecodeRank, writer: Writer) -> None:
    has_begun, go_on = rank.hold()
    first = asyncio.ensure_future(writer.client.attach(attach_request(), timeout_s=DEADLINE_S))
    await asyncio.wait_for(has_begun.wait(), DEADLINE_S)
    with pytest.raises(TransportTimeout):
        await writer.client.attach(attach_request(instance(6)), timeout_s=0.1)

    async def attach_again() -> AttachResponse:
        while True:  # until the server has noticed
            with contextlib.suppress(PeerUnreachable):
                return await writer.client.attach(attach_request(instance(6)), timeout_s=DEADLINE_S)
            await asyncio.sleep(0.01)

    again = asyncio.ensure_future(attach_again())
    await asyncio.sleep(0.1)
    go_on.set()
    assert [(await attached).session_id for attached in (first, again)] == [101, 102]
    assert len(rank.attached) == 2 and rank.lost == []


async def test_an_attach_that_waits_while_the_rank_closes_is_refused(rank: DecodeRank, writer: Writer) -> None:
    has_begun, go_on = rank.hold()
    asked = [asyncio.ensure_future(writer.client.attach(attach_request(instance(n)), timeout_s=DEADLINE_S)) for n in (50, 51)]
    await asyncio.wait_for(has_begun.wait(), DEADLINE_S)
    await asyncio.sleep(0.1)  # the other one waits by now, or comes too late: it is refused in either case
    rank.servicer.close("shutting down")
    go_on.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert "this rank is closing" in next(str(result) for result in results if isinstance(result, PeerUnreachable))
    assert len(rank.attached) == 1 and rank.lost == [(101, "this rank is closing")]


@pytest.fixture
async def complaints() -> list[dict[str, Any]]:
    """Errors that reach the loop's exception handler. Each of them ends a rank."""
    return record_loop_errors()


async def test_errors_caused_by_others_are_no_bug(rank: DecodeRank, writer: Writer, complaints: list[dict[str, Any]]) -> None:
    """Neither a writer that does not fit, nor anyone who has taken the last open file, ends the rank."""
    errors = [OSError(errno.EMFILE, "Too many open files"), ConfigError("blob"), PeerUnreachable("x"), LayoutError("y")]

    async def fail() -> None:
        raise errors[0]

    rank.before_answer = fail
    for kind in (PeerUnreachable, ConfigError, PeerUnreachable, LayoutError):
        with pytest.raises(kind):
            await writer.client.attach(attach_request(), timeout_s=DEADLINE_S)
        errors.append(errors.pop(0))
    assert complaints == [] and rank.servicer.session_ids == ()


async def test_a_session_that_never_opens_its_stream_is_lost(rank: DecodeRank, writer: Writer) -> None:
    await writer.client.attach(attach_request(), timeout_s=DEADLINE_S)
    await until(lambda: bool(rank.lost), "the loss")
    assert rank.lost == [(101, "the writer is silent: 3 heartbeats of 0.2 s missed")]


async def test_the_current_watermark_comes_at_once_and_then_each_change(rank: DecodeRank, writer: Writer) -> None:
    rank.servicer.publish(watermark(2, 512, (Grant(1024, 2048),)))
    await joined(rank, writer)
    assert writer.seen[0] == watermark(2, 512, (Grant(1024, 2048),))
    for sequence in range(3, 8):
        rank.servicer.publish(watermark(sequence, CAPACITY * sequence + 256))
        await until(lambda sequence=sequence: writer.seen[-1].sequence == sequence, "the newest")  # type: ignore[misc]
    assert writer.seen[-1] == watermark(7, CAPACITY * 7 + 256)


async def test_changes_are_coalesced_and_the_newest_always_arrives(rank: DecodeRank, writer: Writer) -> None:
    await joined(rank, writer)
    before = rank.servicer.num_acks
    for sequence in range(2, 2002):
        rank.servicer.publish(watermark(sequence))
        if sequence % 10 == 0:
            await asyncio.sleep(0)
    await until(lambda: writer.seen[-1].sequence == 2001, "the newest")
    assert rank.servicer.num_acks - before < 500
    sequences = [seen.sequence for seen in writer.seen]
    assert sequences == sorted(sequences)
    view = RingView(CAPACITY, incarnation=9)
    for seen in writer.seen:
        view.update(seen)
    assert view.watermark == watermark(2001)


async def test_a_watermark_that_concerns_others_does_not_wake_a_session(rank: DecodeRank, writer: Writer) -> None:
    rank.heartbeat_s = rank.servicer.heartbeat_s = 10.0
    answer, _ = await joined(rank, writer)
    rank.servicer.publish(watermark(2), [answer.session_id + 1])  # an unknown session is no error
    rank.servicer.publish(watermark(3), [answer.session_id])
    await until(lambda: writer.seen[-1].sequence == 3, "its watermark")
    rank.servicer.publish(watermark(4), ())
    await writer.client.attach(attach_request(prefill_rank=1), timeout_s=DEADLINE_S)  # a message would come before this answer
    assert writer.seen[-1].sequence == 3


async def test_a_watermark_that_concerns_others_comes_with_the_next_heartbeat(rank: DecodeRank, writer: Writer) -> None:
    await joined(rank, writer)
    rank.servicer.publish(watermark(2), ())
    await until(lambda: writer.seen[-1].sequence == 2, "the heartbeat")


async def test_a_watermark_for_all_wakes_only_sessions_in_use(rank: DecodeRank, writer: Writer) -> None:
    rank.heartbeat_s = rank.servicer.heartbeat_s = 10.0
    idle, _ = await joined(rank, writer)
    await until(lambda: rank.servicer.is_idle(idle.session_id), "the writer's first heartbeat")
    rank.in_use.add(idle.session_id + 1)
    used = await writer.client.attach(attach_request(prefill_rank=1), timeout_s=DEADLINE_S)
    seen: list[Watermark] = []
    writer.watch(used, on_watermark=seen.append)
    await until(lambda: bool(seen), "the first ack")
    rank.servicer.publish(watermark(2))
    await until(lambda: seen[-1].sequence == 2, "the watermark")
    await writer.client.attach(attach_request(instance(6)), timeout_s=DEADLINE_S)  # a message would come before this answer
    assert writer.seen[-1].sequence == 1
    rank.in_use.add(idle.session_id)  # not yet stated to its writer
    rank.servicer.publish(watermark(3))
    await until(lambda: writer.seen[-1].sequence == 3, "the watermark")


async def test_a_session_states_the_interval_of_its_heartbeats(rank: DecodeRank, server: RegistryServer) -> None:
    """0 soon after a request has begun, and later an interval again."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = pb_grpc.TransferControlStub(channel)
        response = await stub.Attach(attach_request_to_proto(attach_request()))
        call = stub.Watermarks()

        async def stated_s() -> float:
            await call.write(pb.WriterBeat(session_id=response.session_id, idle_heartbeat_s=10.0))
            answer: pb.WatermarkAck = await asyncio.wait_for(call.read(), DEADLINE_S)
            return answer.idle_heartbeat_s

        assert await stated_s() == 1 / 32
        rank.in_use.add(response.session_id)
        assert await stated_s() == 0.0  # at once, although the interval is 10 s by now
        rank.in_use.clear()
        assert await stated_s() == 1 / 32
        await call.write(pb.WriterBeat(session_id=response.session_id, idle_heartbeat_s=10.5))
        await until(lambda: bool(rank.lost), "the loss")
    assert "idle_heartbeat_s is 10.5" in rank.lost[0][1]


async def test_a_writer_states_the_interval_of_its_heartbeats(rank: DecodeRank, writer: Writer) -> None:
    in_use: set[int] = set()
    response = await writer.client.attach(attach_request(), timeout_s=DEADLINE_S)
    writer.watch(response, timer=HeartbeatTimer(lambda: in_use))
    await until(lambda: rank.servicer.is_idle(response.session_id), "an interval")
    in_use.add(response.session_id)
    await until(lambda: not rank.servicer.is_idle(response.session_id), "a heartbeat of a session in use")


async def test_writers_take_turns_to_measure_their_links(rank: DecodeRank, writer: Writer) -> None:
    """A turn ends with the report of the link, and with the session."""
    number = MAX_PROBES + 2
    sessions = [await writer.client.attach(attach_request(instance(50 + one)), timeout_s=DEADLINE_S) for one in range(number)]
    watches = [writer.watch(session) for session in sessions]
    waiting = [asyncio.ensure_future(watch.probe_turn()) for watch in watches]
    await until(lambda: sum(one.done() for one in waiting) == MAX_PROBES, "the first turns")
    assert all(not rank.servicer.is_idle(session) for session in rank.turns), "its writer is noticed soon if it dies"
    first, second = ([session.session_id for session in sessions].index(one) for one in rank.turns[:2])
    watches[first].report_link(LINK)
    await until(lambda: len(rank.turns) == MAX_PROBES + 1, "the turn of the next")
    watches[second].close()
    await until(lambda: sum(one.done() for one in waiting) == number, "the turn of the last")
    assert sorted(rank.turns) == sorted(session.session_id for session in sessions)
    assert [link.lane for _, link in rank.links] == [LINK.lane]
    await until(lambda: rank.servicer.is_idle(rank.turns[0]), "a heartbeat of an idle session")


async def test_a_session_that_ends_ends_the_wait_for_a_turn(rank: DecodeRank, writer: Writer) -> None:
    _, watch = await joined(rank, writer)
    watch.close()
    with pytest.raises(PeerUnreachable, match="has ended before its link was measured"):
        await watch.probe_turn()


async def test_heartbeats_keep_an_idle_session(rank: DecodeRank, writer: Writer) -> None:
    _, watch = await joined(rank, writer)
    await until(lambda: watch.num_acks >= 6, "six heartbeats")
    assert rank.lost == [] and writer.lost == []
    assert {seen.sequence for seen in writer.seen} == {1}


async def test_a_writer_that_closes_is_lost_once_without_on_lost(rank: DecodeRank, writer: Writer) -> None:
    _, watch = await joined(rank, writer)
    watch.close()
    watch.close()
    await until(lambda: bool(rank.lost), "the loss")
    await asyncio.sleep(4 * HEARTBEAT_S)
    assert rank.lost == [(101, "the writer's stream ended")], "a closed stream is no silence"
    assert writer.lost == []
    assert rank.servicer.session_ids == ()


async def test_a_writer_that_leaves_early_is_no_error_of_the_server(
    rank: DecodeRank, server: RegistryServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not read its acks, and what its session ended with waits behind them when it leaves."""
    small_window = (("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(server.address, options=small_window) as channel:
        stub: Any = pb_grpc.TransferControlStub(channel)
        response = await stub.Attach(attach_request_to_proto(attach_request()))
        call = stub.Watermarks()
        released = tuple(Grant(number * 1024 + 512, number * 1024 + 1024) for number in range(64))
        sequence, num_acks, moved_s = 1, -1, time.monotonic()
        while time.monotonic() - moved_s < HEARTBEAT_S:  # until they are stuck
            await call.write(pb.WriterBeat(session_id=response.session_id))
            sequence += 1
            rank.servicer.publish(watermark(sequence, 256, released))
            if rank.servicer.num_acks != num_acks:
                num_acks, moved_s = rank.servicer.num_acks, time.monotonic()
            await asyncio.sleep(0.001)
        rank.servicer.close_session(response.session_id, "quarantine is full")
        await asyncio.sleep(0.05)
        call.cancel()
    await server.close()
    assert rank.lost == [(response.session_id, "quarantine is full")]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_session_closed_by_the_decode_rank_reports_the_reason(rank: DecodeRank, writer: Writer) -> None:
    response, _ = await joined(rank, writer)
    rank.servicer.close_session(response.session_id, "quarantine is full")
    rank.servicer.close_session(response.session_id, "again")
    rank.servicer.close_session(12345, "unknown")
    await until(lambda: bool(writer.lost), "the loss")
    await asyncio.sleep(4 * HEARTBEAT_S)
    assert len(writer.lost) == 1 and "quarantine is full" in writer.lost[0]
    assert rank.lost == [(response.session_id, "quarantine is full")]


async def test_a_closing_rank_loses_all_and_attaches_no_more(rank: DecodeRank, writer: Writer) -> None:
    await joined(rank, writer)
    rank.servicer.close("shutting down")
    await until(lambda: bool(writer.lost), "the loss")
    assert rank.lost == [(101, "shutting down")]
    with pytest.raises(PeerUnreachable, match="closing"):
        await writer.client.attach(attach_request(), timeout_s=DEADLINE_S)


async def test_a_stopped_server_is_noticed_once(rank: DecodeRank, writer: Writer, server: RegistryServer) -> None:
    await joined(rank, writer)
    await server.close()
    await until(lambda: bool(writer.lost), "the loss")
    await asyncio.sleep(4 * HEARTBEAT_S)
    assert len(writer.lost) == 1 and len(rank.lost) == 1


async def test_a_stream_for_an_unknown_session_is_lost_at_once(rank: DecodeRank, writer: Writer) -> None:
    response = await writer.client.attach(attach_request(), timeout_s=DEADLINE_S)
    rank.servicer.close_session(response.session_id, "x")
    writer.watch(response)
    await until(lambda: bool(writer.lost), "the loss")
    assert "unknown or over" in writer.lost[0]


async def test_a_second_stream_takes_nothing_over(rank: DecodeRank, writer: Writer) -> None:
    response, _ = await joined(rank, writer)
    thief = Writer(writer.client)
    thief.watch(response)
    await until(lambda: bool(thief.lost), "the refusal")
    assert "has its stream already" in thief.lost[0] and thief.seen == []
    rank.servicer.publish(watermark(2))
    await until(lambda: writer.seen[-1].sequence == 2, "the newest")
    assert rank.lost == [] and writer.lost == []
    await thief.watches[0].wait_closed()


async def test_hostile_heartbeats_end_only_their_session(rank: DecodeRank, writer: Writer, server: RegistryServer) -> None:
    await joined(rank, writer)
    async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
        stub: Any = pb_grpc.TransferControlStub(channel)
        client = TransferControlClient(server.address)
        for number in range(2):
            response = await client.attach(attach_request(instance(70 + number)), timeout_s=DEADLINE_S)
            call = stub.Watermarks()
            await call.write(pb.WriterBeat(session_id=response.session_id))
            if number == 0:
                await call.write(pb.WriterBeat(session_id=1))
            else:
                await call.write(pb.WriterBeat(session_id=response.session_id, link=pb.LinkStatus(latency_s=float("nan"))))
            await until(lambda number=number: len(rank.lost) == number + 1, "the loss")  # type: ignore[misc]
        for opening in (pb.WriterBeat(), None):
            call = stub.Watermarks()
            if opening is None:
                await call.done_writing()
            else:
                await call.write(opening)
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Attach(pb.AttachRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await client.close()
    assert "session_id is" in rank.lost[0][1] and "latency_s is nan" in rank.lost[1][1]
    assert rank.servicer.num_refused_heartbeats == 2
    assert writer.lost == [] and rank.servicer.session_ids == (101,)


async def test_a_broken_watermark_ends_the_session_with_the_reason(rank: DecodeRank, writer: Writer) -> None:
    response = await writer.client.attach(attach_request(), timeout_s=DEADLINE_S)
    rank.servicer.publish(watermark(3, CAPACITY - 256))
    writer.watch(response, ring_capacity_bytes=4096)  # as if the peer had lied about its ring
    await until(lambda: bool(writer.lost), "the loss")
    assert "tail is" in writer.lost[0] and writer.seen == []


async def test_an_owners_bug_in_the_callback_is_loud(rank: DecodeRank, writer: Writer, complaints: list[dict[str, Any]]) -> None:
    response = await writer.client.attach(attach_request(), timeout_s=DEADLINE_S)

    def fail(_: Watermark) -> None:
        raise KeyError("bug")

    writer.watch(response, on_watermark=fail)
    await until(lambda: bool(writer.lost), "the loss")
    assert [repr(one["exception"]) for one in complaints] == ["KeyError('bug')"] and "KeyError" in writer.lost[0]


async def test_a_busy_loop_is_not_taken_for_a_dead_peer(rank: DecodeRank, writer: Writer) -> None:
    """Both ends share this loop; blocked for longer than three heartbeats, neither may call the other dead."""
    await joined(rank, writer)
    time.sleep(5 * HEARTBEAT_S)
    await asyncio.sleep(3 * HEARTBEAT_S)
    assert rank.lost == [] and writer.lost == []


async def test_an_unreachable_peer_is_an_error_and_not_a_hang() -> None:
    client = TransferControlClient("127.0.0.1:1")
    with pytest.raises(PeerUnreachable, match=r"127\.0\.0\.1:1"):
        await client.attach(attach_request(), timeout_s=DEADLINE_S)
    await client.close()


async def test_a_port_in_use_is_named(server: RegistryServer) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{server.port}; it cannot be bound"):
        await serve("127.0.0.1", server.port)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0"):
        await serve("192.0.2.1", 0)


async def test_health_and_reflection_are_served(rank: DecodeRank, server: RegistryServer) -> None:
    async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        names = ("", "kvferry.v1.TransferControl")
        for is_serving in (False, True, False):
            await server.set_serving(is_serving)
            for name in names:
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert (answer.status == health_pb2.HealthCheckResponse.SERVING) is is_serving
        with pytest.raises(grpc.aio.AioRpcError):
            await health.Check(health_pb2.HealthCheckRequest(service="kvferry.v1.PrefillControl"))
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = await call.read()
        await call.done_writing()
        assert "kvferry.v1.TransferControl" in {service.name for service in listed.list_services_response.service}
