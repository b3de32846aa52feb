"""Turns of a process's loop: counted, and logged with their cause where they are long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from structlog.testing import capture_logs

from node_runtime.event_pump import EventPump
from node_runtime.health import HealthServer, Readiness
from node_runtime.loop_thread import LoopThread
from node_runtime.rank_link import LeaderLink, RankCodec, RankLink
from transfer import loop_turns
from transfer.loop_turns import SAID_AGAIN_S, LoopTurns, MeasuredLoop, TimedSteps, run_measured, turns_of
from transfer.metrics.loop_specs import TURN_BUCKETS_S
from transfer.registry.client import open_channel
from transfer.registry.server import serve

_T = TypeVar("_T")
DEADLINE_S = 60.0


class Clocks:
    """A wall clock and a CPU clock that the test moves."""

    def __init__(self) -> None:
        self.wall_s = 100.0
        self.cpu_s = 1.0

    def work(self, seconds: float) -> None:
        self.wall_s += seconds
        self.cpu_s += seconds

    def stand_still(self, seconds: float) -> None:
        self.wall_s += seconds

    def turns(self, *, is_counting: bool = True) -> LoopTurns:
        turns = LoopTurns(clock=lambda: self.wall_s, cpu_clock=lambda: self.cpu_s)
        if is_counting:
            turns.start_counting()
        return turns


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@contextmanager
def turn(turns: LoopTurns) -> Iterator[None]:
    turns.begin()
    yield
    turns.end()


@dataclass(frozen=True)
class Ping:
    number: int


@dataclass(frozen=True)
class Arrived:
    """As `MessageArrived` of either protocol machine."""

    message: Ping


def warnings(logs: list[Any]) -> list[dict[str, Any]]:
    return [dict(entry) for entry in logs if entry["event"] == "loop_turn_long"]


@pytest.fixture
def every_turn_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_turns, "LONG_TURN_S", 0.0)


def on_measured_loop(main: Callable[[], Coroutine[Any, Any, _T]]) -> tuple[_T, set[str]]:
    """What `main` returns on a loop whose turns count, and the causes of the warnings."""

    async def counted() -> _T:
        turns_of(asyncio.get_running_loop()).start_counting()
        async with asyncio.timeout(DEADLINE_S):
            return await main()

    with capture_logs() as logs:
        found = run_measured(counted())
    return found, {entry["longest_event"] for entry in warnings(logs)}


def test_turns_are_counted_by_length(clocks: Clocks) -> None:
    turns = clocks.turns()
    for seconds in (0.0005, 0.002, 0.002, 20.0):
        with turn(turns):
            clocks.work(seconds)
        clocks.stand_still(3.0)  # in the selector
    assert len(turns.counts) == len(TURN_BUCKETS_S) + 1
    assert (turns.counts[0], turns.counts[1], turns.counts[-1], sum(turns.counts)) == (1, 2, 1, 4)
    assert turns.total_s == pytest.approx(20.0045)


def test_a_long_turn_is_logged_with_its_longest_event(clocks: Clocks) -> None:
    turns = clocks.turns()
    with capture_logs() as logs:
        with turn(turns):
            for event, seconds in ((Ping(1), 0.05), (Arrived(Ping(2)), 0.2), ("GET /metrics", 0.01)):
                begun_s = clocks.wall_s
                clocks.work(seconds)
                turns.took(event, begun_s)
        with turn(turns):
            clocks.work(0.24)  # short of a warning
        with turn(turns):
            clocks.work(0.3)  # no event of its own
    first, second = warnings(logs)
    assert first == {
        "event": "loop_turn_long",
        "log_level": "warning",
        "seconds": 0.26,
        "cpu_seconds": 0.26,
        "longest_event": "Ping",
        "longest_event_seconds": 0.2,
        "events": 3,
    }
    assert (second["longest_event"], second["events"]) == ("none noted", 0)


def test_a_process_that_was_stopped_has_used_no_cpu_time(clocks: Clocks) -> None:
    turns = clocks.turns()
    with capture_logs() as logs:
        for _ in range(100):
            with turn(turns):
                clocks.work(0.001)
        with turn(turns):
            clocks.stand_still(5.0)
    (warning,) = warnings(logs)
    assert warning["seconds"] == 5.0 and warning["cpu_seconds"] <= 0.011, "but for turns just before"


def test_a_cause_is_logged_again_after_a_while(clocks: Clocks) -> None:
    turns = clocks.turns()

    def long_turn(name: str) -> None:
        with turn(turns):
            clocks.work(0.5)
            turns.took(name, clocks.wall_s - 0.5)

    with capture_logs() as logs:
        for name in ("one", "one", "two"):
            long_turn(name)
        clocks.stand_still(SAID_AGAIN_S)
        long_turn("one")
    assert [warning["longest_event"] for warning in warnings(logs)] == ["one", "two", "one"]
    assert sum(turns.counts) == 4, "each of them is counted"


def test_turns_before_a_process_is_ready_are_not_counted(clocks: Clocks) -> None:
    turns = clocks.turns(is_counting=False)
    with capture_logs() as logs:
        with turn(turns):
            clocks.work(9.0)
        with turn(turns):
            clocks.work(9.0)
            turns.start_counting()
            clocks.work(0.002)
    assert not warnings(logs)
    assert sum(turns.counts) == 1 and turns.total_s == pytest.approx(0.002)


def test_a_loops_turn_is_the_time_between_two_calls_of_its_selector(clocks: Clocks) -> None:
    turns = clocks.turns()

    async def main() -> None:
        clocks.work(0.3)
        await asyncio.sleep(0)
        clocks.work(0.02)
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=lambda: MeasuredLoop(turns)) as runner:
        runner.run(main())
    assert turns.total_s == pytest.approx(0.32)
    assert turns.counts[TURN_BUCKETS_S.index(0.5)] == 1 and turns.counts[TURN_BUCKETS_S.index(0.025)] == 1


def test_a_loop_that_is_not_measured_takes_notes_of_nothing() -> None:
    async def main() -> int:
        turns_of(asyncio.get_running_loop()).took("nothing", 0.0)
        return await TimedSteps("one", asyncio.sleep(0, 7))

    assert asyncio.run(main()) == 7


@pytest.mark.usefixtures("every_turn_is_long")
def test_an_event_of_a_machine_is_named() -> None:
    async def main() -> None:
        pump: EventPump[object, object] = EventPump(
            asyncio.get_running_loop(),
            handle=lambda event, now_s: [],
            carry_out=lambda action: None,
            is_idle=lambda: True,
            tick=None,
        )
        pump.feed(Arrived(Ping(1)))
        await asyncio.sleep(0)

    assert "Ping" in on_measured_loop(main)[1]


@pytest.mark.usefixtures("every_turn_is_long")
@pytest.mark.parametrize("is_to_leader", [True, False])
def test_a_message_between_leader_and_rank_is_named(tmp_path: Path, is_to_leader: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        codec = RankCodec(Ping)
        leader = LeaderLink(tmp_path, 1, codec)
        rank = RankLink(leader.address_of(0), codec)
        heard_by_leader, heard_by_rank = asyncio.Event(), asyncio.Event()
        leader.watch(loop, lambda number, message: heard_by_leader.set())
        rank.watch(loop, lambda message: heard_by_rank.set())
        if is_to_leader:
            rank.send(Ping(1))
            await heard_by_leader.wait()
        else:
            while not heard_by_rank.is_set():
                leader.send(0, Ping(1))
                await asyncio.sleep(0.01)  # until the rank is connected
        await asyncio.sleep(0)
        rank.close()
        leader.close()

    assert "Ping" in on_measured_loop(main)[1]


@pytest.mark.usefixtures("every_turn_is_long")
def test_a_call_is_named_by_its_method() -> None:
    async def main() -> int:
        server = await serve("127.0.0.1", 0)
        channel = open_channel(server.address)
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            return int(answer.status)
        finally:
            await channel.close()
            await server.close()

    status, causes = on_measured_loop(main)
    assert status == health_pb2.HealthCheckResponse.NOT_SERVING and "Check" in causes


@pytest.mark.usefixtures("every_turn_is_long")
def test_a_scrape_is_named() -> None:
    async def main() -> bytes:
        server = HealthServer(lambda: Readiness(is_ready=True), lambda: b"page\n")
        port = await server.start("127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                return await answer.read()
        finally:
            await server.stop()

    page, causes = on_measured_loop(main)
    assert page == b"page\n" and "GET /metrics" in causes


async def _raises() -> None:
    await asyncio.sleep(0)
    raise ValueError("as it should")


async def _is_cancelled(seen: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        seen.append("cancelled")
        raise


def test_steps_are_those_of_the_coroutine() -> None:
    seen: list[str] = []

    async def main() -> int:
        with pytest.raises(ValueError, match="as it should"):
            await TimedSteps("raises", _raises())
        task = asyncio.ensure_future(_wrapped(TimedSteps("cancelled", _is_cancelled(seen))))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await TimedSteps("returns", asyncio.sleep(0, 5))

    assert run_measured(main()) == 5 and seen == ["cancelled"]


async def _wrapped(steps: TimedSteps[None]) -> None:
    await steps


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread.shared()
    yield thread
    thread.release()


def test_the_loop_beside_an_engine_is_measured(thread: LoopThread) -> None:
    async def main() -> int:
        await asyncio.sleep(0)
        return sum(turns_of(asyncio.get_running_loop()).counts)

    thread.call(thread.loop.turns.start_counting)
    assert thread.start(main()).result(DEADLINE_S) >= 1
