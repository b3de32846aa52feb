"""Turns of a process's loop: counted, and logged with their cause where they are long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from structlog.testing import capture_logs

from transfer import loop_turns
from transfer.loop_turns import LoopTurns, MeasuredLoop, run_measured, turns_of
from transfer.metrics.specs import TURN_BUCKETS_S
from transfer.registry.options import CHANNEL_OPTIONS
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

    def turns(self) -> LoopTurns:
        turns = LoopTurns(clock=lambda: self.wall_s, cpu_clock=lambda: self.cpu_s)
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


def on_measured_loop(main: Callable[[], Coroutine[Any, Any, _T]]) -> tuple[_T, set[str]]:
    """Return the result of `main` on a measured loop, and the causes of the warnings."""

    async def counted() -> _T:
        turns_of(asyncio.get_running_loop()).start_counting()
        async with asyncio.timeout(DEADLINE_S):
            return await main()

    with capture_logs() as logs:
        found = run_measured(counted())
    return found, {entry["longest_event"] for entry in warnings(logs)}


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


class FaultyPoller:
    """Wait once if `is_near` is set. `handle` raises `error`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.is_near = False
        self.timeouts: list[float | None] = []

    def wait(self, fd: int, timeout_s: float | None) -> bool:
        self.timeouts.append(timeout_s)
        return self.is_near

    def handle(self) -> None:
        self.is_near = False
        raise self.error


@pytest.mark.parametrize("error", [ValueError("found"), asyncio.CancelledError("found")])
def test_a_poller_waits_in_place_of_the_selector_and_its_errors_are_those_of_a_callback(error: BaseException) -> None:
    poller, errors = FaultyPoller(error), list[object]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MeasuredLoop)
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        loop.pollers.append(poller)
        await asyncio.sleep(0)
        assert not poller.timeouts, "a loop with callbacks to run does not wait"
        await asyncio.sleep(0.01)
        assert poller.timeouts and all(one is not None and 0 < one <= 0.01 for one in poller.timeouts)
        poller.is_near = True
        await asyncio.sleep(0.01)

    run_measured(main())
    assert errors == [error]


def test_a_call_is_named_by_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_turns, "LONG_TURN_S", 0.0)

    async def main() -> int:
        server = await serve("127.0.0.1", 0)
        channel = grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS)
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            return int(answer.status)
        finally:
            await channel.close()
            await server.close()

    status, causes = on_measured_loop(main)
    assert status == health_pb2.HealthCheckResponse.NOT_SERVING and "Check" in causes
