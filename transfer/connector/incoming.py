"""The prompts that the decode side of a connector fetches, as its leader sees them.

The engine *wants* a prompt's KV. Its leader asks the prefill side for it; when that is about to send, the prompt is *ready*:
only now does the engine have to take pages, and *bind* them. Then the ranks receive, and when all of them have all of it, or none
writes any more, the prompt is *settled*. A transfer is one try; another one follows where the prefill side still has the prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import structlog

from transfer.breaker import Permit, Verdict
from transfer.chunk import ChunkPlan, check_num_pieces
from transfer.config import ConnectorLimitsConfig
from transfer.config.values import checked_host_port
from transfer.connector.messages import (
    CancelIncoming,
    ExpectBound,
    SettlePrompt,
    TransferBroken,
    TransferDrained,
    TransferExpected,
    TransferWhole,
)
from transfer.connector.prefill_nodes import REASON_GRACE_S, PrefillNodes
from transfer.connector.prefill_peer import PrefillPeer
from transfer.connector.request_view import RequestView
from transfer.connector.retry_rules import is_retried, verdict_of
from transfer.errors import (
    EngineError,
    IntegrityError,
    LayoutError,
    LocalProtocolError,
    PeerUnreachable,
    Preempted,
    ResourceExhausted,
    TransferAborted,
    TransferError,
    TransportClosed,
)
from transfer.instance import Instance
from transfer.messages import clip_reason
from transfer.metrics import outcome_of
from transfer.tracing import Span, Tracer, Value
from transfer.transfer_ids import new_transfer_id
from transfer.utf8 import is_utf8

BIND_WAIT_S: Final = 1.0
"""How long a question for room waits for the engine, which looks once a step, before it is answered "not yet"."""

RETRY_PAUSE_S: Final = 0.05
RETELL_S: Final = 0.5

REJOIN_S: Final = 5.0
"""How long a prompt that was under way waits for its prefill side to be joined again: that has either died, and the prompt with
it, or comes back in a moment."""

YIELD_AFTER_S: Final = 5.0
"""How long the engine has no pages for a prompt that could be sent, until one that could not be, and waits as long, gives them.
Prefill's engine preempts a prompt when it is short of pages, and those may be held by prompts that wait for room here."""

LACKING_GAP_S: Final = 2.0
"""An engine looks at what is ready at every step. If it has not for so long, something else than pages is short."""

MAX_TELLING: Final = 4096
"""Prompts that prefill nodes are still to be told of that they need keep them no longer."""

MAX_NOTE_BYTES: Final = 1 << 20
"""Of what the other side's engine has to tell; an honest one sends no more."""

log = structlog.get_logger(__name__)


class _NotJoined(ResourceExhausted):
    """The prompt's prefill node is not there in time: not tried again, as where there is no room, but somebody's fault."""


class PromptState(Enum):
    WAITING = auto()  # for the prefill side: it pins nothing here
    READY = auto()  # the prefill side is about to send, or has tried to: bind pages
    BOUND = auto()
    FAILED = auto()  # before it was bound


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptView:
    """What the engine is told of a prompt that is not settled."""

    state: PromptState
    failure: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class _Transfer:
    """A try."""

    transfer_id: str
    prompt: _Prompt
    peer: PrefillPeer
    prefill: Instance
    permit: Permit | None
    begun_s: float
    span: Span | None = None
    has_asked: bool = False  # the prefill side has pages for it, and has asked for room
    following: asyncio.Task[None] | None = None  # the prefill side's call
    answering: set[int] = field(default_factory=set)  # ranks that have not answered that
    expected: asyncio.Future[None] | None = None
    receiving: set[int] = field(default_factory=set)  # ranks whose part is not whole
    draining: set[int] = field(default_factory=set)  # ranks that may write to the pages, once it was cancelled
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: asyncio.Future[None]  # done when it is whole; its exception says why it never will be

    @property
    def is_whole(self) -> bool:
        """Whether all of its KV is here."""
        return self.outcome.done() and not self.outcome.cancelled() and self.outcome.exception() is None

    @property
    def is_waiting_for_note(self) -> bool:
        """Whether all of its KV is here, and only what the other side's engine has to tell is not."""
        return self.is_whole and self.prompt.needs_note and self.prompt.note is None


@dataclass(slots=True, kw_only=True, eq=False)
class _Prompt:
    name: str
    transfer_id: str  # that the router gave it; empty: the prefill side is to compute it
    source: str
    token_ids: tuple[int, ...]
    start_token: int
    needs_note: bool
    view: PromptView = PromptView(state=PromptState.WAITING)
    tables: tuple[tuple[int, ...], ...] | None = None
    lacking_s: tuple[float, float] | None = None  # when the engine had no pages for it, though it is ready: first and last
    bound: asyncio.Event = field(default_factory=asyncio.Event)
    transfer: _Transfer | None = None
    wanted_s: float = field(default_factory=time.monotonic)
    num_retries: int = 0
    span: Span | None = None  # of the fetch, where it is traced
    note: bytes | None = None
    life: int | None = None  # incarnation of the prefill instance that was asked first
    task: asyncio.Task[None] | None = None
    given_up: TransferError | None = None
    aborted: TransferError | None = None  # by an operator, while it had no transfer
    is_wanted_again: bool = False  # under another name, which is about to be asked for

    @property
    def request_id(self) -> str:
        """What operators call it by."""
        return self.transfer_id or self.name


class IncomingTransfers:
    """Owned by the leader's loop, but for `view`, which any thread may ask.

    Args:
        peers: Prefill nodes.
        limits: Bounds.
        own: This instance.
        may_join: Whether a prompt may name a prefill node that is not known yet.
        broadcast: Sends a message to every rank.
        on_outcome: Called with "done", "failed", "aborted" or "refused" for each prompt, once.
        on_retry: A prompt is tried again.
        on_given_up: Called with the error of each that was not "done".
        tracer: Records spans of fetches; None disables tracing.
    """

    def __init__(
        self,
        *,
        peers: PrefillNodes,
        limits: ConnectorLimitsConfig,
        own: Instance,
        may_join: bool,
        broadcast: Callable[[object], None],
        on_outcome: Callable[[str], None],
        on_retry: Callable[[], None],
        on_given_up: Callable[[TransferError], None] = lambda error: None,
        tracer: Tracer | None = None,
    ) -> None:
        self._peers = peers
        self._limits = limits
        self._own = own
        self._may_join = may_join
        self._broadcast = broadcast
        self._on_outcome = on_outcome
        self._on_retry = on_retry
        self._on_given_up = on_given_up
        self._tracer = tracer
        self._prompts: dict[str, _Prompt] = {}  # by the engine's name, until they are settled
        self._transfers: dict[str, _Transfer] = {}
        self._following: set[asyncio.Task[None]] = set()  # calls of prefill nodes that are not at their end
        self._telling: set[asyncio.Task[None]] = set()  # calls that let prefill nodes release a prompt

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def num_queued(self) -> int:
        """Prompts that wait for a prefill node, there or for pages here."""
        return self.num_prompts - self.num_running

    @property
    def num_running(self) -> int:
        """Prompts that the ranks receive."""
        return sum(transfer.expected is not None for transfer in self._transfers.values())

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of all transfers, and of prompts that have none now."""
        return (*self._transfers, *(prompt.request_id for prompt in self._prompts.values() if prompt.transfer is None))

    def views(self) -> list[RequestView]:
        """Return all prompts that are not settled."""
        now_s = time.monotonic()
        return [self._view(prompt, now_s) for prompt in self._prompts.values()]

    def _view(self, prompt: _Prompt, now_s: float) -> RequestView:
        transfer = prompt.transfer
        is_receiving = transfer is not None and transfer.expected is not None
        is_over = prompt.view.state is PromptState.FAILED or (transfer is not None and transfer.outcome.done())
        return RequestView(
            request_id=prompt.request_id,
            transfer_id="" if transfer is None else transfer.transfer_id,
            stage="ending" if is_over else "receiving" if is_receiving else "queued",
            age_s=now_s - prompt.wanted_s,
            prompt_tokens=len(prompt.token_ids),
            ready_tokens=prompt.start_token,
            peer="" if transfer is None else transfer.peer.address,
            retries=prompt.num_retries,
            ranks_done=self._own.shard.num_ranks - len(transfer.receiving) if transfer is not None and is_receiving else 0,
        )

    def view(self, name: str) -> PromptView | None:
        """How far a prompt is; None: not wanted, or settled."""
        prompt = self._prompts.get(name)
        return None if prompt is None else prompt.view

    # What the engine says

    def want(
        self,
        name: str,
        transfer_id: str,
        source: str,
        token_ids: tuple[int, ...],
        start_token: int,
        needs_note: bool = False,
        traceparent: str = "",
    ) -> None:
        """Fetch the KV of tokens [start_token, end) of a prompt.

        Args:
            transfer_id: What the prefill side's engine knows it by; empty: it is to compute it.
            source: host:port of the prefill node; empty: any that is joined.
            needs_note: Nothing is whole without what the prefill side's engine has to tell.
            traceparent: Span of the engine in which the fetch lies; empty where it tells none.
        """
        if name in self._prompts:
            raise ValueError(f"prompt {name} is wanted twice")
        prompt = _Prompt(
            name=name,
            transfer_id=transfer_id,
            source=source,
            token_ids=token_ids,
            start_token=start_token,
            needs_note=needs_note,
        )
        if self._tracer is not None:
            told: dict[str, Value] = {"request_id": transfer_id or name, "prompt_tokens": len(token_ids)}
            prompt.span = self._tracer.begin("kvferry.fetch", parent=traceparent, attributes=told)
        self._prompts[name] = prompt
        prompt.task = asyncio.get_running_loop().create_task(self._fetch(prompt))
        prompt.task.add_done_callback(lambda task: self._on_task_over(prompt, task))

    def bind(self, name: str, tables: tuple[tuple[int, ...], ...]) -> None:
        """The engine has taken pages for the whole prompt; they are its again when it is settled.

        Args:
            tables: Its page table in each group of layers, from token 0 on.
        """
        prompt = self._prompts[name]
        before, prompt.view = prompt.view, PromptView(state=PromptState.BOUND)
        prompt.tables = tables
        prompt.bound.set()
        if before.state is PromptState.FAILED:
            self._settle(prompt, before.failure)  # which was counted when it failed

    def report_page_shortage(self, name: str) -> None:
        """The engine has no pages for a prompt that is ready.

        After `YIELD_AFTER_S` the prompt that has waited longest, and at least as long, for prefill to begin it again is given up,
        if there is one, and each time that passes another one.
        """
        prompt, now_s = self._prompts.get(name), time.monotonic()
        if prompt is None or prompt.view.state is not PromptState.READY:
            return
        since_s, last_s = prompt.lacking_s or (now_s, now_s)
        if now_s - last_s > LACKING_GAP_S:
            since_s = now_s
        prompt.lacking_s = since_s, now_s
        if now_s - since_s < YIELD_AFTER_S:
            return
        idle = [
            transfer
            for transfer in self._transfers.values()
            if transfer.prompt.bound.is_set() and not transfer.has_asked and not transfer.outcome.done()
        ]
        longest = min(idle, key=lambda transfer: transfer.begun_s, default=None)
        if longest is not None and now_s - longest.begun_s >= YIELD_AFTER_S:
            prompt.lacking_s = now_s, now_s
            reason = "the prefill side's engine has not begun the prompt again, and others need its pages here"
            self._fail(longest, TransferAborted(reason))

    def cancel(self, name: str, reason: str, *, is_wanted_again: bool = False) -> None:
        """The engine gives the prompt up. One that is bound is settled soon, of others nothing more is heard.

        Args:
            is_wanted_again: The engine is about to want it under another name, so the prefill side keeps it.
        """
        prompt = self._prompts.get(name)
        if prompt is None or prompt.given_up is not None:
            return
        prompt.is_wanted_again = is_wanted_again
        prompt.given_up = TransferAborted(reason)
        if prompt.view.state is PromptState.FAILED:
            self._forget(prompt)
        elif prompt.transfer is not None:
            self._fail(prompt.transfer, prompt.given_up)  # not the task, which has to see the ranks drain
            if prompt.transfer.is_waiting_for_note and prompt.transfer.following is not None:
                prompt.transfer.following.cancel()
        elif prompt.task is not None:
            prompt.task.cancel()

    def decline(self, transfer_id: str, source: str, reason: str) -> None:
        """The engine will never want the prompt of that id, which the prefill side may hold for it."""
        if not is_utf8(transfer_id):
            log.warning("decline_dropped", transfer_id=repr(transfer_id), reason="no prefill side can hold a prompt of that id")
            return
        peer = self._peers.find(source)
        if transfer_id and peer is not None and len(self._telling) < MAX_TELLING:
            telling = asyncio.create_task(self._tell_given_up(peer, transfer_id, reason))
            self._telling.add(telling)
            telling.add_done_callback(self._on_told)

    async def _tell_given_up(self, peer: PrefillPeer, transfer_id: str, reason: str) -> None:
        """As soon as the prefill node is joined, if it is within the time that it would hold the prompt by itself."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.hold_s):
                while True:
                    await peer.joined.wait()
                    if await peer.give_up(transfer_id, reason):
                        return
                    await asyncio.sleep(RETELL_S)

    def _on_told(self, telling: asyncio.Task[None]) -> None:
        """Log the exception of a task, which would otherwise end the engine. The prefill side releases the prompt anyway."""
        self._telling.discard(telling)
        if not telling.cancelled() and (error := telling.exception()) is not None:
            log.critical("decline_broke", error=str(error), exc_info=error)

    def on_peer_lost(self, peer: PrefillPeer, reason: str) -> None:
        for transfer in list(self._transfers.values()):
            if transfer.peer is peer:
                self._fail(transfer, PeerUnreachable(f"prefill node {peer.address} is lost: {reason}"))

    def abort(self, request_id: str, error: TransferError) -> bool:
        """Give up the prompt that has the transfer of that id, or waits for one; False where there is none."""
        transfer = self._transfers.get(request_id)
        if transfer is None:
            for prompt in self._prompts.values():
                is_waiting = prompt.transfer is None and prompt.view.state is not PromptState.FAILED
                if is_waiting and prompt.request_id == request_id and prompt.task is not None:
                    prompt.aborted = error
                    return prompt.task.cancel()
        if transfer is None or transfer.outcome.done():
            return False
        self._fail(transfer, error)
        return True

    async def close(self) -> None:
        tasks = [*self._following, *self._telling, *(prompt.task for prompt in self._prompts.values() if prompt.task is not None)]
        for task in tasks:
            task.cancel()
        for transfer in self._transfers.values():
            transfer.drained.set()  # the ranks end, too
        await asyncio.gather(*tasks, return_exceptions=True)
        for prompt in self._prompts.values():
            self._end_span(prompt, "the decode side shuts down")

    # A prompt's way

    async def _fetch(self, prompt: _Prompt) -> None:
        error: TransferError
        try:
            while True:
                try:
                    await self._try(prompt)
                    self._settle(prompt, "")
                    self._on_outcome("done")
                    self._end_span(prompt)
                    return
                except TransferError as failure:
                    error = failure
                    log.info("transfer_failed", name=prompt.name, attempt=prompt.num_retries, reason=str(error))
                if prompt.given_up is not None:
                    break
                if isinstance(error, Preempted):  # which is nobody's fault, and ends when the engine has computed it
                    if prompt.view.state is PromptState.READY:
                        prompt.view, prompt.lacking_s = PromptView(state=PromptState.WAITING), None
                else:
                    if not is_retried(error) or prompt.num_retries == self._limits.prefill_retries:
                        break
                    prompt.num_retries += 1
                    self._on_retry()
                await asyncio.sleep(RETRY_PAUSE_S)
        except asyncio.CancelledError:
            stopped = prompt.given_up or prompt.aborted
            if stopped is None:
                raise  # this side shuts down
            error = stopped
        self._give_up(prompt, prompt.given_up or error)

    async def _try(self, prompt: _Prompt) -> None:
        """One transfer, to its end; nothing of it touches the prompt's pages afterwards.

        Raises:
            TransferError: It failed.
        """
        if not is_utf8(prompt.transfer_id):
            raise TransferAborted(
                f"the prompt's transfer_id is {prompt.transfer_id!r:.300}; it must be text that UTF-8 can carry"
            )
        peer = await self._joined_peer(prompt)
        assert peer.instance is not None
        life, prompt.life = prompt.life or peer.instance.incarnation, peer.instance.incarnation
        if prompt.source and prompt.transfer_id and life != prompt.life:
            raise TransferAborted(f"prefill node {peer.address} has started again, and what its engine had is gone")
        transfer = _Transfer(
            transfer_id=new_transfer_id(prompt.transfer_id or prompt.name),
            prompt=prompt,
            peer=peer,
            prefill=peer.instance,
            permit=self._peers.begin(peer),
            begun_s=time.monotonic(),
            outcome=asyncio.get_running_loop().create_future(),
        )
        if prompt.span is not None:
            transfer.span = prompt.span.begin("kvferry.try", transfer_id=transfer.transfer_id, prefill_node=peer.address)
        self._transfers[transfer.transfer_id] = transfer
        prompt.transfer = transfer
        peer.outstanding_tokens += len(prompt.token_ids)
        following = transfer.following = asyncio.ensure_future(self._follow(transfer))
        self._following.add(following)
        following.add_done_callback(lambda task: self._on_call_over(transfer, task))
        try:
            await transfer.outcome
            self._judge(transfer, Verdict.SUCCESS)
            if transfer.is_waiting_for_note:
                await following
                if prompt.note is None:
                    raise EngineError(f"{peer.address} has sent the KV without the note that goes with it")
        except TransferError as error:
            self._judge(transfer, verdict_of(error), str(error))
            if transfer.span is not None:
                if transfer.expected is None:
                    self._record_wait(transfer, str(error))
                transfer.span.end(str(error))
            # Where all has come, the prefill side's call goes on to its end: that is how it learns that it may forget the prompt.
            following.cancel()
            raise
        finally:
            self._judge(transfer, Verdict.NOTHING)
            peer.outstanding_tokens -= len(prompt.token_ids)
            await self._drain(transfer)
            if transfer.span is not None:
                transfer.span.end()  # unless it has failed
            prompt.transfer = None
            del self._transfers[transfer.transfer_id]

    def _on_call_over(self, transfer: _Transfer, task: asyncio.Task[None]) -> None:
        self._following.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, TransferError):
            log.critical("prefill_call_broke", request_id=transfer.transfer_id, error=str(error), exc_info=error)
            error = EngineError(f"unexpected {type(error).__name__}; see the log of the decode side")
        if transfer.is_whole and not transfer.is_waiting_for_note:
            # It has not heard so, or does not need to any more; nobody will ask it for the prompt again.
            self.decline(transfer.prompt.transfer_id, transfer.prompt.source, "the decode side has all of it")
        self._fail(transfer, error)

    async def _joined_peer(self, prompt: _Prompt) -> PrefillPeer:
        """The prefill node that has the prompt, once it is joined.

        Raises:
            TransferAborted: It is none of those that this side uses.
            LayoutError: It does not fit: another model, say.
            _NotJoined: It is not joined in time.
        """
        peer = self._peers.find(prompt.source) if prompt.source else self._peers.pick()
        if peer is None and prompt.source:
            if not self._may_join:
                raise TransferAborted(
                    f"the prompt's prefill node is {prompt.source}, which is not in peers.prefill_nodes; it must be one of them "
                    "(join_on_request allows others)"
                )
            try:
                peer = self._peers.add(checked_host_port(prompt.source))
            except ValueError as error:  # a ConfigError is one, too
                raise TransferAborted(f"the prompt's prefill node is {prompt.source!r:.300}: {error}") from error
        if peer is None:
            raise PeerUnreachable(self._peers.unavailable_reason())
        wait_s = self._limits.meet_timeout_s if prompt.life is None else min(REJOIN_S, self._limits.meet_timeout_s)
        waiting = [asyncio.ensure_future(event.wait()) for event in (peer.joined, peer.unfit)]
        try:
            with self._peers.used(peer):
                await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in waiting:
                event.cancel()
        if peer.joined.is_set():
            return peer.other or peer
        kind = LayoutError if peer.unfit.is_set() else _NotJoined
        raise kind(f"prefill node {peer.address} is {peer.state}: {peer.reason}")

    async def _follow(self, transfer: _Transfer) -> None:
        """Follow the prefill node's call to its end."""
        prompt = transfer.prompt
        call = transfer.peer.prefill(
            transfer.transfer_id,
            prompt.token_ids,
            decode_incarnation=self._own.incarnation,
            start_token=prompt.start_token,
            engine_request=prompt.transfer_id,
            traceparent="" if transfer.span is None else transfer.span.traceparent,
        )
        is_sent = False
        async for event in call:
            match event.WhichOneof("event"):
                case "note":
                    if len(event.note.payload) > MAX_NOTE_BYTES:
                        has = f"has {len(event.note.payload)} bytes; it can have {MAX_NOTE_BYTES}"
                        raise TransferAborted(f"the note of {transfer.peer.address} {has}")
                    prompt.note = event.note.payload
                case "preempted":
                    raise Preempted(f"the engine of {transfer.peer.address} has preempted the prompt, and computes it again")
                case "sent":
                    is_sent = True
        if not is_sent:
            raise PeerUnreachable(f"{transfer.peer.address} ended the call early")

    async def reserve(self, request_id: str, prefill_incarnation: int, decode_incarnation: int, plan: ChunkPlan) -> bool:
        """A prefill leader is about to send: have the ranks expect it, once the engine has bound pages; False is "not yet".

        Raises:
            TransportClosed: The transfer does not wait here.
            PeerUnreachable: A rank cannot receive it.
            LayoutError: The plan cuts it into too many chunks.
        """
        transfer = self._transfers.get(request_id)
        if transfer is None or transfer.outcome.done() or decode_incarnation != self._own.incarnation:
            raise TransportClosed(f"request {request_id} does not wait here for room")
        if prefill_incarnation != transfer.prefill.incarnation:
            raise TransportClosed(f"request {request_id} was given to another life of the prefill node")
        transfer.has_asked = True
        prompt = transfer.prompt
        num_tokens = len(prompt.token_ids)
        check_num_pieces(
            plan,
            self._own.layout,
            transfer.prefill.shard,
            self._own.shard,
            num_tokens=num_tokens,
            start_token=prompt.start_token,
        )
        if prompt.view.state is PromptState.WAITING:
            prompt.view = PromptView(state=PromptState.READY)
        try:
            async with asyncio.timeout(BIND_WAIT_S):
                await prompt.bound.wait()
        except TimeoutError:
            return False
        if transfer.outcome.done():
            raise TransportClosed(f"request {request_id} is over")
        if transfer.expected is None:
            self._expect(prompt, transfer, plan)
        assert transfer.expected is not None
        await asyncio.shield(transfer.expected)
        return True

    def _expect(self, prompt: _Prompt, transfer: _Transfer, plan: ChunkPlan) -> None:
        assert prompt.tables is not None
        ranks = set(range(self._own.shard.num_ranks))
        transfer.answering, transfer.receiving, transfer.draining = set(ranks), set(ranks), set(ranks)
        transfer.expected = asyncio.get_running_loop().create_future()
        self._record_wait(transfer)
        self._broadcast(
            ExpectBound(
                transfer_id=transfer.transfer_id,
                prefill_incarnation=transfer.prefill.incarnation,
                num_tokens=len(prompt.token_ids),
                start_token=prompt.start_token,
                plan=plan,
                tables=prompt.tables,
                traceparent="" if transfer.span is None else transfer.span.traceparent,
            )
        )

    def _record_wait(self, transfer: _Transfer, error: str = "") -> None:
        """A transfer has room on both sides, or was given up without."""
        span = transfer.prompt.span
        if span is not None:
            span.record("kvferry.queue", begun_s=transfer.begun_s, ended_s=time.monotonic(), error=error)

    # What the ranks say

    def on_expected(self, rank: int, message: TransferExpected) -> None:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None or transfer.expected is None or transfer.expected.done():
            return
        transfer.answering.discard(rank)
        if message.reason:
            error = PeerUnreachable(f"decode rank {rank}: {message.reason}")
            transfer.expected.set_exception(error)
            transfer.expected.exception()  # also where nobody waits for it any more
            self._fail(transfer, error)
        elif not transfer.answering:
            transfer.expected.set_result(None)

    def on_whole(self, rank: int, message: TransferWhole) -> None:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None:
            return
        transfer.receiving.discard(rank)
        if not transfer.receiving and not transfer.outcome.done():
            transfer.draining.clear()  # nothing of it is under way anywhere
            transfer.outcome.set_result(None)

    def on_broken(self, rank: int, message: TransferBroken) -> None:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None:
            return
        if message.is_data_loss:
            self._fail(transfer, IntegrityError(f"decode rank {rank}: {message.reason}"))
            return
        # A rank only sees that its writer gave up or went away. Why, the prefill node's call is about to say.
        error = PeerUnreachable(f"decode rank {rank}: {message.reason}")
        asyncio.get_running_loop().call_later(REASON_GRACE_S, self._fail, transfer, error)

    def on_drained(self, rank: int, message: TransferDrained) -> None:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is not None:
            transfer.draining.discard(rank)
            if not transfer.draining:
                transfer.drained.set()

    # Ends

    def _fail(self, transfer: _Transfer, error: TransferError) -> None:
        if not transfer.outcome.done():
            transfer.outcome.set_exception(error)
            transfer.outcome.exception()  # also where its task was cancelled meanwhile

    def _judge(self, transfer: _Transfer, verdict: Verdict, reason: str = "") -> None:
        permit, transfer.permit = transfer.permit, None
        if permit is not None:
            self._peers.end(transfer.peer, permit, verdict, reason)

    async def _drain(self, transfer: _Transfer) -> None:
        """Have the ranks give it up, where it is not whole, and wait until none touches its pages."""
        if transfer.expected is not None and not transfer.expected.done():
            transfer.expected.set_exception(TransportClosed(f"request {transfer.transfer_id} is over"))
            transfer.expected.exception()
        if not transfer.draining:
            return
        failure = transfer.outcome.exception() if transfer.outcome.done() and not transfer.outcome.cancelled() else None
        reason = clip_reason(str(failure or "the prompt was given up"))
        self._broadcast(CancelIncoming(transfer_id=transfer.transfer_id, reason=reason))
        await transfer.drained.wait()

    def _give_up(self, prompt: _Prompt, error: TransferError) -> None:
        self._on_given_up(prompt.given_up or error)
        self._end_span(prompt, str(prompt.given_up or error))
        if prompt.given_up is not None:
            self._on_outcome("aborted")
        else:
            self._on_outcome("failed" if isinstance(error, _NotJoined) else outcome_of(error))
        if not prompt.is_wanted_again:
            self.decline(prompt.transfer_id, prompt.source, f"the decode side has given it up: {error}")
        if prompt.view.state is PromptState.BOUND:
            self._settle(prompt, str(error) or type(error).__name__)
        elif prompt.given_up is not None:
            self._forget(prompt)
        else:
            prompt.view = PromptView(state=PromptState.FAILED, failure=str(error))

    def _settle(self, prompt: _Prompt, failure: str) -> None:
        if self._prompts.get(prompt.name) is not prompt:
            raise LocalProtocolError(f"prompt {prompt.name} is settled twice")
        del self._prompts[prompt.name]
        self._broadcast(SettlePrompt(name=prompt.name, failure=clip_reason(failure), note=prompt.note or b""))

    def _end_span(self, prompt: _Prompt, error: str = "") -> None:
        if prompt.span is not None:
            prompt.span.set(retries=prompt.num_retries)
            prompt.span.end(error)

    def _forget(self, prompt: _Prompt) -> None:
        self._prompts.pop(prompt.name, None)

    def _on_task_over(self, prompt: _Prompt, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            reason = prompt.given_up or prompt.aborted
            if reason is not None and self._prompts.get(prompt.name) is prompt:
                self._give_up(prompt, reason)  # before it had begun, so that it could not do that itself
        elif (error := task.exception()) is not None:
            log.critical("prompt_broke", name=prompt.name, error=str(error), exc_info=error)
            self._give_up(prompt, EngineError(f"unexpected {type(error).__name__}; see the log of the decode side"))
