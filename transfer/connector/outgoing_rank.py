"""One rank of a connector's prefill side: it sends the KV of prompts that the engine computes as it likes.

The engine schedules, and owns its pages. It says which pages a prompt has and how much of it is computed (`progress`), and that
it will say no more of it (`finish`). In return it is told when nothing reads those pages any more (`Free`): not before they may
hold anything else. Owned by the loop of its process; the engine's threads come in through `kvferry.engines.connector_rank`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from transfer.chunk import Chunks, split_into_chunks
from transfer.connector.messages import (
    CancelOutgoing,
    ClosePrompt,
    FreePrompt,
    PromptIdle,
    PromptWanted,
    StartTransfer,
    TransferNotSent,
    TransferSent,
)
from transfer.connector.outgoing_sessions import OutgoingSessions
from transfer.engine_types import DeviceEvent
from transfer.errors import LocalProtocolError
from transfer.messages import clip_reason
from transfer.send.events import SentStats
from transfer.send.loop import SenderLoop

log = structlog.get_logger(__name__)

Tables = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A decode side waits for the prompt, from `start_token` on."""

    name: str
    start_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """The prompt will not be sent, and the engine has not finished it: it need not compute the rest. Once it says that it is done
    with it, `Free` follows."""

    name: str
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Nothing reads the prompt's pages any more, on any rank; the name is forgotten.

    Args:
        failure: Why its KV was not sent; empty where it was.
    """

    name: str
    failure: str


TransferEvent = Wanted | GivenUp | Free


@dataclass(slots=True, kw_only=True, eq=False)
class _Source:
    """A prompt of the engine, from the first that is heard of it until both leader and engine are done with it."""

    tables: Tables = ()
    num_computed: int = 0
    event: DeviceEvent | None = None  # behind which `num_computed` tokens are in the pool
    transfers: dict[str, _Transfer] = field(default_factory=dict)  # those that may still read
    paused: list[asyncio.Future[None]] = field(default_factory=list)  # who waits until nothing reads
    wanted_from: int | None = None  # the token that a decode side asked for last
    is_finished: bool = False
    is_closed: bool = False
    is_idle: bool = False  # and the leader has been told, which counts each rank once
    is_free: bool = False
    failure: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class _Transfer:
    """An attempt to send it."""

    chunks: Chunks
    num_told: int = 0  # of them; they are in the order of their tokens
    reason: str = ""  # why it was ended here
    is_preempted: bool = False


class OutgoingRank:
    """See the module's docstring; a `transfer.send.loop.SenderOwner`.

    Args:
        loop: The owner's.
        send: To the leader.
        on_news: Hears what the engine has to be told.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[object], None],
        on_news: Callable[[TransferEvent], None],
    ) -> None:
        self._loop = loop
        self._send = send
        self._on_news = on_news
        self._sources: dict[str, _Source] = {}
        self._names: dict[str, str] = {}  # transfer -> name, as long as the sender may ask for its tables
        self._sending: set[str] = set()  # transfers that the sender knows; their last bytes travel when nothing reads any more
        self._sender: SenderLoop
        self._sessions: OutgoingSessions

    def begin(self, sender: SenderLoop, sessions: OutgoingSessions) -> None:
        """Take over what was opened with this rank as its owner."""
        self._sender = sender
        self._sessions = sessions

    # What the engine says

    def progress(self, name: str, tables: Tables, num_computed: int, event: DeviceEvent | None) -> None:
        """The prompt's first `num_computed` tokens are in the pool, behind `event`.

        Args:
            tables: Its page table in each group of layers, from token 0 on; what was there before stays as it was, until `pause`.
        """
        source = self._sources.setdefault(name, _Source())
        source.tables, source.num_computed, source.event = tables, num_computed, event
        for transfer_id in list(source.transfers):
            self._tell_computed(source, transfer_id)

    def finish(self, name: str) -> None:
        """The engine is done with the prompt: no more `progress` of it follows."""
        source = self._sources.setdefault(name, _Source())
        source.is_finished = True
        for transfer_id in list(source.transfers):
            self._tell_computed(source, transfer_id)
        self._free_if_over(name, source)

    def pause(self, name: str, reason: str) -> asyncio.Future[None]:
        """The engine takes the prompt's pages back, to compute it again later: done when nothing reads them any more."""
        idle: asyncio.Future[None] = self._loop.create_future()
        source = self._sources.get(name)
        if source is None:
            idle.set_result(None)
            return idle
        source.num_computed, source.event = 0, None
        source.paused.append(idle)
        self._end_transfers(source, reason, is_preempted=True)
        self._on_reading_over(name, source)
        return idle

    # What the leader says

    def on_message(self, message: Any) -> None:
        match message:
            case PromptWanted():
                source = self._sources.setdefault(message.name, _Source())
                if source.wanted_from != message.start_token:  # else it is another attempt, which is no news
                    source.wanted_from = message.start_token
                    self._on_news(Wanted(name=message.name, start_token=message.start_token))
            case StartTransfer():
                self._start(message)
            case CancelOutgoing():
                self._abort(message)
            case ClosePrompt():
                source = self._sources.setdefault(message.name, _Source())
                source.is_closed, source.failure = True, message.reason
                if message.reason and not source.is_finished:
                    self._on_news(GivenUp(name=message.name, failure=message.reason))
                self._end_transfers(source, message.reason or "the prompt was given up")
                self._on_reading_over(message.name, source)
            case FreePrompt():
                source = self._sources[message.name]
                source.is_free = True
                self._free_if_over(message.name, source)
            case _:
                if not self._sessions.on_message(message):
                    raise LocalProtocolError(f"a connector's prefill rank cannot serve {type(message).__name__}")

    def _start(self, message: StartTransfer) -> None:
        peer = self._sessions.of(message.decode_incarnation)
        source = self._sources.setdefault(message.name, _Source())
        if peer is None or source.is_closed:
            reason = "the decode instance is gone" if peer is None else "the prompt was given up"
            self._send(TransferNotSent(transfer_id=message.transfer_id, reason=reason, is_passing=peer is None))
            return
        if message.transfer_id in self._sending:
            # Ids are the decode side's choice. The sender, which knows each once, would take it for a bug of this process.
            reason = "a transfer of that id is still under way; each attempt needs an id of its own"
            self._send(TransferNotSent(transfer_id=message.transfer_id, reason=reason))
            return
        chunks = split_into_chunks(
            message.plan, num_tokens=message.num_tokens, num_layers=peer.layout.num_layers, start_token=message.start_token
        )
        source.transfers[message.transfer_id] = _Transfer(chunks=chunks)
        self._names[message.transfer_id] = message.name
        self._sending.add(message.transfer_id)
        self._sender.start_request(
            peer.terms.request(
                message.transfer_id,
                plan=message.plan,
                num_tokens=message.num_tokens,
                start_token=message.start_token,
                traceparent=message.traceparent,
            )
        )
        if message.transfer_id in source.transfers:
            self._tell_computed(source, message.transfer_id)

    def _tell_computed(self, source: _Source, transfer_id: str) -> None:
        """Tell the sender of the chunks whose tokens are all there; give up what is never going to be."""
        transfer = source.transfers[transfer_id]
        while transfer.num_told < len(transfer.chunks) and not transfer.reason:
            chunk = transfer.chunks[transfer.num_told]
            if chunk.tokens.end > source.num_computed:
                if source.is_finished:
                    reason = (
                        f"the prefill side's engine has ended the prompt with {source.num_computed} of "
                        f"{transfer.chunks[-1].tokens.end} tokens computed"
                    )
                    self._end_transfer(source, transfer_id, reason)
                return
            transfer.num_told += 1
            self._sender.chunk_computed(transfer_id, chunk.index, source.event)

    def _abort(self, message: CancelOutgoing) -> None:
        name = self._names.get(message.transfer_id)
        if name is not None:
            self._end_transfer(self._sources[name], message.transfer_id, message.reason)

    def _end_transfers(self, source: _Source, reason: str, *, is_preempted: bool = False) -> None:
        for transfer_id in list(source.transfers):
            self._end_transfer(source, transfer_id, reason, is_preempted=is_preempted)

    def _end_transfer(self, source: _Source, transfer_id: str, reason: str, *, is_preempted: bool = False) -> None:
        transfer = source.transfers[transfer_id]
        if not transfer.reason:
            transfer.reason, transfer.is_preempted = reason, is_preempted
            self._sender.abort_request(transfer_id, clip_reason(reason))

    # What the sender says

    def tables_of(self, request_id: str) -> Tables:
        return self._sources[self._names[request_id]].tables

    def on_source_released(self, request_id: str) -> None:
        name = self._names.pop(request_id)
        source = self._sources[name]
        transfer = source.transfers.pop(request_id)
        if transfer.reason:
            # Its last writes may still be under way, of which `on_failed` hears; the reason is the better one here.
            self._send(TransferNotSent(transfer_id=request_id, reason=transfer.reason, is_preempted=transfer.is_preempted))
        self._on_reading_over(name, source)

    def on_sent(self, request_id: str, stats: SentStats) -> None:
        self._sending.discard(request_id)
        self._send(TransferSent(transfer_id=request_id, stats=stats))

    def on_failed(self, request_id: str, reason: str) -> None:
        self._sending.discard(request_id)
        self._send(TransferNotSent(transfer_id=request_id, reason=reason, is_passing=True))

    # Inside

    def _on_reading_over(self, name: str, source: _Source) -> None:
        """Perhaps nothing reads its pages any more."""
        if source.transfers:
            return
        for idle in source.paused:
            if not idle.done():
                idle.set_result(None)
        source.paused.clear()
        if source.is_closed and not source.is_idle:
            source.is_idle = True
            self._send(PromptIdle(name=name))

    def _free_if_over(self, name: str, source: _Source) -> None:
        if source.is_free and source.is_finished:
            del self._sources[name]
            self._on_news(Free(name=name, failure=source.failure))

    # Reports and end

    def status(self) -> dict[str, Any]:
        """Fields of the wire contract's RankStatus."""
        return {
            "staging_slots_used": self._sender.num_slots_used,
            "requests": len(self._sources) + self._sender.num_requests,
            "sessions": self._sender.num_sessions,
            "pending_transfers": self._sender.driver.num_watches,
            "watermark_acks": self._sessions.num_acks,
            "link_uses": self._sessions.link_uses(),
            "dropped_messages": self._sender.num_dropped,
        }

    @property
    def num_transfers(self) -> int:
        return len(self._names)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is known of any prompt."""
        return not self._sources and not self._sender.num_requests

    def check_idle(self) -> bool:
        """Prove what must hold while nothing is in flight; False: something is. Raises LocalProtocolError when it does not."""
        if not self.is_idle:
            return False
        self._sender.check_idle()
        return True

    async def close(self) -> None:
        await self._sessions.close_all("the prefill side's engine shuts down")
        self._sender.close()
