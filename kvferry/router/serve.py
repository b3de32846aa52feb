"""`kvferry route`: a router from its first health check to its last request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog
from aiohttp import web

from kvferry import exit_codes
from kvferry.router.api import Backend
from kvferry.router.app import RouterApp
from kvferry.router.metrics import RouterMetrics
from kvferry.router.settings import RouterSettings
from node_runtime.open_files import raise_open_files
from transfer.errors import ConfigError
from transfer.registry.security import Security

log = structlog.get_logger(__name__)

_STOP_S: Final = 2.0  # for answers whose last bytes are on their way


async def run_router(settings: RouterSettings, security: Security | None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code says whether requests had to be cut off.

    Args:
        security: How decode nodes are called; None: the servers are vLLM's.

    Raises:
        ConfigError: The address cannot be bound, a file cannot be written, or the tokenizer cannot be used.
    """
    raise_open_files()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    metrics = RouterMetrics()
    backend = _make_backend(settings, security, metrics)
    try:
        app = RouterApp(backend, settings, metrics)
        runner = web.AppRunner(
            app.application(), handle_signals=False, handler_cancellation=True, access_log=None, shutdown_timeout=_STOP_S
        )
        await runner.setup()
        try:
            return await _serve(app, runner, backend, settings, stop)
        finally:
            await runner.cleanup()
    finally:
        await backend.close()


def _make_backend(settings: RouterSettings, security: Security | None, metrics: RouterMetrics) -> Backend:
    if settings.are_nodes:
        from kvferry.router.node_flow import NodeFlow  # brings gRPC

        assert security is not None
        return NodeFlow(settings, security, metrics)
    from kvferry.router.vllm_flow import VllmFlow

    return VllmFlow(settings, metrics)


async def _serve(app: RouterApp, runner: web.AppRunner, backend: Backend, settings: RouterSettings, stop: asyncio.Event) -> int:
    address = await _listen(runner, settings)
    # A fault of the checks is a bug, and ends the router: it would go on with servers as they were.
    watching = asyncio.ensure_future(backend.watch())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        with _ready_file(settings.ready_file, address):
            log.info("router_ready", address=address, prefill=list(settings.prefill), decode=list(settings.decode))
            print(f"kvferry route: ready on http://{address}", flush=True)
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            stop.clear()  # a second signal cuts the wait short
            log.info("draining", in_flight=app.num_running)
            cut_off = await app.drain(settings.drain_timeout_s, stop)
        log.info("stopped", cut_off=cut_off)
        return exit_codes.ABORTED if cut_off else exit_codes.OK
    finally:
        for task in (watching, stopping):
            task.cancel()
        await asyncio.gather(watching, stopping, return_exceptions=True)


async def _listen(runner: web.AppRunner, settings: RouterSettings) -> str:
    """Bind, and return host:port."""
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
    """The file is there while the router takes requests."""
    if path is None:
        yield
        return
    temporary = Path(f"{path}.new")
    try:
        temporary.write_text(json.dumps({"role": "router", "pid": os.getpid(), "http_address": address}))
        temporary.replace(path)  # whoever waits for the file sees it whole
    except OSError as error:
        raise ConfigError(f"--ready-file is {path}, which cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
