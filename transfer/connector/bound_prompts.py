"""The prompts that an engine fetches, if it schedules and binds pages by itself, as vLLM and SGLang do.

The engine *wants* a prompt's KV. When the prefill side is about to send it, the prompt is *ready*. Only then does the engine take
pages and *bind* them. All attempts fill the same pages. When all ranks have the complete KV, or none writes any more, the prompt
is *settled*.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final

import structlog

from transfer.chunk import ChunkPlan
from transfer.config import ConnectorLimitsConfig
from transfer.connector.attempt import (
    Attempt,
    AttemptStage,
    IncomingObserver,
    IncomingRoom,
    IncomingScheduler,
    NotYet,
    WantedPrompt,
)
from transfer.connector.incoming import IncomingTransfers
from transfer.connector.messages import ExpectBound, SettlePrompt
from transfer.connector.prefill_nodes import PrefillNodes
from transfer.connector.prefill_peer import PrefillPeer
from transfer.errors import Preempted, TransferAborted, TransferError, TransportClosed
from transfer.instance import Instance
from transfer.messages import clip_reason
from transfer.metrics import outcome_of
from transfer.tracing import Tracer
from transfer.utf8 import is_utf8

BIND_WAIT_S: Final = 1.0
"""Wait for the engine to bind pages, before a question for room is answered "not yet". An engine looks once a step."""

RETELL_S: Final = 0.5

YIELD_AFTER_S: Final = 5.0
"""Duration of a shortage of pages after which a prompt that waits for prefill releases its pages; see `report_page_shortage`.
Prefill's engine preempts a prompt when it is short of pages. Prompts that wait for room here may hold those pages."""

LAST_PART_S: Final = 0.05
"""Age of the last part of a prompt after which the engine no longer waits for the rest. A transfer can stall for longer."""

LACKING_GAP_S: Final = 2.0
"""Longest pause between two reports of one shortage. An engine looks at ready prompts at every step."""

MAX_TELLING: Final = 4096
"""Maximum number of declined prompts that are not reported to prefill nodes yet."""

log = structlog.get_logger(__name__)


class PromptState(Enum):
    WAITING = auto()  # waits for the prefill side, and holds nothing here
    READY = auto()  # the prefill side is about to send: bind pages
    BOUND = auto()
    FAILED = auto()  # before it was bound


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptView:
    """The engine's view of a prompt that is not settled.

    Args:
        can_start_late: Whether the prompt can be bound from a later token than the wanted one.
    """

    state: PromptState
    failure: str = ""
    can_start_late: bool = False


_WAITING: Final = PromptView(state=PromptState.WAITING)


@dataclass(slots=True, kw_only=True, eq=False)
class BoundPrompt(WantedPrompt):
    name: str  # the engine's
    shown: PromptView = _WAITING
    tables: tuple[tuple[int, ...], ...] = ()
    bound_token: int = 0  # first token whose KV is needed, once it is bound
    bound: asyncio.Event = field(default_factory=asyncio.Event)
    lacking_s: tuple[float, float] | None = None  # first and last report that the engine has no pages for it, while it is ready
    sent_s: float = 0.0  # time when it was last sent to a prefill node
    is_cancelled: bool = False
    is_wanted_again: bool = False  # the engine is about to want it under another name

    def bind(self, tables: tuple[tuple[int, ...], ...], start_token: int) -> None:
        """Record the pages that the engine allocated for the prompt."""
        self.shown = PromptView(state=PromptState.BOUND)
        self.tables, self.bound_token = tables, start_token
        self.bound.set()

    @property
    def is_idle(self) -> bool:
        """Whether the prompt holds pages, and prefill has not begun it again."""
        if not self.bound.is_set() or not self.attempts:
            return False
        attempt = self.current
        return attempt.stage is AttemptStage.WAITING and attempt.peer is not None and not attempt.has_asked


class BoundPrompts(IncomingScheduler[BoundPrompt]):
    """Serve as `IncomingScheduler` of a connector. Owned by the leader's loop, except `view` and `take_first_tokens`,
    which any thread may call.

    Args:
        may_join: Whether a prompt may name a prefill node that is not known yet.
        tracer: Records a span of each prompt; None disables tracing.
    """

    reuses_pages = True

    def __init__(
        self,
        *,
        peers: PrefillNodes,
        limits: ConnectorLimitsConfig,
        own: Instance,
        may_join: bool,
        broadcast: Callable[[object], None],
        observer: IncomingObserver,
        tracer: Tracer | None = None,
    ) -> None:
        self.transfers = IncomingTransfers[BoundPrompt](
            scheduler=self,
            peers=peers,
            own=own,
            retries=limits.prefill_retries,
            may_join=may_join,
            broadcast=broadcast,
            observer=observer,
        )
        self._peers = peers
        self._limits = limits
        self._broadcast = broadcast
        self._observer = observer
        self._tracer = tracer
        self._prompts: dict[str, BoundPrompt] = {}  # by the engine's name, until they are settled
        self._first_tokens: deque[tuple[str, int]] = deque()  # names and tokens of received prompts, until the engine takes them
        self._has_first_tokens = threading.Event()
        self._telling: set[asyncio.Task[None]] = set()  # calls that let prefill nodes release a prompt
        self._is_closed = False

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def view(self, name: str) -> PromptView | None:
        """Return the progress of a prompt. None means that it is not wanted, or settled."""
        prompt = self._prompts.get(name)
        return None if prompt is None else prompt.shown

    def take_first_tokens(self, *, patience_s: float = 0.0) -> dict[str, int]:
        """Return the first tokens of prompts received since the last call, by name. Omit prompts that do not need the token.

        The KV of such a prompt is in the pool, but the ranks report `Settled` a little later. The engine may have cancelled the
        prompt in the meantime.

        Args:
            patience_s: Longest wait for a token, if there is none yet and the newest prompt lacks only its KV or only its token.
                There is no wait if that prompt got its last part more than `LAST_PART_S` ago.
        """
        if patience_s and not self._first_tokens and self._is_token_near():
            self._has_first_tokens.wait(patience_s)
        self._has_first_tokens.clear()
        tokens: dict[str, int] = {}
        while self._first_tokens:
            name, token = self._first_tokens.popleft()
            tokens[name] = token
        return tokens

    def _is_token_near(self) -> bool:
        newest = self.transfers.newest_partial
        if newest is None or newest.stage is not AttemptStage.RECEIVING:
            return False
        return time.monotonic() - self.transfers.newest_partial_s < LAST_PART_S

    async def close(self) -> None:
        self._is_closed = True
        for task in self._telling:
            task.cancel()
        await self.transfers.close(TransferAborted("the decode side shuts down"))
        await asyncio.gather(*self._telling, return_exceptions=True)

    # Calls of the engine

    def want(
        self,
        name: str,
        transfer_id: str,
        source: str,
        token_ids: tuple[int, ...],
        start_token: int,
        needs_first_token: bool = False,
        needs_note: bool = False,
        traceparent: str = "",
        cache_salt: str = "",
        tables: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        """Fetch the KV of tokens [start_token, end) of a prompt.

        Args:
            transfer_id: Name of the prompt in the prefill side's engine; empty means that the prefill side computes it.
            source: host:port of the prefill node; empty means any that is joined.
            needs_first_token: The KV is of no use without the first token; see `take_first_tokens`.
            needs_note: The KV is of no use without the note of the prefill side's engine.
            traceparent: The engine's span of the request.
            cache_salt: Salt of the prompt in the prefill side's engine; see `OfferedPrompts.offer`.
            tables: Page tables, as in `bind`, if the engine has allocated the pages already. They allow early room, and
                `bind` is not called. None means that `bind` follows.
        """
        if name in self._prompts:
            raise ValueError(f"prompt {name} is wanted twice")
        span = None
        if self._tracer is not None:
            attributes: dict[str, str | int] = {
                "request_id": transfer_id if transfer_id and is_utf8(transfer_id) else name,
                "prompt_tokens": len(token_ids),
            }
            span = self._tracer.begin("kvferry.fetch", parent=traceparent, attributes=attributes)
        prompt = self._prompts[name] = BoundPrompt(
            name=name,
            request_id=transfer_id or name,
            engine_request=transfer_id,
            source=source,
            token_ids=token_ids,
            start_token=start_token,
            needs_first_token=needs_first_token,
            needs_note=needs_note,
            span=span,
            traceparent=traceparent,
            cache_salt=cache_salt,
            accepted_s=time.monotonic(),
            join_timeout_s=self._limits.meet_timeout_s,
        )
        if tables is not None:
            prompt.bind(tables, start_token)
        try:
            if not is_utf8(transfer_id):
                raise TransferAborted(f"the prompt's transfer_id is {transfer_id!r:.300}; it must be text that UTF-8 can carry")
            self.transfers.fetch(prompt)
        except TransferError as error:  # no attempt was begun
            self._observer.on_outcome(outcome_of(error))
            self._observer.on_given_up(error)
            self.settled(prompt, error)

    def bind(self, name: str, tables: tuple[tuple[int, ...], ...], start_token: int | None = None) -> None:
        """Record the pages that the engine took for the whole prompt. They belong to the engine again when the prompt is settled.

        Args:
            tables: Its page table in each group of layers, from token 0 on.
            start_token: First token whose KV is needed. None means the wanted one.

        Raises:
            ValueError: `start_token` is below the wanted one, or not below the prompt's length.
        """
        prompt = self._prompts[name]
        start_token = prompt.start_token if start_token is None else start_token
        if not prompt.start_token <= start_token < len(prompt.token_ids):
            bounds = f"[{prompt.start_token}, {len(prompt.token_ids)})"
            raise ValueError(f"prompt {name} is bound from token {start_token} on; it must be in {bounds}")
        before = prompt.shown
        prompt.bind(tables, start_token)
        if prompt.attempts:
            self.transfers.ask_again(prompt.current)
        if before.state is PromptState.FAILED:
            self._settle(prompt, before.failure)  # it was counted when it failed

    def report_page_shortage(self, name: str) -> None:
        """Record that the engine has no pages for a prompt that is ready.

        After `YIELD_AFTER_S`, one prompt is given up: the one that has waited longest for prefill to begin it again, if it has
        waited as long. After each further `YIELD_AFTER_S`, another one is given up.
        """
        prompt, now_s = self._prompts.get(name), time.monotonic()
        if prompt is None or prompt.shown.state is not PromptState.READY:
            return
        since_s, last_s = prompt.lacking_s or (now_s, now_s)
        if now_s - last_s > LACKING_GAP_S:
            since_s = now_s
        prompt.lacking_s = since_s, now_s
        if now_s - since_s < YIELD_AFTER_S:
            return
        idle = [one for one in self._prompts.values() if one.is_idle]
        longest = min(idle, key=lambda one: one.sent_s, default=None)
        if longest is not None and now_s - longest.sent_s >= YIELD_AFTER_S:
            prompt.lacking_s = now_s, now_s
            reason = "the prefill side's engine has not begun the prompt again, and others need its pages here"
            self.transfers.give_up(longest, TransferAborted(reason))

    def cancel(self, name: str, reason: str, *, is_wanted_again: bool = False) -> None:
        """Give a prompt up. A bound prompt is settled soon; other prompts are forgotten.

        Args:
            is_wanted_again: The engine is about to want the prompt under another name, so the prefill side keeps it.
        """
        prompt = self._prompts.get(name)
        if prompt is None or prompt.is_cancelled:
            return
        prompt.is_cancelled, prompt.is_wanted_again = True, is_wanted_again
        if prompt.shown.state is PromptState.FAILED:
            del self._prompts[name]
        else:
            self.transfers.give_up(prompt, TransferAborted(reason))

    def decline(self, transfer_id: str, source: str, reason: str) -> None:
        """Report that the engine will never want the prompt of that id, which the prefill side may hold for it."""
        if not is_utf8(transfer_id):
            log.warning("decline_dropped", transfer_id=repr(transfer_id), reason="no prefill side can hold a prompt of that id")
            return
        peer = self._peers.find(source)
        if transfer_id and peer is not None and len(self._telling) < MAX_TELLING:
            telling = asyncio.create_task(self._tell_given_up(peer, transfer_id, reason))
            self._telling.add(telling)
            telling.add_done_callback(self._on_told)

    async def _tell_given_up(self, peer: PrefillPeer, transfer_id: str, reason: str) -> None:
        """Notify the prefill node as soon as it is joined, within the time that it holds the prompt by itself."""
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
            log.critical("decline_crashed", error=str(error), exc_info=error)

    # Implementation of `IncomingScheduler`

    def gives_early_room(self, attempt: Attempt[BoundPrompt]) -> bool:
        """Return whether the engine has allocated the pages. Otherwise, it does so while prefill computes."""
        return attempt.prompt.bound.is_set()

    async def prepare(self, attempt: Attempt[BoundPrompt]) -> None:
        prompt = attempt.prompt
        prompt.sent_s = time.monotonic()
        if prompt.bound.is_set():  # between two attempts, perhaps from a later token on
            prompt.start_token = attempt.start_token = prompt.bound_token

    async def room(self, attempt: Attempt[BoundPrompt], plan: ChunkPlan) -> IncomingRoom | NotYet:
        prompt = attempt.prompt
        if prompt.shown.state is PromptState.WAITING:
            prompt.shown = PromptView(state=PromptState.READY, can_start_late=attempt.can_start_late)
        try:
            async with asyncio.timeout(BIND_WAIT_S):
                await prompt.bound.wait()
        except TimeoutError:
            if not prompt.bound.is_set():  # both can happen in one turn
                return NotYet()
        if prompt.bound_token != attempt.start_token and not attempt.can_start_late:
            error = TransportClosed(f"the prompt is needed from token {prompt.bound_token} on now, and is asked for again")
            self.transfers.fail(attempt, error)
            raise error
        return IncomingRoom(start_token=prompt.bound_token, message=partial(ExpectBound, tables=prompt.tables))

    def stopped(self, attempt: Attempt[BoundPrompt], error: TransferError) -> None:
        prompt = attempt.prompt
        log.info("transfer_failed", name=prompt.name, attempt=prompt.num_retries, reason=str(error))
        if prompt.bound.is_set():
            prompt.start_token = prompt.bound_token
        elif isinstance(error, Preempted):
            prompt.shown, prompt.lacking_s = _WAITING, None

    def settled(self, prompt: BoundPrompt, failure: TransferError | None) -> None:
        if prompt.span is not None:
            prompt.span.set(retries=prompt.num_retries)
            prompt.span.end("" if failure is None else str(failure))
        if self._is_closed:
            return  # the ranks end, too
        if failure is None:
            self._observer.on_outcome("done")
            if prompt.needs_first_token:
                token = prompt.current.first_token
                assert token is not None
                self._first_tokens.append((prompt.name, token))
                self._has_first_tokens.set()
            self._settle(prompt, "")
            self.transfers.forget(prompt)
            return
        if not prompt.is_wanted_again:
            self.decline(prompt.engine_request, prompt.source, f"the decode side has given it up: {failure}")
        if prompt.shown.state is PromptState.BOUND:
            self._settle(prompt, str(failure) or type(failure).__name__)
        elif prompt.is_cancelled:
            del self._prompts[prompt.name]
        else:
            prompt.shown = PromptView(state=PromptState.FAILED, failure=str(failure))

    def call_ended(self, attempt: Attempt[BoundPrompt]) -> None:
        """Let the prefill side release a prompt that is complete here, if it does not know that yet."""
        prompt = attempt.prompt
        is_whole = prompt.is_over and prompt.failure is None
        if is_whole and attempt.is_current and not attempt.is_sent and not self._is_closed:
            self.decline(prompt.engine_request, prompt.source, "the decode side has all of it")

    def _settle(self, prompt: BoundPrompt, failure: str) -> None:
        del self._prompts[prompt.name]
        self._broadcast(SettlePrompt(name=prompt.name, failure=clip_reason(failure), note=prompt.note or b""))
