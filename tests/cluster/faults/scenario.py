"""The frame of every chaos test: requests in flight, a fault at a known moment, and one verdict.

    async with Scenario(tiers, reference) as scene:
        talking = await scene.generating()
        moving = await scene.arriving(2)
        with scene.fault():
            os.kill(pid, signal.SIGKILL)
        scene.ends(moving, UNAVAILABLE)

When the block ends, every request must have ended: those of `ends()` with one of its statuses and in time, all others with the
tokens of an undisturbed run. Then the status of the tiers must be joined and idle, every rank must have checked its invariants
since, and no process may hold more resources than before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from kvferry.local_cluster.cluster import ClusterNode
from tests.cluster.calls import Answer, Caller, Reference, leftovers, prompt, status_of, until
from tests.cluster.faults.figures import Figures, figures_of_node
from transfer.pb import kvferry_pb2 as pb

NOTICE_S = 10.0
"""Maximum time from a fault until its requests have failed. A fault that is not detected fails them at their deadline, after
`END_S`. Detection takes three heartbeats of half a second, which tests/registry/test_heartbeats.py counts, and longer on a busy
machine."""

LONG = 2000
IDLE_S = 15.0
JOIN_S = 60.0  # a rank group starts again in a second or two on two quiet cores
END_S = 60.0

OK = grpc.StatusCode.OK
ABORTED, CANCELLED = grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED
RESOURCE_EXHAUSTED, UNAVAILABLE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE


@dataclass(slots=True, kw_only=True)
class Tiers:
    """One prefill node and one decode node, and their resources when they are idle."""

    prefill: ClusterNode
    decode: ClusterNode
    prefill_ranks: int = 1
    decode_ranks: int = 1
    sessions: int = 1
    idle: dict[str, Figures] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[ClusterNode, ClusterNode]:
        return self.prefill, self.decode

    def lives(self) -> list[tuple[tuple[int, ...], int]]:
        """Return the rank processes and the incarnation of each. They change if something starts again."""
        return [(node.rank_pids, node.incarnation) for node in self.nodes]

    async def statuses(self) -> list[pb.NodeStatus] | None:
        """Return the status of both, prefill first; None while one of them does not answer."""
        found = [await status_of(node) if node.exit_code is None and node.ready_file else None for node in self.nodes]
        return None if None in found else [status for status in found if status is not None]

    async def is_ready(self) -> bool:
        """Return whether the decode node accepts requests."""
        status = await status_of(self.decode)
        return status is not None and status.ready

    async def what_is_left(self) -> list[str]:
        """Return the reasons why they are not joined and idle."""
        statuses = await self.statuses()
        if statuses is None:
            return ["a node does not answer"]
        held = [f"{status.role}: {line}" for status in statuses for line in leftovers(status)]
        held += [f"{status.role} is not ready: {status.not_ready_reason}" for status in statuses if not status.ready]
        joined = [peer.state for status in statuses for peer in status.peers]
        if joined != ["joined", "joined"]:
            held.append(f"peers are {joined}")
        sessions = [sum(rank.sessions for rank in status.ranks) for status in statuses]
        if sessions != [self.sessions, self.sessions]:
            held.append(f"sessions are {sessions}, not {self.sessions}")
        if [len(status.ranks) for status in statuses] != [self.prefill_ranks, self.decode_ranks]:
            held.append("a rank has not reported")
        if self.idle:
            held += [
                line
                for node, status in zip(self.nodes, statuses, strict=True)
                for name, figures in figures_of_node(node, status).items()
                for line in figures.excess(name, self.idle[name])
            ]
        return held

    async def until_idle(self, *, within_s: float) -> None:
        """Wait until they are joined and idle, and every rank has checked its invariants since."""
        held: list[str] = []

        async def is_idle() -> bool:
            held[:] = await self.what_is_left()
            return not held

        started_s = time.monotonic()
        while not await is_idle():
            assert time.monotonic() - started_s < within_s, f"still there after {within_s:g} s: {held}"
            await asyncio.sleep(0.1)
        proven = await self._proofs()

        async def have_proven() -> bool:
            now = await self._proofs()
            return all(count > proven.get(pid, -1) for pid, count in now.items())

        await until(have_proven, "every rank proves its invariants", within_s=IDLE_S)

    async def _proofs(self) -> dict[int, int]:
        statuses = await self.statuses()
        return {} if statuses is None else {rank.pid: rank.idle_checks for status in statuses for rank in status.ranks}

    async def remember_idle(self) -> None:
        """Record the present resources as the limit after every fault."""
        statuses = await self.statuses()
        assert statuses is not None
        for node, status in zip(self.nodes, statuses, strict=True):
            self.idle |= figures_of_node(node, status)


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One request, and its expected ends; by default it ends with all its tokens."""

    token_ids: tuple[int, ...]
    answer: Answer
    task: asyncio.Task[Answer]
    codes: tuple[grpc.StatusCode, ...] = (grpc.StatusCode.OK,)
    within_s: float = END_S


class Scenario:
    """See the module's docstring.

    Args:
        tiers: Joined and idle.
        reference: Tokens of the undisturbed run.
        join_s: Longest time from the end of the block until the tiers are joined and idle again.
    """

    def __init__(self, tiers: Tiers, reference: Reference, *, join_s: float = JOIN_S) -> None:
        self._tiers = tiers
        self._reference = reference
        self._join_s = join_s
        self._caller = Caller(tiers.decode.address)
        self._flights: list[Flight] = []
        self._variant = 0
        self.fault_s = 0.0
        """Monotonic time of the last fault."""

    async def __aenter__(self) -> Scenario:
        await self._tiers.until_idle(within_s=JOIN_S)
        await self._caller.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self._judge()
        finally:
            await self._caller.__aexit__()
        if kind is None:
            await self._tiers.until_idle(within_s=self._join_s)

    # Requests

    def begin(self, num_tokens: int, max_new_tokens: int, *, request_id: str = "", timeout_s: float = END_S) -> Flight:
        """Send a request with a prompt of its own.

        Args:
            num_tokens: Length of the prompt.
            max_new_tokens: Generated tokens.
            request_id: Its id; the node makes one if it is empty.
            timeout_s: Its deadline.
        """
        self._variant += 1
        token_ids = prompt(num_tokens, self._variant)
        answer, task = self._caller.begin(token_ids, max_new_tokens, request_id=request_id, timeout_s=timeout_s)
        flight = Flight(token_ids=token_ids, answer=answer, task=task)
        self._flights.append(flight)
        return flight

    async def generating(self, max_new_tokens: int = 120) -> Flight:
        """Return a request whose KV has arrived. It generates, and does not need the prefill node any more."""
        flight = self.begin(60, max_new_tokens)
        await until(lambda: len(flight.answer.tokens) >= 3 or flight.task.done(), "three tokens")
        return flight

    async def arriving(self, number: int, *, num_tokens: int = LONG, request_id: str = "") -> list[Flight]:
        """Return long requests. Some of their KV has arrived at the decode node, but of none all of it."""
        before = await self._bound_pages()
        flights = [self.begin(num_tokens, 8, request_id=request_id) for _ in range(number)]

        async def is_arriving() -> bool:
            return await self._bound_pages() > before + 8

        await until(is_arriving, "KV of a long request in the decode pool")
        assert not any(flight.task.done() or flight.answer.tokens for flight in flights), "it has arrived whole already"
        return flights

    async def _bound_pages(self) -> int:
        status = await status_of(self._tiers.decode)
        return 0 if status is None else sum(rank.pool_pages_bound for rank in status.ranks)

    async def serves(self, *lengths: int) -> None:
        """Send requests, and check their tokens."""
        flights = [self.begin(num_tokens, 8) for num_tokens in lengths or (5, 140, 300)]
        await asyncio.gather(*(flight.task for flight in flights))
        for flight in flights:
            self._reference.check(flight.token_ids, flight.answer)

    async def serves_again(self, *, within_s: float) -> None:
        """Wait until the tiers have joined again, and send requests."""
        await until(self._tiers.is_ready, "joined again", within_s=within_s)
        await self.serves()

    # Faults and verdict

    @contextmanager
    def fault(self) -> Iterator[None]:
        """Mark the block as the fault; times count from its begin."""
        self.fault_s = time.monotonic()
        yield

    def ends(self, flights: Sequence[Flight], *codes: grpc.StatusCode, within_s: float = NOTICE_S) -> None:
        """Expect one of the statuses within so many seconds after the last fault."""
        for flight in flights:
            flight.codes, flight.within_s = codes, within_s

    def since_fault_s(self, end_s: float) -> float:
        """Return the seconds from the last fault to that monotonic time."""
        return end_s - self.fault_s

    async def over(self, flights: Sequence[Flight]) -> list[Answer]:
        """Wait for the end of these requests."""
        return list(await asyncio.wait_for(asyncio.gather(*(flight.task for flight in flights)), END_S))

    async def until_noticed(
        self, is_true: Callable[[], bool | Awaitable[bool]], what: str, *, within_s: float = NOTICE_S
    ) -> None:
        """Wait for a state that must come within so many seconds after the last fault."""
        await until(is_true, what, within_s=END_S)
        took_s = self.since_fault_s(time.monotonic())
        assert took_s < within_s, f"{what}: {took_s:.2f} s after the fault"

    async def _judge(self) -> None:
        await asyncio.wait_for(asyncio.gather(*(flight.task for flight in self._flights), return_exceptions=True), END_S)
        for flight in self._flights:
            if flight.task.cancelled():
                assert CANCELLED in flight.codes, "it was to stay"
                continue
            answer = flight.answer
            assert answer.code in flight.codes, f"{answer.code} instead of {flight.codes}: {answer.details}"
            if answer.code is grpc.StatusCode.OK:
                self._reference.check(flight.token_ids, answer)
                continue
            assert answer.details, f"{answer.code} without a reason"
            took_s = self.since_fault_s(answer.ended_s)
            assert took_s < flight.within_s, f"{answer.code} took {took_s:.2f} s"
