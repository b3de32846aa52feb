"""A prefill rank's sessions while the decode instance goes away under them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
import torch

from tests.runtime.instances import instance, until
from transfer.chunk import ChunkPlan
from transfer.config import TransportConfig
from transfer.control.zmq_authenticator import new_key_pair
from transfer.control.zmq_channel import ZmqControlClient
from transfer.errors import LayoutError, PeerUnreachable, RemoteProtocolError, ResourceExhausted, TransferError, TransportError
from transfer.instance import AttachRequest, AttachResponse
from transfer.metrics import RankMetrics
from transfer.pool.staging import StagingBuffer
from transfer.rank_context import RankContext
from transfer.registry import probe_turns
from transfer.registry.client import SessionWatch, TransferControlClient
from transfer.registry.probe_turns import MAX_PROBES
from transfer.registry.server import TransferControlServicer, serve
from transfer.ring import Watermark
from transfer.send.attach import DecodeSessions
from transfer.send.loop import SenderLoop
from transfer.transport.base import Session
from transfer.transport.driver import SessionDriver
from transfer.transport.inproc import InprocHub, InprocSession, InprocTransport
from transfer.transport.probe import host_copy_bytes_per_s

LIFE = 9


RING_BYTES = 4096
PROBE_BYTES = 2048
HEARTBEAT_S = 10.0  # no session is lost by silence, however slow the machine is


class NoSender:
    """No session may reach the sender in these tests."""

    def watch_sessions(self, on_closed: Callable[[int, str], None]) -> None:
        pass

    def open_session(self, *args: Any, **values: Any) -> None:
        raise AssertionError("a session was opened with an instance that had been closed")

    def on_watermark(self, number: int, watermark: Watermark) -> None:
        """It has no session to hear one."""

    def sessions_in_use(self) -> set[int]:
        return set()

    def close_session(self, number: int, reason: str) -> None:
        raise AssertionError("there is none")


class Attaching:
    """A decode rank that answers an attach when the test lets it."""

    def __init__(self, *, is_one_sided: bool = False, sender: object = None, floor: float = 0.0) -> None:
        self.hub = InprocHub()
        self.target = InprocTransport(self.hub, one_sided=is_one_sided)
        self.memory = StagingBuffer(num_bytes=RING_BYTES + PROBE_BYTES)
        self.ring = self.target.register(self.memory.tensor)
        self.gate = asyncio.Event()
        self.answer: dict[str, Any] = {}  # what it answers differently from what is right
        self.refusal: TransferError | None = None
        self.num_attaches = 0
        self.turns: list[int] = []
        self.lost: list[tuple[int, int, str]] = []
        self.sessions = DecodeSessions(
            context=RankContext(
                loop=asyncio.get_running_loop(),
                instance=instance(1),
                rank=0,
                device=torch.device("cpu"),
                transport=InprocTransport(self.hub, one_sided=is_one_sided),
                transport_config=TransportConfig(probe_bytes=PROBE_BYTES, min_bandwidth_bytes_per_s=floor),
                metrics=RankMetrics(role="prefill", rank=0),
                on_crash=lambda error: pytest.fail(repr(error)),
            ),
            sender=cast(SenderLoop, sender or NoSender()),
            plan=ChunkPlan(chunk_tokens=4),
            on_lost=lambda *loss: self.lost.append(loss),
        )
        self.address = ""

    async def on_attach(self, request: AttachRequest) -> AttachResponse:
        self.num_attaches += 1
        await self.gate.wait()
        if self.refusal is not None:
            raise self.refusal
        _, answer = self.target.accept(request.offer, self.ring)
        right: dict[str, Any] = {
            "session_id": self.num_attaches,
            "decode": instance(LIFE),
            "decode_rank": 0,
            "answer": answer,
            "ring_capacity_bytes": RING_BYTES,
            "control_address": "tcp://127.0.0.1:1",
            "heartbeat_s": HEARTBEAT_S,
            "protocol_version": request.prefill.protocol_versions[-1],
            "probe_bytes": PROBE_BYTES,
            "control_key": new_key_pair().public,
        }
        return AttachResponse(**{**right, **self.answer})


@asynccontextmanager
async def attaching(**values: Any) -> AsyncIterator[Attaching]:
    one = Attaching(**values)
    servicer = TransferControlServicer(
        watermark=Watermark(incarnation=LIFE, sequence=1, position=0, released=()),
        ring_capacity_bytes=RING_BYTES,
        heartbeat_s=HEARTBEAT_S,
        on_attach=one.on_attach,
        on_session_lost=lambda session, reason: None,
        on_link=lambda session, link: None,
        on_probe_turn=one.turns.append,
    )
    server = await serve("127.0.0.1", 0, transfer_control=servicer)
    await server.set_serving(True)
    one.address = f"127.0.0.1:{server.port}"
    yield one
    servicer.close("the test is over")
    await server.close()


async def test_an_instance_that_is_closed_while_a_rank_attaches_is_not_opened_after_all() -> None:
    async with attaching() as one:
        opening = asyncio.ensure_future(one.sessions.open(instance(LIFE), (one.address,), join=1))
        await until(lambda: one.num_attaches)
        one.sessions.close(LIFE, "another rank could not attach")
        one.gate.set()
        with pytest.raises(PeerUnreachable, match=r"was closed while decode rank 0 at .* attached"):
            await opening
        assert one.sessions.of(LIFE) is None
        assert not one.lost, "who closed it knows"


@pytest.mark.parametrize(
    ("answer", "error", "complaint"),
    [
        (
            {"decode": instance(LIFE + 1)},
            PeerUnreachable,
            "decode instance 0x000000000000000a answers at .*, where 0x0000000000000009 was to be attached",
        ),
        ({"decode_rank": 1}, PeerUnreachable, "decode rank 1 answers at .*, where 0 was to be attached"),
        ({"control_address": "nonsense"}, TransferError, "nonsense"),
    ],
)
async def test_an_answer_that_is_of_no_use_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    closed = closes(monkeypatch, InprocSession, TransferControlClient)
    async with attaching() as one:
        one.gate.set()
        decode = instance(LIFE, tp_size=2)
        one.answer = {"decode": decode, **answer}
        with pytest.raises(error, match=complaint):
            await one.sessions.open(decode, (one.address, one.address), join=1)
        assert one.sessions.of(LIFE) is None and not one.sessions.link_uses()
        await one.sessions.close_all("the test is over")
        assert sorted(closed) == ["InprocSession", "TransferControlClient"]


def closes(monkeypatch: pytest.MonkeyPatch, *kinds: Any) -> list[str]:
    """Record the class names of objects that are closed from now on. They are closed nevertheless."""
    closed: list[str] = []
    for kind in kinds:

        def noted(one: Any, name: str = kind.__name__, close: Any = kind.close) -> Any:
            closed.append(name)
            return close(one)

        monkeypatch.setattr(kind, "close", noted)
    return closed


class Refusing(NoSender):
    """A sender to which the session's ring is of no use."""

    def __init__(self) -> None:
        self.driven: list[Session] = []
        self.driver = SimpleNamespace(add=self.driven.append, remove=self.driven.remove)

    def open_session(self, *args: Any, **values: Any) -> None:
        raise RemoteProtocolError("the peer's ring begins at 0x8 here")

    def close_session(self, number: int, reason: str) -> None:
        """It has none."""


async def test_a_session_that_the_sender_cannot_take_over_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted for ever among those that the open files are good for, and kept the peer's ring mapped."""
    closed = closes(monkeypatch, InprocSession, ZmqControlClient, SessionWatch)
    sender = Refusing()
    async with attaching(sender=sender) as one:
        one.gate.set()
        with pytest.raises(RemoteProtocolError, match="begins at 0x8"):
            await one.sessions.open(instance(LIFE), (one.address,), join=1)
        assert one.sessions.of(LIFE) is None and not one.sessions.link_uses() and not sender.driven
        assert sorted(closed) == ["InprocSession", "SessionWatch", "ZmqControlClient"]
        await one.sessions.close_all("the test is over")
        assert not one.lost


async def test_instances_that_do_not_fit_are_refused_before_anyone_is_called() -> None:
    async with attaching() as one:
        with pytest.raises(LayoutError, match="weights"):
            await one.sessions.open(instance(LIFE, weights="other"), (one.address,), join=1)
        assert one.num_attaches == 0 and one.sessions.of(LIFE) is None


async def test_a_decode_rank_without_room_for_another_session_is_asked_again_later() -> None:
    """A lack of room passes: the decode leader soon joins again."""
    async with attaching() as one:
        one.gate.set()
        one.refusal = ResourceExhausted("256 sessions are open")
        with pytest.raises(DecodeSessions.PASSING, match="256 sessions are open"):
            await one.sessions.open(instance(LIFE), (one.address,), join=1)


class Sender:
    """Takes sessions, and drives them."""

    def __init__(self) -> None:
        self.driver = SessionDriver(asyncio.get_running_loop())
        self.opened: dict[int, Session] = {}
        self.closed: dict[int, str] = {}
        self.watched: set[int] = set()
        self.copiers = [AsyncMock()]  # its warm_up() does nothing
        self.slot_bytes = 1
        self.direct = False

    def is_direct(self, number: int) -> bool:
        return self.direct

    def sessions_in_use(self) -> set[int]:
        return set()

    def watch_sessions(self, on_closed: Callable[[int, str], None]) -> None:
        self.on_closed = on_closed

    def open_session(self, number: int, session: Session, control: Any, **values: Any) -> None:
        self.opened[number] = session
        control.close()

    def close_session(self, number: int, reason: str) -> None:
        self.closed[number] = reason
        self.driver.remove(self.opened[number])

    def on_watermark(self, number: int, watermark: Watermark) -> None:
        self.watched.add(number)


async def test_a_one_sided_probe_writes_behind_the_ring_that_others_use() -> None:
    sender = Sender()
    sender.direct = True
    async with attaching(is_one_sided=True, sender=sender) as one:
        one.gate.set()
        ring, behind = one.memory.tensor[:RING_BYTES], one.memory.tensor[RING_BYTES:]
        one.memory.tensor.fill_(0x77)  # grants of others; what probes send is zeros
        (link,) = await one.sessions.open(instance(LIFE), (one.address,), join=1)
        # At most that of memory: the bytes of a probe fit into the cache.
        assert 0 < link.bandwidth_bytes_per_s <= host_copy_bytes_per_s()
        assert (ring == 0x77).all() and not behind.any()
        peer = one.sessions.of(LIFE)
        assert peer is not None and peer.ring_bytes == RING_BYTES and peer.sessions == {0: 1}
        assert sender.copiers[0].warm_up.await_args.kwargs["direct_ranks"] == {0}, "gathers store into this ring"
        for number in list(sender.opened):
            sender.on_closed(number, "the test is over")
        await one.sessions.close_all("the test is over")


@pytest.mark.parametrize("capability", ["probe_turns", "another"])
async def test_a_link_is_measured_in_its_turn_if_the_decode_rank_grants_turns(capability: str) -> None:
    sender = Sender()
    async with attaching(is_one_sided=True, sender=sender) as one:
        one.gate.set()
        one.answer["decode"] = instance(LIFE, capabilities=frozenset({capability}))
        await one.sessions.open(instance(LIFE), (one.address,), join=1)
        assert one.turns == ([1] if capability == "probe_turns" else [])
        sender.on_closed(1, "the test is over")
        await one.sessions.close_all("the test is over")


async def test_a_decode_rank_without_a_free_turn_does_not_delay_the_links_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_turns, "MAX_WAIT_S", 600.0)
    sender = Sender()
    takes_turns = frozenset({"probe_turns"})
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(attaching(is_one_sided=True, sender=sender))
        busy = await stack.enter_async_context(attaching(is_one_sided=True))
        for rank, life in ((one, LIFE), (busy, LIFE + 1)):
            rank.gate.set()
            rank.answer["decode"] = instance(life, capabilities=takes_turns)
        busy.target = InprocTransport(one.hub, one_sided=True)  # this writer can write to it, too
        busy.ring = busy.target.register(busy.memory.tensor)
        others: list[SessionWatch] = []
        for number in range(1, MAX_PROBES + 1):
            busy.answer["session_id"] = number + 100
            client = TransferControlClient(busy.address)
            stack.push_async_callback(client.close)
            request = AttachRequest(
                prefill=instance(50 + number),
                prefill_rank=0,
                offer=InprocTransport(one.hub, one_sided=True).offer_to(("inproc",)).blob,
                chunk_plan=ChunkPlan(chunk_tokens=4),
                probe_bytes=PROBE_BYTES,
                control_key=new_key_pair().public,
            )
            answer = await client.attach(request, timeout_s=10.0)
            others.append(
                client.watch(
                    answer.session_id,
                    ring_capacity_bytes=RING_BYTES,
                    heartbeat_s=HEARTBEAT_S,
                    on_watermark=lambda _: None,
                    on_lost=lambda _: None,
                )
            )
            await others[-1].probe_turn()
        busy.answer["session_id"] = 100
        waiting = asyncio.ensure_future(one.sessions.open(busy.answer["decode"], (busy.address,), join=1))
        await until(lambda: 100 in sender.opened)
        async with asyncio.timeout(10.0):
            await one.sessions.open(instance(LIFE), (one.address,), join=2)
        assert not waiting.done()
        for other in others:
            other.close()
        await waiting
        for number in list(sender.opened):
            sender.on_closed(number, "the test is over")
        await one.sessions.close_all("the test is over")


async def test_a_one_sided_link_below_the_floor_is_refused() -> None:
    sender = Sender()
    async with attaching(is_one_sided=True, sender=sender, floor=1e15) as one:
        one.gate.set()
        with pytest.raises(TransportError, match=r"makes .* bytes/s; transport.min_bandwidth_bytes_per_s is 1e\+15"):
            await one.sessions.open(instance(LIFE), (one.address,), join=1)
        assert one.sessions.of(LIFE) is None and list(sender.closed) == [1]
        sender.on_closed(1, "it is closed")
        await one.sessions.close_all("the test is over")


def connections_to(port: int) -> int:
    """TCP connections of this machine that are open to a local port."""
    num = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            num += fields[3] == "01" and int(fields[2].rpartition(":")[2], 16) == port
    return num


async def opened(one: Attaching, *, join: int) -> None:
    """Attach, once the decode rank has noticed that the session before is over."""
    for _ in range(1000):
        try:
            await one.sessions.open(instance(LIFE), (one.address,), join=join)
            return
        except PeerUnreachable:
            await asyncio.sleep(0.05)
    raise AssertionError("it is never taken")


async def test_the_connection_of_a_session_that_fell_silent_is_closed_with_it() -> None:
    """Its call was cut off. In an idle rank, gRPC's objects would wait for the garbage collector."""
    sender = Sender()
    async with attaching(is_one_sided=True, sender=sender) as one:
        one.gate.set()
        port = int(one.address.rpartition(":")[2])
        gc.collect()
        gc.disable()
        try:
            for number in (1, 2, 3):
                await opened(one, join=number)
                # A rank keeps a session that nobody watched yet for half a minute.
                await until(lambda: number in sender.watched)  # noqa: B023
                assert connections_to(port) == 1
                sender.on_closed(number, "the decode rank is silent")
                await until(lambda: connections_to(port) == 0)
        finally:
            gc.enable()
        await one.sessions.close_all("the test is over")
