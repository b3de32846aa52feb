"""Send the KV of prompts from one prefill rank, for daemons and engines alike.

The leader starts each transfer and decides its outcome for all ranks. A rank reports only its own part.
`OutgoingRank` tracks the transfers. Its engine owns the pages and reports what is computed.
`OfferedPages` is the engine of a connector: vLLM and SGLang schedule by themselves, and a prompt can have several attempts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transfer.chunk import Chunks, split_into_chunks
from transfer.connector.messages import (
    AttachDecode,
    CancelOutgoing,
    ClosePrompt,
    DecodeAttached,
    DecodeLost,
    DetachDecode,
    FreePrompt,
    PromptIdle,
    PromptWanted,
    StartOffered,
    StartTransfer,
    TransferNotSent,
    TransferSent,
)
from transfer.engine_types import DeviceEvent
from transfer.errors import LocalProtocolError, TransferError
from transfer.messages import clip_reason
from transfer.send.attach import DecodeSessions
from transfer.send.events import SentStats
from transfer.send.loop import SenderLoop

Tables = Sequence[Sequence[int]]


class OutgoingEngine(Protocol):
    """The owner of the pages that an `OutgoingRank` reads."""

    def tables_of(self, transfer_id: str) -> Tables:
        """See `transfer.send.loop.SenderOwner`."""
        ...

    def on_released(self, transfer_id: str) -> None:
        """Record that no gather of the transfer reads its pages any more. Its last bytes may still be in flight."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Outgoing:
    message: StartTransfer
    chunks: Chunks
    num_reported: int = 0  # chunks that are computed, in their order
    is_reading: bool = True
    reason: str = ""  # set when it is cancelled here
    is_preempted: bool = False
    is_passing: bool = False


class OutgoingRank:
    """Send the transfers that the leader starts; implements `transfer.send.loop.SenderOwner`."""

    def __init__(self, *, engine: OutgoingEngine, send: Callable[[object], None]) -> None:
        self._engine = engine
        self._send = send
        self._outgoing: dict[str, _Outgoing] = {}  # by transfer, until it is sent or has failed
        self._attaching: set[asyncio.Task[None]] = set()
        self._sender: SenderLoop
        self._sessions: DecodeSessions

    def begin(self, sender: SenderLoop, sessions: DecodeSessions) -> None:
        """Use a sender and sessions that were opened with this rank as their owner."""
        self._sender = sender
        self._sessions = sessions

    # Calls from the leader

    def start(self, message: StartTransfer) -> bool:
        """Ask for grants. If the transfer cannot start, report why to the leader and return False, without calling the engine."""
        transfer_id, peer = message.transfer_id, self._sessions.of(message.decode_incarnation)
        if peer is None:
            self._send(TransferNotSent(transfer_id=transfer_id, reason="the decode instance is gone", is_passing=True))
            return False
        chunks = split_into_chunks(
            message.plan, num_tokens=message.num_tokens, num_layers=peer.layout.num_layers, start_token=message.start_token
        )
        self._outgoing[transfer_id] = _Outgoing(message=message, chunks=chunks)
        self._sender.start_request(
            peer.terms.request(
                transfer_id,
                plan=message.plan,
                num_tokens=message.num_tokens,
                start_token=message.start_token,
                traceparent=message.traceparent,
            )
        )
        return True

    def cancel(self, transfer_id: str, reason: str, *, is_preempted: bool = False, is_passing: bool = False) -> None:
        """Stop sending a transfer; no-op if it is over. The first reason is reported to the leader.

        Args:
            is_preempted, is_passing: See `TransferNotSent`.
        """
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is not None and not outgoing.reason:
            outgoing.reason = clip_reason(reason)
            outgoing.is_preempted, outgoing.is_passing = is_preempted, is_passing
            self._sender.abort_request(transfer_id, outgoing.reason)

    def on_message(self, message: Any) -> bool:
        """Handle a message about sessions. Return False if the message is about something else."""
        match message:
            case AttachDecode():
                attaching = asyncio.get_running_loop().create_task(self._attach(message))
                self._attaching.add(attaching)
                attaching.add_done_callback(self._on_attach_over)
            case DetachDecode():
                self._sessions.close(message.incarnation, message.reason)
            case _:
                return False
        return True

    async def _attach(self, message: AttachDecode) -> None:
        incarnation = message.instance.incarnation
        try:
            links = await self._sessions.open(message.instance, message.rank_addresses, join=message.join)
        except TransferError as error:
            self.on_session_lost(message.join, incarnation, str(error), is_refused=not isinstance(error, DecodeSessions.PASSING))
            return
        peer = self._sessions.of(incarnation)
        ring_bytes, slot_bytes = (0, 0) if peer is None else (peer.ring_bytes, peer.slot_bytes)
        self._send(
            DecodeAttached(join=message.join, incarnation=incarnation, links=links, ring_bytes=ring_bytes, slot_bytes=slot_bytes)
        )

    def _on_attach_over(self, attaching: asyncio.Task[None]) -> None:
        self._attaching.discard(attaching)
        if not attaching.cancelled():
            attaching.result()  # an unexpected error ends the process: the leader would wait for an answer that never comes

    def on_session_lost(self, join: int, incarnation: int, reason: str, *, is_refused: bool = False) -> None:
        """Report that a session with a decode instance cannot be opened, or has ended; see `DecodeLost`."""
        self._send(DecodeLost(join=join, incarnation=incarnation, reason=reason, is_refused=is_refused))

    # Calls of the engine

    def progress(
        self, transfer_id: str, num_tokens: int, event: DeviceEvent | None = None, *, end_layer: int | None = None
    ) -> bool:
        """Report the chunks that are in the pool, to be gathered after `event`; no-op if the transfer is over.

        Args:
            num_tokens: The prompt's first tokens that are computed.
            end_layer: Layers below it are written; None means all of them.

        Returns:
            Whether all chunks of the transfer are computed.
        """
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None:
            return True
        while outgoing.num_reported < len(outgoing.chunks) and not outgoing.reason:
            chunk = outgoing.chunks[outgoing.num_reported]
            if chunk.tokens.end > num_tokens or (end_layer is not None and chunk.layers.end > end_layer):
                return False
            outgoing.num_reported += 1
            self._sender.chunk_computed(transfer_id, chunk.index, event)
        return True

    # Reports of the sender

    def tables_of(self, request_id: str) -> Tables:
        return self._engine.tables_of(request_id)

    def on_source_released(self, request_id: str) -> None:
        self._outgoing[request_id].is_reading = False
        self._engine.on_released(request_id)

    def on_sent(self, request_id: str, stats: SentStats) -> None:
        del self._outgoing[request_id]
        self._send(TransferSent(transfer_id=request_id, stats=stats))

    def on_failed(self, request_id: str, reason: str) -> None:
        outgoing = self._outgoing.pop(request_id)
        self._send(
            TransferNotSent(
                transfer_id=request_id,
                reason=outgoing.reason or reason,
                is_passing=outgoing.is_passing or not outgoing.reason,
                is_preempted=outgoing.is_preempted,
            )
        )

    # Reports and end

    def status(self) -> dict[str, Any]:
        """Return fields of the wire contract's RankStatus; `requests` are those of the sender."""
        return {
            "staging_slots": self._sender.num_slots,
            "staging_slots_used": self._sender.num_slots_used,
            "requests": self._sender.num_requests,
            "sessions": self._sender.num_sessions,
            "pending_transfers": self._sender.driver.num_watches,
            "watermark_acks": self._sessions.num_acks,
            "link_uses": self._sessions.link_uses(),
            "dropped_messages": self._sender.num_dropped,
        }

    @property
    def num_transfers(self) -> int:
        return len(self._outgoing)

    def started(self, transfer_id: str) -> StartTransfer:
        """Return the message that started an unfinished transfer."""
        return self._outgoing[transfer_id].message

    def layer_ends(self, transfer_id: str) -> frozenset[int]:
        """Return the layers after which a chunk of an unfinished transfer ends."""
        return self._outgoing[transfer_id].chunks.layer_ends

    def is_reading(self, transfer_id: str) -> bool:
        """Return whether a gather may still read the transfer's pages."""
        outgoing = self._outgoing.get(transfer_id)
        return outgoing is not None and outgoing.is_reading

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is known."""
        return not self._outgoing and not self._sender.num_requests

    def check_idle(self) -> bool:
        """Check the invariants of an idle rank. Return False if something is in flight.

        Raises:
            LocalProtocolError: An invariant is broken.
        """
        if not self.is_idle:
            return False
        self._sender.check_idle()
        return True

    async def close(self) -> None:
        """End the sessions, then the sender."""
        for attaching in self._attaching:
            attaching.cancel()
        await self._sessions.close_all("the prefill side shuts down")
        self._sender.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A decode side has asked for the prompt, from `start_token` on."""

    name: str
    start_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """The prompt will not be sent, so the engine need not compute the rest. `Free` follows once the engine calls `finish`."""

    name: str
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """No rank reads the prompt's pages any more, and the name is forgotten.

    Args:
        failure: Why its KV was not sent; empty if it was sent.
    """

    name: str
    failure: str


TransferEvent = Wanted | GivenUp | Free


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunningStep:
    """The first `num_tokens` tokens are in the pool in all layers below `end_layer`, after `event`."""

    num_tokens: int
    end_layer: int
    event: DeviceEvent | None


@dataclass(slots=True, kw_only=True, eq=False)
class _Source:
    """A prompt of the engine, from the first message about it until both leader and engine are done with it."""

    tables: Tables = ()
    num_computed: int = 0
    event: DeviceEvent | None = None  # after it, `num_computed` tokens are in the pool
    step: _RunningStep | None = None
    transfers: set[str] = field(default_factory=set)  # attempts that may still read
    paused: list[asyncio.Future[None]] = field(default_factory=list)  # done when nothing reads
    wanted_from: int | None = None  # start token of the last question of a decode side
    is_finished: bool = False  # the engine has finished it
    is_closed: bool = False  # the leader has closed it
    is_idle: bool = False  # `PromptIdle` was sent; the leader counts each rank once
    is_free: bool = False  # idle on all ranks
    failure: str = ""


class OfferedPages:
    """Serve as `OutgoingEngine` of a connector: the engine reports the pages and the progress of each prompt by its name.

    A prompt can have several attempts, even while the last bytes of an earlier one are in flight. Its pages are free when the
    leader has closed it and no gather of any attempt reads them.

    Args:
        on_news: Called with each event for the engine.
    """

    def __init__(
        self,
        *,
        send: Callable[[object], None],
        on_news: Callable[[TransferEvent], None],
    ) -> None:
        self.rank = OutgoingRank(engine=self, send=send)
        self._send = send
        self._on_news = on_news
        self._sources: dict[str, _Source] = {}
        self.layer_ends: dict[str, frozenset[int]] = {}
        """Ends of the layer groups of each prompt that is being sent, by its name. Any thread may look up names."""
        self.num_ends_changes = 0
        """Number of changes of `layer_ends` so far. It is counted after the change."""

    # Calls of the engine

    def progress(
        self, name: str, tables: Tables, num_computed: int, event: DeviceEvent | None, *, end_layer: int | None = None
    ) -> None:
        """Record that the prompt's first `num_computed` tokens are in the pool after `event`.

        Args:
            tables: Its page table in each group of layers, from token 0 on. Entries stay the same until `pause`.
            end_layer: Only layers below it are in the pool, because a step is running; None means all layers.
        """
        source = self._sources.setdefault(name, _Source())
        source.tables = tables
        if end_layer is None:
            source.num_computed, source.event, source.step = num_computed, event, None
        else:
            source.step = _RunningStep(num_tokens=num_computed, end_layer=end_layer, event=event)
        self._report(source)

    def finish(self, name: str) -> None:
        """Record that the engine is done with the prompt, and reports no more `progress`."""
        source = self._sources.setdefault(name, _Source())
        source.is_finished = True
        self._report(source)
        self._free_if_over(name, source)

    def pause(self, name: str, reason: str) -> asyncio.Future[None]:
        """Stop reading the pages of a prompt, which the engine takes back. The result is done when nothing reads them."""
        idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        source = self._sources.get(name)
        if source is None:
            idle.set_result(None)
            return idle
        source.num_computed, source.event, source.step = 0, None, None
        source.paused.append(idle)
        self._cancel_all(source, reason, is_preempted=True)
        self._on_reading_over(name, source)
        return idle

    # Calls from the leader

    def on_message(self, message: Any) -> None:
        match message:
            case PromptWanted():
                source = self._sources.setdefault(message.name, _Source())
                if source.wanted_from != message.start_token:  # otherwise it is another attempt
                    source.wanted_from = message.start_token
                    self._on_news(Wanted(name=message.name, start_token=message.start_token))
            case StartOffered():
                self._start(message)
            case CancelOutgoing():
                self.rank.cancel(message.transfer_id, message.reason)
            case ClosePrompt():
                source = self._sources.setdefault(message.name, _Source())
                source.is_closed, source.failure = True, message.reason
                if message.reason and not source.is_finished:
                    self._on_news(GivenUp(name=message.name, failure=message.reason))
                self._cancel_all(source, message.reason or "the prompt was given up")
                self._on_reading_over(message.name, source)
            case FreePrompt():
                source = self._sources[message.name]
                source.is_free = True
                self._free_if_over(message.name, source)
            case _:
                if not self.rank.on_message(message):
                    raise LocalProtocolError(f"a connector's prefill rank cannot serve {type(message).__name__}")

    def _start(self, message: StartOffered) -> None:
        source = self._sources.setdefault(message.name, _Source())
        if source.is_closed:
            self._send(TransferNotSent(transfer_id=message.transfer_id, reason="the prompt was given up"))
        elif self.rank.start(message) and self.rank.is_reading(message.transfer_id):
            source.transfers.add(message.transfer_id)
            self._set_ends(message.name, source)
            self._report(source)

    # Implementation of `OutgoingEngine`

    def tables_of(self, transfer_id: str) -> Tables:
        return self._sources[self._name_of(transfer_id)].tables

    def on_released(self, transfer_id: str) -> None:
        """See `OutgoingEngine.on_released`."""
        name = self._name_of(transfer_id)
        source = self._sources[name]
        source.transfers.discard(transfer_id)
        self._set_ends(name, source)
        self._on_reading_over(name, source)

    # Inside

    def _name_of(self, transfer_id: str) -> str:
        message = self.rank.started(transfer_id)
        assert isinstance(message, StartOffered), "a connector's rank starts nothing else"
        return message.name

    def _set_ends(self, name: str, source: _Source) -> None:
        if source.transfers:
            self.layer_ends[name] = frozenset().union(*map(self.rank.layer_ends, source.transfers))
        else:
            self.layer_ends.pop(name, None)
        self.num_ends_changes += 1

    def _report(self, source: _Source) -> None:
        """Report computed chunks to each attempt. Cancel attempts whose remaining chunks will never be computed."""
        for transfer_id in list(source.transfers):
            is_whole = self.rank.progress(transfer_id, source.num_computed, source.event)
            if (step := source.step) is not None:
                self.rank.progress(transfer_id, step.num_tokens, step.event, end_layer=step.end_layer)
            if not is_whole and source.is_finished:
                num_tokens = self.rank.started(transfer_id).num_tokens
                reason = (
                    f"the prefill side's engine has ended the prompt with {source.num_computed} of {num_tokens} tokens computed"
                )
                self.rank.cancel(transfer_id, reason)

    def _cancel_all(self, source: _Source, reason: str, *, is_preempted: bool = False) -> None:
        for transfer_id in list(source.transfers):
            self.rank.cancel(transfer_id, reason, is_preempted=is_preempted)

    def _on_reading_over(self, name: str, source: _Source) -> None:
        """Report if nothing reads the prompt's pages any more."""
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
        """Return fields of the wire contract's RankStatus."""
        status = self.rank.status()
        return status | {"requests": len(self._sources) + status["requests"]}

    @property
    def num_transfers(self) -> int:
        return self.rank.num_transfers

    @property
    def is_idle(self) -> bool:
        """Whether no prompt is known."""
        return not self._sources and self.rank.is_idle

    def check_idle(self) -> bool:
        """See `OutgoingRank.check_idle`."""
        return not self._sources and self.rank.check_idle()

    async def close(self) -> None:
        await self.rank.close()
