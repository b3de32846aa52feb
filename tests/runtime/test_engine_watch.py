"""A leader notices an engine that hangs, and logs a full pool and steps without memory once for as long as they last."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from structlog.testing import capture_logs

from node_runtime.engine_watch import LINGER_S, MOST_IN_A_ROW, QUIET_S, FullPool, OutOfMemoryWatch, StepWatch
from tests.runtime.virtual_time import VirtualTimeLoop, run_in_virtual_time


class Watched:
    """An `OutOfMemoryWatch` that records its calls."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.num_steps = 0
        self.hopeless: list[str] = []
        self.watch = OutOfMemoryWatch(on_step=self.count, on_hopeless=self.hopeless.append, clock=lambda: self.now_s)

    def count(self) -> None:
        self.num_steps += 1


def test_each_step_is_counted_and_the_first_is_told_of() -> None:
    watched = Watched()
    with capture_logs() as logs:
        for _ in range(3):
            watched.watch.step_failed("no memory for it")
            watched.now_s += 2
            watched.watch.step_done()
        assert [(entry["event"], entry["log_level"], entry["reason"]) for entry in logs] == [
            ("out_of_memory", "error", "no memory for it")
        ]
        watched.now_s += QUIET_S
        watched.watch.step_done()
        watched.watch.step_done()
        assert [(entry["event"], entry["steps"], entry["lasted_s"]) for entry in logs[1:]] == [("out_of_memory_ended", 3, 4.0)]
        watched.watch.step_failed("again")
        assert logs[2]["reason"] == "again"
    assert watched.num_steps == 4 and not watched.hopeless


def test_ranks_that_find_no_memory_at_all_are_given_up() -> None:
    watched = Watched()
    for _ in range(MOST_IN_A_ROW - 1):
        watched.watch.step_failed("no memory for it")
    watched.watch.step_done()
    for _ in range(MOST_IN_A_ROW - 1):
        watched.watch.step_failed("no memory for it")
    assert not watched.hopeless, "one step ended well between"
    for _ in range(3):
        watched.watch.step_failed("no memory for it")
    assert watched.hopeless == [f"{MOST_IN_A_ROW} steps in a row found no memory, the last one: no memory for it"]


def test_the_end_of_one_step_gives_the_next_its_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        said: list[str] = []
        watch = StepWatch(10.0, said.append)
        for _ in range(3):
            watch.step_sent()
        for num_left in (2, 1):
            await asyncio.sleep(9.0)
            watch.step_over(num_left=num_left)
        await asyncio.sleep(9.0)
        assert not said
        await asyncio.sleep(2.0)
        assert said == ["no step of the engine has ended for 10 s (limits.step_timeout_s)"], "the last one is watched too"
        watch.step_sent()
        watch.close()
        await asyncio.sleep(30.0)
        assert len(said) == 1

    run_in_virtual_time(main, monkeypatch)


async def test_time_in_which_this_process_did_not_run_does_not_count() -> None:
    said: list[str] = []
    watch = StepWatch(0.2, said.append)
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    near, far = socket.socketpair()

    def on_message() -> None:
        near.recv(1)
        watch.step_over(num_left=0)
        over.set()

    with near, far:
        # As from a rank: the loop sees a descriptor, and hands the message on in its next turn.
        loop.add_reader(near, lambda: loop.call_soon(on_message) and loop.remove_reader(near))
        watch.step_sent()
        far.send(b"x")  # the step's end, which lies unread while this process is stopped
        time.sleep(0.5)
        await over.wait()
    assert not said


def test_a_full_pool_is_logged_once_until_no_request_has_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        counts: list[int] = []
        pool = FullPool(advice="raise pool.num_pages (now 8)", on_change=counts.append)
        pool.waits("a")
        pool.waits("a")
        pool.waits("b")
        await asyncio.sleep(2.0)
        pool.waits_no_more("a")
        pool.waits_no_more("b")
        await asyncio.sleep(LINGER_S / 2)
        pool.changed(1)  # a busy pool is full again
        pool.changed(0)
        assert counts == [1, 2, 1, 0, 1, 0]
        assert [(entry["event"], entry["log_level"], entry["advice"]) for entry in logs] == [
            ("kv_pool_full", "warning", "raise pool.num_pages (now 8)")
        ]
        await asyncio.sleep(LINGER_S)
        assert (logs[1]["event"], logs[1]["most_requests"], logs[1]["lasted_s"]) == ("kv_pool_has_room", 2, 2.0 + LINGER_S / 2)
        pool.waits("d")
        pool.close()
        await asyncio.sleep(2 * LINGER_S)
        assert [entry["event"] for entry in logs[2:]] == ["kv_pool_full", "kv_pool_has_room"] and counts[-1] == 0

    with capture_logs() as logs:
        run_in_virtual_time(main, monkeypatch)
