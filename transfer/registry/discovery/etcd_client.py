"""One connection to a member of an etcd cluster, with the calls that discovery needs.

The messages and stubs are aetcd's; its own client has no TLS (docs/adr/0036-discovery.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
from aetcd import rpc

from transfer.config import DiscoveryConfig
from transfer.errors import TransportError
from transfer.registry.options import CHANNEL_OPTIONS

CALL_TIMEOUT_S: Final = 5.0
MAX_KEYS: Final = 4096
"""Keys under one prefix that are read; many more than nodes that are used."""

# etcd ends connections that are pinged while no call is under way.
_OPTIONS: Final = tuple((dict(CHANNEL_OPTIONS) | {"grpc.keepalive_permit_without_calls": 0}).items())
_LEADER: Final = ("hasleader", "true")  # a member that is cut off from the others says so, instead of staying silent

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key that was put, or deleted (`value` is None)."""

    key: str
    value: bytes | None


class EtcdClient:
    """See the module's docstring. Every method raises TransportError, with the member and its answer, if the call fails.

    Args:
        endpoint: ``https://host:port`` or ``http://host:port``.
        config: Section `discovery`: certificates and login.

    Raises:
        TransportError: A file of the settings cannot be read.
    """

    def __init__(self, endpoint: str, config: DiscoveryConfig) -> None:
        self._endpoint = endpoint
        self._config = config
        scheme, _, address = endpoint.partition("://")
        if scheme == "http":
            self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(
                self._read("etcd_ca_file", config.etcd_ca_file),
                self._read("etcd_key_file", config.etcd_key_file),
                self._read("etcd_cert_file", config.etcd_cert_file),
            )
            self._channel = grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
        self._metadata: tuple[tuple[str, str], ...] = ()

    async def log_in(self) -> None:
        """Send user and password, if the settings have them; later calls are made as that user."""
        password = self._read("etcd_password_file", self._config.etcd_password_file)
        if password is None:
            return
        question = rpc.AuthenticateRequest(name=self._config.etcd_user, password=password.decode(errors="replace").rstrip("\r\n"))
        answer = await self._ask(rpc.AuthStub(self._channel).Authenticate, question)
        self._metadata = (("token", answer.token),)

    async def named(self, prefix: str) -> tuple[dict[str, bytes], int]:
        """Return the keys with a prefix, their values, and the revision of this state."""
        question = rpc.RangeRequest(key=prefix.encode(), range_end=_behind(prefix), limit=MAX_KEYS)
        answer = await self._ask(rpc.KVStub(self._channel).Range, question)
        return {_text(pair.key): pair.value for pair in answer.kvs}, answer.header.revision

    async def has(self, key: str) -> bool:
        """Return whether a key exists."""
        question = rpc.RangeRequest(key=key.encode(), count_only=True)
        answer = await self._ask(rpc.KVStub(self._channel).Range, question)
        return bool(answer.count)

    async def changes(self, prefix: str, *, after: int) -> AsyncGenerator[list[Change], None]:
        """Yield the changes of keys with a prefix after a revision, until the connection ends."""
        call = rpc.WatchStub(self._channel).Watch(metadata=(*self._metadata, _LEADER))
        try:
            create = rpc.WatchCreateRequest(key=prefix.encode(), range_end=_behind(prefix), start_revision=after + 1)
            await self._call(call.write(rpc.WatchRequest(create_request=create)))
            while True:
                answer = await self._call(call.read())
                if answer is grpc.aio.EOF:
                    raise TransportError(f"etcd {self._endpoint} has ended the watch")
                if answer.canceled or answer.compact_revision:
                    reason = answer.cancel_reason or "what has changed meanwhile is compacted"
                    raise TransportError(f"etcd {self._endpoint} has ended the watch: {reason}")
                yield [
                    Change(key=_text(event.kv.key), value=event.kv.value if event.type == rpc.Event.PUT else None)
                    for event in answer.events
                ]
        finally:
            call.cancel()

    async def grant(self, lease_s: int) -> tuple[int, float]:
        """Return the id of a new lease, and the seconds that it lives without a renewal, which can be more than `lease_s`."""
        answer = await self._ask(rpc.LeaseStub(self._channel).LeaseGrant, rpc.LeaseGrantRequest(TTL=lease_s))
        return answer.ID, float(answer.TTL)

    async def renew(self, lease: int) -> bool:
        """Renew the lease; return False if it is over."""
        call = rpc.LeaseStub(self._channel).LeaseKeepAlive(timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        try:
            await self._call(call.write(rpc.LeaseKeepAliveRequest(ID=lease)))
            answer = await self._call(call.read())
            return answer is not grpc.aio.EOF and answer.TTL > 0
        finally:
            call.cancel()

    async def put(self, key: str, value: bytes, *, lease: int) -> None:
        """Set a key, which ends with the lease."""
        await self._ask(rpc.KVStub(self._channel).Put, rpc.PutRequest(key=key.encode(), value=value, lease=lease))

    async def revoke(self, lease: int, *, timeout_s: float) -> None:
        """End the lease, and its keys with it; one that is over already is no error."""
        try:
            await self._ask(rpc.LeaseStub(self._channel).LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease), timeout_s=timeout_s)
        except TransportError as error:
            if not isinstance(error.__cause__, grpc.aio.AioRpcError) or error.__cause__.code() is not grpc.StatusCode.NOT_FOUND:
                raise

    async def close(self) -> None:
        await self._channel.close()

    async def _ask(self, method: Any, question: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        return await self._call(method(question, timeout=timeout_s, metadata=self._metadata))

    async def _call(self, call: Awaitable[Answer]) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            raise TransportError(f"etcd {self._endpoint}: {code}: {' '.join((error.details() or '').split())[:300]}") from error
        except asyncio.InvalidStateError as error:  # a stream whose connection is gone already
            raise TransportError(f"etcd {self._endpoint}: the call is over: {error}") from error

    def _read(self, setting: str, path: Path | None) -> bytes | None:
        if path is None:
            return None
        try:
            return path.read_bytes()
        except OSError as error:
            raise TransportError(f"discovery.{setting} is {path}, which cannot be read: {error.strerror or error}") from error


def _behind(prefix: str) -> bytes:
    """Return the first key behind all keys with a prefix. A prefix is ASCII, so its last character has a successor."""
    encoded = prefix.encode()
    return encoded[:-1] + bytes([encoded[-1] + 1])


def _text(key: bytes) -> str:
    return key.decode(errors="backslashreplace")
