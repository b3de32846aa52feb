"""The leader's hold on its ranks: starts a life of the group, speaks to it, ends it, and says when it was lost."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from node_runtime.rank_group import RankGroup, end_fork_server
from node_runtime.rank_link import LeaderLink, RankCodec
from node_runtime.rank_process import RankSpec
from node_runtime.rank_report import RankHello, RankReport, RankShutdown, RankStartFailed
from transfer.config import NodeConfig
from transfer.errors import EngineError, LocalProtocolError, TransferError

START_TIMEOUT_S = 300.0
STOP_GRACE_S = 10.0
RANK_SILENCE_S = 30.0  # a rank reports every second; a busy machine can keep it from that for a while, a hung one never ends
SILENCE_TICK_S = 1.0
EXIT_GRACE_S = 0.2  # by then a rank that died has been seen to; its socket may end a moment before its process does

log = structlog.get_logger(__name__)


class RankStartError(TransferError):
    """The ranks could not start.

    Args:
        exit_code: What the node ends with, see `node_runtime.exit_codes`.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankSupervisor:
    """One node's ranks, life after life.

    Args:
        config: The node's settings; every rank gets them.
        entry: Entry point of a rank process, importable by name.
        codec: Messages of the role.
        preload: Modules that the fork server imports once, before it forks ranks.
        on_message: (rank, message) of the running life, but for hellos and reports.
        on_lost: The life is of no more use, and why; `stop()` and perhaps `start()` are the owner's next steps.
    """

    def __init__(
        self,
        config: NodeConfig,
        entry: Callable[[RankSpec], None],
        codec: RankCodec,
        *,
        preload: Sequence[str],
        on_message: Callable[[int, Any], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._config = config
        self._entry = entry
        self._codec = codec
        self._preload = preload
        self._on_message = on_message
        self._on_lost = on_lost
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-")
        self._num_ranks = config.parallel.tp_size
        self._link: LeaderLink | None = None
        self._group: RankGroup | None = None
        self._hellos: dict[int, RankHello] = {}
        self._started: asyncio.Future[None] | None = None
        self._is_running = False
        self._silent_ticks: list[int] = []
        self._ticker: asyncio.TimerHandle | None = None
        self.incarnation = 0
        self.reports: dict[int, RankReport] = {}

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    @property
    def pids(self) -> list[int]:
        return self._group.pids if self._group is not None else []

    async def start(self) -> tuple[RankHello, ...]:
        """Start a new life, under a new incarnation; returns the ranks' hellos in rank order.

        Raises:
            RankStartError: A rank refused, died, or did not answer in time. `stop()` is still to be called.
        """
        loop = asyncio.get_running_loop()
        self.incarnation = secrets.randbits(63) + 1
        self._hellos, self.reports = {}, {}
        self._started = loop.create_future()
        self._link = LeaderLink(Path(self._folder.name), self._num_ranks, self._codec)
        self._link.watch(loop, self._receive)
        rendezvous = Path(self._folder.name) / f"rendezvous-{self.incarnation:x}"
        specs = [
            RankSpec(
                config=self._config,
                rank=rank,
                incarnation=self.incarnation,
                address=self._link.address_of(rank),
                rendezvous=rendezvous,
            )
            for rank in range(self._num_ranks)
        ]
        self._group = RankGroup(self._config.role, self._entry, [(spec,) for spec in specs], preload=self._preload)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.gather(self._group.start(self._on_exit), self._started)
        except TimeoutError:
            missing = sorted(set(range(self._num_ranks)) - self._hellos.keys())
            raise RankStartError(f"ranks {missing} did not start within {START_TIMEOUT_S:g} s", exit_code=4) from None
        return tuple(self._hellos[rank] for rank in range(self._num_ranks))

    def broadcast(self, message: object) -> None:
        """To every rank, in the same order as all broadcasts. A rank that does not take it ends the life.

        Raises:
            LocalProtocolError: No message can carry it. The life ends here too: the ranks do not know what the leader takes for
                said, and what they hold for it would never be given back.
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
        """Give the life up, but let the exit of a process that died come first: it says which rank it was, and how."""
        asyncio.get_running_loop().call_later(EXIT_GRACE_S, self._lose_life, self.incarnation, reason)

    def _lose_life(self, incarnation: int, reason: str) -> None:
        if incarnation == self.incarnation:
            self.lose(reason)

    async def stop(self, *, is_graceful: bool) -> None:
        """End the life; afterwards no process of it is left. Graceful: the ranks close what they have open."""
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

    def cleanup(self) -> None:
        """Remove the private folder; the supervisor is of no more use."""
        end_fork_server()
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    def _receive(self, rank: int, message: Any) -> None:
        if self._silent_ticks:
            self._silent_ticks[rank] = 0
        match message:
            case RankHello():
                self._hellos[rank] = message
                if len(self._hellos) == self._num_ranks and self._started is not None and not self._started.done():
                    self._is_running = True  # from this very moment on a rank's end is a loss, and no failed start
                    self._silent_ticks = [0] * self._num_ranks
                    self._tick()
                    self._started.set_result(None)
            case RankStartFailed():
                self._fail_start(message.reason, message.exit_code)
            case RankReport():
                self.reports[rank] = message
            case _ if self._is_running:
                try:
                    self._on_message(rank, message)
                except Exception as error:
                    # Half of it may have been done: no count of this life can be trusted any more.
                    log.exception("rank_message_failed", rank=rank, message=type(message).__name__)
                    self.lose(f"{type(message).__name__} of rank {rank} could not be handled: {error!r}")

    def _tick(self) -> None:
        """Count towards each rank's silence.

        Ticks, not seconds: a leader that was stopped, or busy, has ticked once when it goes on, and then reads what its ranks
        have said meanwhile.
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
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        self._fail_start(f"rank {rank} ended while it started: {how}", exit_code=4)
        self.lose(f"rank {rank} died: {how}")

    def _fail_start(self, reason: str, exit_code: int) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(RankStartError(reason, exit_code))

    def lose(self, reason: str) -> None:
        """Give the life up: it cannot go on."""
        if self._is_running:
            self._is_running = False
            self._stop_ticking()
            log.error("rank_group_lost", reason=reason)
            self._on_lost(reason)


def check_alike(hellos: tuple[RankHello, ...]) -> None:
    """Ranks of one group must see one model, have pools of one size, and write and check KV alike.

    Raises:
        EngineError: They do not; the ranks and values are named.
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
