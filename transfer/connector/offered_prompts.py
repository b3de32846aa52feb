"""Track the prompts of an engine that schedules by itself, in the leader of its prefill side.

A prompt is *offered* when the engine gets it, *begun* when the engine has pages for it, and *finished* when the engine has
computed it. A decode side asks for it by its transfer id, before or after each of these. A prompt is *closed* when it has been
sent, was given up, or no decode side asked in time. A closed prompt is *free* when no rank reads its pages any more.
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

from transfer.chunk import ChunkPlan
from transfer.config import ConnectorLimitsConfig
from transfer.connector.decode_instances import Join, Reservation
from transfer.connector.messages import ClosePrompt, FreePrompt, PromptIdle, PromptWanted, StartOffered
from transfer.connector.outgoing import OutgoingTransfers, Transfer
from transfer.connector.side_service import RequestView
from transfer.errors import ConfigError, EngineError, ResourceExhausted, TransferAborted, TransferError
from transfer.messages import clip_reason

LOOK_S: Final = 0.01
MAX_REMEMBERED: Final = 4096  # closed prompts whose reason is kept for decode sides that ask late
MAX_NOTE_BYTES: Final = 1 << 20

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Prompt:
    """A prompt that the engine has."""

    name: str
    transfer_id: str
    token_ids: tuple[int, ...] = field(repr=False)
    cache_salt: str | None = field(repr=False)
    offered_s: float
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    was_begun: bool = False  # the engine has preempted it, and will begin it again
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    finished_s: float = 0.0
    note: bytes | None = None
    first_token: int | None = None
    transfer: Transfer | None = None  # the current attempt
    hold: asyncio.TimerHandle | None = None  # closes a prompt that no decode side asks for
    is_closed: bool = False
    failure: str = ""
    reading: set[int] = field(default_factory=set)  # ranks that may read its pages, once it is closed


@dataclass(slots=True, kw_only=True, eq=False)
class _Attempt:
    """State of a transfer that is not over."""

    task: asyncio.Task[None]
    computing: asyncio.Task[None] | None = None  # the engine's call, if the prompt is computed for this attempt
    prompt: _Prompt | None = None  # set once the engine has it


class OfferedPrompts(OutgoingTransfers):
    """See the module's docstring.

    Args:
        num_ranks, broadcast, reserve, on_outcome, on_given_up: See `OutgoingTransfers`.
        compute: Gives the engine a prompt that it does not have, as `Transfer.engine_request`, and ends when the prompt is
            computed. It is cancelled when the transfer is over. None means that the engine cannot do this.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        limits: ConnectorLimitsConfig,
        broadcast: Callable[[object], None],
        reserve: Callable[[Join, str, ChunkPlan], Awaitable[Reservation]],
        compute: Callable[[Transfer], Coroutine[Any, Any, None]] | None = None,
        on_outcome: Callable[[str], None],
        on_given_up: Callable[[TransferError], None] = lambda error: None,
    ) -> None:
        super().__init__(
            num_ranks=num_ranks, broadcast=broadcast, reserve=reserve, on_outcome=on_outcome, on_given_up=on_given_up
        )
        self._limits = limits
        self._compute = compute
        self._prompts: dict[str, _Prompt] = {}  # by the engine's name, until they are free
        self._offered: dict[str, _Prompt] = {}  # by transfer id, until they are closed
        self._waiting: dict[str, set[asyncio.Future[_Prompt]]] = {}  # by transfer id: attempts whose prompt is not offered yet
        self._closed: OrderedDict[str, str] = OrderedDict()  # transfer id -> why it is closed
        self._attempts: dict[Transfer, _Attempt] = {}  # attempts of transfers that are not over

    @property
    def num_prompts(self) -> int:
        """Prompts whose pages the engine must keep."""
        return len(self._prompts)

    @property
    def num_queued(self) -> int:
        """Number as in `OutgoingTransfers.num_queued`, plus prompts that no transfer sends now."""
        return super().num_queued + sum(prompt.transfer is None for prompt in self._prompts.values())

    def views(self) -> list[RequestView]:
        """Return the views of `OutgoingTransfers.views`, and of the prompts that no transfer sends now."""
        now_s = time.monotonic()
        return [
            *super().views(),
            *(
                RequestView(
                    request_id=prompt.transfer_id,
                    transfer_id=prompt.transfer_id,
                    stage="ending" if prompt.is_closed else "queued",
                    age_s=now_s - prompt.offered_s,
                    prompt_tokens=len(prompt.token_ids),
                    ready_tokens=len(prompt.token_ids) if prompt.finished.is_set() else 0,
                )
                for prompt in self._prompts.values()
                if prompt.transfer is None
            ),
        ]

    # Calls of the engine

    def offer(self, name: str, transfer_id: str, token_ids: tuple[int, ...], cache_salt: str | None = None) -> None:
        """Record that the engine has got the prompt.

        Args:
            cache_salt: Salt that a decode side must send with the prompt. None accepts any.
        """
        if name in self._prompts:
            raise ValueError(f"prompt {name} is offered twice")
        prompt = _Prompt(
            name=name, transfer_id=transfer_id, token_ids=token_ids, cache_salt=cache_salt, offered_s=time.monotonic()
        )
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
        """Record that the engine has pages for the prompt, and computes it."""
        prompt = self._prompts.get(name)
        if prompt is not None:
            prompt.begun.set()

    def pause(self, name: str) -> None:
        """Record that the engine takes the prompt's pages back. It computes the prompt again later, and calls `begin` then.

        The current attempt ends. This side asks for no room meanwhile. Otherwise the decode side would keep pages for a prompt
        that waits for pages itself. Those pages may belong to prompts that wait for room on the decode side.
        """
        prompt = self._prompts.get(name)
        if prompt is None or prompt.is_closed or prompt.finished.is_set():
            return
        transfer = prompt.transfer
        if transfer is not None and transfer.is_only_attempt and not transfer.is_started:
            return  # no other attempt would follow; this one is sent when the prompt is computed again
        if prompt.begun.is_set():
            prompt.begun.clear()
            prompt.was_begun = True
        if transfer is not None and not transfer.is_sent:  # otherwise no rank reads the pages any more
            self._preempt(transfer, "the prefill side's engine has preempted the prompt")

    def finish(self, name: str, *, first_token: int | None = None, note: bytes | None = None) -> None:
        """Record that the engine has computed the whole prompt. Its pages stay until kvferry reports that they are free.

        Args:
            first_token: Token after the prompt, if known.
            note: Note for the engine of the decode side.
        """
        prompt = self._prompts.get(name)
        if prompt is None or prompt.is_closed:
            return
        if note is not None and len(note) > MAX_NOTE_BYTES:
            self._close(prompt, f"the engine's note has {len(note)} bytes; it can have {MAX_NOTE_BYTES}")
            return
        prompt.first_token, prompt.note = first_token, note
        prompt.begun.set()
        prompt.finished_s = time.monotonic()
        prompt.finished.set()
        if prompt.transfer is None:
            self._hold(prompt)

    def withdraw(self, name: str, reason: str) -> None:
        """Give the prompt up for the engine, and report the reason to decode sides that ask for it. No-op for a closed one."""
        prompt = self._prompts.get(name)
        if prompt is not None and not prompt.is_closed:
            self._close(prompt, reason)

    # Calls from decode sides

    def _accept(self, transfer: Transfer) -> None:
        if self.num_transfers >= self._limits.max_transfers:
            raise ResourceExhausted(f"{self.num_transfers} transfers are in flight, as many as limits.max_transfers allows")
        if not transfer.engine_request and self._compute is None:
            raise ConfigError(
                "engine_request is empty; prompts reach the engine of this node by a router: it must be the transfer_id of one"
            )
        transfer.is_only_attempt = not transfer.engine_request
        computing = None
        if transfer.is_only_attempt and self._compute is not None:
            transfer.engine_request = secrets.token_hex(16)
            computing = self._begin_task(transfer, self._compute(transfer))
            computing.add_done_callback(lambda task: self._on_engine_done(transfer))
        task = self._begin_task(transfer, self._follow(transfer))
        self._attempts[transfer] = _Attempt(task=task, computing=computing)

    def decline(self, engine_request: str, reason: str) -> bool:
        """Record that no decode side will ask for the prompt of that id. Return False if the engine does not have it (yet)."""
        prompt = self._offered.get(engine_request)
        if prompt is None:
            self._remember(engine_request, reason)
            return False
        self._close(prompt, reason)
        return True

    async def close(self, error: TransferError) -> None:
        """End every transfer with `error`, without the ranks."""
        every = [task for attempt in self._attempts.values() for task in (attempt.task, attempt.computing)]
        tasks = [task for task in every if task is not None]
        self._end_all(error)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for prompt in self._prompts.values():
            if prompt.hold is not None:
                prompt.hold.cancel()

    # Reports of the ranks

    def on_idle(self, rank: int, message: PromptIdle) -> None:
        prompt = self._prompts.get(message.name)
        if prompt is None or rank not in prompt.reading:
            return  # about an earlier prompt of that name
        prompt.reading.discard(rank)
        if not prompt.reading:
            del self._prompts[message.name]
            self._broadcast(FreePrompt(name=message.name))

    # A transfer

    def _num_computed(self, transfer: Transfer) -> int:
        """Return 0, because only the ranks know the engine's progress."""
        return 0

    async def _follow(self, transfer: Transfer) -> None:
        prompt = await self._begun_prompt(transfer)
        await self._take_room(transfer)
        self._start(transfer, StartOffered, name=prompt.name)
        await prompt.finished.wait()
        if transfer.is_only_attempt and prompt.first_token is None:
            raise EngineError(f"the engine has ended prompt {prompt.name} without a token")
        self._on_computed(
            transfer,
            begun_s=prompt.offered_s,
            ended_s=prompt.finished_s,
            token_id=prompt.first_token,
            note=prompt.note,
        )

    async def _begun_prompt(self, transfer: Transfer) -> _Prompt:
        """Return the prompt as `_meet` does, but once the engine has begun it. Raise ResourceExhausted if that takes too long."""
        try:
            async with asyncio.timeout(self._limits.meet_timeout_s):
                prompt = await self._meet(transfer)
                if not prompt.was_begun:
                    await prompt.begun.wait()
        except TimeoutError:
            progress = "has not begun" if self._attempts[transfer].prompt is not None else "was not given"
            raise ResourceExhausted(
                f"the prefill side's engine {progress} prompt {transfer.engine_request} within {self._limits.meet_timeout_s:g} s "
                "(limits.meet_timeout_s)"
            ) from None
        await prompt.begun.wait()  # a preempted prompt may take the engine any time
        return prompt

    async def _meet(self, transfer: Transfer) -> _Prompt:
        """Return the engine's prompt of the transfer, once the engine has it.

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
        if prompt.cache_salt not in (None, transfer.cache_salt):
            raise ConfigError(
                f"cache_salt is {transfer.cache_salt!r}; that of the prefill side's engine is "
                f"{prompt.cache_salt!r}: LoRA adapter or revision differ"
            )
        # The decode side may have given the attempt before up, and this side is about to get its end.
        while prompt.transfer is not None:
            await asyncio.sleep(LOOK_S)
        if prompt.is_closed:
            raise TransferAborted(f"prompt {name} is over: {prompt.failure or 'it was sent'}")
        prompt.transfer, self._attempts[transfer].prompt = transfer, prompt
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
        """Wait until the decode side has room, as long as pages are held for a prompt that no decode side asks for.

        Raises:
            ResourceExhausted: It had no room.
        """
        try:
            async with asyncio.timeout(self._limits.hold_s):
                while not await self._reserve_room(transfer):
                    pass
        except TimeoutError:
            raise ResourceExhausted(
                f"the decode side had no room for {transfer.transfer_id} within {self._limits.hold_s:g} s (limits.hold_s)"
            ) from None

    def _on_end(self, transfer: Transfer, error: TransferError | None) -> None:
        """Keep the prompt for another attempt after a failure, for a limited time."""
        attempt = self._attempts.pop(transfer)
        for task in (attempt.task, attempt.computing):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        if (prompt := attempt.prompt) is not None:
            prompt.transfer = None
            if error is None:
                self._close(prompt, "")
            elif prompt.finished.is_set() and not prompt.is_closed:
                self._hold(prompt)
        if error is not None and transfer.is_only_attempt:
            # No other attempt can ask for it. If the call could not be stopped, the engine may get the prompt only now.
            self.decline(transfer.engine_request, str(error))

    def _begin_task(self, transfer: Transfer, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda task: self._on_task_over(transfer, task))
        return task

    def _on_task_over(self, transfer: Transfer, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, TransferError):
            log.critical("transfer_crashed", request_id=transfer.transfer_id, error=str(error), exc_info=error)
            error = EngineError(f"unexpected {type(error).__name__}; see the log of the prefill side")
        self.fail(transfer, error)

    def _on_engine_done(self, transfer: Transfer) -> None:
        """Handle the engine's answer to the call that gave it the prompt."""
        attempt = self._attempts.get(transfer)
        if attempt is not None and attempt.prompt is None and transfer.engine_request not in self._offered:
            error = EngineError("another engine computed the prompt; api_url must be the address of this engine")
            self.fail(transfer, error)

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
        """Send nothing more of the prompt. An empty `failure` means that it was sent."""
        prompt.is_closed, prompt.failure = True, failure
        if prompt.hold is not None:
            prompt.hold.cancel()
        if self._offered.get(prompt.transfer_id) is prompt:
            del self._offered[prompt.transfer_id]
            self._remember(prompt.transfer_id, failure or "it was sent")
        if prompt.transfer is not None:
            self.fail(prompt.transfer, TransferAborted(f"the prefill side gave the prompt up: {failure}"))
        prompt.reading = set(range(self._num_ranks))
        self._broadcast(ClosePrompt(name=prompt.name, reason=clip_reason(failure)))

    def _remember(self, transfer_id: str, why: str) -> None:
        self._closed.setdefault(transfer_id, why)
        while len(self._closed) > MAX_REMEMBERED:
            self._closed.popitem(last=False)


def _check_same_prompt(ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    """Raise ConfigError if the two prompts differ: KV of another prompt would be used for this one."""
    if ours == theirs:
        return
    if len(ours) != len(theirs):
        raise ConfigError(f"token_ids has {len(theirs)} tokens; the prompt of the prefill side's engine has {len(ours)}")
    index = next(index for index, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
    raise ConfigError(f"token_ids[{index}] is {theirs[index]}; the prompt of the prefill side's engine has {ours[index]}")
