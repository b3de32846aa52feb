"""Where the ranks of an engine that spans hosts meet their leader: a gRPC port, and the control channel that it leads to.

The leader of a node starts its ranks, and they meet over a socket file (`node_runtime.rank_link`). An engine that spans hosts
starts the processes on each host itself. Their ranks call `RankControl.Meet` at the one address that every host has in its
settings (`leader.address`). The call exchanges the keys of the control channel, as an attach does between ranks of two tiers.
With mutual TLS, each end has shown a certificate. The channel is that of sessions, too: TCP with CURVE between hosts, a Unix
socket on the leader's host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, cast

import grpc
import structlog

import transfer
from node_runtime.rank_link import MAX_PAYLOAD_BYTES, LeaderLink, RankAddress, RankCodec, RankLink
from transfer.config import ServerConfig
from transfer.control.base import KEY_BYTES
from transfer.control.repeating_channel import HEADER_BYTES, RepeatingClient, RepeatingServer
from transfer.control.session_channel import SessionControlServer, open_session_client
from transfer.control.zmq_authenticator import new_key_pair
from transfer.errors import ConfigError, PeerUnreachable, TransferError
from transfer.instance import check_id
from transfer.log_rate_limiter import LogRateLimiter
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.refusals import log_refusal
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import MutualTls, Security
from transfer.registry.server import RegistryServer, host_port, serve
from transfer.registry.status import end_with, error_of, readable

MEET_TIMEOUT_S: Final = 5.0
MAX_INSTANCE_CHARS: Final = 256

_FRAME_BYTES: Final = MAX_PAYLOAD_BYTES + HEADER_BYTES

log = structlog.get_logger(__name__)


def security_among_hosts(security: Security, peer_names: tuple[str, ...]) -> Security:
    """Return the security of calls between the hosts of one engine.

    Args:
        security: Security of the calls to the other tier, with the same certificate.
        peer_names: Names in the certificates of the engine's hosts.
    """
    return replace(security, peer_names=peer_names, client_names=()) if isinstance(security, MutualTls) else security


class RankPort(pb_grpc.RankControlServicer):
    """The leader's side.

    Args:
        instance: Name of this life of the engine. A rank must give it.
        num_ranks: Ranks of the engine.
        codec: Messages of both directions.
        server: Host that the ports bind, and that the control channel advertises.
        why_not: Returns why a rank cannot be admitted any more; empty if it can.
        on_misfit: Called with the reason if a rank of the engine can never be admitted.

    Raises:
        ConfigError: The control channel cannot be bound.
        TransportError: This process has no descriptors left.
    """

    def __init__(
        self,
        *,
        instance: str,
        num_ranks: int,
        codec: RankCodec,
        server: ServerConfig,
        why_not: Callable[[int], str],
        on_misfit: Callable[[str], None],
    ) -> None:
        self._instance = instance
        self._num_ranks = num_ranks
        self._why_not = why_not
        self._on_misfit = on_misfit
        self._host = server.host
        self._refused = LogRateLimiter()
        self._server: RegistryServer | None = None
        self._control = SessionControlServer(
            f"tcp://{host_port(server.host, 0)}",
            keys=new_key_pair(),  # keys of this life
            advertise_host=server.advertised_host,
            max_payload_bytes=_FRAME_BYTES,
        )
        unmet = [RankAddress(endpoint=self._control.address, token=rank + 1) for rank in range(num_ranks)]
        self.link = LeaderLink(unmet, codec, server=RepeatingServer(self._control))

    async def open(self, port: int, security: Security) -> int:
        """Serve `Meet`; return the bound port, which is a free one for port 0.

        Raises:
            ConfigError: The port cannot be bound, or plain text may not be used with the host.
        """
        self._server = await serve(
            self._host,
            port,
            rank_control=self,
            security=security,
            on_refused=lambda refusal: log_refusal(refusal, self._refused),
        )
        await self._server.set_serving(True)
        return self._server.port

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        self.link.close()

    async def Meet(self, request: pb.MeetRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.MeetResponse:
        try:
            self._check(request)
        except TransferError as error:
            await end_with(context, error)
        address = self.link.admit(request.rank, request.control_key)
        return pb.MeetResponse(
            session_id=address.token,
            control_address=address.endpoint,
            control_key=self._control.public_key,
            local_control_address=self._control.local_address,
        )

    def _check(self, request: pb.MeetRequest) -> None:
        if len(request.instance) > MAX_INSTANCE_CHARS:
            raise ConfigError(f"instance has {len(request.instance)} characters; it must have at most {MAX_INSTANCE_CHARS}")
        if request.instance != self._instance:
            raise PeerUnreachable(f"instance {request.instance!r} is not here; this is the leader of another engine or life")
        if request.version != transfer.__version__:
            problem = f"version of rank {request.rank} is {request.version[:64]!r}, and {transfer.__version__} of its leader"
            self._on_misfit(f"{problem}: install one version of kvferry on all hosts of the engine")
            raise ConfigError(problem)
        if request.rank >= self._num_ranks:
            raise ConfigError(f"rank is {request.rank}; the engine has {self._num_ranks}")
        if len(request.control_key) != KEY_BYTES:
            raise ConfigError(f"control_key has {len(request.control_key)} bytes; it must have {KEY_BYTES}")
        if reason := self._why_not(request.rank):
            raise PeerUnreachable(reason)


async def meet_leader(address: str, *, security: Security, instance: str, rank: int, codec: RankCodec) -> RankLink:
    """Return a rank's link to the leader at `address`.

    Raises:
        PeerUnreachable, TransportTimeout: The leader cannot be reached, or does not admit this rank now.
        TransferError: It never will.
    """
    keys = new_key_pair()  # keys of this life
    channel = PeerChannel(address, security)
    try:
        ready = await channel.ready(timeout_s=MEET_TIMEOUT_S)
        request = pb.MeetRequest(version=transfer.__version__, instance=instance, rank=rank, control_key=keys.public)
        stub = cast("pb_grpc.RankControlAsyncStub", pb_grpc.RankControlStub(ready))
        answer = readable(await stub.Meet(request, timeout=MEET_TIMEOUT_S), peer=address, method="Meet")
    except grpc.aio.AioRpcError as error:
        raise error_of(error, peer=address) from error
    finally:
        await channel.close()
    check_id("session_id", answer.session_id)
    client = open_session_client(
        answer.control_address,
        answer.local_control_address,
        session_id=answer.session_id,
        keys=keys,
        server_key=answer.control_key,
        max_payload_bytes=_FRAME_BYTES,
    )
    return RankLink(RankAddress(endpoint=answer.control_address, token=answer.session_id), codec, client=RepeatingClient(client))
