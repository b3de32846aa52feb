"""kvferry inside an engine that schedules by itself: what its processes call, from their own threads.

One process of an instance has the `ConnectorLeader`, each rank's process a `ConnectorRank` (a process may have both). They find
each other by the instance's name. No call waits for the network, but for `ConnectorLeader.start`, `pause` and `close`.

    rank = ConnectorRank(config, instance="i-1", rank=0, sides=PREFILL, engine=ConnectorEngine(...))  # each rank
    leader = ConnectorLeader(config, instance="i-1", num_ranks=1, sides=PREFILL)                   # one of them
    leader.start()
    leader.offer("a", "transfer-1", token_ids)      # the engine was given the prompt
    leader.begin("a")                               # ... begins to compute it
    rank.progress("a", [pages], 128, event)         # ... has computed 128 tokens of it
    rank.finish("a"); leader.finish("a")            # ... is done with it
    rank.poll_events() -> [Free(name="a", ...)]     # its pages may be used for something else

and on the other side

    leader.want("b", "transfer-1", "host:port", token_ids, start_token=0)
    leader.view("b").state is PromptState.READY     # the other side is about to send: take pages
    leader.bind("b", [pages])
    rank.poll_events() -> [Settled(name="b", failure="", ...)]    # on every rank: all KV is there, on all ranks
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import IO, Any, Final

import structlog

from kvferry.engines.connector import (
    CLOSE_TIMEOUT_S,
    CODEC,
    DECODE,
    FROM_DECODE,
    PREFILL,
    LifeBegins,
    RankWaiting,
    SideReport,
    Sides,
    security_for,
    wait_for_close,
)
from kvferry.engines.connector_service import ConnectorNode
from node_runtime.loop_thread import LoopThread
from node_runtime.process_setup import raise_open_files
from node_runtime.rank_link import LeaderLink, RankAddress, rank_socket_address
from node_runtime.supervisor import check_alike
from transfer.config import ConnectorConfig
from transfer.connector.bound_prompts import PromptState, PromptView
from transfer.connector.decode_service import DecodeService
from transfer.connector.outgoing import Transfer
from transfer.connector.prefill_service import PrefillService
from transfer.connector.rank_report import RankReady, RankReport, RankStartFailed
from transfer.errors import ConfigError, LocalProtocolError
from transfer.logs import configure_engine_logging
from transfer.registry.server import host_port

START_TIMEOUT_S: Final = 60.0

log = structlog.get_logger(__name__)


class ConnectorLeader:
    """Speak to the other tier's leaders for an instance.

    Args:
        config: Settings.
        instance: Name of this life of the instance, as its ranks have it.
        num_ranks: Of the instance.
        sides: Sides of the instance.
        compute: Has the engine compute a prompt that a decode node requests without a router; see `OfferedPrompts`.

    Raises:
        ConfigError: The TLS or plain text settings cannot be used, or a running instance has the name.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        instance: str,
        num_ranks: int,
        sides: Sides,
        compute: Callable[[Transfer], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        configure_engine_logging(config.log)
        self._config = config
        self._num_ranks = num_ranks
        self._sides = sides
        self._compute = compute
        self._security = security_for(config, sides)
        self._addresses = [rank_socket_address(instance, rank) for rank in range(num_ranks)]
        self._lock = _locked(f"{_socket_path(self._addresses[0])}.lock", instance)
        self._incarnation = secrets.randbits(63) + 1
        self._reports: dict[Sides, dict[int, RankReport]] = {PREFILL: {}, DECODE: {}}
        self._hellos: dict[int, RankReady] = {}
        self._wanted: set[str] = set()  # what the loop may not have heard of yet
        self._all_there: asyncio.Future[None]
        self._link: LeaderLink | None = None
        self._node: ConnectorNode | None = None
        self._is_closed = False
        self._broken = ""
        self.address = ""
        """host:port of this instance's gRPC API, once it is started."""
        self.http_address = ""
        """host:port of /healthz, /readyz, /metrics and the status page."""
        self._thread = LoopThread.shared()

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for all ranks, and serve.

        Raises:
            ConfigError: A rank cannot start, or has not come; a port cannot be had.
            TransferError: The ranks do not fit each other.
        """
        if self._is_closed:
            raise LocalProtocolError("this leader is closed; it cannot be started")
        started = self._thread.start(self._open(timeout_s))
        started.result(timeout_s + CLOSE_TIMEOUT_S)

    # What the engine calls, of prompts that it computes

    def offer(self, name: str, transfer_id: str, token_ids: Sequence[int]) -> None:
        """The engine was given a prompt whose KV is to go to a decode side.

        Args:
            name: The engine's own, not in use.
            transfer_id: By which the decode side asks for it.
        """
        self._call(self.source.requests.offer, name, transfer_id, tuple(token_ids))

    def begin(self, name: str) -> None:
        """The engine has pages for it and is about to compute it."""
        self._call(self.source.requests.begin, name)

    def pause(self, name: str) -> None:
        """The engine takes its pages back, to compute it again later: `begin` follows. Each rank is told by its own `pause`."""
        self._call(self.source.requests.pause, name)

    def finish(self, name: str, *, first_token: int | None = None, note: bytes | None = None) -> None:
        """Record that the engine has computed the whole prompt; see `OfferedPrompts.finish`."""
        self._call(lambda: self.source.requests.finish(name, first_token=first_token, note=note))

    def withdraw(self, name: str, reason: str) -> None:
        """The engine gives it up. No-op for one that was sent."""
        self._call(self.source.requests.withdraw, name, reason)

    # ... and of prompts that it wants

    def want(
        self,
        name: str,
        transfer_id: str,
        source: str,
        token_ids: Sequence[int],
        *,
        start_token: int = 0,
        needs_note: bool = False,
        traceparent: str = "",
    ) -> None:
        """Fetch the KV of a prompt's tokens from `start_token` on; see `BoundPrompts.want`."""
        if self._is_closed:
            return
        self._wanted.add(name)
        self._call(self._want, name, transfer_id, source, tuple(token_ids), start_token, needs_note, traceparent)

    def view(self, name: str) -> PromptView | None:
        """How far a wanted prompt is; None: it is not wanted, or settled."""
        if self._is_closed:
            return None
        if name in self._wanted:
            return PromptView(state=PromptState.WAITING)
        return self.target.prompts.view(name)

    def bind(self, name: str, tables: Sequence[Sequence[int]], *, start_token: int | None = None) -> None:
        """Record the pages that the engine took for the whole prompt. `Settled` follows on every rank.

        Args:
            tables: The prompt's page table in each group of layers, from token 0 on. Pages before the start token are not
                touched.
            start_token: First token whose KV is needed, if it is later than the token given to `want`. Only if the view has
                `can_start_late`.
        """
        self._call(self.target.prompts.bind, name, tuple(tuple(table) for table in tables), start_token)

    def report_page_shortage(self, name: str) -> None:
        """Record that the engine has no pages for a `READY` prompt; may be called repeatedly.

        If the shortage lasts, a prompt that prefill preempted releases its pages; see `BoundPrompts.report_page_shortage`.
        """
        self._call(self.target.prompts.report_page_shortage, name)

    def cancel(self, name: str, reason: str, *, is_wanted_again: bool = False) -> None:
        """Give a prompt up. `Settled` follows only if the prompt is bound; see `BoundPrompts.cancel`."""
        self._call(lambda: self.target.prompts.cancel(name, reason, is_wanted_again=is_wanted_again))

    def decline(self, transfer_id: str, source: str, reason: str) -> None:
        """The engine will never want the prompt of that id, which the prefill side at `source` may hold for it."""
        self._call(self.target.prompts.decline, transfer_id, source, reason)

    @property
    def incarnation(self) -> int:
        """This life of the instance, as peers know it."""
        return self._incarnation

    @property
    def num_joined(self) -> int:
        """Number of joined instances of the other tier."""
        return 0 if self._node is None else self._node.num_joined

    @property
    def is_idle(self) -> bool:
        """Whether no prompt and no transfer is known."""
        return self._node is None or self._node.is_idle

    def check(self) -> None:
        """Raises LocalProtocolError when something broke that nobody expected, or a rank is gone; the engine must not go on."""
        self._thread.check()
        if self._broken:
            raise LocalProtocolError(f"kvferry cannot go on in this instance: {self._broken}")

    def close(self) -> None:
        """End everything; returns when it has, or after some seconds."""
        if self._is_closed or not self._thread.is_own:
            return
        self._is_closed = True
        try:
            wait_for_close(self._thread.start(self._close()))
        finally:
            self._thread.release()
            # ZeroMQ leaves its socket's file. What the lock protects goes before the lock does.
            for path in (_socket_path(self._addresses[0]), Path(self._lock.name)):
                path.unlink(missing_ok=True)
            self._lock.close()

    def _call(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call it; nothing once this is closed, for the loop may still be another's."""
        if not self._is_closed:
            self._thread.call(lambda: None if self._is_closed else function(*args))

    # On the loop

    def _want(self, name: str, *arguments: Any) -> None:
        self.target.prompts.want(name, *arguments)
        self._wanted.discard(name)

    @property
    def source(self) -> PrefillService:
        """The side that sends; owned by the loop. Raises LocalProtocolError when the instance does not have it."""
        if self._node is None or self._node.prefill is None:
            raise LocalProtocolError("this instance computes no prompts for others, or is not started")
        return self._node.prefill

    @property
    def target(self) -> DecodeService:
        """The side that receives; owned by the loop. Raises LocalProtocolError when the instance does not have it."""
        if self._node is None or self._node.decode is None:
            raise LocalProtocolError("this instance fetches no prompts from others, or is not started")
        return self._node.decode

    async def _open(self, timeout_s: float) -> None:
        raise_open_files()
        loop = self._thread.loop
        self._all_there = loop.create_future()
        link = self._link = LeaderLink(self._addresses, CODEC)
        link.watch(loop, self._on_message)
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_there
        except TimeoutError:
            absent = sorted(set(range(self._num_ranks)) - self._hellos.keys())
            raise ConfigError(f"ranks {absent} of the engine have not come within {timeout_s:g} s") from None
        hellos = tuple(self._hellos[rank] for rank in range(self._num_ranks))
        check_alike(hellos)
        await self._serve(hellos)

    async def _serve(self, hellos: tuple[RankReady, ...]) -> None:
        # Whatever fails from here on is closed.
        node = self._node = ConnectorNode(
            self._config,
            sides=self._sides,
            hellos=hellos,
            security=self._security,
            broadcast=self._broadcast,
            reports=self._reports_of,
            why_broken=lambda: self._broken or ("it broke; see its log" if self._thread.is_broken else ""),
            compute=self._compute,
        )
        self.address = await node.open()
        self.http_address = host_port(self._config.server.advertised_host, node.http_port)
        self._thread.loop.turns.start_counting()
        log.info("kvferry_ready", address=self.address, http=self.http_address, ranks=len(hellos))

    def _reports_of(self, side: Sides) -> Sequence[RankReport]:
        reports = self._reports[side]
        return [reports[rank] for rank in sorted(reports)]

    def _broadcast(self, message: object) -> None:
        if self._link is not None and not self._link.broadcast(message) and not self._is_closed:
            self._break(f"a rank has not taken {type(message).__name__}: it is gone, or hangs")

    def _break(self, reason: str) -> None:
        """What a rank was to hear is lost, or is not what it knows of any more: prompts would never end."""
        if not self._broken:
            log.critical("kvferry_broke", error=reason)
            self._broken = reason

    def _on_message(self, rank: int, message: Any) -> None:
        match message:
            case RankWaiting() if rank in self._hellos:
                self._break(f"rank {rank} has been started again, which knows nothing of what the one before was told")
            case RankWaiting():
                if self._link is not None:
                    self._link.send(rank, LifeBegins(incarnation=self._incarnation))
            case RankReady():
                self._hellos[rank] = message
                if len(self._hellos) == self._num_ranks and not self._all_there.done():
                    self._all_there.set_result(None)
            case RankStartFailed():
                if not self._all_there.done():
                    self._all_there.set_exception(ConfigError(f"rank {rank} cannot start: {message.reason}"))
            case SideReport():
                self._reports[Sides(message.side)][rank] = message.report
            case _ if self._node is None:
                log.debug("rank_message_dropped", message=type(message).__name__)  # of strangers: nobody has joined before
            case _ if isinstance(message, FROM_DECODE):
                self.target.on_rank_message(rank, message)
            case _:
                self.source.on_rank_message(rank, message)

    def _close_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    async def _close(self) -> None:
        async with contextlib.AsyncExitStack() as stack:  # in reverse, and each whatever becomes of the others
            stack.callback(self._close_link)
            if self._node is not None:
                stack.push_async_callback(self._node.close)


def _socket_path(address: RankAddress) -> Path:
    return Path(address.endpoint.removeprefix("ipc://"))


def _locked(path: str, instance: str) -> IO[str]:
    """A file that is this process's as long as it is open: two leaders of one name would share one socket."""
    while True:
        file = Path(path).open("w")  # noqa: SIM115 - kept open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), Path(path).stat()):
                return file
        except FileNotFoundError:
            pass
        except OSError:
            file.close()
            raise ConfigError(
                f"instance {instance!r} has a leader already on this machine; each needs a name of its own"
            ) from None
        file.close()  # removed by the one before as it was opened here: what is locked is no file any more
