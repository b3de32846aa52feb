"""Three missed heartbeats, counted in the owner's own ticks."""

from __future__ import annotations

import pytest

from transfer.errors import RemoteProtocolError
from transfer.registry.heartbeats import HeartbeatWatch, checked_idle_heartbeat_s, idle_heartbeat_s


def ticks_until_dead(watch: HeartbeatWatch) -> int:
    return next(count for count in range(1, 1000) if watch.tick())


def ticks_until_due(watch: HeartbeatWatch) -> int:
    return next(count for count in range(1, 1000) if watch.is_due(count * watch.tick_s))


def idle(own_s: float, peer_s: float) -> HeartbeatWatch:
    watch = HeartbeatWatch(0.5)
    watch.on_sent(own_s, 0.0)
    watch.on_heartbeat(peer_s)
    return watch


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


@pytest.mark.parametrize(
    ("own_s", "peer_s", "interval_s"),
    [(8.0, 2.0, 8.0), (2.0, 8.0, 8.0), (0.1, 0.2, 0.5), (0.0, 8.0, 0.5), (8.0, 0.0, 0.5)],
)
def test_the_largest_interval_applies_in_both_directions_unless_an_end_states_0(
    own_s: float, peer_s: float, interval_s: float
) -> None:
    """A peer of the previous release states 0 always."""
    assert ticks_until_due(idle(own_s, peer_s)) == interval_s * 8
    assert ticks_until_dead(idle(own_s, peer_s)) == 3 * interval_s * 8 + 1
    assert idle(own_s, peer_s).describe() == f"3 heartbeats of {interval_s:g} s missed"


def test_a_peer_has_three_heartbeats_to_hear_of_a_shorter_interval() -> None:
    watch = idle(8.0, 8.0)
    for _ in range(150):
        assert not watch.tick()
    watch.on_sent(0.0, 0.0)
    assert ticks_until_dead(watch) == 13


def test_requests_that_come_and_go_do_not_excuse_a_dead_peer() -> None:
    watch = idle(8.0, 8.0)
    num_ticks = 0
    while not watch.tick():
        num_ticks += 1
        watch.on_sent(0.0 if num_ticks % 8 < 4 else 8.0, 0.0)
    assert num_ticks * watch.tick_s <= 3 * 8.0 + 3 * watch.heartbeat_s


def test_an_end_that_loses_its_other_sessions_does_not_excuse_a_dead_peer() -> None:
    """Its interval shrinks with each, as in a rolling restart of the other tier."""
    num_sessions, num_ticks = 320, 0
    watch = idle(idle_heartbeat_s(num_sessions), 0.25)
    while not watch.tick():
        num_ticks += 1
        num_sessions = max(17, num_sessions - 1)
        watch.on_sent(idle_heartbeat_s(num_sessions), 0.0)
    assert num_ticks * watch.tick_s <= 3 * 10.0 + 3 * watch.heartbeat_s


def test_the_interval_of_an_end_grows_with_its_sessions_up_to_a_limit() -> None:
    assert [idle_heartbeat_s(number) for number in (1, 16, 256, 320, 5000)] == [1 / 32, 0.5, 8.0, 10.0, 10.0]


@pytest.mark.parametrize("stated_s", [-0.1, 10.1, float("inf"), float("nan")])
def test_an_interval_out_of_range_is_refused(stated_s: float) -> None:
    with pytest.raises(RemoteProtocolError, match=r"idle_heartbeat_s is .*; it must be in"):
        checked_idle_heartbeat_s(stated_s)
    assert checked_idle_heartbeat_s(10.0) == 10.0
