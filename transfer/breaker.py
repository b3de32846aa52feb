"""A circuit breaker for one peer: whether requests should go there while other peers exist. Pure.

It never refuses. A peer whose breaker is not closed is only the last choice. If no other peer is left, it gets requests all the
same, and each of them can show that it works again. So no peer is ever excluded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from transfer.errors import ConfigError


class BreakerState(Enum):
    """State of a breaker. The values are shown to people."""

    CLOSED = "closed"
    OPEN = "open"  # for a pause it is given nothing that can go elsewhere
    HALF_OPEN = "half-open"  # the pause is over: one request at a time tries it, until one succeeds


class Verdict(Enum):
    """Outcome of a request, as evidence about the peer."""

    SUCCESS = "success"
    FAILURE = "failure"  # by the peer's fault
    NOTHING = "nothing"  # it was given up, or failed by its own fault: the peer is none the better or worse for it


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When a breaker opens, and for how long.

    Args:
        failures: Failures within `window_s` that open it.
        window_s: Seconds for which a failure counts.
        pause_s: Seconds of the first pause.
        max_pause_s: Longest pause. The pause doubles if a trial fails, and if the breaker opens again before it was closed for so
            long.
    """

    failures: int
    window_s: float
    pause_s: float
    max_pause_s: float

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise ConfigError(f"failures is {self.failures}; it must be at least 1")
        for name in ("window_s", "pause_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not self.max_pause_s >= self.pause_s:
            raise ConfigError(f"max_pause_s is {self.max_pause_s}; it must be at least pause_s, {self.pause_s}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Permit:
    """One request at the peer, from `Breaker.begin` to `Breaker.end`.

    Args:
        opening: Openings of the breaker when the request began. A request from before the last opening proves nothing new.
        is_trial: Whether the request tries a half-open peer.
    """

    opening: int
    is_trial: bool


class Breaker:
    """See the module's docstring. End every permit once, or a half-open peer waits for its trial
    for ever. `clock` is monotonic."""

    def __init__(self, settings: BreakerSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._failures: deque[float] = deque()  # when, while it is closed
        self._pause_s = settings.pause_s
        self._pause_ends_s: float | None = None  # None: it is closed
        self._closed_s: float | None = None  # when it closed last; None: it has never been open
        self._trial: Permit | None = None
        self.num_openings = 0

    @property
    def state(self) -> BreakerState:
        if self._pause_ends_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._pause_ends_s else BreakerState.HALF_OPEN

    @property
    def pause_left_s(self) -> float:
        """Seconds until it is half-open; 0 unless it is open."""
        if self._pause_ends_s is None:
            return 0.0
        # The end is a rounded sum, so the difference can exceed the pause.
        return max(0.0, min(self._pause_s, self._pause_ends_s - self._clock()))

    @property
    def wants_trial(self) -> bool:
        """Whether the next request should try the peer: it is half-open, and no other request is trying it."""
        return self.state is BreakerState.HALF_OPEN and self._trial is None

    def begin(self) -> Permit:
        """Record that a request is sent to the peer."""
        permit = Permit(opening=self.num_openings, is_trial=self.wants_trial)
        if permit.is_trial:
            self._trial = permit
        return permit

    def end(self, permit: Permit, verdict: Verdict) -> None:
        """Record the outcome. A success closes a breaker that opened before the request began, trial or not."""
        if permit is self._trial:
            self._trial = None
        if permit.opening != self.num_openings:
            return
        if verdict is Verdict.SUCCESS and self._pause_ends_s is not None:
            self._pause_ends_s, self._closed_s = None, self._clock()
        elif verdict is Verdict.FAILURE and (self._pause_ends_s is not None or self._is_one_too_many()):
            self._open()

    def lose(self) -> None:
        """Record that the peer was lost with all its requests."""
        self._open()

    def _is_one_too_many(self) -> bool:
        now_s = self._clock()
        self._failures.append(now_s)
        while now_s - self._failures[0] > self._settings.window_s:
            self._failures.popleft()
        return len(self._failures) >= self._settings.failures

    def _open(self) -> None:
        now_s = self._clock()
        if self.state is BreakerState.CLOSED and (self._closed_s is None or now_s - self._closed_s >= self._settings.max_pause_s):
            self._pause_s = self._settings.pause_s
        elif self.state is not BreakerState.OPEN:  # else the pause only begins again: one event can cause several failures
            # A peer that is lost again and again may succeed in between: only a long closed time resets the pause.
            self._pause_s = min(2 * self._pause_s, self._settings.max_pause_s)
        self._pause_ends_s = now_s + self._pause_s
        self.num_openings += 1
        self._trial = None
        self._failures.clear()
