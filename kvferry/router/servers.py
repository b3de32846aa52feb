"""The servers behind a router, and the choice of one for each request. No I/O.

A failing server is left out only while a better one exists.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, ClassVar, Final

import structlog

from kvferry.router.api import Answer, Call
from transfer.breaker import Breaker, BreakerSettings, BreakerState, Permit, Verdict

log = structlog.get_logger(__name__)

STATES: Final = ("healthy", "open", "unhealthy", "unfit")

_BREAKER: Final = BreakerSettings(failures=3, window_s=30.0, pause_s=1.0, max_pause_s=15.0)


class ServerFailed(Exception):
    """A server failed an attempt.

    Args:
        kind: "unreachable", "status", "broken", "lost" or "stale".
        reason: One line.
        status: HTTP status of its answer; None means that it did not answer.
        is_counted: Whether the failure counts for the server's breaker.
    """

    def __init__(self, server: Server, kind: str, reason: str, *, status: int | None = None, is_counted: bool = True) -> None:
        super().__init__(f"{server.tier} server {server.url}: {reason}")
        self.server = server
        self.kind = kind
        self.reason = reason
        self.status = status
        self.is_counted = is_counted


class Server(ABC):
    """Load, health and breaker of one server. Subclasses implement the calls to one kind of server.

    Args:
        tier: "prefill" or "decode".
        lost_after_s: A request is given up after this time without data from the server, while its health checks fail.
        clock: Returns monotonic seconds.
        on_opened: Called when the server's breaker opens.
    """

    flow_alone: ClassVar[str]
    """Flow of an attempt without a prefill server."""

    def __init__(
        self,
        url: str,
        tier: str,
        *,
        lost_after_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_opened: Callable[[], object] = lambda: None,
    ) -> None:
        self.url = url
        self.tier = tier
        self.breaker = Breaker(_BREAKER, clock)
        self.outstanding = 0  # prompt tokens (prefill) or requests (decode)
        self.names: frozenset[str] | None = None  # names of the models that it serves; None means unknown
        self.are_names_due = True
        self.misfit = ""  # why it cannot be used with the others
        self.problem = "its health has not been checked yet"  # empty if it is healthy
        self.last_use = 0
        self._clock = clock
        self._on_opened = on_opened
        self._lost_after_s = lost_after_s
        self._failing_since_s: float | None = None
        self._waits: dict[asyncio.Timeout, float] = {}  # start times of waits for the server

    @abstractmethod
    def open(self, call: Call, params: Mapping[str, Any] | None) -> AbstractAsyncContextManager[Answer]:
        """Open the answer of a decode server, from its first token on. The end of the context ends the request at the server.

        Args:
            params: `kv_transfer_params`. None means that the server computes the prompt itself, or has it computed.

        Raises:
            ApiError: The request is wrong, or was aborted.
            ServerFailed: The server failed before the first token. While the answer is read: it broke off.
        """

    def params(self) -> dict[str, Any] | None:
        """Return `kv_transfer_params` by which decode servers have this prefill server compute a prompt; None if they cannot."""
        return None

    def forget(self, *, is_stale: bool = False) -> None:  # noqa: B027
        """Forget the expected source of the next prompt's KV. The server failed, or the source was wrong (`is_stale`)."""

    @abstractmethod
    async def models(self, headers: Mapping[str, str]) -> Answer:
        """Return the answer of a decode server to `/v1/models`.

        Raises:
            ServerFailed: It did not answer.
        """

    @abstractmethod
    async def check(self) -> None:
        """Check the server's health.

        Raises:
            ServerFailed: It cannot serve requests, or does not answer.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close all connections."""

    @property
    def state(self) -> str:
        """One of `STATES`."""
        if self.misfit:
            return "unfit"
        if self.problem:
            return "unhealthy"
        return "open" if self.breaker.state is BreakerState.OPEN else "healthy"

    @property
    def why_not(self) -> str:
        """Why it gets no requests; empty if it gets some."""
        pause = f"left out for {self.breaker.pause_left_s:.1f} s after failures" if self.state == "open" else ""
        return self.misfit or self.problem or pause

    def check_succeeded(self) -> None:
        """Record a successful health check."""
        if self.problem:
            log.info("server_healthy", tier=self.tier, url=self.url)
        self.problem, self._failing_since_s = "", None

    def check_failed(self, reason: str) -> None:
        """Record a failed health check. End waits that have received nothing for `lost_after_s` since the first failure."""
        if self._failing_since_s is None:
            self._failing_since_s = self._clock()
            log.warning("server_unhealthy", tier=self.tier, url=self.url, reason=reason)
        self.problem = reason
        self.are_names_due = True  # another model may come back
        before_s = self._clock() - self._lost_after_s
        for wait, since_s in list(self._waits.items()):
            if max(since_s, self._failing_since_s) <= before_s:
                del self._waits[wait]
                wait.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def unless_lost(self) -> AsyncIterator[None]:
        """End the code inside, which waits for the server, when the server is lost.

        Raises:
            ServerFailed: The server is lost.
        """
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._waits[timeout] = self._clock()
                try:
                    yield
                finally:
                    self._waits.pop(timeout, None)
        except TimeoutError:
            if not timeout.expired():
                raise
            reason = f"nothing heard for {self._lost_after_s:g} s, and its health check fails: {self.problem}"
            raise ServerFailed(self, "lost", reason) from None

    def lose(self, reason: str) -> None:
        """Open the breaker, because the server cannot be reached."""
        with self.watched_breaker(reason):
            self.breaker.lose()

    @contextmanager
    def watched_breaker(self, reason: str) -> Iterator[None]:
        """Log once if the code inside opens the breaker."""
        before, was_open = self.breaker.num_openings, self.breaker.state is BreakerState.OPEN
        yield
        if self.breaker.num_openings > before and not was_open:
            log.warning(
                "breaker_opened", tier=self.tier, url=self.url, reason=reason, pause_s=round(self.breaker.pause_left_s, 3)
            )
            self._on_opened()


class Lease:
    """A place of a request at a server, until `end()`. It counts for the breaker only after `succeeded()` or `failed()`.

    Args:
        weight: Load that the request adds to the server.
    """

    def __init__(self, server: Server, weight: int) -> None:
        self.server = server
        self._weight = weight
        self._permit: Permit | None = server.breaker.begin()
        self._verdict = Verdict.NOTHING
        self._reason = ""
        server.outstanding += weight

    def succeeded(self) -> None:
        self._verdict = Verdict.SUCCESS

    def failed(self, failure: ServerFailed) -> None:
        if failure.is_counted:
            self._verdict, self._reason = Verdict.FAILURE, failure.reason

    def end(self) -> None:
        """End the request. No-op if it has ended."""
        permit, self._permit = self._permit, None
        if permit is None:
            return
        self.server.outstanding -= self._weight
        with self.server.watched_breaker(self._reason):
            self.server.breaker.end(permit, self._verdict)


class Tier:
    """The servers of one side."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = tuple(servers)
        self._num_picks = 0

    def lease(self, weight: int, *, tried: frozenset[Server] = frozenset()) -> Lease | None:
        """Return a place for a request at the server that `pick()` returns; None if there is none."""
        server = self.pick(tried=tried)
        return None if server is None else Lease(server, weight)

    def pick(self, *, tried: frozenset[Server] = frozenset()) -> Server | None:
        """Return the least loaded of the best servers; None if no server fits.

        A server whose breaker wants a trial gets the next new request, and no further attempts of others. Servers in `tried`,
        which failed this request, come last.
        """
        fit = [server for server in self.servers if not server.misfit]
        fresh = [server for server in fit if server not in tried] or fit
        healthy = [server for server in fresh if not server.problem]
        to_attempt = [server for server in healthy if server.breaker.wants_trial]
        closed = [server for server in healthy if server.breaker.state is BreakerState.CLOSED]
        choices = (closed or to_attempt) if tried else (to_attempt or closed)
        picked = min(choices or healthy or fresh, key=lambda one: (one.outstanding, one.last_use), default=None)
        if picked is not None:
            self._num_picks += 1
            picked.last_use = self._num_picks
        return picked

    def unavailable_reason(self) -> str:
        """Return why no server of this tier is healthy; empty if one is."""
        if any(server.state == "healthy" for server in self.servers):
            return ""
        reasons = "; ".join(f"{server.url}: {server.why_not}" for server in self.servers)
        return f"no {self.servers[0].tier} server is healthy ({reasons})"

    def states(self) -> Mapping[tuple[str, str], int]:
        """Return the number of servers by tier and state."""
        counted = Counter(server.state for server in self.servers)
        return {(self.servers[0].tier, state): counted[state] for state in STATES}


def compare_names(servers: Iterable[Server]) -> None:
    """Mark servers whose models have other names than those of the first server whose names are known."""
    known = [server for server in servers if server.names is not None]
    for server in known:
        first = known[0]
        problem = ""
        if server.names != first.names:
            problem = f"it serves {_listed(server.names)}, and {first.url} serves {_listed(first.names)}"
        if problem and problem != server.misfit:
            log.error("server_rejected", tier=server.tier, url=server.url, reason=problem)
        server.misfit = problem


def _listed(names: frozenset[str] | None) -> str:
    return ", ".join(sorted(names or ())) or "nothing"
