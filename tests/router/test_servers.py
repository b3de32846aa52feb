"""Which server a request goes to, by load, health and breaker; no I/O, and a clock that stands still until it is moved."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

from kvferry.router.api import Answer, Call
from kvferry.router.servers import STATES, Lease, Server, ServerFailed, Tier, compare_names
from transfer.breaker import BreakerState


class SilentServer(Server):
    """A server that nobody asks."""

    def open(self, call: Call, params: object) -> AbstractAsyncContextManager[Answer]:
        raise NotImplementedError

    async def models(self, headers: object) -> Answer:
        raise NotImplementedError

    async def check(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(clock: Clock) -> Tier:
    servers = [SilentServer(url, "decode", lost_after_s=1.0, clock=clock) for url in ("a", "b", "c")]
    for server in servers:
        server.check_succeeded()
    return Tier(servers)


def taken(lease: Lease | None) -> str:
    assert lease is not None
    return lease.server.url


def test_the_least_loaded_first_and_in_turns_where_all_are_alike(tier: Tier) -> None:
    assert [taken(tier.lease(1)) for _ in range(6)] == ["a", "b", "c"] * 2
    tier.servers[1].outstanding = 0
    assert taken(tier.lease(5)) == "b" and taken(tier.lease(1)) == "a"


def test_a_server_that_failed_a_request_is_its_last_choice(tier: Tier) -> None:
    a, b, c = tier.servers
    b.outstanding = c.outstanding = 5
    assert tier.pick() is a
    assert tier.pick(tried=frozenset({a})) is b, "although it has more to do"
    assert tier.pick(tried=frozenset({a, b})) is c
    assert tier.pick(tried=frozenset({a, b, c})) is a


def opened(server: Server) -> None:
    server.lose("nobody listens")
    assert server.breaker.state is BreakerState.OPEN and server.state == "open" and "left out" in server.why_not


def test_an_open_breaker_leaves_a_server_out_and_one_request_tries_it_again(tier: Tier, clock: Clock) -> None:
    a, b, c = tier.servers
    opened(a)
    assert {taken(tier.lease(1)) for _ in range(4)} == {"b", "c"}
    clock.now_s += 1.5
    assert a.breaker.state is BreakerState.HALF_OPEN
    assert tier.pick(tried=frozenset({b})) is c, "what has been cut off once is not staked on it"
    trial = tier.lease(1)
    assert trial is not None and trial.server is a
    assert {taken(tier.lease(1)) for _ in range(4)} == {"b", "c"}, "one at a time"
    trial.succeeded()
    trial.end()
    assert a.state == "healthy"
    failing = [Lease(b, 1) for _ in range(3)]
    for lease in failing:
        lease.failed(ServerFailed(b, "status", "500"))
        lease.end()
    assert b.state == "open", "three failures"


def test_the_unhealthy_come_last_and_are_never_shut_out(tier: Tier) -> None:
    a, b, c = tier.servers
    a.check_failed("refused")
    b.check_failed("refused")
    opened(c)
    assert tier.pick() is c, "open, and yet the best that is left"
    c.check_failed("refused")
    assert tier.pick() in tier.servers
    assert tier.unavailable_reason().startswith("no decode server is healthy (a: refused; b: refused")
    a.check_succeeded()
    assert tier.unavailable_reason() == "" and tier.pick() is a


def test_a_server_that_does_not_fit_is_never_chosen(tier: Tier) -> None:
    a, b, c = tier.servers
    a.names, b.names, c.names = frozenset({"m"}), frozenset({"m", "n"}), None
    compare_names(tier.servers)
    assert [server.misfit for server in (a, c)] == ["", ""] and b.misfit == "it serves m, n, and a serves m"
    assert tier.pick(tried=frozenset({a, c})) is not b
    assert dict(tier.states()) == {("decode", state): number for state, number in zip(STATES, (2, 0, 0, 1), strict=True)}
    b.names = frozenset({"m"})
    compare_names(tier.servers)
    assert not b.misfit
    for server in tier.servers:
        server.misfit = "another model"
    assert tier.pick() is None and tier.lease(1) is None
