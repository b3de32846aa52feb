"""The HTTP port: `/healthz` (the process lives), `/readyz` (it accepts requests), `/metrics` (Prometheus), `/` (status page)."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger
from aiohttp.web_protocol import RequestHandler

from node_runtime import status_page
from node_runtime.status_page import StatusPage
from transfer.errors import ConfigError
from transfer.loop_turns import TimedSteps
from transfer.metrics import MetricFamily, MetricsPage

MAX_CONNECTIONS: Final = 128
"""Maximum connections. Probes and scrapers need a few. More connections replace each other, and use no files of the node."""

REQUEST_S: Final = 10.0
"""Longest time from a new connection to its request."""

IDLE_S: Final = 75.0
"""Longest time between two requests of a connection, the answer included. Scrapers ask at least once a minute."""

_PAGES: Final = ("/", "/status.json")
_LINGER_S: Final = 1.0  # wait for the rest of a request whose answer was sent
_STOP_S: Final = 1.0  # wait for answers under way, which take milliseconds unless the client does not read them


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Whether a node can serve requests, and one line on why not."""

    is_ready: bool
    reason: str = ""


class _ServerLog(logging.LoggerAdapter[logging.Logger]):
    """The server's log. Requests that are not HTTP are logged at DEBUG: port scanners, and gRPC or TLS on the wrong port."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **fields: Any) -> None:
        level = logging.DEBUG if isinstance(exc_info, HttpProcessingError) else logging.ERROR
        self.log(level, msg, *args, exc_info=exc_info, **fields)


class _BoundedServer(web.Server):
    """Close slow connections, and the least recently used ones above `MAX_CONNECTIONS`, so that a new one is always accepted."""

    def __init__(self, handler: Callable[[web.BaseRequest], Any]) -> None:
        super().__init__(handler, access_log=None, logger=_ServerLog(server_logger), lingering_time=_LINGER_S)
        self._deadlines: dict[RequestHandler, asyncio.TimerHandle] = {}  # the least recently used first

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._allow(handler, REQUEST_S)
        if len(self._deadlines) > MAX_CONNECTIONS:
            self._end(next(iter(self._deadlines)))

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._forget(handler)

    def used(self, handler: RequestHandler) -> None:
        """Record that a request has arrived on the connection."""
        if handler in self._deadlines:
            self._allow(handler, IDLE_S)

    def _allow(self, handler: RequestHandler, seconds: float) -> None:
        self._forget(handler)
        self._deadlines[handler] = asyncio.get_running_loop().call_later(seconds, self._end, handler)

    def _forget(self, handler: RequestHandler) -> None:
        timer = self._deadlines.pop(handler, None)
        if timer is not None:
            timer.cancel()

    def _end(self, handler: RequestHandler) -> None:
        self._forget(handler)
        if handler.transport is not None:
            server_logger.debug("Closed a connection that was slow, or one of too many")
            handler.transport.abort()


class HealthServer:
    """Serve one node's health and metrics, over at most `MAX_CONNECTIONS` connections at once.

    Args:
        readiness: Called at each `/readyz`.
        metrics: Collects the metrics to show at each `/metrics`.
        page: Content of `/` and `/status.json`. None means that neither is served.
        host_names: Names by which browsers may request those, besides addresses and localhost.
    """

    def __init__(
        self,
        readiness: Callable[[], Readiness],
        metrics: Callable[[], Iterable[MetricFamily]],
        *,
        page: StatusPage | None = None,
        host_names: Collection[str] = (),
    ) -> None:
        self._readiness = readiness
        self._metrics = metrics
        self._metrics_page = MetricsPage()
        self._page = page
        self._host_names = {name.lower() for name in ("localhost", *host_names)}
        self._answers: dict[str, Callable[[web.BaseRequest], Coroutine[Any, Any, web.Response]]] = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._serve_metrics,
        }
        if page is not None:
            self._answers |= {"/": self._serve_page, "/status.json": self._serve_status}
        self._server: _BoundedServer | None = None
        self._runner: web.ServerRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port; port 0 takes a free one.

        Raises:
            ConfigError: The address cannot be bound.
        """
        self._server = _BoundedServer(self._answer)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=_STOP_S)
        await self._runner.setup()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"server.http_port is {port}: {host}:{port} cannot be bound: {error.strerror}") from error
        await web.SockSite(self._runner, listener).start()
        bound: int = listener.getsockname()[1]
        return bound

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return 0 if self._server is None else len(self._server.connections)

    def show(self, page: StatusPage | None) -> None:
        """Replace the status page."""
        self._page = page

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        assert self._server is not None
        self._server.used(request.protocol)
        answer = self._answers.get(request.path)
        if answer is None:
            return web.Response(text=f"known here: {', '.join(self._answers)}\n", status=404)
        if request.method not in ("GET", "HEAD"):
            return web.Response(text="it must be GET or HEAD\n", status=405, headers={"Allow": "GET, HEAD"})
        if request.path in _PAGES and not self._is_own(request.headers.get("Host", "")):
            text = "this node is not known by that name; name it in status_page.host_names, or ask by an address\n"
            return web.Response(text=text, status=403)
        return await TimedSteps(f"GET {request.path}", answer(request))

    def _is_own(self, host: str) -> bool:
        """Return whether a browser that asked for `host` means this node, and not a website whose name resolves to it."""
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
            return True
        return name.lower() in self._host_names

    async def _healthz(self, _: web.BaseRequest) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.BaseRequest) -> web.Response:
        state = self._readiness()
        return web.Response(text="ready\n" if state.is_ready else f"{state.reason}\n", status=200 if state.is_ready else 503)

    async def _serve_metrics(self, request: web.BaseRequest) -> web.Response:
        text, content_type = self._metrics_page.render(self._metrics(), request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def _serve_page(self, _: web.BaseRequest) -> web.Response:
        return web.Response(body=status_page.PAGE, content_type="text/html", charset="utf-8", headers=status_page.HEADERS)

    async def _serve_status(self, _: web.BaseRequest) -> web.Response:
        assert self._page is not None
        return web.Response(body=await self._page.json(), content_type="application/json", headers=status_page.HEADERS)
