"""Run `kvferry route`, from the first health check to the last request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import structlog
from aiohttp import web

from kvferry.cli.client_settings import client_security
from kvferry.router.app import RouterApp
from kvferry.router.backend import Backend
from kvferry.router.metrics import RouterMetrics
from kvferry.router.settings import RouterSettings, is_node, node_address
from node_runtime import exit_codes
from node_runtime.process_setup import raise_open_files
from transfer.config import LogConfig
from transfer.errors import ConfigError
from transfer.logs import configure_logging
from transfer.registry.security import Security

log = structlog.get_logger(__name__)

_STOP_S: Final = 2.0  # limit for the last bytes of answers

_OPTIONS: Final = {
    "file": "--config",
    "cert": "--tls-cert",
    "key": "--tls-key",
    "ca": "--tls-ca",
    "peer_names": "--peer-name",
    "insecure": "--insecure",
}


def run_route(settings: RouterSettings, *, tls: Mapping[str, Any], log_level: str, log_format: str) -> int:
    """Serve, and return the exit code.

    Args:
        tls: The command's arguments of `client_security`, by name.

    Raises:
        ConfigError: An argument is wrong.
    """
    for name, value, allowed in (
        ("--log-level", log_level, ("debug", "info", "warning", "error")),
        ("--log-format", log_format, ("text", "json")),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    security = None
    for option, urls in (("--decode", settings.decode), ("--prefill", settings.prefill)):
        if nodes := [node_address(url) for url in urls if is_node(url)]:
            security = client_security("route", *nodes, what=option, **tls)
    if security is None:
        for name, value in tls.items():
            if value:
                raise ConfigError(f"{_OPTIONS[name]} is for kvferry's own nodes (grpc://); vLLM servers take http:// or https://")
    configure_logging(
        LogConfig(
            level=cast("Literal['debug', 'info', 'warning', 'error']", log_level),
            format=cast("Literal['text', 'json']", log_format),
        ),
        role="router",
    )
    return asyncio.run(run_router(settings, security))


async def run_router(settings: RouterSettings, security: Security | None) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP. Return the exit code, which shows whether requests were cut off.

    Args:
        security: TLS or plain text of calls to nodes. None means that all servers are vLLM's.

    Raises:
        ConfigError: The address cannot be bound, a file cannot be written, or the tokenizer cannot be used.
    """
    raise_open_files()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with open_router(settings, security) as router:
        with _ready_file(settings.ready_file, router.address):
            log.info("router_ready", address=router.address, prefill=list(settings.prefill), decode=list(settings.decode))
            print(f"kvferry route: ready on http://{router.address}", flush=True)
            await router.wait(stop)
        stop.clear()  # a second signal cuts the wait short
        log.info("draining", in_flight=router.app.num_running)
        cut_off = await router.app.drain(settings.drain_timeout_s, stop)
    log.info("stopped", cut_off=cut_off)
    return exit_codes.ABORTED if cut_off else exit_codes.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRouter:
    """A router that serves requests at `address` (host:port).

    Args:
        watching: Checks the servers.
    """

    address: str
    app: RouterApp
    backend: Backend
    watching: asyncio.Future[None]

    async def wait(self, stop: asyncio.Event) -> None:
        """Wait for `stop`. Raise an error of the checks, which is a bug: the router would not notice changes of servers."""
        stopping = asyncio.ensure_future(stop.wait())
        waits: tuple[asyncio.Future[Any], ...] = (self.watching, stopping)
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self.watching.done():
            self.watching.result()


@contextlib.asynccontextmanager
async def open_router(settings: RouterSettings, security: Security | None) -> AsyncIterator[OpenRouter]:
    """Run a router on this loop. See `run_router`."""
    metrics = RouterMetrics()
    backend = Backend(settings, security, metrics)
    app = RouterApp(backend, settings, metrics)
    runner = web.AppRunner(
        app.application(),
        handle_signals=False,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_STOP_S,
        auto_decompress=False,  # a compressed body could exceed the limit; see RouterApp
    )
    try:
        await runner.setup()
        address = await _listen(runner, settings)
        watching = asyncio.ensure_future(backend.watch())
        try:
            yield OpenRouter(address=address, app=app, backend=backend, watching=watching)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    finally:
        await runner.cleanup()
        await backend.close()


async def _listen(runner: web.AppRunner, settings: RouterSettings) -> str:
    """Bind the port and return host:port."""
    host, port = settings.host, settings.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"--port is {port}: {host}:{port} cannot be bound: {error.strerror or error}") from error
    await web.SockSite(runner, listener).start()
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _ready_file(path: Path | None, address: str) -> Iterator[None]:
    """Keep the file while the router serves requests."""
    if path is None:
        yield
        return
    temporary = Path(f"{path}.new")
    try:
        temporary.write_text(json.dumps({"role": "router", "pid": os.getpid(), "http_address": address}))
        temporary.replace(path)  # a reader never sees part of the file
    except OSError as error:
        raise ConfigError(f"--ready-file is {path}, which cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
