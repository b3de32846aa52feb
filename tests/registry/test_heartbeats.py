"""Three missed heartbeats, counted in the owner's own ticks."""

from __future__ import annotations

from transfer.registry.heartbeats import HeartbeatWatch


def ticks_until_dead(watch: HeartbeatWatch) -> int:
    return next(count for count in range(1, 100) if watch.tick())


def test_three_missed_heartbeats_mean_death() -> None:
    watch = HeartbeatWatch(0.5)
    num_ticks = ticks_until_dead(watch)
    assert 3 * watch.heartbeat_s < num_ticks * watch.tick_s <= 3.25 * watch.heartbeat_s
    assert watch.describe() == "3 heartbeats of 0.5 s missed"


def test_a_heartbeat_restarts_the_count() -> None:
    watch = HeartbeatWatch(0.5)
    for _ in range(50):
        for _ in range(12):
            assert not watch.tick()
        watch.on_heartbeat()
    assert ticks_until_dead(watch) == 13
