"""The serving side of the registry plane: a gRPC server with health and reflection, and a decode rank's `TransferControl`.

One asyncio loop owns everything here, and every method is called on it.

A session:

    Attach ── on_attach ──► attached ── first heartbeat on Watermarks ──► streaming ──► lost (once, `on_session_lost`)
                               │                                             │
                               └── no first heartbeat in time ─────► lost ◄──┴── stream ends, three heartbeats missed, owner
                               closes it
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from transfer.errors import ConfigError, LocalProtocolError, PeerUnreachable, RemoteProtocolError, TransferError
from transfer.instance import AttachRequest, AttachResponse, Link
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.convert import attach_request_from_proto, attach_response_to_proto, link_from_proto, watermark_to_proto
from transfer.registry.guard import Guard, Refusal
from transfer.registry.heartbeat_timer import HeartbeatTimer, SessionHeartbeats
from transfer.registry.heartbeats import MISSED_HEARTBEATS, HeartbeatWatch, checked_idle_heartbeat_s
from transfer.registry.options import (
    MAX_CLIENT_CALLS,
    MAX_CONCURRENT_CALLS,
    SERVER_OPTIONS,
    limit_of_files,
    most_connections,
    most_sessions,
)
from transfer.registry.probe_turns import ProbeTurns
from transfer.registry.security import MutualTls, PlainText, Security
from transfer.registry.status import end_call, end_with
from transfer.ring import Watermark

ACK_INTERVAL_S: Final = 0.001
"""Watermarks that change faster than this share an ack."""

ACK_BURST: Final = 16
"""Acks of one session that are sent at once before changes share an ack, so that a writer with few chunks does not wait."""


class RegistryServer:
    """A gRPC server of one process; open one with `serve()`."""

    def __init__(
        self, server: grpc.aio.Server, *, health_servicer: Any, service_names: tuple[str, ...], host: str, port: int
    ) -> None:
        self._server = server
        self._health = health_servicer
        self._service_names = service_names
        self.host = host
        self.port = port

    @property
    def address(self) -> str:
        """host:port as bound. A wildcard host stays a wildcard; the owner advertises another host."""
        return host_port(self.host, self.port)

    async def set_serving(self, is_serving: bool, *, absent: str | None = None) -> None:
        """Set the answer of the health service, for the process and for each of its services.

        Args:
            absent: Full name of a service that does not serve even if the others do.
        """
        for name in ("", *self._service_names):
            serves = is_serving and name != absent
            status = health_pb2.HealthCheckResponse.SERVING if serves else health_pb2.HealthCheckResponse.NOT_SERVING
            await self._health.set(name, status)

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Accept no new calls, wait `grace_s` seconds for those in progress, then cancel them. May be called twice."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


async def serve(
    host: str,
    port: int,
    *,
    transfer_control: pb_grpc.TransferControlServicer | None = None,
    prefill_control: pb_grpc.PrefillControlServicer | None = None,
    decode_control: pb_grpc.DecodeControlServicer | None = None,
    node_control: pb_grpc.NodeControlServicer | None = None,
    rank_control: pb_grpc.RankControlServicer | None = None,
    security: Security | None = None,
    on_refused: Callable[[Refusal], None] | None = None,
) -> RegistryServer:
    """Serve the given services with health (NOT_SERVING until `set_serving`) and reflection.

    Args:
        host: Address or name to bind.
        port: 0 takes a free one.
        security: TLS or plain text; None means plain text on a loopback address.
        on_refused: Called for each call that the caller's certificate does not allow.

    Raises:
        ConfigError: The address cannot be bound, or plain text may not be used with it; it is named.
    """
    security = PlainText() if security is None else security
    security.check("server address", host_port(host, port))
    names = security.names if isinstance(security, MutualTls) else None
    guard = Guard(names, on_refused or (lambda refusal: None), max_client_calls=MAX_CLIENT_CALLS)
    most = most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    options = (*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", most))
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS, interceptors=[guard])
    services = {
        "TransferControl": transfer_control,
        "PrefillControl": prefill_control,
        "DecodeControl": decode_control,
        "NodeControl": node_control,
        "RankControl": rank_control,
    }
    service_names: list[str] = []
    for name, servicer in services.items():
        if servicer is not None:
            getattr(pb_grpc, f"add_{name}Servicer_to_server")(servicer, server)
            service_names.append(pb.DESCRIPTOR.services_by_name[name].full_name)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = host_port(host, port)
    _check_free(host, port)
    try:
        if isinstance(security, MutualTls):
            bound = server.add_secure_port(address, security.server_credentials())
        else:
            bound = server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise ConfigError(f"server address is {address}; it cannot be bound (in use, or not of this machine)")
    opened = RegistryServer(server, health_servicer=health_servicer, service_names=tuple(service_names), host=host, port=bound)
    await opened.set_serving(False)
    await server.start()
    return opened


def _check_free(host: str, port: int) -> None:
    """Refuse a port in use before gRPC does, which would also write to standard error.

    Raises:
        ConfigError: Another socket listens there.
    """
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]").replace("*", ""), port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"server address is {host_port(host, port)}; it cannot be bound: it is in use") from error


def host_port(host: str, port: int) -> str:
    """Return ``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


@dataclass(slots=True, kw_only=True, eq=False)
class _Session:
    """One attached writer."""

    session_id: int
    writer: tuple[int, int]  # incarnation and rank, the key of `_writers`
    heartbeats: SessionHeartbeats = field(init=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    has_stream: bool = False
    has_asked: bool = False  # for a turn to measure its link
    may_probe: bool = False
    lost_reason: str = ""

    @property
    def is_lost(self) -> bool:
        return self.over.is_set()


class TransferControlServicer(pb_grpc.TransferControlServicer):
    """A decode rank's sessions with its writers.

    A session begins when `on_attach` has answered. It ends exactly once, with `on_session_lost`. Attaches are handled one at a
    time, and the number of sessions is limited, because opening one takes memory, files and the loop's time.

    Args:
        watermark: The ring's present state; later ones come through `publish()`.
        heartbeat_s: Seconds between heartbeats, in both directions.
        on_attach: Opens a session for a writer, or raises a `TransferError`. A `LocalProtocolError` is a bug, whatever the
        writer sent,
            and goes to the loop's exception handler. Runs to its end even if the caller leaves meanwhile; then the session is
            reported lost at once.
        on_session_lost: Called with the session's id and the reason of its end.
        on_link: Called with a session's id and its writer's measurements of the link.
        on_probe_turn: Called with a session whose writer measures its link from now on.
        sessions_in_use: Returns the sessions that have a request in flight here.
        max_sessions: Sessions at once; None takes the maximum for the process's limit of open files.
    """

    def __init__(
        self,
        *,
        watermark: Watermark,
        ring_capacity_bytes: int,
        heartbeat_s: float = 0.5,
        on_attach: Callable[[AttachRequest], Awaitable[AttachResponse]],
        on_session_lost: Callable[[int, str], None],
        on_link: Callable[[int, Link], None] | None = None,
        on_probe_turn: Callable[[int], None] | None = None,
        sessions_in_use: Callable[[], Collection[int]] = frozenset,
        max_sessions: int | None = None,
    ) -> None:
        HeartbeatWatch(heartbeat_s)  # checks the interval
        self._timer = HeartbeatTimer(sessions_in_use)
        self._on_probe_turn = on_probe_turn
        self._turns = ProbeTurns(self._grant_turn)
        self.heartbeat_s = heartbeat_s
        self._ring_capacity_bytes = ring_capacity_bytes
        self._on_attach = on_attach
        self._on_session_lost = on_session_lost
        self._on_link = on_link
        self._sessions: dict[int, _Session] = {}
        self._writers: dict[tuple[int, int], int] = {}  # 0: attaching
        self._attaching: set[asyncio.Task[AttachResponse]] = set()
        self._turn = asyncio.Lock()  # of the attach that is being handled
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_sessions = most_sessions(self._open_files) if max_sessions is None else max_sessions
        self._is_closed = False
        self.num_acks = 0
        self.num_refused_heartbeats = 0
        self._watermark = watermark
        self._ack: pb.WatermarkAck | None = None  # of that watermark, once it is needed

    @property
    def session_ids(self) -> tuple[int, ...]:
        return tuple(self._sessions)

    def is_idle(self, session_id: int) -> bool:
        """Return whether both ends of a session have stated that no request is in flight."""
        return not self._sessions[session_id].heartbeats.watch.is_in_use

    def publish(self, watermark: Watermark, sessions: Collection[int] | None = None) -> None:
        """Send a newer watermark soon, without blocking. Watermarks in between may be skipped.

        Args:
            sessions: Sessions that get it at once; the others get it with their next heartbeat. None means every session that has
                a request in flight at either end.

        Raises:
            LocalProtocolError: It is not newer than the last one, or moves back (R2).
        """
        last = self._watermark
        if watermark.sequence <= last.sequence or watermark.position < last.position:
            raise LocalProtocolError(
                f"watermark {watermark.sequence} at {watermark.position} published after {last.sequence} at {last.position} (R2)"
            )
        self._watermark = watermark
        self._ack = None
        if sessions is None:
            in_use = set(self._timer.sessions_in_use())
            sessions = [number for number in self._sessions if number in in_use or not self.is_idle(number)]
        for session_id in sessions:
            if (session := self._sessions.get(session_id)) is not None:
                session.changed.set()

    def close_session(self, session_id: int, reason: str) -> None:
        """End a session from this side; an unknown one is over already."""
        session = self._sessions.get(session_id)
        if session is not None:
            self._lose(session, reason)

    def close(self, reason: str) -> None:
        """End every session and attach no more."""
        self._is_closed = True
        for session in list(self._sessions.values()):
            self._lose(session, reason)

    async def Attach(self, request: pb.AttachRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.AttachResponse:
        try:
            attach = attach_request_from_proto(request)
        except TransferError as error:
            await end_with(context, error)
        writer = (attach.prefill.incarnation, attach.prefill_rank)
        if writer in self._writers:
            await end_call(
                context,
                grpc.StatusCode.ALREADY_EXISTS,
                f"prefill rank {attach.prefill_rank} of incarnation {attach.prefill.incarnation:#018x} is attached already",
            )
        if len(self._writers) >= self._max_sessions:
            await end_call(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"this rank has {len(self._writers)} sessions, and takes {self._max_sessions} with "
                f"{limit_of_files(self._open_files)}",
            )
        self._writers[writer] = 0
        try:
            await self._turn.acquire()
        except asyncio.CancelledError:
            del self._writers[writer]
            raise
        opening = asyncio.ensure_future(self._open_session(attach, writer))
        self._attaching.add(opening)
        opening.add_done_callback(self._attaching.discard)
        try:
            response = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._lose_unclaimed)
            raise
        except Exception as error:
            await end_with(context, error)
        return attach_response_to_proto(response)

    async def Watermarks(  # type: ignore[override]  # grpc.aio takes a coroutine that writes as well as a generator
        self, request_iterator: AsyncIterator[pb.WriterBeat], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        try:
            first = await asyncio.wait_for(anext(request_iterator, None), MISSED_HEARTBEATS * self.heartbeat_s)
        except TimeoutError:
            first = None
        if first is None:
            await end_call(context, grpc.StatusCode.INVALID_ARGUMENT, "no first heartbeat; it must name the session")
        session = self._sessions.get(first.session_id)
        if session is None:
            await end_call(
                context, grpc.StatusCode.NOT_FOUND, f"session {first.session_id:#018x} is unknown or over; attach again"
            )
        if session.has_stream:
            await end_call(context, grpc.StatusCode.ALREADY_EXISTS, f"session {first.session_id:#018x} has its stream already")
        session.has_stream = True
        both = (
            asyncio.ensure_future(self._read_heartbeats(session, first, request_iterator)),
            asyncio.ensure_future(self._send_acks(session, context)),
        )
        try:
            # Both tasks can hang on a frozen peer; the session's end must not.
            await session.over.wait()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            self._lose(session, "the writer's stream ended")
        await end_call(context, grpc.StatusCode.UNAVAILABLE, f"session {session.session_id:#018x} is over: {session.lost_reason}")

    async def _open_session(self, attach: AttachRequest, writer: tuple[int, int]) -> AttachResponse:
        """Open the session during the turn of this attach, and end the turn."""
        try:
            if self._is_closed:
                raise PeerUnreachable("this rank is closing")
            response = await self._on_attach(attach)
            if response.session_id in self._sessions:
                raise LocalProtocolError(f"session {response.session_id:#018x} was assigned twice")
        except BaseException as error:
            del self._writers[writer]
            if isinstance(error, OSError):  # no descriptor or memory left, which is no bug of this process
                raise PeerUnreachable(f"this rank cannot open a session now: {error}") from error
            if isinstance(error, LocalProtocolError) or not isinstance(error, TransferError | asyncio.CancelledError):
                # Other errors report a writer's mistakes. So this is a bug here, and the owner must learn of it.
                asyncio.get_running_loop().call_exception_handler({"message": "attach failed", "exception": error})
            raise
        finally:
            self._turn.release()
        session = _Session(session_id=response.session_id, writer=writer)
        session.heartbeats = SessionHeartbeats(
            session_id=session.session_id,
            watch=HeartbeatWatch(self.heartbeat_s),
            on_due=session.changed.set,
            on_silent=lambda reason: self._lose(session, f"the writer is silent: {reason}"),
        )
        self._sessions[session.session_id] = session
        self._writers[writer] = session.session_id
        self._timer.add(session.heartbeats)
        if self._is_closed:
            self._lose(session, "this rank is closing")
        return response

    def _lose_unclaimed(self, opening: asyncio.Future[AttachResponse]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self.close_session(opening.result().session_id, "the writer went away while it attached")

    async def _read_heartbeats(self, session: _Session, first: pb.WriterBeat, heartbeats: AsyncIterator[pb.WriterBeat]) -> None:
        try:
            self._take_heartbeat(session, first)
            async for heartbeat in heartbeats:
                self._take_heartbeat(session, heartbeat)
        except RemoteProtocolError as error:
            self.num_refused_heartbeats += 1
            self._lose(session, str(error))
        except Exception as error:
            self._fail(session, error)
        else:
            self._lose(session, "the writer's stream ended")

    def _take_heartbeat(self, session: _Session, heartbeat: pb.WriterBeat) -> None:
        if heartbeat.session_id != session.session_id:
            raise RemoteProtocolError(
                f"heartbeat: session_id is {heartbeat.session_id:#018x}; this stream is {session.session_id:#018x}'s"
            )
        session.heartbeats.watch.on_heartbeat(checked_idle_heartbeat_s(heartbeat.idle_heartbeat_s))
        if session.is_lost:
            return
        if heartbeat.wants_probe_turn and not session.has_asked:
            session.has_asked = True
            self._turns.ask(session.session_id)
        if not heartbeat.HasField("link"):
            return
        self._turns.end(session.session_id)
        if self._on_link is not None:
            self._on_link(session.session_id, link_from_proto(heartbeat.link))

    def _grant_turn(self, session_id: int) -> None:
        session = self._sessions[session_id]
        session.may_probe = True
        session.changed.set()
        if self._on_probe_turn is not None:
            self._on_probe_turn(session_id)

    async def _send_acks(self, session: _Session, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        loop = asyncio.get_running_loop()
        paid_until_s = 0.0  # each ack costs an interval, and up to `ACK_BURST` intervals can be owed
        try:
            while not session.is_lost:
                session.changed.clear()
                idle_s = self._timer.stated_idle_s(session.heartbeats)
                now_s = loop.time()
                await context.write(self._newest_ack(idle_s, may_probe=session.may_probe))
                session.heartbeats.watch.on_sent(idle_s, now_s)
                self.num_acks += 1
                paid_until_s = max(paid_until_s, loop.time()) + ACK_INTERVAL_S
                await session.changed.wait()
                owed_s = paid_until_s - loop.time() - ACK_BURST * ACK_INTERVAL_S
                if owed_s > 0:
                    await asyncio.sleep(owed_s)
        except Exception as error:
            self._fail(session, error)

    def _newest_ack(self, idle_s: float, *, may_probe: bool) -> pb.WatermarkAck:
        if self._ack is None:
            self._ack = watermark_to_proto(self._watermark, ring_capacity_bytes=self._ring_capacity_bytes)
        self._ack.idle_heartbeat_s, self._ack.probe_turn = idle_s, may_probe
        return self._ack

    def _fail(self, session: _Session, error: Exception) -> None:
        """End a session after an error of its stream, which gRPC reports in several ways, or after a bug here."""
        if not isinstance(error, grpc.RpcError | asyncio.InvalidStateError | grpc.aio.UsageError | grpc.aio.InternalError):
            asyncio.get_running_loop().call_exception_handler({"message": "a session's stream failed", "exception": error})
        self._lose(session, f"the writer's stream broke: {type(error).__name__} {error}".rstrip())

    def _lose(self, session: _Session, reason: str) -> None:
        if session.is_lost:
            return
        session.lost_reason = reason
        session.over.set()
        self._timer.remove(session.heartbeats)
        self._sessions.pop(session.session_id, None)
        self._writers.pop(session.writer, None)
        self._turns.end(session.session_id)
        self._on_session_lost(session.session_id, reason)
