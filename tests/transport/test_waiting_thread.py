"""The thread on which closed sessions wait: in order, one at a time, and gone when there is nothing to wait for."""

from __future__ import annotations

import functools
import threading

import pytest

from transfer.transport.waiting_thread import WaitingThread


def num_threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_waits_run_in_order_on_one_thread_that_ends_with_them() -> None:
    waits, gate, order = WaitingThread("waits-in-order"), threading.Event(), list[int]()

    def wait() -> None:
        gate.wait()
        order.append(len(order))

    waits.submit(wait)
    for number in range(1, 10):
        waits.submit(functools.partial(order.append, number))
    assert num_threads("waits-in-order") == 1
    assert not waits.join(0.05) and order == []
    gate.set()
    assert waits.join(5) and order == list(range(10))
    again = threading.Event()
    waits.submit(again.set)
    assert again.wait(5) and waits.join(5)
    assert waits.join(0)


def test_a_wait_that_fails_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    waits, ran = WaitingThread("waits-that-fail"), threading.Event()
    waits.submit(fail)
    waits.submit(ran.set)
    assert ran.wait(5) and waits.join(5)
    assert "the device is gone" in caplog.text
