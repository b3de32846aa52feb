"""One timer for many sessions: heartbeats of a busy loop, sessions that fail, and intervals that differ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.runtime.virtual_time import VirtualTimeLoop, in_virtual_time
from transfer.registry.heartbeat_timer import HeartbeatTimer, SessionHeartbeats
from transfer.registry.heartbeats import HeartbeatWatch

HEARTBEAT_S = 0.5
TICK_S = HEARTBEAT_S / 4


def session(
    number: int,
    *,
    heartbeat_s: float = HEARTBEAT_S,
    on_due: Callable[[], None],
    on_silent: Callable[[str], None] = lambda _: None,
) -> SessionHeartbeats:
    return SessionHeartbeats(session_id=number, watch=HeartbeatWatch(heartbeat_s), on_due=on_due, on_silent=on_silent)


class End:
    """One end of a session. It writes a heartbeat one turn of the loop after it is due, as a task does."""

    def __init__(self, timer: HeartbeatTimer) -> None:
        self.loop = asyncio.get_running_loop()
        self.sent_s: list[float] = []
        self.heartbeats = session(1, on_due=lambda: self.loop.call_soon(self.send) and None)
        timer.add(self.heartbeats)
        self.send()

    def send(self) -> None:
        self.sent_s.append(self.loop.time())
        self.heartbeats.watch.on_sent(0.0, self.loop.time())
        self.heartbeats.watch.on_heartbeat()


class BusyLoop(VirtualTimeLoop):
    """Each turn takes `turn_s`."""

    def __init__(self, turn_s: float) -> None:
        super().__init__()
        self.turn_s = turn_s

    def time(self) -> float:
        return max(self.now_s, self.num_turns * self.turn_s)


@pytest.mark.parametrize("turn_s", [0.001, 0.1, 0.12, 0.15, 0.3])
def test_a_loop_whose_turns_are_long_sends_its_heartbeats(turn_s: float) -> None:
    """The peer declares an end dead after three heartbeats without one."""

    async def main() -> list[float]:
        timer = HeartbeatTimer()
        end = End(timer)
        while end.loop.time() < 30:
            await asyncio.sleep(0)
        timer.remove(end.heartbeats)
        return end.sent_s

    with asyncio.Runner(loop_factory=lambda: BusyLoop(turn_s)) as runner:
        sent_s = runner.run(main())
    gaps_s = [after_s - before_s for before_s, after_s in zip(sent_s, [*sent_s[1:], 30.0], strict=True)]
    assert max(gaps_s) < 3 * HEARTBEAT_S


@in_virtual_time
async def test_a_heartbeat_that_is_due_after_a_stop_waits_for_one_tick() -> None:
    """So the reader hears first that the peer has ended the session meanwhile."""
    timer = HeartbeatTimer()
    end = End(timer)
    loop = end.loop
    assert isinstance(loop, VirtualTimeLoop)
    loop.now_s += 2.0  # the process was stopped
    await asyncio.sleep(TICK_S / 2)
    assert end.sent_s == [0.0]
    await asyncio.sleep(TICK_S)
    assert end.sent_s == [0.0, 2.0 + TICK_S]
    timer.remove(end.heartbeats)


@in_virtual_time
async def test_a_heartbeat_that_cannot_wait_is_sent_at_once_unless_a_tick_is_late() -> None:
    timer = HeartbeatTimer()
    end = End(timer)
    loop = end.loop
    assert isinstance(loop, VirtualTimeLoop)
    timer.send_soon(end.heartbeats)
    await asyncio.sleep(0.01)
    assert end.sent_s == [0.0, 0.0]
    loop.now_s = 2.0  # the process was stopped
    timer.send_soon(end.heartbeats)
    await asyncio.sleep(TICK_S / 2)
    assert end.sent_s == [0.0, 0.0]
    timer.send_soon(end.heartbeats)
    timer.remove(end.heartbeats)
    await asyncio.sleep(2 * TICK_S)
    assert end.sent_s[2:] == [2.0 + TICK_S, 2.0 + 1.5 * TICK_S]
    timer.send_soon(end.heartbeats)  # its session is over
    await asyncio.sleep(0.01)
    assert len(end.sent_s) == 5


@in_virtual_time
async def test_a_session_that_fails_does_not_stop_the_heartbeats_of_the_others() -> None:
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))

    def fail(*_: str) -> None:
        raise RuntimeError("bug")

    due: list[float] = []
    timer = HeartbeatTimer()
    failing = session(1, on_due=fail, on_silent=fail)
    other = session(2, on_due=lambda: due.append(loop.time()))
    timer.add(failing)
    timer.add(other)
    await asyncio.sleep(20.5 * TICK_S)
    assert len(complaints) == 20, "it ticks on"
    assert len(due) == 12, "after 12 ticks, the other one is silent"
    assert {repr(one["exception"]) for one in complaints} == {"RuntimeError('bug')"}
    timer.remove(failing)
    timer.remove(other)


@in_virtual_time
async def test_sessions_of_other_intervals_keep_their_own_ticks() -> None:
    """Also after a session was removed, and after one session has ended another within a tick."""
    loop = asyncio.get_running_loop()
    due: list[tuple[int, float]] = []
    timer = HeartbeatTimer()
    sessions: dict[int, SessionHeartbeats] = {}

    def note(number: int) -> None:
        due.append((number, loop.time()))
        timer.remove(sessions[3])

    for number, heartbeat_s in ((1, 1.0), (2, 2.0), (3, 1.0)):
        sessions[number] = session(number, heartbeat_s=heartbeat_s, on_due=lambda number=number: note(number))  # type: ignore[misc]
        timer.add(sessions[number])
    assert timer.stated_idle_s(sessions[1]) == 3 / 32
    await asyncio.sleep(0.6)
    assert due == [(1, 0.25), (2, 0.5), (1, 0.5)]
    assert timer.stated_idle_s(sessions[1]) == 2 / 32
    timer.remove(sessions[1])
    await asyncio.sleep(0.5)
    assert due[3:] == [(2, 1.0)]
    timer.remove(sessions[2])
