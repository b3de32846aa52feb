"""A leader logs steps without memory, and a full pool, once for as long as the condition lasts."""

from __future__ import annotations

from structlog.testing import capture_logs

from node_runtime.memory_watch import MOST_IN_A_ROW, QUIET_S, OutOfMemoryWatch


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
