"""A circuit breaker for one peer: whether requests should go there while there are others to send them to. Pure.

It never says no. A peer whose breaker is not closed is only the last choice: where nobody else is left it is given requests all
the same, and each of them can show that it works again. So no peer is ever shut out, whatever happened to it before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from transfer.errors import ConfigError


class BreakerState(Enum):
    """Where a breaker stands; the values are what people see."""

    CLOSED = "closed"
    OPEN = "open"  # for a pause it is given nothing that can go elsewhere
    HALF_OPEN = "half-open"  # the pause is over: one request at a time tries it, until one succeeds


class Verdict(Enum):
    """What came of a request, as far as it speaks of the peer."""

    SUCCESS = "success"
    FAILURE = "failure"  # by the peer's fault
    NOTHING = "nothing"  # it was given up, or failed by its own fault: the peer is none the better or worse for it


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When a breaker opens, and for how long.

    Args:
        failures: Failures within `window_s` that open it.
        window_s: Seconds after which a failure counts no more.
        pause_s: Seconds for which it opens first.
        max_pause_s: Seconds for which it opens at most. The pause doubles when a trial fails, and when the breaker opens again
            before it has been closed for so long.
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
        opening: How often the breaker had opened when the request began: what began before the last time says nothing new.
        is_trial: It is the one that tries a half-open peer.
    """

    opening: int
    is_trial: bool


class Breaker:
    """See the module's docstring. Every permit must be ended once, or a half-open peer waits for its trial for ever.

    Args:
        settings: When it opens, and for how long.
        clock: Seconds that never go back.
    """

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
        return 0.0 if self._pause_ends_s is None else max(0.0, self._pause_ends_s - self._clock())

    @property
    def wants_trial(self) -> bool:
        """Whether the next request should try the peer: it is half-open, and no other request is trying it."""
        return self.state is BreakerState.HALF_OPEN and self._trial is None

    def begin(self) -> Permit:
        """A request is sent to the peer."""
        permit = Permit(opening=self.num_openings, is_trial=self.wants_trial)
        if permit.is_trial:
            self._trial = permit
        return permit

    def end(self, permit: Permit, verdict: Verdict) -> None:
        """That is what came of it. A success closes a breaker that has opened before the request began, trial or not."""
        if permit is self._trial:
            self._trial = None
        if permit.opening != self.num_openings:
            return
        if verdict is Verdict.SUCCESS and self._pause_ends_s is not None:
            self._pause_ends_s, self._closed_s = None, self._clock()
        elif verdict is Verdict.FAILURE and (self._pause_ends_s is not None or self._is_one_too_many()):
            self._open()

    def lose(self) -> None:
        """The peer was lost, and what it was doing with it."""
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
        elif self.state is not BreakerState.OPEN:  # else the pause only begins anew: one event can come as several failures
            # A peer that is lost again and again may well succeed in between: only staying closed starts it afresh.
            self._pause_s = min(2 * self._pause_s, self._settings.max_pause_s)
        self._pause_ends_s = now_s + self._pause_s
        self.num_openings += 1
        self._trial = None
        self._failures.clear()
