"""A channel to one address that survives changes of connections, of the addresses of its name, and of certificates."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

import grpc

from transfer.errors import LocalProtocolError, PeerUnreachable
from transfer.plain_text import host_of
from transfer.registry.connecting import MAX_ADDRESSES, address_of, connected, is_literal, text_of
from transfer.registry.options import CHANNEL_OPTIONS
from transfer.registry.security import MutualTls, PlainText, Security
from transfer.registry.tls_identity import Greeted, greet

CONNECT_TIMEOUT_S: Final = 10.0
"""Time to find the node that answers, and again for gRPC to connect there."""

SILENT_S: Final = 2.0
"""An address that accepted a connection from here, and none of gRPC's for so long, is tried after the others of its name."""

RETIRE_S: Final = 60.0
"""Time that calls may go on over a connection that accepts no new ones."""


class PeerChannel:
    """Return the channel for each call. Owned by one loop.

    A name is looked up before each new connection, and gRPC gets the address. After a lookup of its own failed, gRPC makes the
    next ones after pauses that grow to two minutes, and no option bounds them. gRPC knows no other address of the name. So an
    address that accepted a connection and was then silent comes last the next time.

    With TLS, a channel lives as long as its connection. Before each new connection the certificate of the node that answers is
    checked with the files as they are then. A change of files does not end a connection.

    Args:
        address: host:port.
        security: TLS or plain text.

    Raises:
        ConfigError: Plain text may not be used with the address.
    """

    def __init__(self, address: str, security: Security) -> None:
        security.check("address", address)
        self.address = address
        self._security = security
        self._lock = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()
        self._channel: grpc.aio.Channel | None = None
        self._found: tuple[grpc.aio.Channel, str] | None = None  # in plain text: a channel and the address of the name
        self._given: tuple[str, float] | None = None  # the host that gRPC must connect to, and since when (monotonic)
        self._failed: list[str] = []  # addresses of the name to which gRPC could not connect, the latest last
        self._is_closed = False
        self._is_lasting = isinstance(security, PlainText) and is_literal(host_of(address))
        if self._is_lasting:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    @property
    def current(self) -> grpc.aio.Channel:
        """The channel that `ready()` returned last."""
        if self._channel is None:
            raise LocalProtocolError(f"channel to {self.address} is used before it is ready")
        return self._channel

    async def ready(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> grpc.aio.Channel:
        """Return the channel for a call that is made at once.

        Args:
            timeout_s: To find the node that answers, including attempts of other callers that this one waits for. With TLS gRPC
                has the same time again to connect there.

        Raises:
            PeerUnreachable: With TLS, or with a name: there is no connection, and none can be made; with the reason.
        """
        if self._is_lasting:
            return self.current
        try:
            async with asyncio.timeout(timeout_s) as limit, self._lock:
                return await self._ready(timeout_s, limit)
        except TimeoutError:
            raise PeerUnreachable(f"{self.address}: no answer within {timeout_s:g} s") from None

    async def _ready(self, timeout_s: float, limit: asyncio.Timeout) -> grpc.aio.Channel:
        old = self._channel
        if old is not None and old.get_state() is grpc.ChannelConnectivity.READY:
            self._given = None
            return old
        if isinstance(self._security, PlainText):
            new = await self._find(old)
        else:
            new = await self._connect(self._security, timeout_s, limit)
        if self._is_closed:
            await new.close()
            raise PeerUnreachable(f"{self.address}: this side has closed the channel")
        self._channel = new
        if old is not None and old is not new:
            self._retire(old)
        return self._channel

    def connect_anew(self) -> None:
        """Let the next call connect at once. After failed connections, gRPC fails calls until its own back-off ends.

        With TLS, `ready()` connects for each call anyway. An open connection stays.
        """
        failed = self._channel
        if failed is None or self._is_closed or failed.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return
        if self._is_lasting:
            self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
            self._retire(failed, after_s=0.0)
        else:
            self._found = None  # so that `ready()`, which may be looking the name up, makes a new channel

    async def close(self) -> None:
        """End every call and connection, also one that is being opened."""
        self._is_closed = True
        for retiring in self._retiring:
            retiring.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    async def _find(self, old: grpc.aio.Channel | None) -> grpc.aio.Channel:
        """Return a plain-text channel to the first address that accepts a connection; the old one, if it goes there."""
        self._note_failure(old)
        try:
            with await connected(self.address, last=self._failed) as tried:
                peer = tried.getpeername()  # an error if the connection has been reset
        except OSError as error:
            raise PeerUnreachable(f"{self.address}: {text_of(error)}") from None
        target = address_of(peer)
        if self._given is None or self._given[0] != peer[0]:
            self._given = peer[0], time.monotonic()
        if old is not None and self._found == (old, target):
            return old
        new = grpc.aio.insecure_channel(target, options=[*CHANNEL_OPTIONS, ("grpc.default_authority", self.address)])
        self._found = new, target
        return new

    def _note_failure(self, old: grpc.aio.Channel | None) -> None:
        """Record that gRPC is not connected to its address. It forgets failures by itself, and may still be trying."""
        if old is None or self._given is None:
            return
        host, since_s = self._given
        if old.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE or time.monotonic() - since_s >= SILENT_S:
            self._given = None
            self._failed = [*(failed for failed in self._failed if failed != host), host][-MAX_ADDRESSES:]

    async def _connect(self, tls: MutualTls, timeout_s: float, limit: asyncio.Timeout) -> grpc.aio.Channel:
        own = tls.files.current()
        greeted = await greet(self.address, own, allowed=tls.peer_names, timeout_s=timeout_s)
        limit.reschedule(None)  # the rest has its own limit, with a better error
        credentials = grpc.ssl_channel_credentials(greeted.authorities, own.key, own.chain)
        channel = grpc.aio.secure_channel(greeted.target, credentials, options=[*CHANNEL_OPTIONS, *_checked_name(greeted)])
        try:
            async with asyncio.timeout(timeout_s):
                await channel.channel_ready()
        except TimeoutError:
            await channel.close()
            raise PeerUnreachable(f"{self.address}: it answered, and then took no connection within {timeout_s:g} s") from None
        except BaseException:
            await channel.close()
            raise
        return channel

    def _retire(self, channel: grpc.aio.Channel, *, after_s: float = RETIRE_S) -> None:
        retiring = asyncio.ensure_future(_close_later(channel, after_s))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)


def _checked_name(greeted: Greeted) -> tuple[tuple[str, str], ...]:
    return () if greeted.name is None else (("grpc.ssl_target_name_override", greeted.name),)


async def _close_later(channel: grpc.aio.Channel, after_s: float) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(after_s)
    await channel.close()
