"""kvferry inside an engine that schedules by itself. The engine's processes call it from their own threads.

One process of an instance has the `ConnectorLeader`, each rank's process a `ConnectorRank` (a process may have both). They find
each other by the instance's name, or by `leader.address` if the engine spans hosts. Only `ConnectorLeader.start`,
`ConnectorRank.pause` and `close` wait for the network.

    rank = ConnectorRank(config, instance="i-1", rank=0, sides=PREFILL, engine=ConnectorEngine(...))  # each rank
    leader = ConnectorLeader(config, instance="i-1", num_ranks=1, sides=PREFILL)                   # one of them
    leader.start()
    leader.offer("a", "transfer-1", token_ids)      # the engine received the prompt
    leader.begin("a")                               # ... starts to compute it
    rank.progress("a", [pages], 128, event)         # ... has computed 128 tokens of it
    rank.finish("a"); leader.finish("a")            # ... has computed all of it
    rank.poll_events() -> [Free(name="a", ...)]     # its pages can be reused

and on the decode side

    leader.want("b", "transfer-1", "host:port", token_ids, start_token=0)
    leader.view("b").state is PromptState.READY     # prefill is about to send: allocate pages
    leader.bind("b", [pages])
    rank.poll_events() -> [Settled(name="b", failure="", ...)]    # on every rank: the KV is there, on all ranks
"""

from __future__ import annotations

import asyncio
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
    close_on,
    security_for,
)
from kvferry.engines.connector_service import ConnectorNode
from node_runtime.loop_thread import LoopThread
from node_runtime.process_setup import raise_open_files
from node_runtime.rank_link import LeaderLink, rank_socket_address
from node_runtime.rank_port_service import RankPort, security_among_hosts
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
    """The leader of an instance, which calls the leaders of the other tier.

    Args:
        instance: Name of this life of the instance, the same as in its ranks.
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
        self._instance = instance
        self._lock = _locked(f"{rank_socket_address(instance, 0).path}.lock", instance)
        self._incarnation = secrets.randbits(63) + 1
        self._reports: dict[Sides, dict[int, RankReport]] = {PREFILL: {}, DECODE: {}}
        self._hellos: dict[int, RankReady] = {}
        self._wanted: set[str] = set()  # prompts that the loop may not know yet
        self._all_there: asyncio.Future[None]
        self._link: LeaderLink | None = None
        self._port: RankPort | None = None
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
            ConfigError: A rank cannot start or is missing, or a port cannot be opened.
            TransferError: The ranks do not fit each other.
        """
        if self._is_closed:
            raise LocalProtocolError("this leader is closed; it cannot be started")
        self._thread.start(self._open(timeout_s)).result(timeout_s + CLOSE_TIMEOUT_S)

    # Prompts that the engine computes

    def offer(self, name: str, transfer_id: str, token_ids: Sequence[int], *, cache_salt: str | None = None) -> None:
        """Offer a prompt to decode sides.

        Args:
            name: The engine's own name of the prompt, not in use.
            transfer_id: The decode side requests the prompt by it.
            cache_salt: See `OfferedPrompts.offer`.
        """
        self._call(self.outgoing.requests.offer, name, transfer_id, tuple(token_ids), cache_salt)

    def begin(self, name: str) -> None:
        """Report that the engine has pages for the prompt and is about to compute it."""
        self._call(self.outgoing.requests.begin, name)

    def pause(self, name: str) -> None:
        """Report that the engine frees the pages, and will `begin` again. Call `pause` of each rank, too."""
        self._call(self.outgoing.requests.pause, name)

    def finish(self, name: str, *, first_token: int | None = None, note: bytes | None = None) -> None:
        """Record that the engine has computed the whole prompt; see `OfferedPrompts.finish`."""
        self._call(self.outgoing.requests.finish, name, first_token=first_token, note=note)

    def withdraw(self, name: str, reason: str) -> None:
        """Give a prompt up. No-op if it was sent."""
        self._call(self.outgoing.requests.withdraw, name, reason)

    # Prompts that the engine fetches

    def want(
        self,
        name: str,
        transfer_id: str,
        source: str,
        token_ids: Sequence[int],
        *,
        start_token: int = 0,
        needs_first_token: bool = False,
        needs_note: bool = False,
        traceparent: str = "",
        cache_salt: str = "",
        tables: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Fetch the KV of a prompt's tokens from `start_token` on; see `BoundPrompts.want`. With `tables`, it is also bound."""
        if self._is_closed:
            return
        self._wanted.add(name)
        needs = needs_first_token, needs_note
        bound = None if tables is None else tuple(tuple(table) for table in tables)
        self._call(self._want, name, transfer_id, source, tuple(token_ids), start_token, *needs, traceparent, cache_salt, bound)

    def view(self, name: str) -> PromptView | None:
        """Return the state of a wanted prompt; None means that it is not wanted, or settled."""
        if self._is_closed:
            return None
        if name in self._wanted:
            return PromptView(state=PromptState.WAITING)
        return self.incoming.prompts.view(name)

    def take_first_tokens(self, *, patience_s: float = 0.0) -> dict[str, int]:
        """Return the first tokens of received prompts, by name; see `BoundPrompts.take_first_tokens`."""
        return {} if self._is_closed else self.incoming.prompts.take_first_tokens(patience_s=patience_s)

    def bind(self, name: str, tables: Sequence[Sequence[int]], *, start_token: int | None = None) -> None:
        """Record the pages that the engine allocated for the whole prompt. `Settled` follows on every rank.

        Args:
            tables: Page table in each group of layers, from token 0 on. Pages before the start token are not touched.
            start_token: First token to fetch, if it is later than in `want`. Needs `can_start_late` of the view.
        """
        self._call(self.incoming.prompts.bind, name, tuple(tuple(table) for table in tables), start_token)

    def report_page_shortage(self, name: str) -> None:
        """Record that the engine has no pages for a `READY` prompt; may be called repeatedly.

        If the shortage lasts, a prompt that prefill preempted releases its pages; see `BoundPrompts.report_page_shortage`.
        """
        self._call(self.incoming.prompts.report_page_shortage, name)

    def cancel(self, name: str, reason: str, *, is_wanted_again: bool = False) -> None:
        """Give a prompt up. `Settled` follows only if the prompt is bound; see `BoundPrompts.cancel`."""
        self._call(self.incoming.prompts.cancel, name, reason, is_wanted_again=is_wanted_again)

    def decline(self, transfer_id: str, source: str, reason: str) -> None:
        """Notify the prefill side at `source` that the engine will never fetch the prompt of that id."""
        self._call(self.incoming.prompts.decline, transfer_id, source, reason)

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
        """Raise LocalProtocolError after an unexpected error, or if a rank is gone. The engine must stop."""
        self._thread.check()
        if self._broken:
            raise LocalProtocolError(f"kvferry cannot continue in this instance: {self._broken}")

    def close(self) -> None:
        """End everything, and wait for that at most `CLOSE_TIMEOUT_S`."""
        if self._is_closed or not self._thread.is_own:
            return
        self._is_closed = True
        try:
            close_on(self._thread, self._close())
        finally:
            Path(self._lock.name).unlink(missing_ok=True)
            self._lock.close()

    def _call(self, function: Callable[..., object], *args: Any, **options: Any) -> None:
        """Call a function on the loop. No-op once this is closed, although others may still use the loop."""
        if not self._is_closed:
            self._thread.call(lambda: None if self._is_closed else function(*args, **options))

    # On the loop

    def _want(self, name: str, *arguments: Any) -> None:
        self.incoming.prompts.want(name, *arguments)
        self._wanted.discard(name)

    @property
    def outgoing(self) -> PrefillService:
        """The prefill side, owned by the loop. Raises LocalProtocolError if the instance has none."""
        if self._node is None or self._node.prefill is None:
            raise LocalProtocolError("this instance computes no prompts for others, or is not started")
        return self._node.prefill

    @property
    def incoming(self) -> DecodeService:
        """The decode side, owned by the loop. Raises LocalProtocolError if the instance has none."""
        if self._node is None or self._node.decode is None:
            raise LocalProtocolError("this instance fetches no prompts from others, or is not started")
        return self._node.decode

    async def _open(self, timeout_s: float) -> None:
        raise_open_files()
        loop = self._thread.loop
        self._all_there = loop.create_future()
        link = self._link = self._open_link()
        link.watch(loop, self._on_message)
        if self._port is not None:
            await self._open_port(self._port)
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_there
        except TimeoutError:
            absent = sorted(set(range(self._num_ranks)) - self._hellos.keys())
            reason = f"ranks {absent} of the engine have not connected within {timeout_s:g} s"
            leader = self._config.leader.address
            advice = (
                "if they are on other hosts, set leader.address on all hosts"
                if leader is None
                else f"leader.address is {leader}; their logs have the reason"
            )
            raise ConfigError(f"{reason}: {advice}") from None
        hellos = tuple(self._hellos[rank] for rank in range(self._num_ranks))
        check_alike(hellos)
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
        loop.turns.start_counting()
        log.info("kvferry_ready", address=self.address, http=self.http_address, ranks=len(hellos))

    def _open_link(self) -> LeaderLink:
        if self._config.leader.address is None:
            return LeaderLink([rank_socket_address(self._instance, rank) for rank in range(self._num_ranks)], CODEC)
        self._port = RankPort(
            instance=self._instance,
            num_ranks=self._num_ranks,
            codec=CODEC,
            server=self._config.server,
            why_not=self._why_not_admitted,
            on_misfit=self._on_misfit,
        )
        return self._port.link

    async def _open_port(self, port: RankPort) -> None:
        """Open the port to which the ranks of all hosts connect."""
        leader = self._config.leader
        assert leader.address is not None, "the port opens at this address"
        await port.open(int(leader.address.rpartition(":")[2]), security_among_hosts(self._security, leader.peer_names))
        log.info("waiting_for_ranks", address=leader.address, ranks=self._num_ranks)

    def _why_not_admitted(self, rank: int) -> str:
        return f"rank {rank} is already connected; restart the whole engine" if rank in self._hellos else ""

    def _on_misfit(self, reason: str) -> None:
        if not self._all_there.done():
            self._all_there.set_exception(ConfigError(reason))

    def _reports_of(self, side: Sides) -> Sequence[RankReport]:
        reports = self._reports[side]
        return [reports[rank] for rank in sorted(reports)]

    def _broadcast(self, message: object) -> None:
        if self._link is not None and not self._link.broadcast(message) and not self._is_closed:
            self._break(f"a rank has not taken {type(message).__name__}: it is gone, or hangs")

    def _break(self, reason: str) -> None:
        """Stop the engine, because a message to a rank is lost and prompts would never end."""
        if not self._broken:
            log.critical("kvferry_failed", error=reason)
            self._broken = reason

    def _on_message(self, rank: int, message: Any) -> None:
        match message:
            case RankWaiting() if rank in self._hellos:
                self._break(f"rank {rank} was started again and lost the state of the earlier process")
            case RankWaiting():
                if self._link is not None:
                    self._link.send(rank, LifeBegins(incarnation=self._incarnation))
            case RankReady():
                self._hellos[rank] = message
                if self._link is not None:
                    # The rank has answered LifeBegins, the only message that it was sent, so no message to it is in the socket.
                    self._link.bypass_socket(rank)
                if len(self._hellos) == self._num_ranks and not self._all_there.done():
                    self._all_there.set_result(None)
            case RankStartFailed():
                self._on_misfit(f"rank {rank} cannot start: {message.reason}")
            case SideReport():
                self._reports[Sides(message.side)][rank] = message.report
            case _ if self._node is None:  # about an unknown peer, because no peer has joined yet
                log.debug("rank_message_dropped", message=type(message).__name__)
            case _ if isinstance(message, FROM_DECODE):
                self.incoming.on_rank_message(rank, message)
            case _:
                self.outgoing.on_rank_message(rank, message)

    def _close_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    async def _close(self) -> None:
        try:
            if self._node is not None:
                await self._node.close()
        finally:
            self._close_link()
            if self._port is not None:
                await self._port.close()


def _locked(path: str, instance: str) -> IO[str]:
    """Lock the instance's name for this process until the file is closed. Two leaders of one name would share one socket."""
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
            raise ConfigError(f"instance {instance!r} already has a leader on this machine; use different names") from None
        file.close()  # the previous leader removed the file after it was opened here
