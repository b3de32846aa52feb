"""A peer's circuit breaker: when it opens, whom it lets try, and that nobody is shut out for good."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transfer.breaker import Breaker, BreakerSettings, BreakerState, Permit, Verdict
from transfer.errors import ConfigError
from transfer.metrics import BREAKER_STATES

CLOSED, OPEN, HALF_OPEN = BreakerState
SUCCESS, FAILURE, NOTHING = Verdict
SETTINGS = BreakerSettings(failures=3, window_s=10.0, pause_s=1.0, max_pause_s=8.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(SETTINGS, clock)


def go_through(breaker: Breaker, verdict: Verdict) -> None:
    breaker.end(breaker.begin(), verdict)


def half_open(breaker: Breaker, clock: Clock) -> None:
    breaker.lose()
    clock.now_s += breaker.pause_left_s
    assert breaker.state is HALF_OPEN


def test_every_state_has_its_series() -> None:
    assert tuple(state.value for state in BreakerState) == BREAKER_STATES


def test_it_opens_at_once_when_the_peer_is_lost_and_lets_one_request_try_after_the_pause(breaker: Breaker, clock: Clock) -> None:
    breaker.lose()
    assert (breaker.state, breaker.pause_left_s, breaker.num_openings) == (OPEN, 1.0, 1)
    clock.now_s += 0.75
    assert (breaker.state, breaker.pause_left_s, breaker.wants_trial) == (OPEN, 0.25, False)
    clock.now_s += 0.25
    assert (breaker.state, breaker.pause_left_s, breaker.wants_trial) == (HALF_OPEN, 0.0, True)
    trial, other = breaker.begin(), breaker.begin()
    assert trial.is_trial and not other.is_trial and not breaker.wants_trial
    breaker.end(trial, SUCCESS)
    assert breaker.state is CLOSED and not breaker.begin().is_trial


def test_failures_within_a_time_open_it_and_old_ones_do_not_count(breaker: Breaker, clock: Clock) -> None:
    for _ in range(10):
        go_through(breaker, FAILURE)
        clock.now_s += 5.1
    assert breaker.state is CLOSED, "never three of them in ten seconds"
    for verdict in (FAILURE, SUCCESS, NOTHING, FAILURE, NOTHING):
        go_through(breaker, verdict)
    assert breaker.state is OPEN, "a success between them makes none undone, and the oldest is 5.1 s old"


def test_the_pause_doubles_with_each_failed_trial_up_to_its_bound(breaker: Breaker, clock: Clock) -> None:
    pauses = []
    breaker.lose()
    for _ in range(6):
        pauses.append(breaker.pause_left_s)
        clock.now_s += breaker.pause_left_s
        go_through(breaker, FAILURE)
        assert breaker.state is OPEN
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_peer_that_is_lost_again_and_again_is_left_out_for_longer_until_it_has_served_for_a_while(
    breaker: Breaker, clock: Clock
) -> None:
    pauses = []
    for served_s in (0.5, 7.9, 7.9, 8.0, 0.0):
        half_open(breaker, clock)
        go_through(breaker, SUCCESS)
        clock.now_s += served_s
        breaker.lose()
        pauses.append(breaker.pause_left_s)
        clock.now_s += breaker.pause_left_s
        go_through(breaker, SUCCESS)
        clock.now_s += 8.0
    assert pauses == [2.0, 2.0, 2.0, 1.0, 2.0]


def test_several_failures_of_one_event_open_it_once(breaker: Breaker) -> None:
    permits = [breaker.begin() for _ in range(10)]
    breaker.lose()
    for permit in permits:
        breaker.end(permit, FAILURE)
    assert breaker.num_openings == 1, "they began before"
    for permit in [breaker.begin() for _ in range(10)]:
        breaker.end(permit, FAILURE)
    assert (breaker.num_openings, breaker.pause_left_s) == (2, 1.0), "the pause begins again, and no longer"


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("failures", 0, "at least 1"),
        ("pause_s", math.nan, "above 0"),
        ("max_pause_s", 0.5, "at least pause_s, 1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, value: float, right: str) -> None:
    values = {"failures": 3, "window_s": 10.0, "pause_s": 1.0, "max_pause_s": 8.0, name: value}
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be {right}"):
        BreakerSettings(**values)  # type: ignore[arg-type]


MOVES = st.one_of(
    st.just("begin"),
    st.just("lose"),
    st.tuples(st.sampled_from(Verdict), st.integers(0, 50)),
    st.floats(0.0, 20.0),
)


@example(moves=["lose", 2.622162536555464, "lose", 9.0, "lose", 8.537469386507794, "lose"])  # the end of the pause is rounded
@given(moves=st.lists(MOVES, max_size=100))
def test_in_any_history_one_trial_at_a_time_and_always_a_way_back(moves: list[str | float | tuple[Verdict, int]]) -> None:
    clock = Clock()
    breaker = Breaker(SETTINGS, clock)
    live: list[Permit] = []
    for move in moves:
        openings, state = breaker.num_openings, breaker.state
        match move:
            case "begin":
                wanted = breaker.wants_trial
                live.append(breaker.begin())
                assert live[-1].is_trial == wanted
            case "lose":
                breaker.lose()
                assert breaker.num_openings == openings + 1 and breaker.state is OPEN
            case (verdict, number) if live:
                permit = live.pop(number % len(live))
                breaker.end(permit, verdict)
                is_news = permit.opening == openings and verdict is not NOTHING
                assert is_news or (breaker.num_openings, breaker.state) == (openings, state)
                if is_news and verdict is SUCCESS:
                    assert breaker.state is CLOSED
                if is_news and verdict is FAILURE and state is not CLOSED:
                    assert breaker.state is OPEN and breaker.num_openings == openings + 1
            case float():
                clock.now_s += move
        trials = [permit for permit in live if permit.is_trial and permit.opening == breaker.num_openings]
        assert len(trials) <= 1 or breaker.state is CLOSED
        assert not (breaker.wants_trial and trials)
        assert 0 <= breaker.pause_left_s <= SETTINGS.max_pause_s
        assert (breaker.pause_left_s > 0) == (breaker.state is OPEN)
    for permit in live:
        breaker.end(permit, NOTHING)
    clock.now_s += SETTINGS.max_pause_s
    assert breaker.state is CLOSED or breaker.wants_trial, "nobody is shut out"
    go_through(breaker, SUCCESS)
    assert breaker.state is CLOSED
