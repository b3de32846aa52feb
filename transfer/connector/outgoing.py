"""Track the prompts of a connector's prefill side in its leader: offered, requested, sent and freed.

A prompt is *offered* when the engine is given it, *begun* when the engine has pages for it, *finished* when it has computed it. A
decode side asks for it by its transfer id, before or after each of these; what it asks for is a *transfer*, one attempt. A prompt
is *closed* when it has been sent, was given up, or nobody asked in time; when then no rank reads its pages any more, it is
*free*.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from transfer.config import ConnectorLimitsConfig
from transfer.connector.decode_instances import Join
from transfer.connector.messages import (
    CancelOutgoing,
    ClosePrompt,
    FreePrompt,
    PromptIdle,
    PromptWanted,
    StartOffered,
    TransferNotSent,
    TransferSent,
)
from transfer.connector.prefill_calls import EngineNote, Progress, PromptFirstToken, PromptSent, PromptStarted
from transfer.engine_types import SamplingParams
from transfer.errors import (
    ConfigError,
    EngineError,
    PeerUnreachable,
    Preempted,
    ResourceExhausted,
    TransferAborted,
    TransferError,
)
from transfer.messages import clip_reason
from transfer.metrics import outcome_of
from transfer.send.events import SentStats

RETRY_RESERVE_S: Final = 0.05
LOOK_S: Final = 0.01
MAX_REMEMBERED: Final = 4096  # of prompts that are closed, to tell who asks late why
MAX_NOTE_BYTES: Final = 1 << 20

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Prompt:
    """A prompt that the engine has."""

    name: str
    transfer_id: str
    token_ids: tuple[int, ...]
    offered_s: float
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    was_begun: bool = False  # and will be again
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    note: bytes | None = None
    first_token: int | None = None
    transfer: Transfer | None = None  # the one under way
    hold: asyncio.TimerHandle | None = None  # until nobody has asked for too long
    is_closed: bool = False
    failure: str = ""
    reading: set[int] = field(default_factory=set)  # ranks that may read its pages, once it is closed


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """An attempt; `progress` is what its caller reads, the last item is `PromptSent` or an error."""

    transfer_id: str
    engine_request: str
    token_ids: tuple[int, ...]
    start_token: int
    sampling: SamplingParams
    cache_salt: str
    join: Join
    queued_s: float
    progress: asyncio.Queue[Progress] = field(default_factory=asyncio.Queue)
    prompt: _Prompt | None = None
    task: asyncio.Task[None] | None = None
    computing: asyncio.Task[None] | None = None
    unsent: set[int] = field(default_factory=set)  # ranks that have not sent their part
    stats: list[SentStats] = field(default_factory=list)
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    is_started: bool = False
    is_over: bool = False


class OutgoingTransfers:
    """Owned by the leader's loop.

    Args:
        num_ranks: Ranks of this instance.
        limits: Bounds.
        broadcast: Sends a message to every rank.
        reserve: Asks the decode leader for room; False is "not yet".
        compute: Has the engine given a prompt that it does not have, as `Transfer.engine_request`, and ends when that has been
            computed; cancelled when the transfer is over. None: it cannot be done.
        on_outcome: Called with "sent", "failed", "aborted" or "refused" for each transfer that ends.
        on_given_up: Called with the error of each that was not "sent".
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        limits: ConnectorLimitsConfig,
        broadcast: Callable[[object], None],
        reserve: Callable[[Join, str], Awaitable[bool]],
        compute: Callable[[Transfer], Coroutine[Any, Any, None]] | None = None,
        on_outcome: Callable[[str], None],
        on_given_up: Callable[[TransferError], None] = lambda error: None,
    ) -> None:
        self._num_ranks = num_ranks
        self._limits = limits
        self._broadcast = broadcast
        self._reserve = reserve
        self._compute = compute
        self._on_outcome = on_outcome
        self._on_given_up = on_given_up
        self._prompts: dict[str, _Prompt] = {}  # by the engine's name, until they are free
        self._offered: dict[str, _Prompt] = {}  # by transfer id, until they are closed
        self._waiting: dict[str, set[asyncio.Future[_Prompt]]] = {}  # by transfer id: who asks for what is not offered yet
        self._closed: OrderedDict[str, str] = OrderedDict()  # transfer id -> why it is closed
        self._transfers: dict[str, Transfer] = {}

    @property
    def num_prompts(self) -> int:
        """Prompts whose pages the engine must keep."""
        return len(self._prompts)

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._transfers)

    def others_tokens(self, join: Join) -> int:
        """Prompt tokens of transfers to other decode instances, of which not all is sent: what that one does not know of."""
        return sum(
            len(transfer.token_ids)
            for transfer in self._transfers.values()
            if not transfer.is_over and transfer.join.incarnation != join.incarnation
        )

    # What the engine says

    def offer(self, name: str, transfer_id: str, token_ids: tuple[int, ...]) -> None:
        """The engine has been given the prompt."""
        if name in self._prompts:
            raise ValueError(f"prompt {name} is offered twice")
        prompt = _Prompt(name=name, transfer_id=transfer_id, token_ids=token_ids, offered_s=time.monotonic())
        self._prompts[name] = prompt
        if transfer_id in self._offered or transfer_id in self._closed:
            why = self._closed.get(transfer_id, "it is another prompt's")
            self._close(prompt, f"transfer_id {transfer_id} was used before ({why}); each prompt needs one of its own")
            return
        self._offered[transfer_id] = prompt
        for waiting in self._waiting.pop(transfer_id, ()):
            if not waiting.done():
                waiting.set_result(prompt)

    def begin(self, name: str) -> None:
        """The engine has pages for the prompt, and computes it."""
        prompt = self._prompts.get(name)
        if prompt is not None:
            prompt.begun.set()

    def pause(self, name: str) -> None:
        """The engine takes the prompt's pages back, to compute it again later: `begin` says when.

        What is under way of it ends, and the next attempt waits for that. No room is asked for meanwhile: the decode side would
        keep pages for a prompt that waits for pages itself, perhaps for those of prompts that wait for room on the decode side.
        """
        prompt = self._prompts.get(name)
        if prompt is None or prompt.is_closed or prompt.finished.is_set():
            return
        transfer = prompt.transfer
        if transfer is not None and transfer.computing is not None and not transfer.is_started:
            return  # nothing else would ask for it; what is not being sent yet is sent when it is computed again
        if prompt.begun.is_set():
            prompt.begun.clear()
            prompt.was_begun = True
        if transfer is not None and not transfer.sent.is_set():  # else there is nothing more to read
            self._fail(transfer, _preempted(transfer, "the prefill side's engine has preempted the prompt"))

    def finish(self, name: str, *, first_token: int | None = None, note: bytes | None = None) -> None:
        """The engine has computed the whole prompt; its pages stay until it is told that they are free.

        Args:
            first_token: The one after the prompt, where it is known.
            note: For the engine of the decode side.
        """
        prompt = self._prompts.get(name)
        if prompt is None or prompt.is_closed:
            return
        if note is not None and len(note) > MAX_NOTE_BYTES:
            self._close(prompt, f"the engine's note has {len(note)} bytes; it can have {MAX_NOTE_BYTES}")
            return
        prompt.first_token, prompt.note = first_token, note
        prompt.begun.set()
        prompt.finished.set()
        if prompt.transfer is None:
            self._hold(prompt)

    def withdraw(self, name: str, reason: str) -> None:
        """The engine gives the prompt up: who asks for it is told why. No-op for one that is closed."""
        prompt = self._prompts.get(name)
        if prompt is not None and not prompt.is_closed:
            self._close(prompt, reason)

    # What decode sides say

    def submit(
        self,
        transfer_id: str,
        engine_request: str,
        token_ids: tuple[int, ...],
        start_token: int,
        sampling: SamplingParams,
        join: Join,
        *,
        cache_salt: str = "",
    ) -> Transfer:
        """Begin to send a prompt; see `Transfer.progress`.

        Args:
            sampling: How its first token is chosen, where it is computed for this transfer.
            cache_salt: The engine shares KV with prompts of the same one only, likewise; a router has told it its own.

        Raises:
            TransferAborted: A transfer of that id is in flight.
            ResourceExhausted: There are too many.
            ConfigError: The engine cannot be given prompts from here.
        """
        if transfer_id in self._transfers:
            raise TransferAborted(f"request_id {transfer_id} is in flight already; ids must be unique")
        if len(self._transfers) >= self._limits.max_transfers:
            raise ResourceExhausted(f"{len(self._transfers)} transfers are in flight, as many as limits.max_transfers allows")
        if not engine_request and self._compute is None:
            raise ConfigError(
                "engine_request is empty; prompts reach the engine of this node by a router: it must be the transfer_id of one"
            )
        transfer = Transfer(
            transfer_id=transfer_id,
            engine_request=engine_request or secrets.token_hex(16),
            token_ids=token_ids,
            start_token=start_token,
            sampling=sampling,
            cache_salt=cache_salt,
            join=join,
            queued_s=time.monotonic(),
        )
        self._transfers[transfer_id] = transfer
        loop = asyncio.get_running_loop()
        if not engine_request and self._compute is not None:
            transfer.computing = loop.create_task(self._compute(transfer))
            transfer.computing.add_done_callback(lambda task: self._on_computed(transfer, task))
        transfer.task = loop.create_task(self._run(transfer, is_computed_here=not engine_request))
        transfer.task.add_done_callback(lambda task: self._on_task_over(transfer, task))
        return transfer

    def give_up(self, transfer: Transfer, error: TransferError) -> None:
        """Its caller is gone, or an operator says so. No-op once it is over."""
        self._fail(transfer, error)

    def decline(self, engine_request: str, reason: str) -> bool:
        """No decode side will ask for the prompt of that id, or ask again; False when the engine does not have it (yet)."""
        prompt = self._offered.get(engine_request)
        if prompt is None:
            self._remember(engine_request, reason)
            return False
        self._close(prompt, reason)
        return True

    def abort(self, request_id: str, error: TransferError) -> bool:
        """Give a transfer up by its id; False when none of that id is in flight."""
        transfer = self._transfers.get(request_id)
        if transfer is None or transfer.is_over:
            return False
        self._fail(transfer, error)
        return True

    def abort_join(self, join: Join, error: TransferError) -> None:
        """The decode instance is gone, and so is every transfer to it."""
        for transfer in list(self._transfers.values()):
            if transfer.join is join:
                self._fail(transfer, error)

    async def close(self, error: TransferError) -> None:
        """End every transfer with `error`, without the ranks."""
        every = [task for transfer in self._transfers.values() for task in (transfer.task, transfer.computing)]
        tasks = [task for task in every if task is not None]
        for transfer in list(self._transfers.values()):
            self._end(transfer, error)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for prompt in self._prompts.values():
            if prompt.hold is not None:
                prompt.hold.cancel()

    # What the ranks say

    def on_sent(self, rank: int, message: TransferSent) -> None:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None:
            return
        transfer.unsent.discard(rank)
        transfer.stats.append(message.stats)
        if not transfer.unsent:
            transfer.sent.set()

    def on_not_sent(self, rank: int, message: TransferNotSent) -> None:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is not None:
            reason = f"prefill rank {rank}: {message.reason}"
            kind = PeerUnreachable if message.is_passing else TransferAborted
            self._fail(transfer, _preempted(transfer, reason) if message.is_preempted else kind(reason))

    def on_idle(self, rank: int, message: PromptIdle) -> None:
        prompt = self._prompts.get(message.name)
        if prompt is None or rank not in prompt.reading:
            return  # said of one that had the name before
        prompt.reading.discard(rank)
        if not prompt.reading:
            del self._prompts[message.name]
            self._broadcast(FreePrompt(name=message.name))

    # A transfer

    async def _run(self, transfer: Transfer, *, is_computed_here: bool) -> None:
        try:
            prompt = await self._begun_prompt(transfer)
            await self._take_room(transfer)
            self._start(transfer, prompt)
            await transfer.sent.wait()
            await self._tell_rest(transfer, prompt, is_token_needed=is_computed_here)
        except TransferError as error:
            self._fail(transfer, error)

    async def _begun_prompt(self, transfer: Transfer) -> _Prompt:
        """As `_meet`, once the engine has begun to compute it. Raises ResourceExhausted when that takes too long, too."""
        try:
            async with asyncio.timeout(self._limits.meet_timeout_s):
                prompt = await self._meet(transfer)
                if not prompt.was_begun:
                    await prompt.begun.wait()
        except TimeoutError:
            what = "has not begun" if transfer.prompt is not None else "was not given"
            raise ResourceExhausted(
                f"the prefill side's engine {what} prompt {transfer.engine_request} within {self._limits.meet_timeout_s:g} s "
                "(limits.meet_timeout_s)"
            ) from None
        await prompt.begun.wait()  # a preempted one: for as long as the engine takes
        return prompt

    async def _meet(self, transfer: Transfer) -> _Prompt:
        """The engine's prompt that the transfer is for, once the engine has it.

        Raises:
            TransferAborted: It is over.
            ConfigError: It is another prompt.
        """
        name = transfer.engine_request
        if name in self._closed:
            raise TransferAborted(f"prompt {name} is over: {self._closed[name]}")
        prompt = self._offered.get(name)
        if prompt is None:
            prompt = await self._next_offer(name)
        _check_same_prompt(prompt.token_ids, transfer.token_ids)
        # It can be an attempt that its decode side has given up, and of whose end this side is about to hear.
        while prompt.transfer is not None:
            await asyncio.sleep(LOOK_S)
        if prompt.is_closed:
            raise TransferAborted(f"prompt {name} is over: {prompt.failure or 'it was sent'}")
        prompt.transfer, transfer.prompt = transfer, prompt
        if prompt.hold is not None:
            prompt.hold.cancel()
        self._broadcast(PromptWanted(name=prompt.name, start_token=transfer.start_token))
        return prompt

    async def _next_offer(self, name: str) -> _Prompt:
        waiting: asyncio.Future[_Prompt] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, set()).add(waiting)
        try:
            return await waiting
        finally:
            others = self._waiting.get(name)
            if others is not None:
                others.discard(waiting)
                if not others:
                    del self._waiting[name]

    async def _take_room(self, transfer: Transfer) -> None:
        """Wait until the decode side has room: for as long as pages would be held for one that does not ask at all.

        Raises:
            ResourceExhausted: It had none.
        """
        try:
            async with asyncio.timeout(self._limits.hold_s):
                while not await self._reserve(transfer.join, transfer.transfer_id):
                    await asyncio.sleep(RETRY_RESERVE_S)
        except TimeoutError:
            raise ResourceExhausted(
                f"the decode side had no room for {transfer.transfer_id} within {self._limits.hold_s:g} s (limits.hold_s)"
            ) from None

    def _start(self, transfer: Transfer, prompt: _Prompt) -> None:
        if transfer.is_over:
            return
        transfer.unsent = set(range(self._num_ranks))
        transfer.is_started = True
        self._broadcast(
            StartOffered(
                transfer_id=transfer.transfer_id,
                name=prompt.name,
                decode_incarnation=transfer.join.incarnation,
                num_tokens=len(prompt.token_ids),
                start_token=transfer.start_token,
                plan=transfer.join.plan,
            )
        )
        transfer.progress.put_nowait(PromptStarted(queue_s=time.monotonic() - transfer.queued_s))

    async def _tell_rest(self, transfer: Transfer, prompt: _Prompt, *, is_token_needed: bool) -> None:
        """All KV is there: what else the decode side gets, and the end."""
        await prompt.finished.wait()  # the last chunk was computed in the engine's last step of it, which ends in a moment
        if is_token_needed and prompt.first_token is None:
            raise EngineError(f"the engine has ended prompt {prompt.name} without a token")
        if prompt.first_token is not None:
            compute_s = time.monotonic() - prompt.offered_s
            transfer.progress.put_nowait(PromptFirstToken(token_id=prompt.first_token, compute_s=compute_s))
        if prompt.note is not None:
            transfer.progress.put_nowait(EngineNote(payload=prompt.note))
        if transfer.is_over:
            return
        transfer.is_over = True
        transfer.progress.put_nowait(PromptSent(stats=tuple(transfer.stats)))
        self._on_outcome("sent")
        self._forget(transfer)
        self._close(prompt, "")

    def _fail(self, transfer: Transfer, error: TransferError) -> None:
        if transfer.is_over:
            return
        self._end(transfer, error)
        if transfer.is_started:
            self._broadcast(CancelOutgoing(transfer_id=transfer.transfer_id, reason=clip_reason(str(error))))
        self._forget(transfer)
        if transfer.computing is not None:
            # Nobody else can ask for it, and the engine may be given it only now, where the call could not be stopped any more.
            self.decline(transfer.engine_request, str(error))

    def _end(self, transfer: Transfer, error: TransferError) -> None:
        if not transfer.is_over:
            transfer.is_over = True
            transfer.progress.put_nowait(error)
            self._on_outcome(outcome_of(error))
            self._on_given_up(error)

    def _forget(self, transfer: Transfer) -> None:
        """The prompt waits for another attempt, but not for ever."""
        self._transfers.pop(transfer.transfer_id, None)
        prompt = transfer.prompt
        if prompt is not None and prompt.transfer is transfer:
            prompt.transfer = None
            if prompt.finished.is_set() and not prompt.is_closed:
                self._hold(prompt)
        for task in (transfer.task, transfer.computing):
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def _on_computed(self, transfer: Transfer, task: asyncio.Task[None]) -> None:
        self._on_task_over(transfer, task)
        if transfer.prompt is None and transfer.engine_request not in self._offered:
            error = EngineError("the prompt was computed, but not by this engine, which was never given it (the setting api_url)")
            self._fail(transfer, error)

    def _on_task_over(self, transfer: Transfer, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, TransferError):
                self._fail(transfer, error)
                return
            log.critical("transfer_broke", request_id=transfer.transfer_id, error=str(error), exc_info=error)
            self._fail(transfer, EngineError(f"unexpected {type(error).__name__}; see the log of the prefill side"))

    # A prompt

    def _hold(self, prompt: _Prompt) -> None:
        if prompt.hold is not None:
            prompt.hold.cancel()
        reason = f"no decode side has asked for it within {self._limits.hold_s:g} s (limits.hold_s)"
        prompt.hold = asyncio.get_running_loop().call_later(self._limits.hold_s, self._expire, prompt, reason)

    def _expire(self, prompt: _Prompt, reason: str) -> None:
        if not prompt.is_closed and prompt.transfer is None:
            log.warning("prompt_not_fetched", transfer_id=prompt.transfer_id, reason=reason)
            self._close(prompt, reason)

    def _close(self, prompt: _Prompt, failure: str) -> None:
        """Send nothing more of it; `failure` is empty where it was sent."""
        prompt.is_closed, prompt.failure = True, failure
        if prompt.hold is not None:
            prompt.hold.cancel()
        if self._offered.get(prompt.transfer_id) is prompt:
            del self._offered[prompt.transfer_id]
            self._remember(prompt.transfer_id, failure or "it was sent")
        if prompt.transfer is not None:
            self._fail(prompt.transfer, TransferAborted(f"the prefill side gave the prompt up: {failure}"))
        prompt.reading = set(range(self._num_ranks))
        self._broadcast(ClosePrompt(name=prompt.name, reason=clip_reason(failure)))

    def _remember(self, transfer_id: str, why: str) -> None:
        self._closed.setdefault(transfer_id, why)
        while len(self._closed) > MAX_REMEMBERED:
            self._closed.popitem(last=False)


def _preempted(transfer: Transfer, reason: str) -> TransferError:
    """One that is computed for this transfer alone goes with it: whoever asks again, perhaps elsewhere, has it computed anew."""
    return Preempted(reason) if transfer.computing is None else PeerUnreachable(reason)


def _check_same_prompt(ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    """KV of another prompt would be taken for this one's."""
    if ours == theirs:
        return
    if len(ours) != len(theirs):
        raise ConfigError(
            f"token_ids has {len(theirs)} tokens; the prompt that the prefill side's engine was given has {len(ours)}"
        )
    index = next(index for index, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
    raise ConfigError(
        f"token_ids[{index}] is {theirs[index]}; in the prompt that the prefill side's engine was given it is {ours[index]}"
    )
