"""Supervise a node's ranks in its leader: start a life of the group, send it messages, end it, and report its loss."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from node_runtime.exit_codes import DOES_NOT_FIT, ENGINE_FAILED
from node_runtime.fork_server import end_fork_server
from node_runtime.rank_group import RankGroup
from node_runtime.rank_link import LeaderLink, RankCodec, new_addresses
from node_runtime.rank_messages import RankLogLevel, RankShutdown, RankSwitch
from node_runtime.rank_worker import RankSpec
from transfer.config import NodeConfig
from transfer.connector.rank_report import RankReady, RankReport, RankStartFailed
from transfer.errors import EngineError, LocalProtocolError, TransferError

START_TIMEOUT_S = 300.0
STOP_GRACE_S = 10.0
RANK_SILENCE_S = 30.0  # a rank reports every second; reports of a busy machine can be late, and those of a hung rank never arrive
SILENCE_TICK_S = 1.0
EXIT_GRACE_S = 0.2  # the socket of a rank that died may close a moment before its exit is seen

log = structlog.get_logger(__name__)


class RankStartError(TransferError):
    """The ranks could not start.

    Args:
        exit_code: Exit code of the node, see `node_runtime.exit_codes`.
        may_pass: See `RankStartFailed`.
    """

    def __init__(self, message: str, exit_code: int, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.may_pass = may_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSide:
    """The part of a node's ranks that depends on the role.

    Args:
        config: Settings of the node, for every rank.
        codec: Messages of the role.
        on_message: Called with the rank and each message of the running life except hellos and reports.
    """

    config: NodeConfig
    codec: RankCodec
    on_message: Callable[[int, Any], None]


class RankSupervisor:
    """The ranks of one node, life after life.

    Args:
        side: The role that the node begins with.
        entry: Entry point of a rank process, importable by name.
        preload: Modules that the fork server imports once, before it forks ranks.
        on_lost: Called with the reason when the life cannot continue. The owner calls `stop()`, and perhaps `start()`.
        other_config: Settings of the node's other role. None means that it has none, and that `switch()` may not be called.
    """

    def __init__(
        self,
        side: RankSide,
        entry: Callable[[RankSpec], None],
        *,
        preload: Sequence[str],
        on_lost: Callable[[str], None],
        other_config: NodeConfig | None = None,
    ) -> None:
        config = side.config
        self._side = side
        self._entry = entry
        self._configs = (config, other_config)
        self._preload = preload
        self._on_lost = on_lost
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-")
        self.folder = Path(self._folder.name)
        """Private folder of the ranks' sockets, until `cleanup()`."""
        self._num_ranks = config.parallel.tp_size
        self._link: LeaderLink | None = None
        self._group: RankGroup | None = None
        self._hellos: dict[int, RankReady] = {}
        self._refusals: dict[int, RankStartFailed] | None = None  # ranks that could not change their role; None: no change
        self._started: asyncio.Future[None] | None = None
        self._is_running = False
        self.is_whole = True
        """Whether no process of the group is known to have ended."""
        self._silent_ticks: list[int] = []
        self._ticker: asyncio.TimerHandle | None = None
        self._log_level: str = config.log.level  # the same in both roles
        self.incarnation = 0
        self.reports: dict[int, RankReport] = {}

    @property
    def pids(self) -> list[int]:
        return self._group.pids if self._group is not None else []

    async def start(self) -> tuple[RankReady, ...]:
        """Start a new life under a new incarnation; return the ranks' hellos in rank order.

        Raises:
            RankStartError: A rank refused, died, or did not answer in time. The owner must still call `stop()`.
        """
        link, started = self._begin_life()
        self.is_whole = True
        config = self._side.config
        other_config = next(one for one in self._configs if one is not config)
        specs = [
            RankSpec(
                config=config,
                rank=rank,
                incarnation=self.incarnation,
                address=link.addresses[rank],
                rendezvous=self._rendezvous,
                other_config=other_config,
            )
            for rank in range(self._num_ranks)
        ]
        self._group = RankGroup(config.role, self._entry, specs, preload=self._preload)
        return await self._until_started(self._group.start(self._on_exit), started)

    async def switch(self, side: RankSide) -> tuple[RankReady, ...]:
        """Have the running processes begin a new life in the other role; return their hellos in rank order.

        Raises:
            RankStartError: A rank could not, or died. If `is_whole`, every rank waits, and `switch()` to the former role is
                possible. Otherwise only `stop()` is.
        """
        before = self._link
        assert before is not None and self._group is not None
        self._is_running = False
        self._stop_ticking()
        self._side = side
        link, started = self._begin_life()
        self._refusals = {}
        try:
            for rank in range(self._num_ranks):
                message = RankSwitch(
                    role=side.config.role,
                    incarnation=self.incarnation,
                    address=link.addresses[rank],
                    rendezvous=str(self._rendezvous),
                )
                if not before.send(rank, message):
                    self.is_whole = False
                    raise RankStartError(f"rank {rank} does not take messages", ENGINE_FAILED)
            return await self._until_started(started)
        finally:
            self._refusals = None
            before.close()  # every rank has left it, or the group cannot be used any more

    def begin_as(self, side: RankSide) -> None:
        """Set the role of the ranks that the next `start()` starts."""
        self._side = side

    def _begin_life(self) -> tuple[LeaderLink, asyncio.Future[None]]:
        """Renew the state of a life. Later messages of the former life are ignored."""
        loop = asyncio.get_running_loop()
        self.incarnation = secrets.randbits(63) + 1
        self._hellos, self.reports = {}, {}
        self._started = loop.create_future()
        self._link = LeaderLink(new_addresses(self.folder, self._num_ranks), self._side.codec)
        self._link.watch(loop, partial(self._receive, self.incarnation))
        return self._link, self._started

    @property
    def _rendezvous(self) -> Path:
        return self.folder / f"rendezvous-{self.incarnation:x}"

    async def _until_started(self, *waited_for: Awaitable[None]) -> tuple[RankReady, ...]:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.gather(*waited_for)
        except TimeoutError:
            self.is_whole = False
            missing = sorted(set(range(self._num_ranks)) - self._hellos.keys())
            raise RankStartError(f"ranks {missing} did not start within {START_TIMEOUT_S:g} s", ENGINE_FAILED) from None
        if self._log_level != self._side.config.log.level:
            self.broadcast(RankLogLevel(level=self._log_level))
        return tuple(self._hellos[rank] for rank in range(self._num_ranks))

    def set_log_level(self, level: str) -> None:
        """Set the log level of the ranks in this life and later ones; one of `transfer.logs.LEVELS`."""
        self._log_level = level
        if self._is_running:  # ranks that are starting receive it once they have started
            self.broadcast(RankLogLevel(level=level))

    def broadcast(self, message: object) -> None:
        """Send to every rank, in the same order as all broadcasts. A rank that does not take it ends the life.

        Raises:
            LocalProtocolError: The message cannot be encoded. This ends the life too: leader and ranks would differ, and memory
                that one holds for the other would never be released.
        """
        if self._link is None:
            return
        try:
            is_taken = self._link.broadcast(message)
        except LocalProtocolError as error:
            self.lose(f"a message to the ranks cannot be sent: {error}")
            raise
        if not is_taken:
            self.lose_soon("a rank does not take messages")

    def send(self, rank: int, message: object) -> None:
        if self._link is not None and not self._link.send(rank, message):
            self.lose_soon(f"rank {rank} does not take messages")

    def lose_soon(self, reason: str) -> None:
        """End the life after a moment in which the exit of a dead process can be seen; its reason is more precise."""
        asyncio.get_running_loop().call_later(EXIT_GRACE_S, self._lose_life, self.incarnation, reason)

    def _lose_life(self, incarnation: int, reason: str) -> None:
        if incarnation == self.incarnation:
            self.lose(reason)

    async def stop(self, *, is_graceful: bool) -> None:
        """End the life and all its processes. If `is_graceful`, the ranks first close their resources."""
        self._is_running = False
        self._stop_ticking()
        if self._link is not None and is_graceful:
            self._link.broadcast(RankShutdown())
        if self._group is not None:
            await self._group.stop(STOP_GRACE_S if is_graceful else 0.0)
            self._group = None
        if self._link is not None:
            self._link.close()
            self._link = None
        self.reports = {}  # otherwise pages would show rings, links and sessions that no longer exist

    def cleanup(self) -> None:
        """End the fork server and remove the private folder. The supervisor cannot be used any more."""
        end_fork_server()
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    def _receive(self, incarnation: int, rank: int, message: Any) -> None:
        if incarnation != self.incarnation:
            return
        if self._silent_ticks:
            self._silent_ticks[rank] = 0
        match message:
            case RankReady():
                self._hellos[rank] = message
                self._end_switch_if_heard()
                if len(self._hellos) == self._num_ranks and self._started is not None and not self._started.done():
                    self._is_running = True  # from now on a rank's exit is a loss, not a failed start
                    self._silent_ticks = [0] * self._num_ranks
                    self._tick()
                    self._started.set_result(None)
            case RankStartFailed() if self._refusals is not None:
                self._refusals[rank] = message
                self._end_switch_if_heard()
            case RankStartFailed():
                self._refuse_start(message)
            case RankReport():
                self.reports[rank] = message
            case _ if self._is_running:
                try:
                    self._side.on_message(rank, message)
                except Exception as error:
                    # The message may be half handled, so no count of this life can be trusted.
                    log.exception("rank_message_failed", rank=rank, message=type(message).__name__)
                    self.lose(f"{type(message).__name__} of rank {rank} could not be handled: {error!r}")

    def _end_switch_if_heard(self) -> None:
        """Fail a change of role that a rank refused, once every rank has answered."""
        if self._refusals and len(self._refusals.keys() | self._hellos.keys()) == self._num_ranks:
            self._refuse_start(next(iter(self._refusals.values())))  # later refusals can be a consequence of the first

    def _tick(self) -> None:
        """Count the ticks since each rank's last message.

        Ticks, not seconds: a leader that was stopped or busy ticks once when it continues, and then reads the messages that
        arrived meanwhile.
        """
        for rank, ticks in enumerate(self._silent_ticks):
            self._silent_ticks[rank] = ticks + 1
            if ticks * SILENCE_TICK_S > RANK_SILENCE_S:
                self.lose(f"rank {rank} has not reported for {RANK_SILENCE_S:g} s")
                return
        self._ticker = asyncio.get_running_loop().call_later(SILENCE_TICK_S, self._tick)

    def _stop_ticking(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._ticker, self._silent_ticks = None, []

    def _on_exit(self, rank: int, code: int) -> None:
        self.is_whole = False
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        is_memory = code == DOES_NOT_FIT
        if is_memory:
            how += " (memory ran out; the log of the rank names the work and the settings)"
        exit_code = DOES_NOT_FIT if is_memory else ENGINE_FAILED
        self._fail_start(RankStartError(f"rank {rank} ended while it started: {how}", exit_code, may_pass=is_memory))
        self.lose(f"rank {rank} died: {how}")

    def _refuse_start(self, refusal: RankStartFailed) -> None:
        self._fail_start(RankStartError(refusal.reason, refusal.exit_code, may_pass=refusal.may_pass))

    def _fail_start(self, error: RankStartError) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)

    def lose(self, reason: str) -> None:
        """End the life: it cannot continue."""
        if self._is_running:
            self._is_running = False
            self._stop_ticking()
            log.error("rank_group_lost", reason=reason)
            self._on_lost(reason)


def check_alike(hellos: tuple[RankReady, ...]) -> None:
    """Check that the ranks of a group have the same model, pool size, KV scales and digests.

    Raises:
        EngineError: They differ; the message names the ranks and values.
    """
    first = hellos[0]
    for hello in hellos[1:]:
        if hello.instance.layout != first.instance.layout or hello.instance.model_fields != first.instance.model_fields:
            raise EngineError(f"ranks {first.rank} and {hello.rank} have loaded different models")
        for name in ("kv_scales", "digests"):  # peers take those of one rank for all
            if getattr(hello.instance, name) != getattr(first.instance, name):
                raise EngineError(f"ranks {first.rank} and {hello.rank} have different {name}")
        if hello.pool_pages != first.pool_pages:
            counts = (", ".join(map(str, one.pool_pages)) for one in (first, hello))
            raise EngineError(f"ranks {first.rank} and {hello.rank} have {' and '.join(counts)} pages")
