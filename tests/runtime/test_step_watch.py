"""A deadline for steps that a stopped or starved leader does not hold against its engine."""

from __future__ import annotations

import asyncio
import socket
import time

from node_runtime.step_watch import StepWatch
from tests.runtime.instances import until


async def test_a_step_that_does_not_end_is_overdue_once() -> None:
    said: list[str] = []
    watch = StepWatch(0.1, said.append)
    watch.step_sent()
    watch.step_sent()
    await until(lambda: bool(said))
    await asyncio.sleep(0.2)
    assert said == ["no step of the engine has ended for 0.1 s (limits.step_timeout_s)"]


async def test_time_in_which_this_process_did_not_run_does_not_count() -> None:
    said: list[str] = []
    watch = StepWatch(0.2, said.append)
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    with near, far:
        # As from a rank: the loop sees a descriptor, and hands the message on in its next turn.
        loop.add_reader(near, lambda: near.recv(1) and loop.call_soon(lambda: watch.step_over(num_left=0)))
        watch.step_sent()
        far.send(b"x")  # the step's end, which lies unread while this process is stopped
        time.sleep(0.5)
        await asyncio.sleep(0.1)
        loop.remove_reader(near)
    assert not said


async def test_the_end_of_one_step_gives_the_next_its_whole_time() -> None:
    said: list[str] = []
    watch = StepWatch(0.4, said.append)
    for _ in range(3):
        watch.step_sent()
    for num_left in (2, 1):
        await asyncio.sleep(0.25)
        watch.step_over(num_left=num_left)
    assert not said
    watch.close()
    await asyncio.sleep(0.5)
    assert not said
