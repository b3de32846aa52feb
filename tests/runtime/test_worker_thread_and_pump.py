"""Lane: work in order beside the loop. EventPump: one event after the other, ticks only while there is something to wait for."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, get_args

import pytest

from bench.two_tiers import TwoTiers
from tests.runtime.instances import until
from transfer import event_pump
from transfer.event_pump import EventPump
from transfer.layout import DType, KVLayout, Shard
from transfer.receive import loop as receive_loop
from transfer.receive.events import Action as ReceiverAction
from transfer.send import loop as send_loop
from transfer.send.events import Action as SenderAction
from transfer.worker_thread import WorkerThread


async def test_work_runs_in_order_on_one_other_thread_and_answers_on_the_loop() -> None:
    crashes: list[BaseException] = []
    lane = WorkerThread("copies", asyncio.get_running_loop(), crashes.append)
    done: list[tuple[int, str]] = []
    here = threading.get_ident()

    def work(number: int) -> tuple[int, str]:
        assert threading.get_ident() != here
        return number, threading.current_thread().name

    def on_done(result: tuple[int, str]) -> None:
        assert threading.get_ident() == here
        done.append(result)

    for number in range(20):
        lane.submit(partial(work, number), on_done)
    assert await lane.call(lambda: 42) == 42
    assert done == [(number, "copies") for number in range(20)]
    assert not crashes
    assert lane.close(timeout_s=5.0)


async def test_a_waiting_thread_keeps_nothing_of_its_last_work() -> None:
    """A gather's target can be a mapping of a peer's ring, which stays in quarantine until the last reference is gone."""
    lane = WorkerThread("copies", asyncio.get_running_loop(), lambda error: None)
    gone, done = threading.Event(), threading.Event()

    def gather_into(target: set[int]) -> set[int]:
        return target

    def submit() -> None:
        class Target(set[int]):
            pass

        target = Target()
        weakref.finalize(target, gone.set)
        lane.submit(partial(gather_into, target), lambda result: done.set())

    submit()
    await until(done.is_set)
    await until(gone.is_set)
    assert lane.close(timeout_s=5.0)


async def test_an_exception_of_call_is_raised_there_and_one_of_submit_is_a_crash() -> None:
    crashes: list[BaseException] = []
    lane = WorkerThread("x", asyncio.get_running_loop(), crashes.append)
    with pytest.raises(ZeroDivisionError):
        await lane.call(lambda: 1 // 0)
    assert not crashes
    answered: list[object] = []
    lane.submit(lambda: 1 // 0, answered.append)
    assert await lane.call(lambda: "goes on") == "goes on"
    assert [type(error) for error in crashes] == [ZeroDivisionError]
    assert not answered
    lane.close(timeout_s=5.0)


async def test_a_cancelled_call_harms_nobody_and_close_says_whether_it_ended() -> None:
    crashes: list[BaseException] = []
    lane = WorkerThread("x", asyncio.get_running_loop(), crashes.append)
    gate = threading.Event()
    waiting = asyncio.ensure_future(lane.call(gate.wait))
    await asyncio.sleep(0.01)
    waiting.cancel()
    assert not lane.close(timeout_s=0.01), "its work has not ended"
    gate.set()
    assert lane.close(timeout_s=5.0)
    await asyncio.sleep(0.01)
    assert not crashes


class Machine:
    """Answers event n with the actions n * 10 and n * 10 + 1."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_idle = True
        self.num_ticks = 0

    def handle(self, event: object, now_s: float) -> Iterable[int]:
        if event == "tick":
            self.num_ticks += 1
            return []
        assert isinstance(event, int)
        self.log.append(f"event {event}")
        return [event * 10, event * 10 + 1]


def pump_of(machine: Machine, carry_out: Callable[[int], None]) -> EventPump[object]:
    return EventPump(
        asyncio.get_running_loop(),
        handle=machine.handle,
        carry_out={int: carry_out},
        is_idle=lambda: machine.is_idle,
        tick="tick",
    )


async def test_what_an_action_brings_about_is_handled_after_all_actions_of_its_event() -> None:
    machine = Machine()

    def carry_out(action: int) -> None:
        machine.log.append(f"action {action}")
        if action in (10, 11):
            pump.feed(action - 8)  # events 2 and 3, from inside
            machine.log.append(f"fed by {action}")

    pump = pump_of(machine, carry_out)
    pump.feed(1)
    assert machine.log == [
        *("event 1", "action 10", "fed by 10", "action 11", "fed by 11"),
        *("event 2", "action 20", "action 21"),
        *("event 3", "action 30", "action 31"),
    ]
    pump.close()


async def test_ticks_come_only_while_the_machine_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_pump, "TICK_S", 0.005)
    machine = Machine()
    pump = pump_of(machine, lambda action: None)
    pump.feed(1)
    await asyncio.sleep(0.03)
    assert machine.num_ticks == 0, "idle: it costs nothing"
    machine.is_idle = False
    pump.feed(2)
    pump.feed(3)
    await until(lambda: machine.num_ticks >= 3)
    machine.is_idle = True
    await asyncio.sleep(0.02)
    seen = machine.num_ticks
    await asyncio.sleep(0.03)
    assert machine.num_ticks == seen
    pump.close()


async def test_both_loops_carry_out_every_action_of_their_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[set[type]] = []

    def recorded(loop: asyncio.AbstractEventLoop, **arguments: Any) -> EventPump[Any]:
        tables.append(set(arguments["carry_out"]))
        return EventPump(loop, **arguments)

    for module in (send_loop, receive_loop):
        monkeypatch.setattr(module, "EventPump", recorded)
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, dtype=DType.FLOAT16)
    TwoTiers(layout, Shard(), Shard(), is_one_sided=True).close()
    for action_type in (SenderAction, ReceiverAction):
        assert set(get_args(action_type)) in tables
