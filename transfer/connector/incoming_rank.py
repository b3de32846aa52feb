"""Receive the KV of prompts on one decode rank, for daemons and engines alike.

The leader announces each transfer and decides its outcome for all ranks. A rank reports only its own part.
`IncomingRank` tracks the transfers. Its engine owns the pages and decides the next step.
`BoundPages` is the engine of a connector: vLLM and SGLang choose the pages before the transfer is announced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transfer.connector.messages import (
    CancelIncoming,
    ExpectBound,
    ExpectTransfer,
    ForgetPrefill,
    LinkProbed,
    PagesReleased,
    PrefillRankLost,
    SettlePrompt,
    TransferBroken,
    TransferExpected,
    TransferWhole,
)
from transfer.errors import LocalProtocolError
from transfer.instance import Link
from transfer.receive.attach import PrefillSessions, Unattached
from transfer.receive.loop import ReceiverLoop

Tables = Sequence[Sequence[int]]


class IncomingEngine(Protocol):
    """The owner of the pages that an `IncomingRank` fills."""

    def tables_up_to(self, transfer_id: str, num_tokens: int) -> Tables:
        """See `transfer.receive.loop.ReceiverOwner`."""
        ...

    def on_over(self, transfer_id: str, *, is_whole: bool) -> None:
        """Record that nothing writes into the transfer's pages any more: it is complete, or was cancelled and has drained."""
        ...


@dataclass(slots=True, kw_only=True)
class _Incoming:
    message: ExpectTransfer
    is_receiving: bool = True
    is_cancelled: bool = False


class IncomingRank:
    """Receive the transfers that the leader announces; implements `transfer.receive.loop.ReceiverOwner`."""

    def __init__(self, *, engine: IncomingEngine, send: Callable[[object], None]) -> None:
        self._engine = engine
        self._send = send
        self._incoming: dict[str, _Incoming] = {}  # by transfer, until it is whole, or cancelled and drained
        self._receiver: ReceiverLoop
        self._sessions: PrefillSessions

    def begin(self, receiver: ReceiverLoop, sessions: PrefillSessions) -> None:
        """Use a receiver and sessions that were opened with this rank as their owner."""
        self._receiver = receiver
        self._sessions = sessions

    # Calls from the leader

    def expect(self, message: ExpectTransfer) -> None:
        """Let the writers of a prompt ask for grants, or report why it cannot be received."""
        writers = self._sessions.writers_of(message.prefill_incarnation)
        if self._receiver.is_known(message.transfer_id):
            writers = Unattached(reason="an earlier request of the same id is still draining")
        if isinstance(writers, Unattached):
            self._send(TransferExpected(transfer_id=message.transfer_id, reason=writers.reason))
            return
        self._incoming[message.transfer_id] = _Incoming(message=message)
        self._send(TransferExpected(transfer_id=message.transfer_id))
        self._receiver.expect_request(
            writers.request(
                message.transfer_id,
                plan=message.plan,
                num_tokens=message.num_tokens,
                start_token=message.start_token,
                traceparent=message.traceparent,
            )
        )

    def cancel(self, transfer_id: str, reason: str) -> None:
        """Cancel a transfer at any stage. `IncomingEngine.on_over` follows, at once if nothing is in flight."""
        incoming = self._incoming.get(transfer_id)
        if incoming is not None and incoming.is_receiving:
            incoming.is_cancelled = True  # before the call below, which calls on_drained at once if nothing is in flight
            if self._receiver.cancel_request(transfer_id, reason):
                return
        self._incoming.pop(transfer_id, None)
        self._engine.on_over(transfer_id, is_whole=False)

    def on_message(self, message: Any) -> bool:
        """Handle a message about sessions. Return False if the message is about something else."""
        if not isinstance(message, ForgetPrefill):
            return False
        self._sessions.forget_prefill(message.incarnation, message.reason)
        return True

    # Reports of the sessions

    def on_writer_lost(self, incarnation: int, rank: int, reason: str) -> None:
        self._send(PrefillRankLost(incarnation=incarnation, prefill_rank=rank, reason=reason))

    def on_link_probed(self, link: Link) -> None:
        self._send(LinkProbed(link=link))

    # Reports of the receiver

    def tables_up_to(self, request_id: str, num_tokens: int) -> Tables:
        return self._engine.tables_up_to(request_id, num_tokens)

    def on_complete(self, request_id: str) -> None:
        del self._incoming[request_id]
        self._send(TransferWhole(transfer_id=request_id))
        self._engine.on_over(request_id, is_whole=True)

    def on_failed(self, request_id: str, reason: str, *, is_data_loss: bool) -> None:
        self._send(TransferBroken(transfer_id=request_id, reason=reason, is_data_loss=is_data_loss))

    def on_drained(self, request_id: str) -> None:
        incoming = self._incoming[request_id]
        incoming.is_receiving = False
        if incoming.is_cancelled:  # otherwise it has failed, and the leader is about to cancel it
            del self._incoming[request_id]
            self._engine.on_over(request_id, is_whole=False)

    # Reports and end

    def status(self) -> dict[str, Any]:
        """Return the fields of the wire contract's RankStatus."""
        return self._sessions.status() | {"requests": len(self._incoming) + self._receiver.num_requests}

    @property
    def num_transfers(self) -> int:
        return len(self._incoming)

    def expected(self, transfer_id: str) -> ExpectTransfer:
        """Return the message that announced a transfer that is not over."""
        return self._incoming[transfer_id].message

    def is_receiving(self, transfer_id: str) -> bool:
        """Return whether something may write into the transfer's pages."""
        incoming = self._incoming.get(transfer_id)
        return incoming is not None and incoming.is_receiving

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is known, and no grant is live."""
        return not self._incoming and self._receiver.is_idle

    def check_idle(self) -> bool:
        """Check the invariants of an idle rank; see `OutgoingRank.check_idle`."""
        if not self.is_idle:
            return False
        self._receiver.check_idle()
        return True

    async def close(self) -> None:
        """End the sessions, then the receiver."""
        await self._sessions.close("the decode side shuts down")
        self._receiver.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The outcome of a prompt on all ranks. Nothing writes to its pages any more; see `SettlePrompt`."""

    name: str
    failure: str
    note: bytes


class BoundPages:
    """Serve as `IncomingEngine` of a connector: the leader sends the page tables with each transfer.

    Args:
        on_news: Called with each event for the engine.
    """

    def __init__(self, *, send: Callable[[object], None], on_news: Callable[[Settled], None]) -> None:
        self.rank = IncomingRank(engine=self, send=send)
        self._send = send
        self._on_news = on_news

    def on_message(self, message: Any) -> None:
        match message:
            case ExpectBound():
                self.rank.expect(message)
            case CancelIncoming():
                self.rank.cancel(message.transfer_id, message.reason)
            case SettlePrompt():
                self._on_news(Settled(name=message.name, failure=message.failure, note=message.note))
            case _:
                if not self.rank.on_message(message):
                    raise LocalProtocolError(f"a connector's decode rank cannot serve {type(message).__name__}")

    def tables_up_to(self, transfer_id: str, num_tokens: int) -> Tables:
        message = self.rank.expected(transfer_id)
        assert isinstance(message, ExpectBound), "a connector's rank expects nothing else"
        return message.tables

    def on_over(self, transfer_id: str, *, is_whole: bool) -> None:
        if not is_whole:
            self._send(PagesReleased(transfer_id=transfer_id))
