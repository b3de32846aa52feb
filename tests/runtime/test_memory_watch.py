"""A leader logs steps without memory, and a full pool, once for as long as the condition lasts."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from node_runtime import memory_watch
from node_runtime.memory_watch import MOST_IN_A_ROW, QUIET_S, FullPool, OutOfMemoryWatch


class Watched:
    """An `OutOfMemoryWatch` and what it did."""

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
        assert [(entry["event"], entry["steps"], entry["lasted_s"]) for entry in logs[1:]] == [("out_of_memory_over", 3, 4.0)]
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


async def test_a_full_pool_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_watch, "LINGER_S", 0.0)
    shown: list[int] = []
    pool = FullPool(advice="raise memory.static_fraction", on_change=shown.append)
    with capture_logs() as logs:
        for name in ("a", "b", "a"):
            pool.waits(name)
        pool.waits_no_more("a")
        pool.waits_no_more("a")
        pool.waits_no_more("b")
        pool.waits("c")  # at once: it is still the same fullness
        pool.waits_no_more("c")
        assert [(entry["event"], entry["log_level"], entry["advice"]) for entry in logs] == [
            ("kv_pool_full", "warning", "raise memory.static_fraction")
        ]
        await turns()
        assert [(entry["event"], entry["requests"]) for entry in logs[1:]] == [("kv_pool_has_room", 3)]
        assert logs[1]["lasted_s"] >= 0
        await turns()
        pool.only(["d", "e"])
        pool.only(["e"])
        assert [entry["event"] for entry in logs[2:]] == ["kv_pool_full"]
        pool.close()
        assert [(entry["event"], entry["requests"]) for entry in logs[3:]] == [("kv_pool_has_room", 2)]
        pool.close()
        await turns()
        assert len(logs) == 4
    assert shown == [1, 2, 1, 0, 1, 0, 2, 1, 0]


async def test_the_end_of_a_life_ends_a_fullness_that_lingers() -> None:
    pool = FullPool(advice="", on_change=lambda number: None)
    pool.waits("a")
    pool.waits_no_more("a")
    with capture_logs() as logs:
        pool.close()
    assert [entry["event"] for entry in logs] == ["kv_pool_has_room"]


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)
