"""A deadline for steps that a stopped or starved leader does not hold against its engine."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from node_runtime.step_watch import StepWatch
from tests.runtime.virtual_time import VirtualTimeLoop, run_in_virtual_time


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
