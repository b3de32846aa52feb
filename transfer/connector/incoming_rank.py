"""One rank of a connector's decode side: it receives the KV of prompts into pages that the engine has chosen.

The leader says what comes and into which pages. It decides for all ranks at once what has become of a prompt, and the engine
hears only that (`Settled`): KV is used when every rank has all of it, and pages are the engine's again when no rank writes to
them any more. Owned by the loop of its process; the engine's threads come in through `kvferry.engines.connector_rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transfer.connector.incoming_sessions import IncomingSessions
from transfer.connector.messages import (
    CancelIncoming,
    ExpectTransfer,
    SettlePrompt,
    TransferBroken,
    TransferDrained,
    TransferExpected,
    TransferWhole,
)
from transfer.errors import LocalProtocolError
from transfer.receive.attach import Receiving, Unattached


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What has become of a prompt, on all ranks: nothing writes to its pages any more.

    Args:
        failure: Why its KV did not come; empty where all of it is in the pool, on every rank.
        note: What the prefill side's engine had to tell.
    """

    name: str
    failure: str
    note: bytes


@dataclass(slots=True, kw_only=True)
class _Incoming:
    tables: tuple[tuple[int, ...], ...]
    is_receiving: bool = True
    is_cancelled: bool = False


class IncomingRank:
    """See the module's docstring; a `transfer.receive.loop.ReceiverOwner`.

    Args:
        send: To the leader.
        on_news: Hears what the engine has to be told.
    """

    def __init__(self, *, send: Callable[[object], None], on_news: Callable[[Settled], None]) -> None:
        self._send = send
        self._on_news = on_news
        self._incoming: dict[str, _Incoming] = {}  # by transfer, until it is whole or drained
        self._receiving: Receiving
        self._writers: IncomingSessions

    def begin(self, receiving: Receiving, writers: IncomingSessions) -> None:
        """Take over what was opened with this rank as its owner."""
        self._receiving = receiving
        self._writers = writers

    # What the leader says

    def on_message(self, message: Any) -> None:
        match message:
            case ExpectTransfer():
                self._expect(message)
            case CancelIncoming():
                self._cancel(message)
            case SettlePrompt():
                self._on_news(Settled(name=message.name, failure=message.failure, note=message.note))
            case _:
                if not self._writers.on_message(message):
                    raise LocalProtocolError(f"a connector's decode rank cannot serve {type(message).__name__}")

    def _expect(self, message: ExpectTransfer) -> None:
        writers = self._writers.writers_of(message.prefill_incarnation)
        if isinstance(writers, Unattached):
            self._send(TransferExpected(transfer_id=message.transfer_id, reason=writers.reason))
            return
        self._incoming[message.transfer_id] = _Incoming(tables=message.tables)
        self._send(TransferExpected(transfer_id=message.transfer_id))
        self._receiving.loop.expect_request(
            writers.request(
                message.transfer_id, plan=message.plan, num_tokens=message.num_tokens, start_token=message.start_token
            )
        )

    def _cancel(self, message: CancelIncoming) -> None:
        incoming = self._incoming.get(message.transfer_id)
        if incoming is not None and incoming.is_receiving:
            incoming.is_cancelled = True  # before the receiver hears of it: with nothing under way, on_drained comes at once
            if self._receiving.loop.cancel_request(message.transfer_id, message.reason):
                return
        self._incoming.pop(message.transfer_id, None)
        self._send(TransferDrained(transfer_id=message.transfer_id))

    # What the receiver says

    def tables_up_to(self, request_id: str, num_tokens: int) -> Sequence[Sequence[int]]:
        return self._incoming[request_id].tables

    def on_complete(self, request_id: str) -> None:
        del self._incoming[request_id]
        self._send(TransferWhole(transfer_id=request_id))

    def on_failed(self, request_id: str, reason: str, *, is_data_loss: bool) -> None:
        self._send(TransferBroken(transfer_id=request_id, reason=reason, is_data_loss=is_data_loss))

    def on_drained(self, request_id: str) -> None:
        incoming = self._incoming[request_id]
        incoming.is_receiving = False
        if incoming.is_cancelled:  # otherwise the leader is about to say so, for it has heard that it failed
            del self._incoming[request_id]
            self._send(TransferDrained(transfer_id=request_id))

    # Reports and end

    def status(self) -> dict[str, Any]:
        """Fields of the wire contract's RankStatus."""
        return self._writers.status() | {"requests": len(self._incoming) + self._receiving.loop.num_requests}

    @property
    def num_transfers(self) -> int:
        return len(self._incoming)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is known of any prompt, and no grant is live."""
        return not self._incoming and self._receiving.loop.is_idle

    def check_idle(self) -> bool:
        """Prove what must hold while nothing is in flight; False: something is. Raises LocalProtocolError when it does not."""
        if not self.is_idle:
            return False
        self._receiving.loop.check_idle()
        return True

    async def close(self) -> None:
        await self._writers.close("the decode side's engine shuts down")
        self._receiving.loop.close()
