"""Follow a source of addresses, keep the result of the last good look, and tell the listeners."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from transfer.registry.discovery.entries import RefusedFor, sort_entries
from transfer.registry.security import Security

AGAIN_S: Final = 5.0
"""Pause after a bug: of a source that has ended, or of a listener."""

ASK_AGAIN_S: Final = 2.0
"""Time after which a node that may not be used yet is asked again. A join that gets no answer is tried as often."""

ASKS_PER_S: Final = 32
"""Nodes that may not be used yet and are asked in a second."""

NOT_ANSWERED: Final = "it was asked whether it serves, and has not answered yet"

_MAX_SHOWN: Final = 5  # addresses that wait, in one line of text

Ask = Callable[[str], Awaitable[str]]
"""Returns why a node may not be used yet; an empty text if it may."""

Listener = Callable[[tuple[str, ...]], None]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Callbacks to which a source reports each look.

    Args:
        saw: All entries that are named now, in any order, unchecked. Entries of the look before that are missing are gone.
        failed: The look failed; one line says why. The look before goes on to count.
        same: The entries of the look before still hold.
    """

    saw: Callable[[Sequence[str]], None]
    failed: Callable[[str], None]
    same: Callable[[], None]


class Source(Protocol):
    """One way to learn the addresses of prefill nodes."""

    @property
    def where(self) -> str:
        """Place where it looks, with the name of the setting; for people."""
        ...

    async def follow(self, looks: Looks) -> None:
        """Look until cancelled, or until nothing can change any more.

        Every exception is a bug: failures go to `looks.failed`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryView:
    """State of discovery.

    Args:
        where: Place where it looks.
        addresses: Addresses that it found.
        waiting: Addresses that are named, and why they are not used yet.
        problem: Why the last look failed; empty if it did not.
        age_s: Seconds since the addresses were last known to hold; None before the first good look.
        failures: Looks that failed, and bugs of listeners.
        refused: Entries that cannot be used, by reason, each counted once while it is there.
        interval_s: Seconds between two looks; 0 if the source never changes.
    """

    where: str
    addresses: tuple[str, ...]
    waiting: dict[str, str]
    problem: str
    age_s: float | None
    failures: int
    refused: dict[str, int]
    interval_s: float = 0.0

    def __str__(self) -> str:
        """Return one line that says which nodes are missing, and why."""
        parts = [f"{address} is not used yet: {reason}" for address, reason in list(self.waiting.items())[:_MAX_SHOWN]]
        if len(self.waiting) > _MAX_SHOWN:
            parts.append(f"and {len(self.waiting) - _MAX_SHOWN} more are not used yet")
        if self.problem:
            parts.insert(0, f"looking failed: {self.problem}")
        elif self.age_s is None:
            parts.insert(0, "nothing was heard from there yet")
        elif not self.addresses and not self.waiting:
            parts.insert(0, "no prefill node is named there")
        return f"{self.where}: {'; '.join(parts)}" if parts else self.where


class Discovery:
    """Follow a source, keep the result of the last good look, and tell the listeners. Owned by one loop.

    Args:
        source: Source of the addresses.
        security: TLS or plain text of the calls to the nodes; addresses that it does not allow are refused.
        ask: Called for each new address, again and again until it may be used.
        interval_s: See `DiscoveryView`.
        clock: Seconds.
    """

    def __init__(
        self,
        source: Source,
        *,
        security: Security,
        ask: Ask | None = None,
        interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._interval_s = interval_s
        self._security = security
        self._ask = ask
        self._clock = clock
        self._named: tuple[str, ...] = ()
        self._addresses: tuple[str, ...] = ()  # of those that are named, the ones that may be used
        self._waiting: dict[str, str] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}  # one for each that waits: one that hangs holds up nothing but itself
        self._problem = ""
        self._seen_s: float | None = None
        self._is_fixed = False
        self._failures = 0
        self._refused_now: frozenset[str] = frozenset()
        self._refused: Counter[str] = Counter()
        self._told: dict[Listener, tuple[str, ...] | None] = {}  # None: it has to be told again
        self._telling_again: asyncio.TimerHandle | None = None
        self._following: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of all prefill nodes that may be used now, sorted."""
        return self._addresses

    @property
    def view(self) -> DiscoveryView:
        now_s = self._clock()
        if self._is_fixed:
            self._seen_s = now_s
        return DiscoveryView(
            where=self._source.where,
            addresses=self._addresses,
            waiting=dict(self._waiting),
            problem=self._problem,
            age_s=None if self._seen_s is None else now_s - self._seen_s,
            failures=self._failures,
            refused={kind.value: self._refused[kind] for kind in RefusedFor},
            interval_s=self._interval_s,
        )

    def start(self) -> None:
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        if self._telling_again is not None:
            self._telling_again.cancel()
        ending = [*self._asking.values(), *([] if self._following is None else [self._following])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def listen(self, listener: Listener) -> None:
        """Call a listener with the addresses: now, and at each change. A listener that raises is called again later."""
        listener(self._addresses)
        self._told[listener] = self._addresses

    def unlisten(self, listener: Listener) -> None:
        """Stop calling a listener. An unknown one is ignored."""
        self._told.pop(listener, None)

    async def _follow(self) -> None:
        looks = Looks(saw=self._saw, failed=self._fail, same=self._see)
        while True:
            try:
                await self._source.follow(looks)
                self._is_fixed = True
                return
            except Exception as error:
                log.critical(
                    "discovery_broke", where=self._source.where, error=f"{type(error).__name__}: {error}", exc_info=error
                )
                self._fail(f"unexpected {type(error).__name__}; see the log of this node")
            await asyncio.sleep(AGAIN_S)

    def _saw(self, entries: Sequence[object]) -> None:
        self._see()
        found = sort_entries(entries, lambda address: self._security.check("prefill node", address))
        for refused in found.refused:
            if refused.entry not in self._refused_now:
                self._refused[refused.kind] += 1
                log.warning("discovered_entry_refused", where=self._source.where, kind=refused.kind.value, reason=refused.reason)
        self._refused_now = frozenset(refused.entry for refused in found.refused)
        self._named = found.addresses
        for address in set(self._asking).difference(self._named):
            self._asking.pop(address).cancel()
            self._waiting.pop(address)
        if self._ask is not None:
            for address in self._named:
                if address not in self._addresses and address not in self._asking:
                    self._waiting[address] = NOT_ANSWERED
                    self._asking[address] = asyncio.get_running_loop().create_task(self._ask_until_it_may(address, self._ask))
        self._tell()

    async def _ask_until_it_may(self, address: str, ask: Ask) -> None:
        """Use an address as soon as it may be used, independent of the others."""
        is_told = False
        while reason := await self._why_not(address, ask):
            self._waiting[address] = reason
            if not is_told:
                log.info("discovered_node_not_used_yet", address=address, reason=reason)
                is_told = True
            await asyncio.sleep(max(ASK_AGAIN_S, len(self._waiting) / ASKS_PER_S))
        del self._asking[address], self._waiting[address]
        self._tell()

    async def _why_not(self, address: str, ask: Ask) -> str:
        """Return the answer of `ask`. After a bug there the address is asked again."""
        try:
            return await ask(address)
        except Exception as error:
            news = f"unexpected {type(error).__name__}; see the log of this node"
            if self._waiting[address] != news:  # once
                log.critical("discovery_crashed", address=address, error=f"{type(error).__name__}: {error}", exc_info=error)
            return news

    def _tell(self) -> None:
        addresses = tuple(address for address in self._named if address not in self._waiting)
        before, self._addresses = set(self._addresses), addresses
        for event, changed in (
            ("prefill_nodes_named", sorted(set(addresses) - before)),
            ("prefill_nodes_no_longer_named", sorted(before - set(addresses))),
        ):
            if changed:
                log.info(event, where=self._source.where, addresses=changed)
        self._tell_listeners()

    def _tell_listeners(self) -> None:
        """Call each listener that does not know the addresses yet.

        A listener that raises is called again after `AGAIN_S`: the next look can be equal to this one, and would call no
        listener.
        """
        for listener in [listener for listener, told in self._told.items() if told != self._addresses]:
            try:
                listener(self._addresses)
            except Exception as error:
                self._failures += 1
                log.critical("discovery_listener_crashed", error=f"{type(error).__name__}: {error}", exc_info=error)
                self._told[listener] = None
                if self._telling_again is not None:
                    self._telling_again.cancel()
                self._telling_again = asyncio.get_running_loop().call_later(AGAIN_S, self._tell_listeners)
            else:
                self._told[listener] = self._addresses

    def _fail(self, reason: str) -> None:
        self._failures += 1
        if not self._problem:  # once: until it works again there is no other news
            log.warning("discovery_failed", where=self._source.where, reason=reason, kept=len(self._addresses))
        self._problem = reason

    def _see(self) -> None:
        if self._problem:
            log.info("discovery_recovered", where=self._source.where)
        self._problem, self._seen_s = "", self._clock()
