"""The calling side of the registry plane: channels, and a prefill rank's sessions with a decode rank.

One asyncio loop owns everything here, and every method is called on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import grpc

from transfer.errors import PeerUnreachable, RemoteProtocolError
from transfer.instance import AttachRequest, AttachResponse, Link, check_id
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.convert import (
    attach_request_to_proto,
    attach_response_from_proto,
    link_to_proto,
    watermark_from_proto,
)
from transfer.registry.heartbeat_timer import HeartbeatTimer, SessionHeartbeats
from transfer.registry.heartbeats import HeartbeatWatch, checked_idle_heartbeat_s
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import PlainText, Security
from transfer.registry.status import error_of, readable
from transfer.ring import Watermark

if TYPE_CHECKING:
    from transfer.pb.kvferry_pb2_grpc import TransferControlAsyncStub


class TransferControlClient:
    """A prefill rank's calls to one decode rank.

    Args:
        address: host:port of the rank's `TransferControl`.
        security: TLS or plain text; None means plain text on a loopback address.

    Raises:
        ConfigError: Plain text may not be used with the address.
    """

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        self.address = address
        self._channel = PeerChannel(address, PlainText() if security is None else security)

    def _stub(self, channel: grpc.aio.Channel) -> TransferControlAsyncStub:
        return cast("TransferControlAsyncStub", pb_grpc.TransferControlStub(channel))

    async def attach(self, request: AttachRequest, *, timeout_s: float) -> AttachResponse:
        """Open a session; `watch()` must follow within three heartbeats, or the decode rank ends it.

        Raises:
            LayoutError: The two instances do not fit; one line names the differences.
            PeerUnreachable: No connection, the rank is closing, or an older session of this writer is not yet dead there.
            TransportTimeout: `timeout_s` passed.
            RemoteProtocolError: The answer breaks a rule.
        """
        stub = self._stub(await self._channel.ready(timeout_s=timeout_s))
        try:
            answer = await stub.Attach(attach_request_to_proto(request), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, peer=self.address) from error
        response = attach_response_from_proto(readable(answer, peer=self.address, method="Attach"))
        if response.protocol_version not in request.prefill.protocol_versions:
            spoken = ", ".join(map(str, request.prefill.protocol_versions))
            raise RemoteProtocolError(
                f"{self.address}: protocol_version is {response.protocol_version}; this writer speaks {spoken}"
            )
        if response.probe_bytes > request.probe_bytes:
            raise RemoteProtocolError(
                f"{self.address}: probe_bytes is {response.probe_bytes}; this writer can probe with {request.probe_bytes}"
            )
        return response

    def watch(
        self,
        session_id: int,
        *,
        ring_capacity_bytes: int,
        heartbeat_s: float,
        on_watermark: Callable[[Watermark], None],
        on_lost: Callable[[str], None],
        timer: HeartbeatTimer | None = None,
    ) -> SessionWatch:
        """Keep a session alive and receive its watermarks, until it is lost or closed.

        Args:
            session_id, ring_capacity_bytes, heartbeat_s: Values of the answer to the attach.
            on_watermark: Called with each ack, including repeated ones (heartbeats). If it raises `RemoteProtocolError`, the
                session ends.
            on_lost: Called exactly once, with the reason, unless `SessionWatch.close()` came first.
            timer: Timer of all sessions of this process. None means that this session has one of its own.
        """
        return SessionWatch(
            self._stub(self._channel.current),
            peer=self.address,
            session_id=session_id,
            ring_capacity_bytes=ring_capacity_bytes,
            heartbeats=HeartbeatWatch(heartbeat_s),
            on_watermark=on_watermark,
            on_lost=on_lost,
            timer=HeartbeatTimer() if timer is None else timer,
        )

    async def close(self) -> None:
        """Close the channel; sessions still watched are lost."""
        await self._channel.close()


class SessionWatch:
    """The stream that keeps one session alive; `TransferControlClient.watch()` opens it."""

    def __init__(
        self,
        stub: TransferControlAsyncStub,
        *,
        peer: str,
        session_id: int,
        ring_capacity_bytes: int,
        heartbeats: HeartbeatWatch,
        on_watermark: Callable[[Watermark], None],
        on_lost: Callable[[str], None],
        timer: HeartbeatTimer,
    ) -> None:
        check_id("session_id", session_id)
        self._peer = peer
        self._session_id = session_id
        self._ring_capacity_bytes = ring_capacity_bytes
        self._heartbeats = heartbeats
        self._timer = timer
        self._on_watermark = on_watermark
        self._on_lost = on_lost
        self._link: Link | None = None
        self._turn: asyncio.Future[None] | None = None
        self._is_over = False
        self._wake = asyncio.Event()
        self.num_acks = 0
        self._loop = asyncio.get_running_loop()
        self._call: grpc.aio.StreamStreamCall[Any, Any] = stub.Watermarks()
        self._reader = asyncio.ensure_future(self._read())
        self._writer = asyncio.ensure_future(self._write())
        self._timed = SessionHeartbeats(
            session_id=session_id,
            watch=heartbeats,
            on_due=self._wake.set,
            on_silent=lambda reason: self._end(f"{peer} is silent: {reason}"),
        )
        timer.add(self._timed)

    def report_link(self, link: Link) -> None:
        """Report this writer's measurements of the link to the decode rank, with a heartbeat that is sent at once."""
        self._link = link
        self._timed.is_probing = False
        self._timer.send_soon(self._timed)

    async def probe_turn(self) -> None:
        """Wait until the decode rank grants the turn to measure the link; call this once. The report of the link ends the turn.

        Raises:
            PeerUnreachable: The session has ended.
        """
        self._turn = self._loop.create_future()
        self._timed.is_probing = True
        self._timer.send_soon(self._timed)
        if not self._is_over:
            await self._turn
        if self._is_over:
            raise PeerUnreachable(f"the session with {self._peer} has ended before its link was measured")

    def close(self) -> None:
        """End the session from this side, without `on_lost`. May be called twice."""
        self._end(None)

    async def wait_closed(self) -> None:
        """Wait until all tasks of the session ended; call `close()` first."""
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)

    async def _read(self) -> None:
        reason = "the decode rank ended the stream"
        try:
            async for answer in self._call:
                ack = readable(answer, method="Watermarks")
                if self._is_over:
                    return
                self._heartbeats.on_heartbeat(checked_idle_heartbeat_s(ack.idle_heartbeat_s))
                self.num_acks += 1
                if ack.probe_turn and self._turn is not None and not self._turn.done():
                    self._turn.set_result(None)
                self._on_watermark(watermark_from_proto(ack, ring_capacity_bytes=self._ring_capacity_bytes))
        except grpc.aio.AioRpcError as error:
            reason = str(error_of(error, peer=self._peer))
        except RemoteProtocolError as error:
            reason = f"{self._peer}: {error}"
        except asyncio.CancelledError:
            reason = "watching the session was cancelled"
            raise
        except Exception as error:
            reason = self._unexpected(error)
        finally:
            self._end(reason)

    async def _write(self) -> None:
        try:
            while not self._is_over:
                self._wake.clear()
                link, self._link = self._link, None
                idle_s = self._timer.stated_idle_s(self._timed)
                heartbeat = pb.WriterBeat(
                    session_id=self._session_id,
                    link=None if link is None else link_to_proto(link),
                    idle_heartbeat_s=idle_s,
                    wants_probe_turn=self._turn is not None and not self._turn.done(),
                )
                now_s = self._loop.time()
                await self._call.write(heartbeat)
                self._heartbeats.on_sent(idle_s, now_s)
                await self._wake.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call is over, and the reader hears why
        except Exception as error:
            self._end(self._unexpected(error))

    def _unexpected(self, error: Exception) -> str:
        """Report a bug here or in a callback to the loop's handler; the session cannot go on."""
        self._loop.call_exception_handler({"message": "watching a session failed", "exception": error})
        return f"watching the session failed: {error!r}"

    def _end(self, reason: str | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._timer.remove(self._timed)
        self._wake.set()
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)
        self._call.cancel()
        if asyncio.current_task() is not self._writer:
            self._writer.cancel()  # a heartbeat that the other end took no more would wait for ever
        if reason is not None:
            self._on_lost(reason)
