"""The plain HTTP port: `/healthz` (the process lives), `/readyz` (send it requests), `/metrics` (Prometheus)."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger
from prometheus_client import CONTENT_TYPE_LATEST

from transfer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Whether a node should be sent requests, and in one line why not."""

    is_ready: bool
    reason: str = ""


class _ServerLog(logging.LoggerAdapter[logging.Logger]):
    """The server's log, with what is no HTTP at DEBUG: port scanners, and clients of gRPC or TLS that took the wrong port."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **fields: Any) -> None:
        level = logging.DEBUG if isinstance(exc_info, HttpProcessingError) else logging.ERROR
        self.log(level, msg, *args, exc_info=exc_info, **fields)


class HealthServer:
    """Serves one node's health and metrics.

    Args:
        readiness: Asked at each `/readyz`.
        metrics: Renders the exposition text at each `/metrics`.
    """

    def __init__(self, readiness: Callable[[], Readiness], metrics: Callable[[], bytes]) -> None:
        self._readiness = readiness
        self._metrics = metrics
        app = web.Application()
        app.add_routes(
            [web.get("/healthz", self._healthz), web.get("/readyz", self._readyz), web.get("/metrics", self._serve_metrics)]
        )
        self._runner = web.AppRunner(app, access_log=None, logger=_ServerLog(server_logger))

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (port 0 takes a free one).

        Raises:
            ConfigError: The address cannot be bound.
        """
        await self._runner.setup()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"server.http_port is {port}: {host}:{port} cannot be bound: {error.strerror}") from error
        await web.SockSite(self._runner, listener).start()
        bound: int = listener.getsockname()[1]
        return bound

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        state = self._readiness()
        return web.Response(text="ready\n" if state.is_ready else f"{state.reason}\n", status=200 if state.is_ready else 503)

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})
